"""The stages of production in one process: routing, two buffers and the sequencer, without Ray and without a thread.

The code of ``pipeline`` decides everything. What is added here is what Ray adds in production: it carries calls to the
buffer and results to the sequencer. The sequencer's event loop stands still until a test lets it run, and what the
sequencer would do in a thread is done at once. So a seed decides the whole order of events.

A buffer does its work when it is called. Its results wait until ``finish`` gives them to the sequencer, in any order.
All transactions begin in the first buffer; ``finish`` with a ``shuffle`` also moves some of them to the other one.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import selectors
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pyarrow as pa

from xidstream.pipeline.account.model import SequencerReport
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.joining import JoinRule
from xidstream.pipeline.exchange import Batch, BufferedTransaction, Opened, TransactionEnd
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.stream import PlainBlock, Prepared, StreamEvent, TransactionBlock
from xidstream.pipeline.stream.backlog import Backlog
from xidstream.pipeline.stream.event_router import EventRouter
from xidstream.pipeline.stream.ledger import TransactionLedger
from xidstream.pipeline.transactions.buffer_calls import BufferCall, BufferSettings, RawBlock
from xidstream.pipeline.transactions.relation_cache import RelationCache
from xidstream.pipeline.transactions.transaction_buffer import TransactionBuffer

_Result = TypeVar("_Result")


class InProcess:
    """A reference to a table, as Ray has one: told apart by identity."""

    def __init__(self, table: pa.Table | pa.RecordBatch) -> None:
        self.table = table


def batches_of(ref: InProcess) -> list[pa.RecordBatch]:
    return table_of(ref).to_batches()


def table_of(ref: InProcess) -> pa.Table:
    table = ref.table
    return pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table


class _Buffer(TransactionBuffer):
    """``next_call``: what goes with the next call; ``relation_cache``: which relation versions it was told."""

    def __init__(self, settings: BufferSettings) -> None:
        super().__init__(settings, InProcess)
        self.next_call = BufferCall()
        self.relation_cache = RelationCache()


class LocalBuffers:
    """``event_router.Buffers``, called directly; ``result`` makes an awaitable of what they return."""

    def __init__(
        self, settings: BufferSettings, result: Callable[[Any], Any], spares: Spares | None = None
    ) -> None:
        self._first, self._second = _Buffer(settings), _Buffer(settings)
        self._moved: set[Xid] = set()
        """What is in the second one."""
        self._result = result
        self._spares = spares
        self._steps: dict[Xid, int] = {}
        self._sealed: dict[Xid, Any] = {}
        self.open: dict[Xid, BufferedTransaction] = {}
        self.n_spills = 0
        self.highest_bytes = 0

    @property
    def n_open(self) -> int:
        """How many transactions the buffers themselves still have."""
        return len(self._first._open) + len(self._second._open)

    def move(self, xid: Xid) -> None:
        """An open transaction goes to the other buffer, as through Ray's object store."""
        source = self._of(xid)
        self._send(source)
        self._moved ^= {xid}
        carried = pickle.loads(pickle.dumps(source.give_up(xid, self._steps[xid])))
        self._note(self._of(xid).adopt(carried))

    def add_block(self, event: TransactionBlock) -> None:
        self.open.setdefault(event.xid, BufferedTransaction(event.xid, 0, 0, 0))
        self._of(event.xid).next_call.add_block(event, self._step(event.xid))

    def abort(self, xid: Xid) -> None:
        self._sent(xid).abort(xid, self._leave(xid))

    def decode_plain(self, event: PlainBlock, ticket: int) -> Any:
        assert event.block is not None
        versions = event.block.relations.versions
        new_versions = self._first.relation_cache.exchange(versions, versions)
        block = self._carried((event.block.payload, event.block.lengths))
        return self._result(self._first.decode_plain(tuple(versions), new_versions, block))

    def prepare(self, event: Prepared, ticket: int) -> Any:
        return self._result(self._sent(event.xid).prepare(event, self._leave(event.xid)))

    def commit(self, end: TransactionEnd, ticket: int, aborted: tuple[Xid, ...]) -> None:
        buffer = self._of(end.xid)
        buffer.next_call.add_end(end, self._leave(end.xid), aborted)

    def send(self) -> None:
        self._send(self._first)
        self._send(self._second)

    def sealed(self, xid: Xid) -> Any:
        return self._sealed.pop(xid)

    def _of(self, xid: Xid) -> _Buffer:
        return self._second if xid in self._moved else self._first

    def _sent(self, xid: Xid) -> _Buffer:
        """The transaction's buffer, which has had all that was added for it."""
        buffer = self._of(xid)
        self._send(buffer)
        return buffer

    def _send(self, buffer: _Buffer) -> None:
        call = buffer.next_call
        if not call.heads and not call.ends:
            return
        buffer.next_call = BufferCall()
        new_versions = buffer.relation_cache.exchange(call.relation_numbers(), call.versions)
        blocks = [self._carried(block) for block in call.blocks]
        *sealed, helds = buffer.add_and_commit(call.heads, new_versions, blocks, call.ends)
        for end, content in zip(call.ends, sealed, strict=True):
            self._sealed[end.end.xid] = self._result(content)
        for held in helds:
            self._note(held)

    def _note(self, held: BufferedTransaction) -> None:
        before = self.open.get(held.xid)
        if before is None:
            return  # it has ended since
        self.n_spills += held.n_segments - before.n_segments
        self.open[held.xid] = held
        self.highest_bytes = max(self.highest_bytes, sum(h.n_bytes_in_memory for h in self.open.values()))

    def _carried(self, block: RawBlock) -> RawBlock:
        """As shared memory does it: the buffer has a copy, and the reader's array may serve again."""
        if self._spares is None:
            return block
        payload, lengths = block
        copied = payload.copy()
        self._spares.release(payload)
        return copied, lengths

    def _step(self, xid: Xid) -> int:
        step = self._steps.get(xid, 0)
        self._steps[xid] = step + 1
        return step

    def _leave(self, xid: Xid) -> int:
        """The number of calls that the transaction had."""
        self.open.pop(xid, None)
        self._moved.discard(xid)
        return self._steps.pop(xid, 0)


