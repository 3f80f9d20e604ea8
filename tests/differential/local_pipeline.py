"""The pipeline in one process: the real parts over a real replication connection, without Ray and Spark.

What the actors do, with their shells left out: ``open_slot`` → ``StreamCutter`` → ``decode_*_block`` →
``OpenTransaction`` (spilling through ``pipeline.segments`` under ``BufferMemory``) and ``rows.release`` →
``CommitOrder`` and ``PreparedBook`` → a ``Sink``. The record of the confirmed LSN is written before the server
is told, prepared transactions have durable manifests, a new ``LocalPipeline`` over the same storage and
sink is a restart. Each class names the actor that it mirrors; nothing is decided here that they do not decide.

``order`` makes buffers finish in a random order, as actors do; without it they finish at once.

The ``Sink`` is what a user has: an append-only list with a watermark of its own, which drops what the server
repeats. It also remembers, for each position that was confirmed, how much it held then.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from xidstream.pipeline import rows
from xidstream.pipeline.buffer import BufferMemory, OpenTransaction, is_too_large_for_memory
from xidstream.pipeline.buffer.messages import message_parts
from xidstream.pipeline.buffer.transaction import nothing, undeliverable
from xidstream.pipeline.decode import decode_plain_block, decode_transaction_block
from xidstream.pipeline.errors import ConnectionLost, SlotInUse
from xidstream.pipeline.exchange import (
    InlineMessages,
    MemoryMessages,
    MemoryPart,
    MessagePart,
    Opened,
    PreparedTransaction,
    Sealed,
    SegmentPart,
    SlotIdentity,
    SpilledMessages,
    TransactionEnd,
)
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.protocol.message_buffer import Outcome
from xidstream.pipeline.protocol.parser import parse_keepalive
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.segments import (
    Layout,
    SegmentReader,
    Storage,
    write_messages,
    write_prepared,
    write_segment,
)
from xidstream.pipeline.sequencer import CommitOrder, FinishedPrepares
from xidstream.pipeline.slot.opening import OpenSlot, open_slot
from xidstream.pipeline.slot.settings import SlotSettings, Streaming
from xidstream.pipeline.spark.released import released_messages
from xidstream.pipeline.stages.slot_storage import SlotStorage
from xidstream.pipeline.stream import (
    Aborted,
    Committed,
    CommittedPrepared,
    Cut,
    PlainBlock,
    Position,
    Prepared,
    RolledBackPrepared,
    StreamCutter,
    SubtransactionsAborted,
    TransactionBlock,
)

_MESSAGES_PER_LOOK = 2000
_POSITION_INTERVAL_S = 0.2
"""Each position that is confirmed costs some flushes of the disk: a record must be durable."""


@dataclass(frozen=True)
class Options:
    """What a pipeline is run with; the memory limits are tiny, so that cuts and spills happen in tests."""

    streaming: str = "on"
    proto_version: int | None = None
    two_phase: bool = False
    logical_decoding_work_mem: str = "64kB"
    block_bytes: int = 40_000
    pending_limit_bytes: int = 120_000
    buffer_memory_bytes: int = 200_000
    batch_rows: int = 3_000
    batch_bytes: int = 1_000_000

    def __str__(self) -> str:
        proto = self.proto_version if self.proto_version is not None else "highest"
        return f"streaming={self.streaming} proto={proto} two_phase={'on' if self.two_phase else 'off'}"


@dataclass(frozen=True)
class Message:
    """A logical message as ``rows.MESSAGES_SCHEMA`` has it."""

    commit_lsn: int | None
    lsn: int
    xid: int | None
    transactional: bool
    prefix: str
    content: bytes = field(repr=False)


@dataclass
class Released:
    """One transaction as the sink got it. ``parts`` are in contract layout, each of one relation version."""

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_timestamp: Any
    gid: str | None
    origin: str | None
    streamed: bool
    n_rows: int
    tables: list[str]
    parts: list[tuple[RelationVersion, pa.Table]] = field(default_factory=list, repr=False)
    messages: list[Message] = field(default_factory=list, repr=False)

    def by_layout(self) -> dict[tuple[str, pa.Schema], pa.Table]:
        """The rows of each table and layout, in the order of ``_seq``."""
        gathered: dict[tuple[str, pa.Schema], list[pa.Table]] = {}
        for relation, table in self.parts:
            gathered.setdefault((relation.name, table.schema), []).append(table)
        return {key: in_order(pa.concat_tables(tables)) for key, tables in gathered.items()}

    def rows(self) -> list[dict[str, Any]]:
        """All rows as dicts, in the order of ``_seq``; ``table`` and ``relid`` say whose, ``keys`` its identity."""
        found = [
            {"table": relation.name, "relid": relation.relid, "keys": key_names(relation), **row}
            for relation, table in self.parts
            for row in table.to_pylist()
        ]
        return sorted(found, key=lambda row: row["_seq"])


def key_names(relation: RelationVersion) -> tuple[str, ...]:
    return tuple(c.name for c in relation.columns if c.is_key)


def in_order(table: pa.Table) -> pa.Table:
    return table.take(pa.compute.sort_indices(table["_seq"])).combine_chunks()


@dataclass
class Sink:
    """Append-only, with a watermark of its own: what a restart repeats is dropped."""

    transactions: list[Released] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    confirmations: list[tuple[Lsn, int, int]] = field(default_factory=list)
    """(confirmed LSN, transactions held, messages held) for each time the server was told."""
    watermark: int = 0
    _lsns: set[int] = field(default_factory=set)

    def take(self, transactions: list[Released], messages: list[Message]) -> None:
        fresh = [t for t in transactions if t.commit_lsn > self.watermark]
        self.transactions += fresh
        self.messages += [m for m in messages if m.lsn not in self._lsns]
        self._lsns.update(m.lsn for m in messages)
        if fresh:
            self.watermark = fresh[-1].commit_lsn

    def rows(self, table: str | None = None) -> list[dict[str, Any]]:
        return [r for t in self.transactions for r in t.rows() if table in (None, r["table"])]


def put_in_process(table: pa.Table | pa.RecordBatch) -> pa.Table:
    return table


class Buffer:
    """``actors.xid_buffer.XidBuffer``."""

    def __init__(self, storage: Storage, layout: Layout, memory_bytes: int) -> None:
        self._storage = storage
        self._layout = layout
        self._memory = BufferMemory(memory_bytes)
        self.open: dict[Xid, OpenTransaction] = {}
        self.n_spills = 0
        self.highest_bytes = 0

    def decode_plain(self, cut: PlainBlock) -> Sealed:
        assert cut.block is not None
        reach("decoding_block")
        decoded = decode_plain_block(cut.block.payload, cut.block.lengths, cut.block.relations.relations)
        memory = []
        for table in decoded.tables:
            released = rows.release(
                table.batch, table.relation, decoded.stamp, rows.DroppedRuns(), plain=True
            )
            memory.append(
                MemoryPart(
                    table.relation,
                    released.num_rows,
                    released.nbytes,
                    put_in_process(pa.Table.from_batches([released])),
                )
            )
        messages = self._plain_messages(decoded.messages)
        return Sealed(
            transactions=decoded.transactions,
            memory=tuple(memory),
            segments=(),
            messages=tuple(messages),
            n_rows=decoded.n_rows,
            n_bytes=sum(p.n_bytes for p in memory) + sum(p.n_bytes for p in messages),
            undeliverable=decoded.undeliverable,
        )

    def _plain_messages(self, messages: pa.RecordBatch | None) -> list[MessagePart]:
        if messages is None:
            return []
        if not is_too_large_for_memory(messages.nbytes):
            return message_parts([messages], messages.nbytes, put_in_process)
        key = self._layout.segment_key(Xid(0), Lsn(messages.column("lsn")[0].as_py()), 0)
        return [SpilledMessages(write_messages(self._storage, key, [messages]))]

    def add_block(self, cut: TransactionBlock) -> None:
        transaction = self.open.get(cut.xid)
        if transaction is None:
            transaction = self.open[cut.xid] = OpenTransaction(cut.xid, cut.first_lsn, streamed=cut.streamed)
        reach("decoding_block")
        decoded = decode_transaction_block(
            cut.block.payload,
            cut.block.lengths,
            cut.block.relations.relations,
            streamed=cut.streamed,
            xid=cut.xid,
            first_ordinal=transaction.n_rows,
        )
        transaction.add(
            [(t.relation, t.batch) for t in decoded.tables],
            decoded.messages,
            (decoded.run_subxid, decoded.run_first, decoded.run_count),
            decoded.n_rows,
        )
        transaction.note(decoded.notes)
        reach("block_decoded")
        while (spill := self._memory.next_spill(self.open.values())) is not None:
            self._spill(spill.transaction, spill.relation)
        self.highest_bytes = max(self.highest_bytes, sum(t.n_bytes for t in self.open.values()))

    def abort_subtransactions(self, cut: SubtransactionsAborted) -> None:
        self.open[cut.xid].abort_subtransactions(cut.subxids)

    def abort(self, cut: Aborted) -> None:
        self._storage.delete(self.open.pop(cut.xid).segment_keys())

    def commit(self, end: TransactionEnd) -> Sealed:
        transaction = self.open.pop(end.xid)
        reach("sealing")
        sealed = transaction.seal(end, put_in_process)
        reach("sealed")
        given = set(sealed.stored_keys())
        self._storage.delete([k for k in transaction.segment_keys() if k not in given])
        return sealed

    def prepare(self, cut: Prepared) -> PreparedTransaction:
        transaction = self.open.pop(cut.xid, None)
        if transaction is None:
            transaction = OpenTransaction(cut.xid, cut.prepare_lsn, streamed=cut.streamed)
        for relation, *_ in list(transaction.spillable()):
            self._spill(transaction, relation)
        record = transaction.prepared(cut.gid, cut.prepare_lsn, cut.end_lsn, cut.origin)
        reach("writing_prepared")
        write_prepared(self._storage, self._layout, record)
        reach("prepared_written")
        named = set(record.stored_keys())
        self._storage.delete([k for k in transaction.segment_keys() if k not in named])
        return record

    def _spill(self, transaction: OpenTransaction, relation: RelationVersion | None) -> None:
        key = self._layout.segment_key(transaction.xid, transaction.first_lsn, transaction.n_segments)
        reach("writing_segment")
        if relation is None:
            transaction.messages_spilled(write_messages(self._storage, key, transaction.take_messages()))
            return
        batches = transaction.take_group(relation)
        segment = write_segment(self._storage, key, relation, batches)
        reach("segment_written")
        transaction.spilled(segment, batches)
        self.n_spills += 1


class Sequencer:
    """``actors.commit_sequencer.CommitSequencer`` without its Ray: entries are filled in ``order``'s order."""

    def __init__(
        self,
        storage: Storage,
        epoch: str,
        opened: Opened,
        options: Options,
        sink: Sink,
    ) -> None:
        self._segments = storage
        self._sink = sink
        self._storage = SlotStorage(storage.uri, opened, epoch)
        self.recorded, self.prepared = self._storage.take_over()
        self._watermark = max(self.recorded.before, Lsn(sink.watermark))
        self.order = CommitOrder(batch_rows=options.batch_rows, batch_bytes=options.batch_bytes)
        self._finished = FinishedPrepares()
        self.works: list[tuple[int, Callable[[], bool]]] = []
        """What is to be done for an entry; False when it must wait for an earlier entry."""

    def take(self, cut: Cut, buffer: Buffer) -> None:
        ticket = self.order.next_ticket
        if isinstance(cut, PlainBlock):
            self.order.add_unit(
                ticket, cut.first_commit_lsn, cut.last_commit_lsn, cut.end_lsn, cut.n_transactions
            )
            self._later(ticket, lambda: self._fill(ticket, buffer.decode_plain(cut)))
        elif isinstance(cut, Committed):
            self._add_transaction(ticket, cut.end)
            content = buffer.commit(cut.end) if cut.has_blocks else nothing(cut.end)
            self._later(ticket, lambda: self._fill(ticket, content))
        elif isinstance(cut, Prepared):
            self.order.add_hold(ticket, cut.end_lsn)
            record = buffer.prepare(cut)
            self._later(ticket, lambda: self._prepare(ticket, record))
        elif isinstance(cut, CommittedPrepared):
            self._add_transaction(ticket, cut.end)
            self._later(ticket, lambda: self._fill_prepared(ticket, cut.end))
        elif isinstance(cut, RolledBackPrepared):
            self.order.add_hold(ticket, cut.end_lsn)
            self._later(ticket, lambda: self._roll_back_prepared(ticket, cut))
        else:
            assert isinstance(cut, Position), cut
            self.order.add_position(ticket, cut.wal_end)

    def work(self, shuffle: random.Random | None) -> None:
        """Let the buffers finish; with ``shuffle`` only some of them, in any order."""
        works = self.works
        if shuffle is not None:
            shuffle.shuffle(works)
        self.works = [(ticket, work) for ticket, work in works if not work()]

    def drain(self, shuffle: random.Random | None) -> None:
        while self.works:
            self.work(shuffle)

    def to_sink(self) -> bool:
        """What the driver does: pull batches, give them to the sink, report them done; then record."""
        reach("releasing")
        while (batch := self.order.next_batch()) is not None:
            reach("released")
            transactions, messages = [], []
            for unit in batch.units:
                t, m = content_of(unit, self._segments)
                transactions += t
                messages += m
            reach("writing_batch")
            self._sink.take(transactions, messages)
            reach("batch_written")
            self._batch_done(batch.number)
            reach("batch_reported")
        if self.order.undeliverable is not None and self.order.confirmed_lsn <= self.recorded:
            raise self.order.undeliverable
        confirmed = self.order.confirmed_lsn
        if confirmed <= self.recorded:
            return False
        reach("recording")
        due = self._finished.due(self.order.done_ticket)
        self._storage.record(confirmed, list(due.values()))
        self._finished.forget(due)
        reach("recorded")
        self.recorded = confirmed
        self._sink.confirmations.append((confirmed, len(self._sink.transactions), len(self._sink.messages)))
        return True

    def _batch_done(self, number: int) -> None:
        contents = self.order.batch_done(number)
        reach("batch_accepted")
        keys = [key for content in contents for key in content.stored_keys()]
        self._storage.delete(self._finished.without_kept(keys))

    def _later(self, ticket: int, work: Callable[[], bool]) -> None:
        self.works.append((ticket, work))

    def _add_transaction(self, ticket: int, end: TransactionEnd) -> None:
        self.order.add_unit(ticket, end.commit_lsn, end.commit_lsn, end.end_lsn, 1)

    def _fill(self, ticket: int, content: Sealed) -> bool:
        self.order.fill(ticket, content)
        return True

    def _prepare(self, ticket: int, record: PreparedTransaction) -> bool:
        replaced = self.prepared.add(record)
        if replaced is not None:
            self._storage.replace(replaced, record)
        self.order.resolve(ticket)
        return True

    def _fill_prepared(self, ticket: int, end: TransactionEnd) -> bool:
        if self.order.holds_before(ticket):
            return False
        prepared = self.prepared.commit(end, self._watermark)
        if prepared is None:
            return self._fill(ticket, nothing(end))
        self._finished.add(ticket, prepared)
        if prepared.poison is not None:
            return self._fill(ticket, undeliverable(prepared.poison.of(end.xid, end.commit_lsn)))
        return self._fill(ticket, self._storage.content_of(prepared, end))

    def _roll_back_prepared(self, ticket: int, cut: RolledBackPrepared) -> bool:
        if self.order.holds_before(ticket):
            return False
        prepared = self.prepared.roll_back(cut.xid, cut.gid)
        if prepared is not None:
            self._finished.add(ticket, prepared)
        self.order.resolve(ticket)
        return True


