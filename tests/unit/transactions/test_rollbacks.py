"""Rolled-back subtransactions, from the wire to the rows that a commit gives: in memory, in segments, and in both.

``Course`` also plays PostgreSQL: it gives xids to a transaction and its savepoints at their first row, parents first,
and tells a rollback by one abort for each subtransaction, children before their parents. What must come out is what a
plain list says: all rows but those of the rolled-back subtransactions, numbered from 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.memory_parts import part_rows
from tests.wire import Wire
from xidstream.pipeline.commits.prepared import stamp_segments
from xidstream.pipeline.errors import IllegalTransition
from xidstream.pipeline.exchange import PreparedTransaction, Sealed, SegmentPart, TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import Committed, Prepared, StreamCutter, TransactionBlock
from xidstream.pipeline.transactions import transaction
from xidstream.pipeline.transactions.buffer_calls import BufferCall, BufferSettings
from xidstream.pipeline.transactions.transaction_buffer import TransactionBuffer

XID = 700
IN_MEMORY, AT_ONCE = 64 << 20, 1
"""``buffer_memory_bytes``: nothing is spilled, or each block is."""
LAYOUT = Layout(1, "s", "e")
Row = tuple[int, str, str]
"""Number, table and value."""


@dataclass
class Level:
    """The transaction, or an open savepoint. ``released``: the subxids of what was released into it."""

    xid: int | None = None
    released: list[int] = field(default_factory=list)


class Course:
    """A server, and what a reader and a buffer make of it. ``cut`` has the reader cut what it has gathered."""

    def __init__(self, storage: Path, memory_bytes: int, *, block_bytes: int = 1 << 20) -> None:
        self.wire = Wire()
        self.levels = [Level()]
        self.next_xid = XID
        self.written: list[tuple[int, str, str]] = []
        """Subxid, table and value of all rows."""
        self.aborted: set[int] = set()
        self.storage = Storage(str(storage))
        self.folder = storage
        self.cutter = StreamCutter(block_bytes=block_bytes, pending_limit_bytes=1 << 22, parallel=False)
        self.buffer = TransactionBuffer(
            BufferSettings(str(storage), LAYOUT, memory_bytes), lambda table: table
        )
        self.n_blocks = 0
        self._is_begun = self._is_declared = False

    # -- the server ------------------------------------------------------------------------------------

    def write(self, n: int = 1, table: str = "t") -> None:
        for level in self.levels:
            if level.xid is None:
                level.xid, self.next_xid = self.next_xid, self.next_xid + 1
        owner = self.levels[-1].xid
        assert owner is not None
        self.start()
        if not self._is_declared:
            for relid, name in enumerate("tu", 1):
                self.wire.relation(relid, name)
            self._is_declared = True
        for _ in range(n):
            value = f"v{len(self.written)}"
            self.written.append((owner, table, value))
            self.wire.insert(value, relid=1 + "tu".index(table), subxid=owner)
        self.wire.stop()
        self.read()

    def start(self) -> None:
        self.wire.start(XID, first=not self._is_begun)
        self._is_begun = True

    def savepoint(self) -> None:
        self.levels.append(Level())

    def release(self) -> None:
        level = self.levels.pop()
        if level.xid is not None:
            self.levels[-1].released += [*level.released, level.xid]

    def rollback_to(self, depth: int, *, cut_within: bool = False) -> None:
        """The savepoint at ``depth`` (the first is 1) stays, with a new subtransaction."""
        while len(self.levels) > depth:
            level = self.levels.pop()
            for subxid in [] if level.xid is None else [*level.released, level.xid]:
                self.wire.stream_abort(XID, subxid)
                self.aborted.add(subxid)
                self.read()
                if cut_within:
                    self.cut()
        self.savepoint()

    # -- the reader and the buffer -----------------------------------------------------------------------

    def read(self) -> list[Any]:
        return [each for data in self.wire.take() for each in self._handle(self.cutter.feed(data))]

    def cut(self) -> None:
        self._handle(self.cutter.flush_open())

    def _handle(self, events: Sequence[Any]) -> list[Any]:
        results = []
        for event in events:
            call = BufferCall()
            if isinstance(event, TransactionBlock):
                call.add_block(event, self.n_blocks)
                self.n_blocks += 1
            elif isinstance(event, Committed):
                call.add_end(event.end, self.n_blocks, event.aborted)
            else:
                assert isinstance(event, Prepared)
                results.append(self.buffer.prepare(event, self.n_blocks))
                continue
            *sealed, _ = self.buffer.add_and_commit(call.heads, call.versions, call.blocks, call.ends)
            results += sealed
        return results

    def commit(self) -> Sealed:
        self.wire.stream_commit(XID, 1 << 40)
        (sealed,) = self.read()
        assert isinstance(sealed, Sealed)
        return sealed

    def prepare(self) -> PreparedTransaction:
        self.wire.stream_prepare(XID, "gid", 1 << 40)
        (record,) = self.read()
        assert isinstance(record, PreparedTransaction)
        return record

    # -- what comes of it --------------------------------------------------------------------------------

    @property
    def expected(self) -> list[Row]:
        kept = [(table, value) for owner, table, value in self.written if owner not in self.aborted]
        return [(seq, *row) for seq, row in enumerate(kept)]

    def stored(self) -> list[str]:
        """The numbers of the segments in storage, in order."""
        return sorted((path.stem for path in self.folder.rglob("epochs/*/*/*")), key=int)

    def released(self, segments: Sequence[SegmentPart]) -> list[Row]:
        found: list[Row] = []
        read = SegmentReader(self.storage.uri)
        for part in segments:
            batches = list(read(part))
            assert sum(batch.num_rows for batch in batches) == part.n_rows > 0
            for batch in batches:
                found += rows_of(part.relation.table, batch)
        return found

    def check(self, sealed: Sealed) -> None:
        found = self.released(sealed.segments)
        for part in sealed.memory:
            table = part_rows(part, lambda ref: iter(ref.to_batches()))
            assert table.num_rows == part.n_rows > 0
            found += rows_of(part.relation.table, table)
        assert sorted(found) == self.expected
        assert sealed.n_rows == len(found)
        tables = sorted({f"public.{table}" for _, table, _ in self.expected})
        kept = sealed.transactions.to_pylist()
        assert [(row["rows"], row["tables"]) for row in kept] == ([(len(found), tables)] if found else [])
        named = sorted((key.rpartition("/")[2].partition(".")[0] for key in sealed.stored_keys()), key=int)
        assert self.stored() == named, "no segment is left behind"


def rows_of(table: str, released: pa.RecordBatch | pa.Table) -> list[Row]:
    numbers, values = (released.column(name).to_pylist() for name in ("_seq", "a"))
    return [(seq, table, value) for seq, value in zip(numbers, values, strict=True)]


@pytest.fixture(params=[IN_MEMORY, AT_ONCE], ids=["in memory", "spilled"])
def course(request: pytest.FixtureRequest, tmp_path: Path) -> Course:
    return Course(tmp_path / "segments", request.param)


@pytest.mark.parametrize("each_in_a_block", [True, False])
def test_500_kept_500_rolled_back_and_5_kept_are_505_rows(course: Course, each_in_a_block: bool) -> None:
    course.write(500)
    course.savepoint()
    for then in (lambda: course.write(500), lambda: course.rollback_to(1), lambda: course.write(5)):
        if each_in_a_block:
            course.cut()
        then()
    sealed = course.commit()
    course.check(sealed)
    assert sealed.n_rows == 505


def test_a_rollback_to_an_outer_savepoint_takes_what_was_released_into_it(course: Course) -> None:
    course.write(table="u")
    course.savepoint()
    course.write()
    course.savepoint()
    course.write(2, "u")
    course.release()
    course.cut()
    course.write(3)
    course.savepoint()
    course.write()
    course.cut()
    course.rollback_to(1)
    course.write(table="u")
    course.check(course.commit())
    assert course.expected == [(0, "u", "v0"), (1, "u", "v8")]


def test_a_rollback_takes_the_rows_of_many_blocks_and_the_numbers_go_on_before_them(course: Course) -> None:
    course.write(3)
    course.savepoint()
    for n in range(6):
        course.write(2, "tu"[n % 2])
        course.cut()
    course.rollback_to(1)
    course.write(2)
    course.cut()
    if course.stored():
        assert course.stored() == ["6", "7"], (
            "what has no other row is gone at once, and the first one was cut"
        )
    course.write(2, "u")
    course.check(course.commit())
    assert course.expected[-1] == (6, "u", "v18")


def test_a_segment_is_rewritten_once_for_many_rollbacks(tmp_path: Path) -> None:
    """And before the next one of its table is written, not at each rollback."""
    course = Course(tmp_path / "segments", AT_ONCE)
    course.write(3)
    course.savepoint()
    course.write(3)
    course.savepoint()
    course.write(3)
    course.cut()
    for _ in range(20):
        course.rollback_to(2)
        course.write(table="u")
        course.cut()
    course.rollback_to(1)
    course.write(table="u")
    course.cut()
    n_of_u = 21
    assert course.stored() == ["0", str(n_of_u)]
    sealed = course.commit()
    assert course.stored() == [str(n_of_u), str(n_of_u + 1)]
    course.check(sealed)


def test_a_segment_that_was_cut_is_rewritten_before_the_commit_when_more_rows_came(tmp_path: Path) -> None:
    course = Course(tmp_path / "segments", 200_000)
    course.write(4_000)
    course.savepoint()
    course.write(4_000)
    course.cut()
    assert course.stored() == ["0"]
    course.rollback_to(1)
    course.write(500)
    course.cut()
    assert course.stored() == ["0"], "so few do not pay for it"
    course.write(1_500)
    course.cut()
    assert course.stored() == ["1"]
    course.check(course.commit())


def test_what_is_rolled_back_behind_the_last_block_goes_with_the_commit(course: Course) -> None:
    course.write(2)
    course.savepoint()
    course.write(2, "u")
    course.write(2)
    course.cut()
    course.rollback_to(1)
    course.check(course.commit())
    assert len(course.expected) == 2


def test_a_rollback_before_the_first_row_takes_nothing(course: Course) -> None:
    course.savepoint()
    course.start()
    course.wire.stop()
    course.wire.stream_abort(XID, 9_999)
    course.write(2)
    course.rollback_to(1)
    course.write(3)
    course.check(course.commit())
    assert len(course.expected) == 3


def test_a_transaction_that_rolled_everything_back_leaves_no_row_no_segment_and_no_transaction(
    course: Course,
) -> None:
    course.savepoint()
    course.write(3)
    course.cut()
    course.write(3, "u")
    course.cut()
    course.rollback_to(1)
    sealed = course.commit()
    course.check(sealed)
    assert (sealed.n_rows, sealed.segments, sealed.transactions.num_rows) == (0, (), 0)


@pytest.mark.parametrize("memory_bytes", [IN_MEMORY, AT_ONCE])
def test_ten_thousand_savepoints_of_one_block_every_other_one_rolled_back(
    tmp_path: Path, memory_bytes: int
) -> None:
    course = Course(tmp_path / "segments", memory_bytes, block_bytes=4 << 20)
    for n in range(10_000):
        course.savepoint()
        course.write()
        if n % 2:
            course.rollback_to(1)
        course.release()
    course.check(course.commit())
    assert (len(course.expected), course.n_blocks) == (5_000, 1)


def test_a_rollback_of_several_subtransactions_is_one_though_blocks_are_cut_within_it(course: Course) -> None:
    """Those of the child alone are in the middle of its parent's."""
    course.write()
    course.savepoint()
    course.write()
    course.savepoint()
    course.write()
    course.release()
    course.write()
    course.rollback_to(1, cut_within=True)
    course.write()
    course.check(course.commit())
    assert [value for _, _, value in course.expected] == ["v0", "v4"]


