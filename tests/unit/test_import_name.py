"""``xidstream`` is the only name under which anything of ours is imported, whatever lies beside a user's script."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("actors", "pipeline")


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_no_module_is_imported_by_the_names_of_the_folders() -> None:
    folders = (*OURS, "xidstream", "tests", "benchmarks", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    wrong = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in files
        if (found := {n for n in imported_names(ast.parse(file.read_text())) if n.split(".")[0] in OURS})
    }
    assert not wrong


@pytest.mark.parametrize(
    "argument", [["-m", "xidstream"], ["-c", "from xidstream.actors.cli.main import main; main()"]]
)
def test_the_command_line_works_beside_a_users_own_pipeline_py_and_actors_py(
    argument: list[str], tmp_path: Path
) -> None:
    for name in OURS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s own module was imported')\n")
    ended = subprocess.run(
        [sys.executable, *argument, "run", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "--publication" in ended.stdout


def test_importing_the_package_loads_neither_ray_nor_spark_nor_a_second_copy() -> None:
    program = (
        "import sys, xidstream, xidstream.pipeline.spark.executor_tasks\n"
        "print(sorted({'ray', 'raydp', 'pyspark', 'actors', 'pipeline'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_the_old_import_from_a_checkout_gives_the_same_classes() -> None:
    program = "import actors, xidstream; assert actors.ChangeStream is xidstream.ChangeStream"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_executors_find_the_package_from_a_working_directory_with_a_folder_of_its_name(
    tmp_path: Path,
) -> None:
    """A storage of that name makes such a folder; `xidstream.__file__` is None there with an editable install."""
    (tmp_path / "xidstream").mkdir()
    program = "import xidstream.actors.driver.session as s; print(s._python_path().split(':')[-1])"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (Path(ended.stdout.strip()) / "xidstream" / "__init__.py").is_file()


def test_neither_reader_nor_sequencer_nor_a_buffer_that_is_ready_has_pandas(tmp_path: Path) -> None:
    program = (
        "import sys, xidstream.actors.reader.slot_reader, xidstream.actors.commit_sequencer\n"
        "from xidstream.actors.xid_buffer import XidBuffer\n"
        "from xidstream.pipeline import decode\n"
        "from xidstream.pipeline.storage.keys import Layout\n"
        "from xidstream.pipeline.transactions.transaction_buffer import BufferSettings\n"
        "XidBuffer(BufferSettings(sys.argv[1], Layout(1, 's', 'e'), 1 << 20))\n"
        "decode.warm_up()\n"
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
