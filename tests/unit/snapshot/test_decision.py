"""Whether a run takes snapshots: what is asked for, what was recorded, and who creates the slot."""

from __future__ import annotations

from typing import Any

import pytest

from xidstream.pipeline.errors import ExitStatus, Unsupported
from xidstream.pipeline.settings.modes import SnapshotMode
from xidstream.pipeline.settings.sink_kinds import CONSOLE, kind_of
from xidstream.pipeline.snapshot.decision import Decision, takes_snapshots


@pytest.mark.parametrize(
    ("recorded", "creates_slot", "sink", "takes"),
    [
        (None, True, "delta:/tables", True),
        (None, True, "", False),
        (None, True, "foreach:module:function", False),
        (None, False, "delta:/tables", False),
        (Decision(takes_snapshots=True), False, "delta:/tables", True),
        (Decision(takes_snapshots=True), False, "", True),
        (Decision(takes_snapshots=False), True, "delta:/tables", False),
        (Decision(takes_snapshots=True), False, "console", False),
    ],
)
def test_without_the_setting_what_was_recorded_counts_and_else_who_creates_the_slot(
    recorded: Decision | None, creates_slot: bool, sink: str, takes: bool
) -> None:
    assert takes_snapshots(None, recorded, creates_slot=creates_slot, sink=kind_of(sink)) is takes


def test_the_setting_wins_over_the_record() -> None:
    for recorded in (None, Decision(takes_snapshots=True), Decision(takes_snapshots=False)):
        for creates_slot in (True, False):
            for sink in ("delta:/tables", "", "foreach:module:function"):
                arguments: dict[str, Any] = {"creates_slot": creates_slot, "sink": kind_of(sink)}
                assert takes_snapshots(SnapshotMode.INITIAL, recorded, **arguments)
                assert takes_snapshots(SnapshotMode.ONLY, recorded, **arguments)
                assert not takes_snapshots(SnapshotMode.NEVER, recorded, **arguments)


def test_the_console_takes_no_snapshots_and_refuses_to_be_asked_for_them() -> None:
    with pytest.raises(Unsupported, match="the console takes no snapshots") as caught:
        takes_snapshots(SnapshotMode.INITIAL, None, creates_slot=True, sink=CONSOLE)
    assert caught.value.policy.exit_status is ExitStatus.PRECONDITION
