"""The import package: `actors/` and `pipeline/` lie beside it in a checkout, and inside of it where it is installed."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
PARTS = ("actors", "pipeline", "xidstream")
EACH_MODULE_ONCE = """
import importlib, sys
import xidstream
for name in ("actors.supervision.supervisor", "actors.status.page", "pipeline.spark.executor_tasks"):
    importlib.import_module(f"xidstream.{name}")
ours = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "xidstream"}
assert len(set(ours.values())) == len(ours) > 50
assert sys.modules["xidstream.pipeline"] is xidstream.pipeline and xidstream.actors.ChangeStream
print(*ours.values(), sep="\\n")
"""


def copied(to: Path, parts: tuple[str, ...] = PARTS) -> Path:
    """A copy of the checkout's packages: it is not the one that this environment has installed."""
    for name in parts:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )


def test_no_part_of_the_package_is_a_link() -> None:
    links = []
    for name in PARTS:
        for folder, folders, files in os.walk(ROOT / name):
            links += [path for entry in (*folders, *files) if (path := Path(folder, entry)).is_symlink()]
    assert not links and not [name for name in PARTS if (ROOT / name).is_symlink()]


def test_a_checkout_that_nobody_installed_imports_its_own_modules_alone(tmp_path: Path) -> None:
    """As in a job's working directory, on a node that has another version installed."""
    done = run(EACH_MODULE_ONCE, copied(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {Path(file).relative_to(tmp_path).parts[0] for file in done.stdout.split()} == set(PARTS)


def test_an_installed_package_takes_no_folder_beside_it_for_its_own(tmp_path: Path) -> None:
    copied(copied(tmp_path, ("xidstream",)) / "xidstream", ("actors", "pipeline"))
    for name in ("actors", "pipeline"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger was imported')\n")
    done = run(EACH_MODULE_ONCE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {Path(file).relative_to(tmp_path).parts[0] for file in done.stdout.split()} == {"xidstream"}


@pytest.mark.parametrize("name", ["xidstream.tests", "xidstream.benchmarks", "xidstream.xidstream"])
def test_no_other_folder_of_a_checkout_is_part_of_the_package(name: str) -> None:
    done = run(f"import {name}", ROOT)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr, done.stderr


def test_executors_and_the_watchdog_are_given_the_folder_that_has_the_package(tmp_path: Path) -> None:
    program = "import xidstream.actors.driver.session as s; print(s._python_path().split(':')[-1])"
    done = run(program, copied(tmp_path))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path


def test_setup_names_every_folder_that_has_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they make of it, the slow test of the wheel says."""
    arguments: dict[str, Any] = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    with warnings.catch_warnings():
        runpy.run_path("setup.py")
    assert arguments["package_dir"] == {"xidstream.actors": "actors", "xidstream.pipeline": "pipeline"}
    folders = {file.parent.relative_to(ROOT) for name in PARTS for file in (ROOT / name).rglob("*.py")}
    names = [".".join(folder.parts) for folder in folders]
    wanted = {name if name == "xidstream" else f"xidstream.{name}" for name in names}
    assert len(wanted) > 30
    assert set(arguments["packages"]) == wanted and len(arguments["packages"]) == len(wanted)
