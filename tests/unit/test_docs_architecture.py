"""docs/architecture.md names modules, classes and functions: each of them is where the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_a_setting_is_in_no_file_but_those_that_the_page_names_and_the_one_that_uses_it() -> None:
    named = set(re.findall(r"`((?:actors|pipeline)/[\w/]+\.py)`", answer("a setting")))
    assert product_files_with("linger_ms") - named == {"pipeline/stream/read_policy.py"}


def test_an_actor_is_known_in_no_file_but_those_that_the_page_names() -> None:
    named = set(re.findall(r"`((?:actors|pipeline)/[\w/]+\.py)`", answer("an actor")))
    assert product_files_with("(?:SnapshotHolder|snapshot holder)") <= named