class _UntilIdle(selectors.DefaultSelector):
    """Has its event loop stop where it would wait."""

    loop: asyncio.AbstractEventLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.loop.stop()
        return super().select(0)


class _AtOnce(ThreadPoolExecutor):
    """Runs in the caller's thread what is meant for another one. (asyncio takes no executor of another class.)"""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class LocalStages:
    """All between the cutter and a sink. ``write`` is the sink, ``confirm`` hears what the server may be told."""

    def __init__(
        self,
        config: Config,
        opened: Opened,
        epoch: str,
        *,
        buffer_memory_bytes: int,
        write: Callable[[Batch], None],
        watermark: Lsn,
        confirm: Callable[[Lsn], None],
        spares: Spares | None = None,
        bind_late: bool = False,
        ledger: TransactionLedger | None = None,
    ) -> None:
        self._write = write
        self._confirm = confirm
        selector = _UntilIdle()
        self._loop = selector.loop = asyncio.SelectorEventLoop(selector)
        self._loop.set_default_executor(_AtOnce())
        self._unfinished: list[tuple[asyncio.Future[Any], Any]] = []
        layout = Layout(opened.identity.system_identifier, opened.identity.slot, epoch)
        settings = BufferSettings(
            config.storage,
            layout,
            buffer_memory_bytes,
            opened.skips,
            bind_late=bind_late,
            parks=config.on_poison == "park",
        )
        self.buffers = LocalBuffers(settings, self._later, spares)
        self._backlog = Backlog(buffer_memory_bytes)
        self._sequence = CommitSequence(
            config, epoch, lambda error: error, table_of, InProcess, threads=lambda *_: _AtOnce()
        )
        self._router = EventRouter(self.buffers, self._submit, self._backlog, ledger or TransactionLedger())
        try:
            self._run(self._sequence.open(self._tell_reader, opened, None))
            # No time goes by here, so no position may wait for its turn.
            self._sequence._confirming.end()
            self._sequence._order.join_rule = JoinRule(step=1, single_entries=3, least_units=2)
            self._sink_loop = self._run(self._sequence.sink_opened(watermark, 0)).loop
        except BaseException:
            self.close()
            raise

    @property
    def end_lsn(self) -> Lsn:
        """Of the last commit that was sent."""
        return self._router.end_lsn

    def send(self, events: Iterable[StreamEvent]) -> None:
        """What the reader does: events in stream order."""
        self._router.send(events)

    def finish(self, shuffle: random.Random | None, *, entirely: bool = True) -> None:
        """Give what buffers returned to the sequencer; with ``shuffle`` in any order, not ``entirely``: some of it."""
        if shuffle is not None:
            shuffle.shuffle(self._unfinished)
            if self.buffers.open and shuffle.random() < 0.2:
                self.buffers.move(shuffle.choice(list(self.buffers.open)))
        n = (
            len(self._unfinished)
            if entirely or shuffle is None
            else shuffle.randint(0, len(self._unfinished))
        )
        finished, self._unfinished = self._unfinished[:n], self._unfinished[n:]
        for future, result in finished:
            future.set_result(result)
        self._run_until_idle()

    def deliver(self) -> None:
        """What the driver does: pull batches, give them to the sink, report them done. Raises as ``next_batch``."""
        self._run_until_idle()
        while (batch := self._run(self._sequence.next_batch(0, self._sink_loop))) is not None:
            if any(unit.transactions.num_rows or unit.messages for unit in batch.units):
                reach("writing_batch")
                self._write(batch)
                reach("batch_written")
            self._run(self._sequence.batch_done(batch.number, self._sink_loop))
            reach("batch_reported")
            # A call that returns at once sees nothing of what the sequencer's own loops would do next.
            self._run_until_idle()

    def report(self) -> SequencerReport:
        report = self._run(self._sequence.account(with_prepared=False))
        assert report is not None
        return report

    def close(self) -> None:
        """As a crash: what is not done yet is never done."""
        if self._loop.is_closed():
            return
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._run_until_idle()
        self._loop.close()

    def _submit(self, entries: Any) -> None:
        self._run(self._sequence.submit(entries))

    async def _tell_reader(self, confirmed_lsn: Lsn, done_ticket: int, free_ticket: int) -> None:
        self._backlog.done(done_ticket)
        self._confirm(confirmed_lsn)

    def _later(self, result: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._unfinished.append((future, result))
        return future

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Raises RuntimeError where ``work`` waits for what only a later call can bring."""
        return self._loop.run_until_complete(work)

    def _run_until_idle(self) -> None:
        self._loop.run_forever()