def test_what_was_prepared_has_the_rows_that_stay_and_no_others(course: Course) -> None:
    course.write(3)
    course.savepoint()
    course.write(2, "u")
    course.write(2)
    course.cut()
    course.rollback_to(1)
    course.write(2, "u")
    course.cut()
    course.rollback_to(1)
    record = course.prepare()
    parts = stamp_segments(record, TransactionEnd(Xid(XID), Lsn(1 << 41), Lsn(2 << 41), 0, gid="gid"))
    assert sorted(course.released(parts)) == course.expected
    assert len(course.stored()) == len(record.segments) == 1


@pytest.mark.parametrize("memory_bytes", [IN_MEMORY, AT_ONCE])
@pytest.mark.parametrize("in_a_block_before", [True, False])
def test_a_rollback_that_leaves_rows_behind_its_own_is_refused_and_takes_nothing(
    tmp_path: Path, memory_bytes: int, in_a_block_before: bool
) -> None:
    course = Course(tmp_path / "segments", memory_bytes)
    for subxid in (700, 701, 702, 701):
        course.start()
        course.wire.relation()
        course.wire.insert("x", subxid=subxid)
        course.wire.stop()
        course.read()
        if in_a_block_before or subxid == 701:
            course.cut()
    before = course.stored()
    course.wire.stream_abort(XID, 702)
    course.start()
    course.wire.insert("x", subxid=703)
    course.wire.stop()
    course.read()
    with pytest.raises(
        IllegalTransition, match=r"transaction 700 open: 4 rows.*behind those of subtransaction 702"
    ):
        course.cut()
    assert course.stored() == before


