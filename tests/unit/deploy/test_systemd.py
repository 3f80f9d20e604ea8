"""deploy/systemd: systemd's own tools judge the units, and the exit statuses and times in them are the run's.

Nothing is started here: docs/deployment.md says how the unit was tried under a systemd.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from xidstream.actors.cli.main import cli
from xidstream.actors.runtime.run_folder import parent_folder
from xidstream.pipeline.errors import ExitStatus

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
SERVICE = (FOLDER / "xidstream@.service").read_text(encoding="utf-8")
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="there is no systemd-analyze on this machine")


def settings(text: str = SERVICE) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def verify(unit: Path) -> list[str]:
    """What systemd finds wrong with it. Other units that it loads are the machine's."""
    return [line for line in analyze("verify", "--man=no", str(unit)).splitlines() if "xidstream" in line]


def analyze(*arguments: str) -> str:
    assert ANALYZE is not None
    done = subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with a program that there is on this machine."""
    for unit in FOLDER.iterdir():
        text = unit.read_text(encoding="utf-8").replace("/opt/xidstream/bin/xidstream", sys.executable)
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("unit", ["xidstream@.service", "xidstream@.timer"])
def test_systemd_finds_nothing_wrong_with_a_unit(units: Path, unit: str) -> None:
    assert verify(units / unit) == []


@needs_systemd
def test_a_unit_with_a_word_that_systemd_does_not_know_is_found(units: Path) -> None:
    unit = units / "xidstream@.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("KillMode=", "KilMode="), encoding="utf-8")
    assert [line for line in verify(unit) if "KilMode" in line]


@needs_systemd
def test_systemd_rates_the_service_as_little_exposed(units: Path) -> None:
    # In tenths: below 2.0 of 10. A version of systemd without --offline fails with a usage error.
    if "--offline" not in analyze("--help"):
        pytest.skip("this systemd-analyze rates running services alone")
    analyze("security", "--offline=yes", "--threshold=20", str(units / "xidstream@.service"))


def test_it_runs_a_command_that_there_is_and_restarts_it_where_that_may_help() -> None:
    found = settings()
    (line,) = found["ExecStart"]
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("/opt/xidstream/bin/xidstream", "run")
    options = cli.commands[command].make_context(command, arguments).params
    assert options["config_file"] == Path("/etc/xidstream/%i.toml")
    assert found["Restart"] == ["on-failure"]
    for_people = {int(status) for status in found["RestartPreventExitStatus"][0].split()}
    assert for_people == {ExitStatus.USAGE, ExitStatus.TERMINAL}


def test_a_run_has_time_to_end_and_alone_gets_the_signal() -> None:
    found = settings()
    assert found["KillMode"] == ["mixed"]
    assert int(found["TimeoutStopSec"][0]) > 120, "what the journal may take when a run is ended"
    assert "KillSignal" not in found, "SIGTERM, the default, is the one that a run handles"


def test_all_that_the_run_writes_may_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings()
    (state,) = found["StateDirectory"]
    environment = dict(each.split("=", 1) for each in found["Environment"])
    for path in (environment["HOME"], environment["RAY_TMPDIR"], found["WorkingDirectory"][0]):
        assert path.startswith(f"%S/{state}")
    monkeypatch.setenv("RAY_TMPDIR", environment["RAY_TMPDIR"].replace("%S", "/var/lib"))
    assert parent_folder() == f"/var/lib/{state}/tmp", "not too long a path for Ray's sockets"


def test_what_java_numba_and_ray_need_is_not_taken_away() -> None:
    assert not {"MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork", "PrivateUsers"} & set(settings())
