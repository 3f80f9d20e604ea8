"""Real buffer actors whose calls are all on their way before the first of them fails, or is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from tests.memory_parts import part_rows
from tests.ray.conftest import wait_until
from tests.unit.decode.builder import Block, begin, block, insert, relation
from tests.unit.decode.builder import commit as commit_message
from xidstream.actors.driver.object_store_frames import read_object
from xidstream.actors.reader.buffer_pool import BufferPool
from xidstream.actors.runtime.object_store import put_arrow
from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.actors.xid_buffer import XidBuffer
from xidstream.pipeline.errors import ComponentLost, PoisonedChange, ProtocolViolation
from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.packs import FEW_TABLES
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.stream import Block as StreamBlock
from xidstream.pipeline.stream import Prepared, TransactionBlock, UsedRelations
from xidstream.pipeline.stream.ledger import TransactionLedger
from xidstream.pipeline.transactions.buffer_calls import BlockHead, BufferSettings, End
from xidstream.pipeline.transactions.relation_cache import REMEMBERED_COLUMNS

pytestmark = pytest.mark.ray

VERSIONS = {1: relation(("note", "text"))}
USED = UsedRelations(VERSIONS)

XID = Xid(700)
GOOD = block(*[insert([str(i)], subxid=700) for i in range(100)])
POISON = block(insert([b"caf\xe9"], subxid=700))
TORN = block(insert(["a", "b"], subxid=700))
"""Two columns, where the table has one."""
COMMIT = TransactionEnd(XID, Lsn(0x200), Lsn(0x208), 0, streamed=True)
PREPARE = Prepared(XID, "p", Lsn(0x200), Lsn(0x208), streamed=True, origin=None, has_blocks=True)


class Buffer:
    def __init__(self, storage: Path) -> None:
        settings = BufferSettings(str(storage), Layout(1, "s", "e"), 64 << 20)
        self.actor = ray.remote(XidBuffer).options(num_cpus=0.01).remote(settings)
        self.n_added = 0

    def add(self, content: Block) -> Any:
        self.n_added += 1
        head = BlockHead(XID, self.n_added - 1, Lsn(0x100), True, (1,))
        return self.actor.add_blocks.remote([head], {} if head.step else VERSIONS, [content])

    def end(self, how: str = "commit") -> Any:
        if how == "commit":
            add_and_commit = self.actor.add_and_commit.options(num_returns=2)
            return add_and_commit.remote([], {}, [], [End(COMMIT, self.n_added, 0)])[0]
        return self.actor.prepare.remote(PREPARE, self.n_added)

    def error_of(self, ref: Any) -> BaseException:
        with pytest.raises(Exception) as caught:
            ray.get(ref)
        return unwrap(caught.value, "xid buffer")


def pool_of_one(storage: Path) -> BufferPool:
    settings = BufferSettings(str(storage), Layout(1, "s", "e"), 64 << 20)
    pool = BufferPool(
        Config.of({"buffers_min": 1, "buffers_max": 1}), settings, Spares(1 << 20), TransactionLedger()
    )
    pool.fleet.await_ready()
    return pool


def commit(pool: BufferPool, end: TransactionEnd, ticket: int) -> Any:
    pool.commit(end, ticket)
    pool.send()
    return pool.sealed(end.xid)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "segments"


@pytest.mark.parametrize("end", ["commit", "prepare"])
def test_a_transaction_with_a_torn_block_is_neither_committed_nor_prepared(storage: Path, end: str) -> None:
    buffer = Buffer(storage)
    refs = [buffer.add(GOOD), buffer.add(TORN), buffer.add(GOOD)]
    errors = [buffer.error_of(ref) for ref in [*refs[1:], buffer.end(end)]]
    assert all(isinstance(error, ProtocolViolation) for error in errors), errors
    assert not list(storage.rglob("*.json")), "a torn transaction was made durable"
    ray.kill(buffer.actor)


def test_poison_takes_nothing_with_it_of_the_other_transactions_of_its_buffer(storage: Path) -> None:
    """Those that commit before it must be delivered, also those that were open when the bad block came."""
    pool = pool_of_one(storage)
    for xid in (700, 701, 702):
        pool.add_block(transaction_block(xid, [f"of {xid}"]))
    pool.commit(COMMIT, 0)
    bad = block(insert([b"caf\xe9"], subxid=701))
    pool.add_block(TransactionBlock(Xid(701), StreamBlock(*bad, USED), True, Lsn(0x100)))
    pool.commit(TransactionEnd(Xid(702), Lsn(0x280), Lsn(0x288), 0, streamed=True), 1)
    pool.commit(TransactionEnd(Xid(701), Lsn(0x300), Lsn(0x308), 0, streamed=True), 2)
    pool.send()
    assert len(pool._in_flight) == 1, "all in one call"
    assert texts_of(ray.get(pool.sealed(XID))) == ["of 700"]
    assert texts_of(ray.get(pool.sealed(Xid(702)))) == ["of 702"]
    sealed = ray.get(pool.sealed(Xid(701)))
    assert isinstance(sealed.undeliverable.error, PoisonedChange) and not sealed.memory
    pool.collect(timeout_s=60)
    for buffer in pool._buffers.values():
        buffer.kill()


def test_what_was_given_up_is_left_out_though_it_could_be_delivered(storage: Path) -> None:
    settings = BufferSettings(str(storage), Layout(1, "s", "e"), 64 << 20, frozenset({(XID, Lsn(0x200))}))
    pool = BufferPool(
        Config.of({"buffers_min": 1, "buffers_max": 1}), settings, Spares(1 << 20), TransactionLedger()
    )
    pool.fleet.await_ready()
    for xid in (700, 701):
        pool.add_block(transaction_block(xid, [f"of {xid}"]))
        pool.commit(TransactionEnd(Xid(xid), Lsn(0x200), Lsn(0x208), 0, streamed=True), xid)
    pool.send()
    sealed = ray.get(pool.sealed(XID))
    assert sealed.skipped == (SkippedTransaction(Xid(700), Lsn(0x200), (5,)),)
    assert (sealed.memory, sealed.undeliverable, sealed.transactions.num_rows) == ((), None, 0)
    assert texts_of(ray.get(pool.sealed(Xid(701)))) == ["of 701"], "another xid"
    for buffer in pool._buffers.values():
        buffer.kill()


def test_the_last_block_of_a_transaction_goes_with_its_commit_and_gives_its_credit_back(
    storage: Path,
) -> None:
    pool = pool_of_one(storage)
    pool.add_block(transaction_block(700, ["first"]))
    pool.send()
    last = transaction_block(700, ["second", "third"])
    before_bytes = pool.in_flight_bytes
    pool.add_block(last)
    sealed = ray.get(commit(pool, COMMIT, 0))
    assert texts_of(sealed) == ["first", "second", "third"]
    assert len(pool._in_flight) == 2, "one call for the block before, one for the last and the commit"
    assert pool.in_flight_bytes == before_bytes + last.block.n_bytes
    pool.collect(timeout_s=60)
    assert pool.in_flight_bytes == 0
    for buffer in pool._buffers.values():
        buffer.kill()


def test_a_transaction_whose_buffer_died_while_it_was_to_move_is_not_committed_without_its_first_rows(
    storage: Path,
) -> None:
    """Ray fails the call that was to adopt it without telling the new buffer, and goes on with those after it."""
    settings = BufferSettings(str(storage), Layout(1, "s", "e"), 64 << 20)
    pool = BufferPool(
        Config.of({"buffers_min": 1, "buffers_max": 2}), settings, Spares(1 << 20), TransactionLedger()
    )
    pool.fleet.await_ready()
    (victim,) = pool.fleet.pids()

    def give(xid: int) -> None:
        rows = block(*[insert([str(i)], subxid=xid) for i in range(10)])
        pool.add_block(TransactionBlock(Xid(xid), StreamBlock(*rows, USED), True, Lsn(0x100)))
        pool.send()

    give(699)
    give(700)
    pool.collect(timeout_s=60)

    def the_second_buffer_is_there() -> bool:
        return (
            pool.fleet.n_asked == 1 and ray.wait([b.ping for b in pool.fleet._starting()], timeout=0)[0] != []
        )

    pool._policy.allow(2)
    pool.fleet.start_wanted()
    wait_until(the_second_buffer_is_there)
    os.kill(victim, signal.SIGKILL)
    pool.adapt()
    assert pool.n_moved == 1
    give(700)
    ended = commit(pool, COMMIT, 0)
    with pytest.raises(Exception) as caught:
        sealed = ray.get(ended, timeout=60)
        pytest.fail(f"{sealed.n_rows} of 20 rows were committed")
    assert isinstance(unwrap(caught.value, "xid buffer"), ComponentLost), caught.value
    with pytest.raises(ComponentLost):
        wait_until(lambda: pool.collect(timeout_s=1))
    for buffer in pool._buffers.values():
        buffer.kill()


def transaction_block(xid: int, texts: list[str]) -> TransactionBlock:
    content = block(*[insert([text], subxid=xid) for text in texts])
    return TransactionBlock(Xid(xid), StreamBlock(*content, USED), True, Lsn(0x100))


def texts_of(sealed: Any) -> list[str]:
    tables = [part_rows(part, read_object) for part in sealed.memory]
    return [text for table in tables for text in table.column("note").to_pylist()]


def test_blocks_of_several_transactions_in_one_call_keep_their_rows_apart_and_in_order(storage: Path) -> None:
    pool = pool_of_one(storage)
    xids = (700, 701, 702)
    for round_ in range(3):
        for xid in xids:
            pool.add_block(transaction_block(xid, [f"{xid}.{round_}.{i}" for i in range(5)]))
    assert not pool._in_flight, "nothing is on its way before send"
    pool.send()
    assert len(pool._in_flight) == 1, "one call for all"
    pool.add_block(transaction_block(701, ["last"]))
    ends = {xid: TransactionEnd(Xid(xid), Lsn(xid), Lsn(xid), 0, streamed=True) for xid in (702, 701, 700)}
    n_before = len(pool._in_flight)
    for ticket, end in enumerate(ends.values()):
        pool.commit(end, ticket)
    assert len(pool._in_flight) == n_before
    pool.send()
    assert len(pool._in_flight) == n_before + 1, "one call for the last block and all commits"
    sealed = {xid: ray.get(pool.sealed(Xid(xid))) for xid in ends}
    for xid in xids:
        texts = [f"{xid}.{round_}.{i}" for round_ in range(3) for i in range(5)]
        assert texts_of(sealed[xid]) == texts + ["last"] * (xid == 701)
    pool.collect(timeout_s=60)
    assert pool.in_flight_bytes == 0
    for buffer in pool._buffers.values():
        buffer.kill()


@pytest.mark.slow
def test_a_table_that_is_changed_hundreds_of_times_is_decoded_by_the_definition_of_each_row(
    storage: Path,
) -> None:
    """A buffer is told each definition once, and remembers the last ones: an old one that comes again is told again."""
    pool = pool_of_one(storage)
    wide = [(f"c{i}", "text") for i in range(63)]
    n_remembered = REMEMBERED_COLUMNS // relation(*wide, ("v", "text")).weight
    changes = [*range(2 * n_remembered + 40), 0, 1, 2 * n_remembered - 60]

    def give(version: int) -> None:
        content = block(insert([*[None] * len(wide), str(version)], subxid=700))
        used = UsedRelations({version: relation(*wide, (f"v{version}", "text"))})
        pool.add_block(TransactionBlock(Xid(700), StreamBlock(*content, used), True, Lsn(0x100)))

    for version in changes[: n_remembered + 20]:
        give(version)  # all in one call
    pool.send()
    for version in changes[n_remembered + 20 :]:
        give(version)
        pool.send()
    sealed = ray.get(commit(pool, COMMIT, 0))
    pool.collect(timeout_s=60)
    assert sealed.n_rows == len(changes)
    for part in sealed.memory:
        table = part_rows(part, read_object)
        (name,) = [n for n in table.column_names if n.startswith("v")]
        assert set(table.column(name).to_pylist()) == {name[1:]}
    for buffer in pool._buffers.values():
        buffer.kill()


@pytest.mark.parametrize("poisoned", [False, True], ids=["whole", "with poison"])
def test_rows_of_many_tables_share_an_object_and_those_of_few_do_not(storage: Path, poisoned: bool) -> None:
    versions = {n: relation(("note", "text"), relid=n, name=f"t{n}") for n in range(1, 101)}
    buffer = Buffer(storage)

    def sealed_of(n_tables: int) -> Any:
        messages = []
        for n in range(1, n_tables + 1):
            bad = poisoned and n == n_tables
            row = insert([b"caf\xe9" if bad else f"of {n}"], relid=n)
            messages += [begin(n, n), row, commit_message(n)]
        numbers = tuple(range(1, n_tables + 1))
        return ray.get(buffer.actor.decode_plain.remote(numbers, versions, block(*messages)))

    few, many = sealed_of(FEW_TABLES), sealed_of(100)
    for sealed, n_tables in ((few, FEW_TABLES), (many, 100)):
        kept = range(1, n_tables + 1 - poisoned)
        assert [part.relation for part in sealed.memory] == [versions[n] for n in kept]
        assert texts_of(sealed) == [f"of {n}" for n in kept]
        assert (sealed.undeliverable is not None) == poisoned
        assert sealed.n_bytes == sum(part.n_bytes for part in sealed.memory)
    assert len({part.ref for part in few.memory}) == len(few.memory)
    assert len({part.ref for part in many.memory}) == 1
    ray.kill(buffer.actor)


def test_what_is_put_is_the_bytes_of_one_stream_without_empty_record_batches() -> None:
    batches = [pa.record_batch({"i": pa.array(np.arange(n))}) for n in (3, 0, 4)]
    content = ray.get(put_arrow(pa.Table.from_batches(batches)))
    assert type(content) is bytes, "the executors' JVMs read nothing else"
    with pa.ipc.open_stream(content) as reader:
        found = list(reader)
    assert [batch.num_rows for batch in found] == [3, 4], "the JVM takes an empty batch for the end"
    assert pa.Table.from_batches(found).column("i").to_pylist() == [0, 1, 2, 0, 1, 2, 3]
