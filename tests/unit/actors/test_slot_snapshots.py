"""When the snapshots in hand go on with the next epoch, and when all is asked anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.opened import opened_at
from xidstream.actors.supervision import slot_snapshots
from xidstream.actors.supervision.slot_snapshots import SlotSnapshots
from xidstream.pipeline.settings.config import Config


class Taking:
    """A coordinator that notes what it is told."""

    made: list[Taking]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.told: list[str] = []
        self.made.append(self)

    def begin_epoch(self) -> None:
        self.told.append("begin_epoch")

    def stop(self) -> None:
        self.told.append("stop")


@pytest.mark.parametrize(
    ("last_owners", "told"),
    [
        ([0, 1, 2], [["begin_epoch", "begin_epoch"]]),
        ([4, 4, 5, 5], [["begin_epoch", "begin_epoch", "begin_epoch"]]),
        ([0, 2, 3], [["stop"], ["begin_epoch"]]),
        ([None, 3, None, 9], [["begin_epoch", "begin_epoch", "begin_epoch"]]),
    ],
    ids=["one epoch after the other", "batch loops of an epoch", "another run in between", "not known"],
)
def test_what_is_in_hand_is_given_up_where_another_run_has_had_the_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_owners: list[int | None], told: list[list[str]]
) -> None:
    """It committed tables that the other run had taken meanwhile, and said that the server was restored."""
    monkeypatch.setattr(Taking, "made", [], raising=False)
    monkeypatch.setattr(slot_snapshots, "SnapshotCoordinator", Taking)
    snapshots = SlotSnapshots(
        Config(dsn="host=nowhere", slot="s", storage=str(tmp_path), sink=f"delta:{tmp_path}/delta"), print
    )
    epoch: Any = dataclasses.make_dataclass("Epoch", [("name", str)])("e")
    for last_owner in last_owners:
        found = dataclasses.replace(opened_at(0, 0), server={"port": "5432"}, last_owner=last_owner)
        snapshots.begin(epoch, found, epoch)
    assert [each.told for each in Taking.made] == told