@pytest.mark.parametrize("seed", range(60))
def test_random_savepoints_leave_what_a_list_without_the_rolled_back_rows_has(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = random.Random(seed)
    monkeypatch.setattr(transaction, "_ROWS_PER_FILE", c.choice((0, 1_000)))
    memory_bytes = c.choice((IN_MEMORY, 40_000, 12_000, AT_ONCE))
    course = Course(tmp_path / "segments", memory_bytes, block_bytes=c.choice((200, 1_000, 1 << 20)))
    for _ in range(c.choice((10, 60, 200))):
        what = c.randrange(100)
        if what < 45:
            course.write(c.choice((1, 1, 2, 5)), c.choice("tu"))
        elif what < 60:
            course.savepoint()
        elif what < 70 and len(course.levels) > 1:
            course.release()
        elif what < 82 and len(course.levels) > 1:
            course.rollback_to(c.randrange(1, len(course.levels)), cut_within=c.random() < 0.3)
        else:
            course.cut()
    course.write()
    if c.random() < 0.5:
        course.check(course.commit())
        return
    record = course.prepare()
    parts = stamp_segments(record, TransactionEnd(Xid(XID), Lsn(1 << 41), Lsn(2 << 41), 0, gid="gid"))
    assert sorted(course.released(parts)) == course.expected
    assert len(course.stored()) == len(record.segments)