class LocalPipeline:
    """One life of a reader and all behind it. ``folder`` and ``sink`` outlive it.

    ``peek`` sees each CopyData message before the cutter does.
    """

    def __init__(
        self,
        dsn: str,
        slot: str,
        publications: tuple[str, ...],
        folder: Path,
        sink: Sink,
        options: Options,
        *,
        epoch: str = "1",
        order: random.Random | None = None,
        peek: Callable[[bytes], None] | None = None,
    ) -> None:
        self.options = options
        self.sink = sink
        self._shuffle = order
        self._peek = peek
        settings = SlotSettings(
            dsn=dsn,
            slot=slot,
            publications=publications,
            streaming=Streaming(options.streaming),
            proto_version=options.proto_version,
            logical_decoding_work_mem=options.logical_decoding_work_mem,
            two_phase=options.two_phase,
        )
        self.slot = _open_when_free(settings)
        try:
            self._connection = self.slot.connection
            self._cutter = StreamCutter(
                block_bytes=options.block_bytes,
                pending_limit_bytes=options.pending_limit_bytes,
                parallel=self.slot.streaming == "parallel",
            )
            self._block_bytes = options.block_bytes
            self._loop = self._connection.copy_loop()
            self.storage = Storage(str(folder))
            identity: SlotIdentity = self.slot.identity
            self.layout = Layout(identity.system_identifier, identity.slot, epoch)
            self.sequencer = Sequencer(self.storage, epoch, self.slot.opened(), options, sink)
            self.buffer = Buffer(self.storage, self.layout, options.buffer_memory_bytes)
        except BaseException:
            self.slot.connection.close()
            raise
        self._received = INVALID_LSN
        self._target = INVALID_LSN
        self._solicited_s = self._position_s = 0.0

    def __enter__(self) -> LocalPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def confirmed_lsn(self) -> Lsn:
        return self.sequencer.recorded

    def read_until(self, target: Lsn, timeout_s: float = 60.0) -> None:
        """Read, release and confirm until the confirmed position has reached ``target``."""
        deadline = time.monotonic() + timeout_s
        self._target = target
        while self.confirmed_lsn < target:
            drained = self._read()
            if drained:
                self._hand_over(self._cutter.flush())
                self._settle(entirely=True)
                self._solicit_position()
                self._connection.wait_readable(0.02)
            else:
                self._settle(entirely=False)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"confirmed {self.confirmed_lsn}, received {self._received}, wanted {target}: "
                    f"{self._cutter.open_transactions} open, {self.sequencer.order.n_waiting} waiting"
                )

    def read_some(self, n_messages: int) -> None:
        """At most so many messages, as far as they are there; nothing is confirmed."""
        self._read_each(n_messages)

    def close(self) -> None:
        """As a crash: what is in memory is gone, and the server is told nothing more."""
        self._connection.close()

    def stop(self) -> None:
        """As an end in order: the last confirmed position has surely reached the server."""
        self._send_status(reply=False)
        self._connection.stop(10.0)

    def segment_keys(self) -> list[str]:
        """All spilled rows in storage, of any epoch."""
        return [k for k in self.storage.list_keys(self.layout.root) if "/epochs/" in k]

    # -- SlotReader ------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """As the slot reader does; message by message where a test looks at each."""
        if self._peek is not None:
            return self._read_each(_MESSAGES_PER_LOOK)
        for _ in range(_MESSAGES_PER_LOOK):
            outcome = self._loop.gather(self._cutter.target, self._block_bytes)
            self._hand_over(self._cutter.settle())
            if outcome is Outcome.DRAINED:
                return True
            if outcome is Outcome.MESSAGE:
                self._take(self._loop.take_message())
            elif outcome is not Outcome.FULL:
                failed = outcome is Outcome.FAILED
                raise self._connection.failure() if failed else self._connection.end_of_stream()
        return False

    def _read_each(self, n_messages: int) -> bool:
        for _ in range(n_messages):
            data = self._connection.get_copy_data()
            if data is None:
                if not self._connection.wait_readable(0):
                    return True
                continue
            if self._peek is not None and data[0] == ord("w"):
                self._peek(bytes(data))
            self._take(data)
        return False

    def _take(self, data: bytes | memoryview) -> None:
        if data[0] == ord("w"):
            self._hand_over(self._cutter.feed(data))
            return
        keepalive = parse_keepalive(data)
        self._received = max(self._received, keepalive.end_lsn)
        now_s = time.monotonic()
        if keepalive.end_lsn >= self._target or now_s - self._position_s > _POSITION_INTERVAL_S:
            self._position_s = now_s
            self._hand_over(self._cutter.position(keepalive.end_lsn))
            if self._target:
                self._settle(entirely=False)
        if keepalive.reply_requested:
            self._send_status(reply=False)

    def _hand_over(self, cuts: Iterable[Cut]) -> None:
        for cut in cuts:
            if isinstance(cut, TransactionBlock):
                reach("giving_block")
                self.buffer.add_block(cut)
                reach("block_given")
            elif isinstance(cut, SubtransactionsAborted):
                self.buffer.abort_subtransactions(cut)
            elif isinstance(cut, Aborted):
                self.buffer.abort(cut)
            else:
                self.sequencer.take(cut, self.buffer)

    def _settle(self, *, entirely: bool) -> None:
        if entirely:
            self.sequencer.drain(self._shuffle)
        elif self._shuffle is None or self._shuffle.random() < 0.5:
            self.sequencer.work(self._shuffle)
        if self._shuffle is not None and self._cutter.has_open_rows and self._shuffle.random() < 0.1:
            self._hand_over(self._cutter.flush_open())
        if self.sequencer.to_sink():
            reach("confirming")
            self._send_status(reply=False)
            reach("confirmed")

    def _solicit_position(self) -> None:
        now_s = time.monotonic()
        if now_s - self._solicited_s >= 0.02:
            self._solicited_s = now_s
            self._send_status(reply=True)

    def _send_status(self, *, reply: bool) -> None:
        flushed = max(self.confirmed_lsn, self.slot.confirmed_flush_lsn)
        reach("sending_status")
        self._connection.send_status(max(self._received, flushed), flushed, flushed, reply)
        reach("status_sent")


