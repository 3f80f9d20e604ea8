"""The tables that are held, and where the rows of each go: from its lock to the last row that is read.

To hold a table takes two answers. The holder gives its snapshot, and then the sink a place for its files. The sink also
tells up to which commit the table's log was cut (``SnapshotOutput.cut``). A snapshot is of no use that may lack one of
those commits, or one from before the slot (``SnapshotBook.may_lack``): nobody else has it.

A table that is *alone* is held again then, behind its writers, however long they take. Tables that are held *together*
wait for nobody: such a table is left out, and held alone by the caller. So are those that the holder leaves out
(``postgres.table_snapshot``), those that turn out to be large under their lock, because the others would wait for
them, and those whose column names clash. All of a group have one snapshot. If that may lack a commit, all are left out.

An example. Tables 7, 8 and 9 are asked for, in attempts 70, 80 and 90. The slot begins at xid 100 (``slot_xmax``). The
holder holds all three, with one snapshot whose xmin is 104: it sees every transaction below 100. The log of 8 was cut
at 0/5400, and the snapshot has all up to its checkpoint, 0/5000. Under its lock 9 has 3 MiB::

    7   its output is that of attempt 70, and TableHeld is told
    9   is released before the sink is asked, and left out
    8   is released, what the sink made for it is removed, and it is left out
    8   alone: it is held once more, behind its writers; then the snapshot has all of the table below its own place

Where xmin is 99, all three are released, and held alone one after the other.

A table may be given up while it is held, on another thread. Then nothing of it is kept: neither its lock nor its place.

Called by ``SnapshotSteps``, on its threads. Rejected: to wait with a group for the writers of one of its tables. All
would be locked for as long as that one waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from xidstream.actors.snapshots.actors import SnapshotActors
from xidstream.pipeline.errors import ColumnNameClash, SnapshotLost, XidstreamError
from xidstream.pipeline.initial_copy.copy_schedule import SMALL_BYTES, Hold, LeftOut, Release, TableHeld
from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput, SnapshotTables
from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.postgres.table_snapshot import HeldSnapshot
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import PublishedSource, plan_ranges

log = logging.getLogger(__name__)


class HeldTables:
    """``actors`` has the holder, and ``tables`` the sink's places."""

    def __init__(self, actors: SnapshotActors, book: SnapshotBook, tables: SnapshotTables) -> None:
        self._actors = actors
        self._book = book
        self._tables = tables
        self.n_readers = 1
        """How many readers there are, for which the ranges of a table are planned."""
        self.outputs: dict[int, SnapshotOutput] = {}
        """Where the files of each attempt go, by the attempt's number."""
        self._given_up: set[int] = set()
        """Attempts that are over: one of them may still be about to get a place for its files."""
        self._late: dict[int, SnapshotOutput] = {}
        """By relid: of an attempt that failed. A reader may have written a last file after its end."""

    def clear(self) -> None:
        """No table is held."""
        self.outputs.clear()
        self._given_up.clear()
        self._late.clear()

    def hold(self, action: Hold) -> TableHeld:
        """One table alone. It waits for its lock and its writers, and raises why it cannot be held."""
        relation = action.source.relation
        if relation.clash is not None:
            raise ColumnNameClash(f"the snapshot of table {relation.name}: {relation.clash}")
        self._discard_late(relation.relid)
        behind = self._book.last_snapshot_lsn(action.source)
        held = self._actors.hold("hold", action.source, action.wait_for_writers, behind)
        if not action.wait_for_writers and self._book.may_lack(held.bounds):
            held = self._actors.hold("hold", action.source, True, behind)
        output = self._output_of(held)
        self._place(action, output)
        if not action.wait_for_writers and held.bounds.whole_upto < output.cut:
            # The sink would refuse it each time, for as long as a transaction is open from before the last checkpoint.
            held = self._actors.hold("hold", action.source, True, behind)
            self._place(action, self._output_of(held))
        # A repair's rows are found by the key: one COPY for each table with rows of its own.
        by_range = held.by_range and action.repair is None
        ranges = plan_ranges(held.source.leaves, by_range=by_range, n_readers=self.n_readers)
        relid = held.source.relation.relid
        only = () if action.repair is None else self._book.rows_of(action.repair, held.source)
        return TableHeld(relid, action.attempt, held.source, held.snapshot_name, held.bounds, ranges, only)

    def _output_of(self, held: HeldSnapshot) -> SnapshotOutput:
        (output,) = self._tables.outputs([(held.source.relation, held.bounds.snapshot_lsn)])
        if isinstance(output, XidstreamError):
            raise output
        return output

    def hold_together(self, actions: Sequence[Hold]) -> list[TableHeld | LeftOut | XidstreamError]:
        """Several tables, under one snapshot. What became of each, in their order: it is held, or left out, or the sink
        has no place for it. If an error is raised none of them is held."""
        try:
            return self._held_together(actions)
        except BaseException:
            self._release_all([action.source.relation.relid for action in actions])
            raise

    def _held_together(self, actions: Sequence[Hold]) -> list[TableHeld | LeftOut | XidstreamError]:
        for action in actions:
            self._discard_late(action.source.relation.relid)
        sources = [action.source for action in actions if action.source.relation.clash is None]
        behind = max(map(self._book.last_snapshot_lsn, sources), default=INVALID_LSN)
        held: dict[int, HeldSnapshot] = self._actors.hold("hold_together", sources, behind)
        if any(self._book.may_lack(each.bounds) for each in held.values()):
            self._release_all(list(held))  # a table that waits for its writers does so alone
            held = {}
        large = [relid for relid, each in held.items() if each.source.n_bytes > SMALL_BYTES]
        if large:
            # It has grown, or its size could not be asked before. The others would wait for it.
            self._release_all(large)
            held = {relid: each for relid, each in held.items() if relid not in large}
        wanted = [(each.source.relation, each.bounds.snapshot_lsn) for each in held.values()]
        outputs = dict(zip(held, self._tables.outputs(wanted) if wanted else (), strict=True))
        found: list[TableHeld | LeftOut | XidstreamError] = []
        for action in actions:
            relid = action.source.relation.relid
            one, output = held.get(relid), outputs.get(relid)
            if one is not None and isinstance(output, SnapshotOutput):
                if one.bounds.whole_upto >= output.cut:
                    self._place(action, output)
                    ranges = plan_ranges(one.source.leaves, by_range=one.by_range)
                    found.append(
                        TableHeld(relid, action.attempt, one.source, one.snapshot_name, one.bounds, ranges)
                    )
                    continue
                self.discard(output)
            if one is not None:
                self._release_all([relid])
            found.append(output if isinstance(output, XidstreamError) else LeftOut(relid, action.attempt))
        return found

    def _discard_late(self, relid: int) -> None:
        """Before the table is held again: what came behind the end of its last attempt."""
        if (late := self._late.pop(relid, None)) is not None:
            self.discard(late)

    def _place(self, action: Hold, output: SnapshotOutput) -> None:
        """Have the files of this attempt go there. Where it was given up meanwhile, nothing of it is kept."""
        self.outputs[action.attempt] = output
        # In this order, and in the other one in ``release``: one of the two finds it.
        if action.attempt in self._given_up and self.outputs.pop(action.attempt, None) is not None:
            self._release_all([action.source.relation.relid])  # it may have been held behind its release
            self.discard(output)

    def let_go(self, sources: Sequence[PublishedSource], bounds: SnapshotBounds) -> dict[int, SnapshotLost]:
        """Let go of the tables' locks, because all rows are read. Returns those that were not held to the end, with an
        error: they are taken anew."""
        relids = [source.relation.relid for source in sources]
        lost: dict[int, SnapshotLost] = self._actors.hold("confirm", relids, bounds.valid_from)
        self._release_all(relids)
        return {
            relid: SnapshotLost(f"table {source.name} was not held to the end: {lost[relid].message}")
            for source, relid in zip(sources, relids, strict=True)
            if relid in lost
        }

    def release(self, action: Release) -> None:
        """Let go of the table, and remove what the attempt has written that is discarded, if any."""
        self._release_all([action.relid])
        if action.discarded is None:
            return
        self._given_up.add(action.discarded)
        output = self.outputs.pop(action.discarded, None)
        if output is not None:
            self.discard(output)
            self._late[action.relid] = output

    def _release_all(self, relids: Sequence[int]) -> None:
        with suppress(XidstreamError):  # they were lost, and their locks with them
            self._actors.release(*relids)

    def discard(self, output: SnapshotOutput) -> None:
        """Remove what a failed attempt has written, as far as the sink can be reached: else a vacuum does."""
        try:
            self._tables.discard(output)
        except XidstreamError as error:
            log.debug("what a snapshot wrote that failed is left to a vacuum: %s", error.message)
