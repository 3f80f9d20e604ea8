"""Units that wait for a sink that hangs: what they take, and that nothing of them is changed where they are joined."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.memory_parts import part_rows
from tests.unit.commits.test_commit_sequence import AT_5, Reader
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.joined_units import join
from xidstream.pipeline.exchange import SINGLE_UNITS, InlineMessages, MemoryMessages, MemoryPart, Sealed
from xidstream.pipeline.packs import FEW_TABLES, PartsBuilder
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream import PlainBlock
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.event_router import OrderedEvent

ROW_BYTES = 160
"""Of a transaction of one row, as the server sends it."""


class Stored:
    """An object in Ray's store: bytes."""

    def __init__(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self.content = sink.getvalue().to_pybytes()


def fetch(ref: Stored) -> pa.Table:
    with pa.ipc.open_stream(ref.content) as reader:
        return reader.read_all()


def relation(table: str = "tick", *more: str) -> RelationVersion:
    columns = tuple(Column(name, 25, -1, False) for name in ("v", *more))
    return RelationVersion(1000 + len(table), "public", table, ReplicaIdentity.DEFAULT, columns)


def rows_of(version: RelationVersion, lsns: Sequence[int]) -> pa.Table:
    """One row for each commit LSN."""
    values = [
        {c.name: c.name for c in version.columns}
        | {"_change_type": "insert", "_commit_lsn": lsn, "_xid": lsn, "_seq": 0}
        for lsn in lsns
    ]
    return pa.Table.from_pylist(values, schema=contract_schema(version))


def lines(lsns: Sequence[int], version: RelationVersion) -> pa.Table:
    values = [
        {"xid": lsn, "commit_lsn": lsn, "end_lsn": lsn + 5, "commit_timestamp": lsn, "rows": 1}
        | {"streamed": False, "tables": [version.name]}
        for lsn in lsns
    ]
    return pa.Table.from_pylist(values, schema=TRANSACTIONS_SCHEMA)


def unit(lsn: int, *versions: RelationVersion, message: bool = False) -> Sealed:
    """One transaction with a row in each table, perhaps with a message."""
    parts = PartsBuilder(Stored, len(versions))
    for version in versions:
        parts.add(version, rows_of(version, [lsn]))
    memory = parts.finish()
    row = {"commit_lsn": lsn, "lsn": lsn, "xid": lsn, "transactional": True, "prefix": "p", "content": b"c"}
    messages = (InlineMessages(pa.RecordBatch.from_pylist([row], schema=MESSAGES_SCHEMA)),) if message else ()
    (batch,) = lines([lsn], versions[0]).to_batches()
    n_bytes = sum(part.n_bytes for part in (*memory, *messages))
    return Sealed(batch, memory, (), messages, len(versions), n_bytes)


def read(ref: Stored) -> Iterator[pa.RecordBatch]:
    return iter(fetch(ref).to_batches())


def by_version(contents: list[Sealed]) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """The rows of each table in their order, each with its layout."""
    found: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        for part in content.memory:
            rows = part_rows(part, read)
            assert (part.n_rows, part.first_commit_lsn) == (rows.num_rows, rows["_commit_lsn"][0].as_py())
            found.setdefault(part.relation.name, []).extend(rows.to_pylist())
    return sorted((name, len(rows), rows) for name, rows in found.items())


def test_what_crosses_processes_is_what_it_was() -> None:
    sent = unit(100, relation(), message=True)
    content = pickle.loads(pickle.dumps(sent, protocol=5))
    assert content.transactions.equals(sent.transactions)
    assert content.transactions.schema.equals(TRANSACTIONS_SCHEMA)
    assert content.messages[0].rows.equals(sent.messages[0].rows)  # type: ignore[union-attr]
    assert (content.n_rows, content.n_bytes) == (1, sent.n_bytes)
    assert len(pickle.dumps(content, protocol=5)) < 4000


@pytest.mark.parametrize("n_tables", [1, 3, FEW_TABLES + 4], ids=["a table", "tables", "many tables"])
def test_a_joined_unit_has_all_rows_lines_and_messages_in_their_order(n_tables: int) -> None:
    versions = [relation("t" * (i + 1)) for i in range(n_tables)]
    contents = [unit(lsn, *versions, message=lsn % 3 == 0) for lsn in range(100, 150)]
    contents[7] = dataclasses.replace(contents[7], skipped=(SkippedTransaction(Xid(7), Lsn(107)),))
    joined = join(contents, fetch, Stored)
    assert by_version([joined]) == by_version(contents)
    assert len(joined.memory) == n_tables
    assert joined.n_rows == 50 * n_tables
    assert joined.n_bytes == sum(part.n_bytes for part in (*joined.memory, *joined.messages))
    assert joined.transactions.column("commit_lsn").to_pylist() == [*range(100, 150)]
    (messages,) = joined.messages
    assert isinstance(messages, InlineMessages)
    assert messages.rows.column("lsn").to_pylist() == [*range(102, 150, 3)]
    assert joined.skipped == ((7, 107, None),)


def test_rows_of_two_versions_of_a_table_stay_apart_also_where_the_first_comes_back() -> None:
    narrow, wide = relation(), relation("tick", "w")
    contents = [unit(lsn, wide if 110 <= lsn < 120 else narrow) for lsn in range(100, 130)]
    parts: list[MemoryPart] = list(join(contents, fetch, Stored).memory)
    assert [(part.relation, part.n_rows, part.first_commit_lsn) for part in parts] == [
        (narrow, 10, 100),
        (wide, 10, 110),
        (narrow, 10, 120),
    ]


def test_messages_that_are_not_few_any_more_go_to_the_object_store() -> None:
    row = {"lsn": 1, "transactional": False, "prefix": "p", "content": b"c" * 8000}
    part = InlineMessages(pa.RecordBatch.from_pylist([row], schema=MESSAGES_SCHEMA))
    nothing = lines(range(0), relation()).to_batches() or [
        pa.RecordBatch.from_pylist([], schema=TRANSACTIONS_SCHEMA)
    ]
    contents = [Sealed(nothing[0], (), (), (part,), 0, part.n_bytes) for _ in range(20)]
    (messages,) = join(contents, fetch, Stored).messages
    assert isinstance(messages, MemoryMessages) and fetch(messages.ref).num_rows == 20


# -- a sink that hangs -----------------------------------------------------------------------------------


_MARK = 0x7F1E2D3C4B5A6978
"""Stands for an LSN in one unit's bytes; wherever it is stored it takes eight of them."""


_KEPT_UP_UNITS = SINGLE_UNITS + 60


class Trickle:
    """Commits of one row each. One of them is made as a buffer makes it; the bytes of all others differ in LSN and xid
    alone."""

    def __init__(self) -> None:
        self._template = pickle.dumps(unit(_MARK, relation()), protocol=5)
        assert self._template.count(_le(_MARK)) > 5

    def unit(self, lsn: int) -> Sealed:
        content: Sealed = pickle.loads(self._template.replace(_le(_MARK), _le(lsn)))
        return content


def _le(number: int) -> bytes:
    return number.to_bytes(8, "little")


async def hang_and_go_on(config: Config, n_commits: int, look: Callable[[int, int, int], None]) -> int:
    """Commits after a sink that hangs, until all are there or reading stops. Then it takes all of them. Returns how
    many there were; ``look`` gets now and then how many came, how many units wait, and what counts as waiting."""
    trickle, backlog = Trickle(), Backlog(config.buffer_memory_bytes)
    sequencer = CommitSequence(config, "e", lambda error: error, fetch, Stored)

    class Told(Reader):
        async def tell(self, confirmed_lsn: Lsn, done_ticket: int, free_ticket: int) -> None:
            await super().tell(confirmed_lsn, done_ticket, free_ticket)
            backlog.done(done_ticket)

    await sequencer.open(Told().tell, AT_5, None)
    loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
    n = 0
    while n < n_commits and backlog.n_bytes <= config.backlog_bytes:
        entries = []
        for ticket in range(n, min(n + 20, n_commits)):
            lsn = Lsn(100 + 10 * ticket)
            content: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
            content.set_result(trickle.unit(lsn // 10))
            backlog.owe(ticket, ROW_BYTES)
            entries.append(OrderedEvent(ticket, PlainBlock(None, lsn, lsn, Lsn(lsn + 5), 1), content))
        n += len(entries)
        backlog.measured(await sequencer.submit(entries))
        del entries, content
        await asyncio.sleep(0)
        while sequencer._order.n_waiting > _KEPT_UP_UNITS + n // 200:
            await asyncio.sleep(0.001)  # an hour has as much time for each unit
        if n % 2000 == 0 or n == n_commits:
            report = await sequencer.account(with_prepared=False)
            assert report is not None
            look(n, report.sequencer.n_waiting, backlog.n_bytes)
    lsns: list[int] = []
    while len(lsns) < n:
        batch = await sequencer.next_batch(10, loop)
        assert batch is not None
        for content in batch.units:
            lsns += content.transactions.column("commit_lsn").to_pylist()
            rows = [part_rows(part, read) for part in content.memory]
            assert (
                pa.concat_tables(rows)["_commit_lsn"].to_pylist()
                == content.transactions["commit_lsn"].to_pylist()
            )
        await sequencer.batch_done(batch.number, loop)
    assert lsns == [*range(10, 10 + n)], "each commit once, in order"
    while (await sequencer.account(with_prepared=False)).confirmed_lsn < 100 + 10 * (n - 1) + 5:  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
    assert backlog.n_bytes == 0
    return n


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def looked_at(n_commits: int, folder: Path) -> list[tuple[int, int, int, int]]:
    """How many commits had come, how many units waited, what was counted, and what the process took."""
    looks: list[tuple[int, int, int, int]] = []

    def look(n: int, n_waiting: int, counted_bytes: int) -> None:
        gc.collect()
        looks.append((n, n_waiting, counted_bytes, anonymous_bytes()))

    config = Config(storage=str(folder), journal_max_bytes=0)
    asyncio.run(hang_and_go_on(config, n_commits, look))
    return looks


def test_what_waits_for_a_sink_that_hangs_takes_its_rows_and_little_more(tmp_path: Path) -> None:
    """It took 24 KB for each commit of one row, and the process was killed long before reading stopped."""
    (early, *_, late) = looked_at(10_000, tmp_path)
    n_commits = late[0] - early[0]
    assert late[1] < SINGLE_UNITS + 100, "units were joined"
    assert late[3] - early[3] < 1000 * n_commits


@pytest.mark.nightly
def test_in_an_hour_of_200_commits_a_second_behind_a_sink_that_hangs_reading_stops_at_backlog_bytes(
    tmp_path: Path,
) -> None:
    """720,000 commits would take 17 GB as they came. The process never has more than the setting says."""
    looks = looked_at(720_000, tmp_path)
    early, late = looks[0], looks[-1]
    assert 50_000 < late[0] < 720_000, "reading goes on for long, and stops"
    assert max(counted_bytes for _, _, counted_bytes, _ in looks) <= Config().backlog_bytes
    assert late[3] - early[3] < Config().backlog_bytes
