"""A buffer as production has it, without Ray: torn blocks, poison, spills that fail, calls that do not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.decode.builder import Block, block, insert, relation
from xidstream.pipeline.errors import ComponentLost, PoisonedChange, ProtocolViolation, StorageFault
from xidstream.pipeline.exchange import PreparedTransaction, Sealed, TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import load_prepared
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import Prepared
from xidstream.pipeline.transactions import memory
from xidstream.pipeline.transactions.buffer_calls import BlockHead, BufferSettings, End
from xidstream.pipeline.transactions.transaction_buffer import TransactionBuffer

VERSIONS = {1: relation(("note", "text"))}
XID = Xid(700)
GOOD = block(*[insert([str(i)], subxid=700) for i in range(100)])
POISON = block(insert([b"caf\xe9"], subxid=700))
TORN = block(insert(["a", "b"], subxid=700))
"""Two columns, where the table has one."""
COMMIT = TransactionEnd(XID, Lsn(0x200), Lsn(0x208), 0, streamed=True)
PREPARE = Prepared(XID, "p", Lsn(0x200), Lsn(0x208), streamed=True, origin=None, has_blocks=True)


class Calls:
    """The reader's calls for one transaction, each with the number of those before it."""

    def __init__(self, storage: Path, memory_bytes: int = 64 << 20, **settings_: Any) -> None:
        settings = BufferSettings(str(storage), Layout(1, "s", "e"), memory_bytes, **settings_)
        self.buffer = TransactionBuffer(settings, lambda table: table)
        self.n_steps = 0

    def add(self, content: Block) -> None:
        head = BlockHead(XID, self.n_steps, Lsn(0x100), True, (1,))
        self.n_steps += 1
        self.buffer.add_blocks([head], {} if head.step else VERSIONS, [content])

    def commit(self) -> Sealed:
        sealed, _ = self.buffer.add_and_commit([], {}, [], [End(COMMIT, self.n_steps, 0)])
        assert isinstance(sealed, Sealed)
        return sealed

    def prepare(self) -> PreparedTransaction:
        return self.buffer.prepare(PREPARE, self.n_steps)

    def end(self, how: str) -> Any:
        return self.commit() if how == "commit" else self.prepare()


def notes_of(sealed: Sealed) -> list[str]:
    return [note for part in sealed.memory for note in part.ref.column("note").to_pylist()]


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "segments"


@pytest.mark.parametrize("end", ["commit", "prepare"])
def test_a_transaction_with_a_torn_block_is_neither_committed_nor_prepared(storage: Path, end: str) -> None:
    calls = Calls(storage)
    calls.add(GOOD)
    with pytest.raises(ProtocolViolation) as first:
        calls.add(TORN)
    for call in (lambda: calls.add(GOOD), lambda: calls.end(end)):
        with pytest.raises(ProtocolViolation) as again:
            call()
        assert again.value is first.value, "a buffer that has failed says the same to every call"
    assert not list(storage.rglob("*.json")), "a torn transaction was made durable"


def test_a_transaction_whose_last_block_came_with_its_commit_and_is_torn_is_not_committed(
    storage: Path,
) -> None:
    calls = Calls(storage)
    calls.add(GOOD)
    head = BlockHead(XID, 1, Lsn(0x100), True, (1,))
    with pytest.raises(ProtocolViolation):
        list(calls.buffer.add_and_commit([head], {}, [TORN], [End(COMMIT, 2, 1)]))


def test_another_transaction_of_a_failed_buffer_gets_its_error_too(storage: Path) -> None:
    calls = Calls(storage)
    with pytest.raises(ProtocolViolation):
        calls.add(TORN)
    with pytest.raises(ProtocolViolation):
        calls.buffer.abort(Xid(701), 1)


@pytest.mark.parametrize("memory_bytes", [64 << 20, 1], ids=["in memory", "spilled"])
def test_a_transaction_that_keeps_poison_gives_its_error_at_its_commit_and_no_row(
    storage: Path, memory_bytes: int
) -> None:
    calls = Calls(storage, memory_bytes)
    for content in (GOOD, POISON, GOOD):
        calls.add(content)
    sealed = calls.commit()
    assert sealed.undeliverable is not None and isinstance(sealed.undeliverable.error, PoisonedChange)
    assert "xid 700" in sealed.undeliverable.error.message and "0/200" in sealed.undeliverable.error.message
    assert (sealed.memory, sealed.segments, sealed.n_rows, sealed.transactions.num_rows) == ((), (), 0, 0)
    assert not list(storage.rglob("*.parquet"))