def _open_when_free(settings: SlotSettings) -> OpenSlot:
    """A walsender whose client has gone needs a moment to notice."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return open_slot(settings, create=False)
        except (SlotInUse, ConnectionLost):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def content_of(unit: Sealed, storage: Storage) -> tuple[list[Released], list[Message]]:
    """What a sink makes of a unit: its transactions with their rows, and its messages."""
    released = []
    for row in unit.transactions.to_pylist():
        row["n_rows"] = row.pop("rows")
        released.append(Released(**row))
    by_commit = {t.commit_lsn: t for t in released}
    parts = [(p.relation, p.ref) for p in unit.memory]
    parts += [(p.relation, read_segment(p, storage)) for p in unit.segments]
    for relation, table in parts:
        if len(by_commit) == 1:
            groups = {released[0].commit_lsn: table}
        else:
            column = table["_commit_lsn"]
            groups = {
                lsn: table.filter(pa.compute.equal(column, lsn))
                for lsn in pa.compute.unique(column).to_pylist()
            }
        for lsn, group in groups.items():
            by_commit[lsn].parts.append((relation, group))
    messages = [Message(**row) for row in read_messages(unit, storage).to_pylist()]
    for message in messages:
        if message.commit_lsn is not None:
            by_commit[message.commit_lsn].messages.append(message)
    return released, messages


def read_messages(unit: Sealed, storage: Storage) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    for part in unit.messages:
        if isinstance(part, InlineMessages):
            batches.append(part.rows)
        elif isinstance(part, MemoryMessages):
            batches += part.ref.to_batches()
        else:
            batches += released_messages(part, SegmentReader(storage.uri))
    return pa.Table.from_batches(batches, rows.MESSAGES_SCHEMA)


def read_segment(part: SegmentPart, storage: Storage) -> pa.Table:
    batches = [
        rows.release(batch, part.relation, part.stamp, part.dropped)
        for batch in SegmentReader(storage.uri)(part.segment)
    ]
    table = pa.Table.from_batches(batches, schema=rows.contract_schema(part.relation))
    assert table.num_rows == part.n_rows, (part.segment.key, table.num_rows, part.n_rows)
    return table
