"""The pipeline in one process: the code of production over a real replication connection, without Ray and Spark.

``open_slot`` → ``StreamCutter`` → ``LocalStages``, which has the ``EventRouter``, a ``TransactionBuffer`` and a
``CommitSequence`` → a ``Sink``. Only the loop that reads and the sink are the tests'.
A new ``LocalPipeline`` over the same storage and sink is a restart.

``order`` makes buffers finish in a random order, as actors do; without it they finish at once.

The ``Sink`` is what a user has: an append-only list with a watermark of its own, which drops what the server
repeats. It also remembers, for each position that was confirmed, how much it held then.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.differential.local_stages import LocalBuffers, LocalStages, batches_of
from tests.journal_contents import JournalContents, Journaled
from tests.memory_parts import part_rows
from xidstream.pipeline.errors import ConnectionLost, SlotInUse
from xidstream.pipeline.exchange import Batch, InlineMessages, MemoryMessages, Sealed, SegmentPart
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pgoutput.message_buffer import Outcome
from xidstream.pipeline.pgoutput.parser import parse_keepalive
from xidstream.pipeline.postgres.opening import OpenSlot, connect_slot
from xidstream.pipeline.postgres.settings import SlotSettings, Streaming
from xidstream.pipeline.schema import RelationVersion, rows
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.spark.executor_tasks import released_messages
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import journaled_lsn, last_owner
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.skips import pending_skips
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import StreamCutter, StreamEvent
from xidstream.pipeline.stream.ledger import TransactionLedger

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
    journal: bool = False
    """Everything is written to the journal, little of it stays in memory, and the sink is often late."""
    on_poison: str = "stop"

    def config(self, folder: Path) -> Config:
        """What of it is a setting of the stages, with their storage."""
        config = Config(
            storage=str(folder),
            batch_rows=self.batch_rows,
            batch_bytes=self.batch_bytes,
            on_poison=self.on_poison,
        )
        if not self.journal:
            return config
        return dataclasses.replace(config, journal_after_bytes=0, batch_bytes=8_000)

    def __str__(self) -> str:
        proto = self.proto_version if self.proto_version is not None else "highest"
        journal = " journal=on" if self.journal else ""
        return (
            f"streaming={self.streaming} proto={proto} two_phase={'on' if self.two_phase else 'off'}{journal}"
        )


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
    confirmations: list[tuple[Lsn, int, int, Journaled]] = field(default_factory=list)
    """(confirmed LSN, transactions held, messages held, what the journal had) for each time the server was told."""
    watermark: int = 0
    _lsns: set[int] = field(default_factory=set)

    def write(self, batch: Batch, storage: Storage) -> None:
        """All units of a batch at once."""
        contents = [content_of(unit, storage) for unit in batch.units]
        self.take(
            [t for transactions, _ in contents for t in transactions], [m for _, ms in contents for m in ms]
        )

    def note_confirmed(self, lsn: Lsn, journaled: Journaled) -> None:
        """The server is about to be told ``lsn``."""
        self.confirmations.append((lsn, len(self.transactions), len(self.messages), journaled))

    def take(self, transactions: list[Released], messages: list[Message]) -> None:
        fresh = [t for t in transactions if t.commit_lsn > self.watermark]
        self.transactions += fresh
        self.messages += [m for m in messages if m.lsn not in self._lsns]
        self._lsns.update(m.lsn for m in messages)
        if fresh:
            self.watermark = fresh[-1].commit_lsn

    def rows(self, table: str | None = None) -> list[dict[str, Any]]:
        return [r for t in self.transactions for r in t.rows() if table in (None, r["table"])]


class LocalPipeline:
    """One life of a reader and all after it. ``folder`` and ``sink`` outlive it.

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
        self.storage = Storage(str(folder))
        self.slot, start_lsn = _open_when_free(settings, self.storage, epoch)
        try:
            self._connection = self.slot.connection
            ledger = TransactionLedger()
            self._cutter = StreamCutter(
                block_bytes=options.block_bytes,
                pending_limit_bytes=options.pending_limit_bytes,
                parallel=self.slot.streaming == "parallel",
                ledger=ledger,
            )
            self._block_bytes = options.block_bytes
            self._loop = self._connection.copy_loop()
            self.confirmed_lsn = self.slot.confirmed_flush_lsn
            identity = self.slot.identity
            self.layout = Layout(identity.system_identifier, identity.slot, epoch)
            opened = self.slot.opened(start_lsn, last_owner(self.storage, self.layout))
            self._journal = JournalContents(self.storage, self.layout)
            skipped = pending_skips(self.storage, self.layout, self.slot.confirmed_flush_lsn)
            self.stages = LocalStages(
                options.config(folder),
                dataclasses.replace(opened, skips=skipped),
                epoch,
                buffer_memory_bytes=options.buffer_memory_bytes,
                write=lambda batch: sink.write(batch, self.storage),
                watermark=Lsn(sink.watermark),
                confirm=self._confirm,
                # In some lives the sink is one that takes segments.
                bind_late=order is not None and order.random() < 0.5,
                ledger=ledger,
            )
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
    def buffers(self) -> LocalBuffers:
        return self.stages.buffers

    def read_until(self, target: Lsn, timeout_s: float = 60.0) -> None:
        """Read, release and confirm until the confirmed position has reached ``target``."""
        deadline = time.monotonic() + timeout_s
        self._target = target
        while self.stages.report().delivered_lsn < target:
            drained = self._read()
            if drained:
                self._send(self._cutter.flush())
                self._settle(entirely=True)
                self._solicit_position()
                self._connection.wait_readable(0.02)
            else:
                self._settle(entirely=False)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"confirmed {self.confirmed_lsn}, received {self._received}, wanted {target}: "
                    f"{self._cutter.open_transactions} open, {self.stages.report().sequencer.n_waiting} waiting"
                )

    def read_some(self, n_messages: int) -> None:
        """At most so many messages, as far as they are there; nothing is confirmed."""
        self._read_each(n_messages)

    def close(self) -> None:
        """As a crash: what is in memory is gone, and the server is told nothing more."""
        self._connection.close()
        self.stages.close()

    def stop(self) -> None:
        """As an end in order: the last confirmed position has surely reached the server."""
        self._send_status(reply=False)
        self._connection.stop(10.0)
        self.stages.close()

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
            self._send(self._cutter.settle())
            if outcome is Outcome.DRAINED:
                return True
            if outcome is Outcome.MESSAGE:
                self._take(self._loop.pop_message())
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
            self._send(self._cutter.feed(data))
            return
        keepalive = parse_keepalive(data)
        self._received = max(self._received, keepalive.end_lsn)
        now_s = time.monotonic()
        if keepalive.end_lsn >= self._target or now_s - self._position_s > _POSITION_INTERVAL_S:
            self._position_s = now_s
            self._send(self._cutter.position(keepalive.end_lsn))
            if self._target:
                self._settle(entirely=False)
        if keepalive.reply_requested:
            self._send_status(reply=False)

    def _send(self, events: Sequence[StreamEvent]) -> None:
        if events:
            self.stages.send(events)

    def _confirm(self, lsn: Lsn) -> None:
        if lsn > self.confirmed_lsn:
            self.sink.note_confirmed(lsn, self._journal.look())
            self.confirmed_lsn = lsn

    def _settle(self, *, entirely: bool) -> None:
        shuffle, before = self._shuffle, self.confirmed_lsn
        if entirely or shuffle is None or shuffle.random() < 0.5:
            self.stages.finish(shuffle, entirely=entirely)
        if shuffle is not None and self._cutter.has_open_rows and shuffle.random() < 0.1:
            self._send(self._cutter.flush_open())
        is_late = self.options.journal and shuffle is not None and shuffle.random() < 0.7
        if entirely or not is_late:
            self.stages.deliver()
        if self.confirmed_lsn > before:
            self._send_status(reply=False)

    def _solicit_position(self) -> None:
        now_s = time.monotonic()
        if now_s - self._solicited_s >= 0.02:
            self._solicited_s = now_s
            self._send_status(reply=True)

    def _send_status(self, *, reply: bool) -> None:
        flushed = self.confirmed_lsn
        received = max(self._received, self.stages.end_lsn, flushed)
        reach("sending_status")
        self._connection.send_status(received, flushed, flushed, reply)
        reach("status_sent")


def _open_when_free(settings: SlotSettings, storage: Storage, epoch: str) -> tuple[OpenSlot, Lsn]:
    """Started as the slot reader does it; also gives from where. A walsender whose client has gone needs a moment to
    notice."""
    deadline = time.monotonic() + 30
    while True:
        slot = connect_slot(settings, create=False)
        try:
            identity = slot.identity
            start_lsn = journaled_lsn(storage, Layout(identity.system_identifier, identity.slot, epoch))
            slot.start(start_lsn)
            return slot, start_lsn
        except (SlotInUse, ConnectionLost):
            slot.connection.close()
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
    parts = [(p.relation, part_rows(p, batches_of)) for p in unit.memory]
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
            batches += batches_of(part.ref)
        else:
            batches += released_messages(part, SegmentReader(storage.uri))
    return pa.Table.from_batches(batches, rows.MESSAGES_SCHEMA)


def read_segment(part: SegmentPart, storage: Storage) -> pa.Table:
    batches = SegmentReader(storage.uri)(part)
    table = pa.Table.from_batches(batches, schema=rows.contract_schema(part.relation))
    assert table.num_rows == part.n_rows, (part.segment.key, table.num_rows, part.n_rows)
    return table
