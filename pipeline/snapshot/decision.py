"""Whether a slot's tables are read as they were before the stream: asked for, or decided once and kept.

Where a run creates the slot and its sink is a log, the rows before are part of what a user expects there: so snapshots
are the default there, and nowhere else. A slot that was there before has had a reader, who has the rows or did not want
them. What was decided is recorded before the slot is created, because afterwards nobody could tell the two
cases apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.settings.modes import SnapshotMode
from xidstream.pipeline.settings.sink_kinds import SinkKind, Snapshots
from xidstream.pipeline.snapshot.bounds import SnapshotBounds


@dataclass(frozen=True)
class Decision:
    """``takes_snapshots``: of all published tables. ``published``: relid → what published the table before the slot was
    created (``PublishedSource.published_as``); empty where the slot was there already. ``slot_xmax``: the slot's stream
    has every commit of a transaction with this id (64 bits) or a later one; None where that was not recorded yet."""

    takes_snapshots: bool
    published: Mapping[int, str] = field(default_factory=dict)
    slot_xmax: int | None = None

    def may_lack(self, bounds: SnapshotBounds) -> bool:
        """Whether a commit may be neither in the stream nor in a snapshot with these bounds: one whose record lies
        before the slot's first position, and which nobody saw when the snapshot was taken, because it waited for its
        synchronous standby."""
        return self.slot_xmax is None or bounds.xmin < self.slot_xmax


def takes_snapshots(
    asked: SnapshotMode | None, recorded: Decision | None, *, creates_slot: bool, sink: SinkKind
) -> bool:
    """``asked``: None where the setting is not given.

    Raises Unsupported for a sink that cannot take snapshots.
    """
    if asked is SnapshotMode.NEVER:
        return False
    if asked is not None:
        if sink.snapshots is Snapshots.NONE:
            raise Unsupported(
                f"the {sink.name} takes no snapshots of tables",
                remedy="give --sink delta:URI or foreach:module:function, or --snapshot never",
            )
        return True
    if recorded is not None and sink.snapshots is not Snapshots.NONE:
        return recorded.takes_snapshots
    # A function that was written for changes has no use for rows that it was not told of.
    return creates_slot and sink.is_log