def test_a_prepared_transaction_that_keeps_poison_is_recorded_with_it(storage: Path) -> None:
    calls = Calls(storage)
    for content in (GOOD, POISON):
        calls.add(content)
    record = calls.prepare()
    assert record.poison is not None
    (loaded,) = load_prepared(Storage(str(storage)), Layout(1, "s", "f"))
    assert loaded.poison == record.poison
    assert loaded.bad_tables == record.bad_tables and record.bad_tables[0].n_changes == 101


@pytest.mark.parametrize("bind_late", [False, True])
@pytest.mark.parametrize("memory_bytes", [64 << 20, 1], ids=["in memory", "spilled"])
def test_where_tables_are_parked_a_bad_one_leaves_no_row_and_no_file_at_its_commit(
    storage: Path, memory_bytes: int, bind_late: bool
) -> None:
    calls = Calls(storage, memory_bytes, bind_late=bind_late, parks=True)
    for content in (GOOD, POISON, GOOD):
        calls.add(content)
    sealed = calls.commit()
    assert sealed.undeliverable is None and (sealed.memory, sealed.segments, sealed.n_rows) == ((), (), 0)
    (bad,) = sealed.bad_tables
    assert (bad.relid, bad.xid, bad.commit_lsn, bad.n_changes) == (5, 700, 0x200, 201)
    assert sealed.transactions.column("rows").to_pylist() == [201]
    assert not list(storage.rglob("*.parquet"))


def test_a_transaction_whose_spill_failed_is_not_committed_without_those_rows(storage: Path) -> None:
    storage.write_bytes(b"no folder")
    calls = Calls(storage, memory_bytes=1 << 20)
    big = block(*[insert(["x" * 1000], subxid=700) for _ in range(2000)])
    for call in (lambda: calls.add(big), lambda: calls.add(GOOD), calls.commit):
        with pytest.raises(StorageFault):
            call()


@pytest.mark.parametrize("end", ["commit", "prepare"])
def test_a_transaction_of_which_a_block_did_not_come_is_neither_committed_nor_prepared(
    storage: Path, end: str
) -> None:
    calls = Calls(storage)
    calls.add(GOOD)
    calls.n_steps += 1
    with pytest.raises(ComponentLost, match="the buffer of transaction 700 has got 1 of its first 2 blocks"):
        calls.end(end)


@pytest.mark.parametrize("memory_bytes", [64 << 20, 1], ids=["in memory", "spilled"])
def test_a_transaction_that_moved_has_the_rows_of_both_buffers_in_order(
    storage: Path, memory_bytes: int
) -> None:
    before, after = Calls(storage, memory_bytes), Calls(storage, memory_bytes)
    before.add(block(insert(["first"], subxid=700)))
    after.buffer.adopt(before.buffer.give_up(XID, 1))
    after.buffer.add_blocks(
        [BlockHead(XID, 1, Lsn(0x100), True, (1,))], VERSIONS, [block(insert(["second"], subxid=700))]
    )
    after.n_steps = 2
    sealed = after.commit()
    assert sealed.n_rows == 2 and len(sealed.segments) == (2 if memory_bytes == 1 else 0)
    if not sealed.segments:
        assert notes_of(sealed) == ["first", "second"]
    with pytest.raises(ComponentLost, match="the buffer of transaction 700 has got 0 of its first 1 blocks"):
        before.buffer.abort(XID, 1)


def test_rows_go_where_put_stores_them_without_those_of_a_rolled_back_subtransaction(storage: Path) -> None:
    settings = BufferSettings(str(storage), Layout(1, "s", "e"), 64 << 20)
    stored: list[pa.Table] = []

    def put(table: pa.Table) -> int:
        stored.append(table)
        return len(stored) - 1

    buffer = TransactionBuffer(settings, put)
    content = block(insert(["kept"], subxid=700), insert(["gone"], subxid=701))
    buffer.add_blocks([BlockHead(XID, 0, Lsn(0x100), True, (1,))], VERSIONS, [content])
    sealed, _ = buffer.add_and_commit([], {}, [], [End(COMMIT, 1, 0, (701,))])
    assert isinstance(sealed, Sealed)
    assert [part.ref for part in sealed.memory] == [0]
    assert stored[0].column("note").to_pylist() == ["kept"]


WIDE = block(*[insert(["x" * 1000], subxid=700) for _ in range(1000)])
"""About a megabyte."""


