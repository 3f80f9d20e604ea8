"""Makes neighbouring units that wait for the sink one, in memory: the work behind ``commits.joining``.

One loop beside the sequencer's others, on its event loop. It gets the rows of a run's units from where their buffers
put them, and puts them again as one object for each table, on a thread. The sequencer's process then owns them, as it
owns what it loads from the journal. The buffers' objects are let go of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby

import pyarrow as pa

from xidstream.pipeline.commits.changes import Changes
from xidstream.pipeline.commits.entries import Entry
from xidstream.pipeline.commits.journaling import Fetch, Put
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.exchange import InlineMessages, MemoryPart, MessagePart, Sealed
from xidstream.pipeline.packs import PackReader, PartsBuilder
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.transactions.messages import message_parts


class Joining:
    """``changed``: what the sequencer's loops wait for."""

    def __init__(self, order: CommitOrder, fetch: Fetch, put: Put, changed: Changes) -> None:
        self._order = order
        self._fetch = fetch
        self._put = put
        self._changed = changed

    def begin(self, spawn: Callable[[Awaitable[None]], None]) -> None:
        spawn(self._join_forever())

    async def _run(self) -> list[Entry]:
        run: list[Entry] = []

        def is_found() -> bool:
            run[:] = self._order.to_join()
            return bool(run)

        await self._changed.when(is_found)
        return run

    async def _join_forever(self) -> None:
        while True:
            run = await self._run()
            contents = [entry.content for entry in run if entry.content is not None]
            joined = await asyncio.to_thread(join, contents, self._fetch, self._put)
            self._order.joined(run, contents, joined)
            del run, contents, joined


def join(contents: Sequence[Sealed], fetch: Fetch, put: Put) -> Sealed:
    """One unit of several, in their order. Raises what ``fetch`` and ``put`` raise."""
    memory = [part for content in contents for part in content.memory]
    groups = list(_by_version(memory))
    parts = PartsBuilder(put, len(groups))
    packs = PackReader(lambda ref: iter(fetch(ref).to_batches()))
    for relation, group in groups:
        tables = [fetch(p.ref) if p.pack_index is None else _unpacked(packs, p) for p in group]
        parts.add(relation, pa.concat_tables(tables).combine_chunks())
    joined = parts.finish()
    segments = tuple(part for content in contents for part in content.segments)
    messages = tuple(_messages([part for content in contents for part in content.messages], put))
    transactions = pa.Table.from_batches([content.transactions for content in contents], TRANSACTIONS_SCHEMA)
    return Sealed(
        transactions=_one_batch(transactions),
        memory=joined,
        segments=segments,
        messages=messages,
        n_rows=sum(content.n_rows for content in contents),
        n_bytes=sum(part.n_bytes for part in (*joined, *messages))
        + sum(part.segment.n_bytes for part in segments),
        skipped=tuple(pair for content in contents for pair in content.skipped),
    )


def _by_version(memory: Sequence[MemoryPart]) -> Iterator[tuple[RelationVersion, list[MemoryPart]]]:
    """The parts of each relation, in their order, cut where another version of it begins."""
    by_relid: dict[int, list[MemoryPart]] = {}
    for part in memory:
        by_relid.setdefault(part.relation.relid, []).append(part)
    for parts in by_relid.values():
        for relation, group in groupby(parts, key=lambda part: part.relation):
            yield relation, list(group)


def _unpacked(packs: PackReader, part: MemoryPart) -> pa.Table:
    return pa.Table.from_batches(packs.rows([part]), contract_schema(part.relation))


def _messages(parts: Sequence[MessagePart], put: Put) -> Iterator[MessagePart]:
    """In their order; neighbours that are here by value become one."""
    for is_inline, group in groupby(parts, key=lambda part: isinstance(part, InlineMessages)):
        if not is_inline:
            yield from group
            continue
        batches = [part.rows for part in group if isinstance(part, InlineMessages)]
        yield from message_parts(batches, sum(int(batch.nbytes) for batch in batches), put)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
