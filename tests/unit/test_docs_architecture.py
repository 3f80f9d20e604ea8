"""docs/architecture.md names modules, classes and functions: each of them is where the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from xidstream.pipeline.settings.sink_kinds import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

PATHS = sorted(set(re.findall(r"`((?:actors|pipeline|tests|docs)/[\w/.]+)`", PAGE)))
# `Name` (`path`), or `Name.method` (`path`); a line break may stand between them.
PLACED = sorted(set(re.findall(r"`(\w+(?:\.\w+)?)`\s+\(`((?:actors|pipeline)/[\w/]+\.py)`", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_each_path_on_the_page_is_there(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "path"), PLACED)
def test_each_name_is_defined_in_the_module_beside_it(name: str, path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    first, _, method = name.partition(".")
    if first[0].islower():  # a module's function, as in `rows.release`
        first, method = method or first, ""
    assert re.search(rf"^(?:class|def|async def) {first}\b|^{first}\b.*=", text, re.M), name
    if method:
        assert re.search(rf"def {method}\b|^    {method}:", text, re.M), name


def test_each_package_is_on_the_page() -> None:
    packages = {
        f"{floor}/{folder.name}"
        for floor in ("actors", "pipeline")
        for folder in (ROOT / floor).iterdir()
        if (folder / "__init__.py").exists()
    }
    assert len(packages) > 10
    missing = {package for package in packages if f"`{package}`" not in PAGE}
    assert not missing


def test_the_page_places_names_at_all() -> None:
    assert len(PATHS) > 30
    assert len(PLACED) > 10


def product_files_with(word: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for floor in ("actors", "pipeline")
        for path in (ROOT / floor).glob("**/*.py")
        if re.search(rf"\b{word}\b", path.read_text(encoding="utf-8"))
    }


def answer(what: str) -> str:
    """The page's answer to where one would add it."""
    (found,) = re.findall(rf"^- \*\*{what}:\*\*(.*?)(?=^- \*\*|^## )", PAGE, re.M | re.S)
    return found


def files_in(text: str) -> set[str]:
    return set(re.findall(r"`((?:actors|pipeline)/[\w/]+\.py)`", text))


def chapter(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_a_setting_is_in_no_file_but_those_that_the_page_names_and_the_one_that_uses_it() -> None:
    assert product_files_with("linger_ms") - files_in(answer("a setting")) == {
        "pipeline/stream/read_policy.py"
    }


def test_rules_about_two_settings_stand_where_the_page_says() -> None:
    assert product_files_with("(?:reader_memory_bytes must hold)") <= files_in(answer("a setting"))


def test_an_actor_is_known_in_no_file_but_those_that_the_page_names() -> None:
    assert product_files_with("(?:SnapshotHolder|snapshot holder)") <= files_in(answer("an actor"))


def test_a_type_and_a_codec_are_in_no_file_but_those_that_the_page_names() -> None:
    assert product_files_with("(?:macaddr8|Codec.DATE)") <= files_in(answer("a type"))


# -- a stranger's questions: one row each, with the number of its files ----------------------------------

ASKED = {
    question: (int(number), files_in(files))
    for question, number, files in re.findall(
        r"^\| ([^|]+\?) \| [^|]+ \| (\d+)[^|]* \| ([^|]+) \|$", chapter("A stranger's questions"), re.M
    )
}


@pytest.mark.parametrize("question", ASKED)
def test_the_number_beside_an_answer_is_that_of_its_files(question: str) -> None:
    number, files = ASKED[question]
    assert number == len(files)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        # Who makes the reader's call is among them, and who has the server told without a stream.
        ("Where is an LSN confirmed?", r"(?:TellReader|tell_reader|StatusPace|advance_slot|send_status)"),
        ("What becomes of a rolled-back row?", r"(?:Survivors|due_cuts|shorten_segment)"),
        ("Where would I add a sink?", r"KINDS: Final"),
        ("Where would I add a setting?", r"(?:RUN_SETTINGS|def slot_settings|def check_values|add_options)"),
        ("Where would I add a type?", r"(?:macaddr8|Codec.DATE)"),
        ("Where would I add an actor?", r"(?:SnapshotHolder)"),
        (
            "Who may delete a stored object?",
            r"(?:class Removing|Removing\(|def remove_slot|clean_dead_epochs)",
        ),
        ("What happens after an error?", r"(?:Restarts\(|POLICY\[)"),
    ],
)
def test_what_an_answer_is_about_is_in_no_file_that_it_leaves_out(question: str, words: str) -> None:
    found = product_files_with(words)
    _, files = ASKED[question]
    assert found and found <= files | LESS_THAN_AN_ANSWER.get(question, set())


LESS_THAN_AN_ANSWER: dict[str, set[str]] = {
    # It repeats the reader's last update while the connection waits for something else.
    "Where is an LSN confirmed?": {"pipeline/postgres/kept_alive.py"},
}


# -- the two walks: each file is reached from those before it --------------------------------------------


def imported_by(path: str) -> set[str]:
    """The product's files that a file imports, also through the package that passes a name on."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xidstream."):
            modules = [str(node.module), *(f"{node.module}.{each.name}" for each in node.names)]
            found |= {file for module in modules if (file := file_of(module)) is not None}
    for package in [file for file in found if file.endswith("/__init__.py")]:
        if package != path and package.count("/") > 1:
            found |= imported_by(package)
    return found


def file_of(module: str) -> str | None:
    path = module.removeprefix("xidstream.").replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py") if (ROOT / f).is_file()), None)


def registered() -> set[str]:
    """What ``sink.sink_type`` imports by name."""
    found = {file_of(kind.implementation.partition(":")[0]) for kind in KINDS.values()}
    return {file for file in found if file is not None}


WALKS = re.findall(
    r"^\*\*(A [^*]+?): (\d+) files in (\d+) folders\.\*\*.*?((?:^\|[^\n]*\n)+)",
    chapter("Two walks, file by file"),
    re.M | re.S,
)


@pytest.mark.parametrize(("name", "n_files", "n_folders", "table"), WALKS)
def test_a_walk_has_as_many_files_as_it_says_and_leads_from_one_to_the_next(
    name: str, n_files: str, n_folders: str, table: str
) -> None:
    every: list[str] = []
    for process, number, cell in re.findall(r"^\| ([^|]+) \| (\d+) \| (.*) \|$", table, re.M):
        files = re.findall(r"`([\w/.]+)`", cell)
        assert len(files) == int(number), process
        reached = set().union(*map(imported_by, files))
        if "pipeline/sinks/sink.py" in files:
            reached |= registered()
        assert not [file for file in files[1:] if file not in reached], process
        every += files
    assert (len(set(every)), len({file.rpartition("/")[0] for file in every})) == (
        int(n_files),
        int(n_folders),
    )


def test_both_walks_and_the_questions_are_found() -> None:
    assert len(WALKS) == 2 and len(ASKED) == 8
