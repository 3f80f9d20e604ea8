"""The round in short: a run whose parts are killed while it takes snapshots, judged by its twin at every commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snapshots.range_log import RangeCosts, RangeLog
from tests.snapshots.snapshot_round import Kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


# Each kill must find a moment: on a busy machine the snapshots may be taken before the second one.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("version", "kills", "options"),
    [(18, ["reader@30", "slot-reader@60"], []), (16, ["holder@50", "run@60"], ["--two-phase"])],
)
def test_a_run_with_killed_parts_folds_to_the_twin_at_every_commit(
    tmp_path: Path, version: int, kills: list[str], options: list[str]
) -> None:
    out = tmp_path / "found.json"
    # SIGTERM, unlike SIGKILL, takes the server and the run with it.
    command = [
        "timeout",
        "570",
        sys.executable,
        "-m",
        "tests.snapshots",
        "--rows",
        "6000",
        "--seed",
        "3",
        "--version",
        f"{version}",
    ]
    # So slow that there is a moment for each kill.
    command += ["--bytes-per-s", "600000", "--out", str(out), *options, "--kills", *kills]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=595, stdin=subprocess.DEVNULL, env=env, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())["rounds"]
    assert len(found["struck_at_percent"]) == len(kills) and found["costs"]["n_again"] >= 1
    assert found["n_states"] > 200 and found["n_transactions_contained"] > 0


def test_what_is_read_again_is_the_cost_of_the_kill_before(tmp_path: Path) -> None:
    log = RangeLog(tmp_path / "log")

    def note(what: str, number: int, snapshot_lsn: int, rows: int = 0) -> None:
        line = {"what": what, "table": "t", "place": snapshot_lsn, "number": number, "rows": rows}
        with log.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    note("begun", 0, 100)
    note("done", 0, 100, 30)
    note("begun", 1, 100)
    assert log.percent(60) == 50
    kills = [(len(log.lines()), "reader@50")]
    note("lost", 1, 100)
    note("begun", 1, 100)
    kills.append((len(log.lines()), "holder@50"))
    note("done", 1, 100, 30)
    for number in (0, 1):
        note("begun", number, 200)
    assert log.percent(60) == 0
    for number in (0, 1):
        note("done", number, 200, 30)
    costs = log.costs({"t": 200}, kills)
    assert costs == RangeCosts(2, 3, 2, 1, {"reader@50": (1, 0), "holder@50": (2, 2)})


def test_a_kill_is_told_as_a_kind_and_a_percentage() -> None:
    assert Kill.parse("slot-reader@25") == Kill("slot-reader", 25)
    for text in ("reader", "reader@", "nobody@25"):
        with pytest.raises(ValueError, match="KIND@PERCENT"):
            Kill.parse(text)