@pytest.mark.parametrize("bind_late", [True, False])
def test_a_small_transaction_goes_to_the_sink_from_memory_whatever_the_sink(
    storage: Path, bind_late: bool
) -> None:
    calls = Calls(storage, bind_late=bind_late)
    for _ in range(3):
        calls.add(WIDE)
    sealed = calls.commit()
    assert (sealed.n_rows, sealed.segments) == (3000, ()) and sealed.memory


@pytest.mark.parametrize("bind_late", [True, False])
def test_the_rest_of_a_spilled_transaction_becomes_a_segment_if_the_sink_takes_segments(
    storage: Path, bind_late: bool
) -> None:
    calls = Calls(storage, memory_bytes=3 << 19, bind_late=bind_late)
    for content in (WIDE, WIDE, WIDE):
        calls.add(content)
    sealed = calls.commit()
    assert sealed.n_rows == 3000
    rest = sealed.segments[1:] if bind_late else sealed.memory
    assert [part.n_rows for part in rest] == [1000]
    assert [part.n_rows for part in sealed.segments[:1]] == [2000]
    assert not (bind_late and sealed.memory)
    assert len(list(storage.rglob("*.*"))) == len(sealed.segments)


def test_a_large_transaction_in_memory_becomes_a_segment_if_the_sink_takes_segments(storage: Path) -> None:
    calls = Calls(storage, bind_late=True)
    for _ in range(5):
        calls.add(WIDE)
    sealed = calls.commit()
    assert [part.n_rows for part in sealed.segments] == [5000] and not sealed.memory


def test_a_large_rest_becomes_several_segments_with_each_row_once_and_in_order(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1_000_000)
    calls = Calls(storage, memory_bytes=7 << 20, bind_late=True)
    for _ in range(11):
        calls.add(WIDE)
    sealed = calls.commit()
    assert not sealed.memory
    assert [part.n_rows for part in sealed.segments] == [8000, 1000, 1000, 1000]
    reader = SegmentReader(str(storage))
    seqs = [seq for part in sealed.segments for batch in reader(part) for seq in batch["_seq"].to_pylist()]
    assert seqs == list(range(sealed.n_rows)) == list(range(11_000))
    assert len(list(storage.rglob("*.*"))) == len(sealed.segments)


def test_of_a_large_transaction_tables_with_few_rows_go_to_the_sink_from_memory(storage: Path) -> None:
    """A file for each of thousands took seconds."""
    versions = {n: relation(("note", "text"), relid=n, name=f"t{n}") for n in range(1, 102)}
    buffer = TransactionBuffer(
        BufferSettings(str(storage), Layout(1, "s", "e"), 3 << 19, bind_late=True), lambda table: table
    )
    much = block(*[insert(["x" * 1000], subxid=700, relid=1) for _ in range(2000)])
    rest = block(
        *[insert(["y"], subxid=700, relid=n) for n in range(1, 102)],
        *[insert(["x" * 1000], subxid=700, relid=2) for _ in range(300)],
    )
    heads = [
        BlockHead(XID, 0, Lsn(0x100), True, (1,)),
        BlockHead(XID, 1, Lsn(0x100), True, tuple(versions)),
    ]
    sealed, _ = buffer.add_and_commit(heads, versions, [much, rest], [End(COMMIT, 2, 2)])
    assert isinstance(sealed, Sealed)
    assert [(part.relation.table, part.n_rows) for part in sealed.segments] == [("t1", 2000), ("t2", 301)]
    assert sorted(part.relation.relid for part in sealed.memory) == [1, *range(3, 102)]


def test_a_transaction_whose_last_segment_cannot_be_written_is_not_committed(storage: Path) -> None:
    storage.write_bytes(b"no folder")
    calls = Calls(storage, bind_late=True)
    for _ in range(5):
        calls.add(WIDE)
    for _ in range(2):
        with pytest.raises(StorageFault):
            calls.commit()


@pytest.mark.parametrize("how", ["given up", "undeliverable"])
def test_what_is_not_delivered_is_not_written_at_its_commit(storage: Path, how: str) -> None:
    skips = frozenset({(XID, Lsn(0x200))}) if how == "given up" else frozenset()
    calls = Calls(storage, bind_late=True, skips=skips)
    for _ in range(5):
        calls.add(WIDE)
    calls.add(POISON)
    sealed = calls.commit()
    if how == "given up":
        assert sealed.skipped == ((XID, 0x200, (5,)),)
    assert not storage.exists(), "nothing was ever written"
