"""Whether a run takes snapshots: what is asked for, what was recorded, and who creates the slot."""

from __future__ import annotations

import pytest

from xidstream.pipeline.config import SnapshotMode
from xidstream.pipeline.errors import ExitStatus, Unsupported
from xidstream.pipeline.snapshot.decision import Decision, takes_snapshots


@pytest.mark.parametrize(
    ("recorded", "creates_slot", "sink_is_delta", "takes"),
    [
        (None, True, True, True),
        (None, True, False, False),
        (None, False, True, False),
        (Decision(takes_snapshots=True), False, True, True),
        (Decision(takes_snapshots=False), True, True, False),
        (Decision(takes_snapshots=True), False, False, False),
    ],
)
def test_without_the_setting_what_was_recorded_counts_and_else_who_creates_the_slot(
    recorded: Decision | None, creates_slot: bool, sink_is_delta: bool, takes: bool
) -> None:
    found = takes_snapshots(None, recorded, creates_slot=creates_slot, sink_is_delta=sink_is_delta)
    assert found is takes


def test_the_setting_wins_over_the_record() -> None:
    for recorded in (None, Decision(takes_snapshots=True), Decision(takes_snapshots=False)):
        for creates_slot in (True, False):
            arguments = {"creates_slot": creates_slot, "sink_is_delta": True}
            assert takes_snapshots(SnapshotMode.INITIAL, recorded, **arguments)
            assert takes_snapshots(SnapshotMode.ONLY, recorded, **arguments)
            assert not takes_snapshots(SnapshotMode.NEVER, recorded, **arguments)


def test_a_sink_that_takes_no_snapshots_is_refused_when_they_are_asked_for() -> None:
    with pytest.raises(Unsupported, match="to a Delta sink only") as caught:
        takes_snapshots(SnapshotMode.INITIAL, None, creates_slot=True, sink_is_delta=False)
    assert caught.value.policy.exit_status is ExitStatus.PRECONDITION
