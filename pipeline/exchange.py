"""All that crosses processes: the shapes of what reader, buffers, sequencer and driver give each other.

Frozen values, picklable, small: rows never travel in them, only names of segments and opaque references to
Arrow bytes (``ArrowRef``: a Ray ObjectRef in production, or the bytes where they are few; anything in a test; this
package does not look).

A *release unit* (``Sealed``) is what has one place in commit order: one transaction block's transaction,
or one plain block of many small transactions. A *batch* is consecutive release units.

A record batch of a known schema is pickled as its Arrow message, without the schema. A schema of its own took 16 KB of
the 26 KB that a waiting unit of one row took, because each unpickled batch had one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.parked import BadTable, ParkedTable, SkippedTransaction
from xidstream.pipeline.parquet import CommitStamp, RowFile
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.poison import NO_SKIPS, Poison, Skips
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA
from xidstream.pipeline.snapshot.decision import Decision

UNIT_BYTES = 16 << 10
"""What a release unit takes beside its rows while it waits for the sink, however few these are. Measured with units of
one row: 9 KB in the sequencer, 4 KB in the buffer, 2 KB in the object store."""

PART_BYTES = 2 << 10
"""What the place of a table's rows takes: its names, and the relation version, of which each unit has its own."""

SINGLE_UNITS = 640
"""So many small units may wait before the sequencer joins them (``pipeline.commits.joining``)."""

JOINED_UNIT_BYTES = 1536
"""What a unit still takes when it was joined, beside its rows: in reader, buffers and sequencer together. Measured
with real actors (``benchmarks.hang``), whose private memory grew by some 400 bytes a commit more than the rows have,
with about three commits in a unit."""

ArrowRef = Any
"""A reference to the bytes of one Arrow IPC stream in contract layout."""


@dataclass(frozen=True)
class Segment:
    """Spilled rows of one relation version, as one Parquet file whose commit is bound late (``pipeline.parquet``).

    ``key`` is relative to the storage root.
    """

    key: str
    relation: RelationVersion
    file: RowFile

    @property
    def n_rows(self) -> int:
        return self.file.n_rows

    @property
    def n_bytes(self) -> int:
        return self.file.n_bytes


@dataclass(frozen=True)
class MessageFile:
    """One spilled Arrow IPC file of logical messages, in ``rows.MESSAGES_SCHEMA``.

    ``key`` is relative to the storage root; ``checksum`` is over the whole file's ``n_bytes`` (how: see
    ``pipeline.storage``).
    """

    key: str
    n_rows: int
    n_bytes: int
    checksum: str

    @property
    def schema(self) -> pa.Schema:
        return MESSAGES_SCHEMA


@dataclass(frozen=True)
class MemoryPart:
    """Rows of one relation version, already released (contract layout), in the object store.

    ``first_commit_lsn``: of the first of them, which no other of them is below. ``pack_index`` is None where
    the object is this part alone. Else the object is a pack of many small parts (``pipeline.packs``), which
    ``pack_index`` counts from 0.
    """

    relation: RelationVersion
    n_rows: int
    n_bytes: int
    first_commit_lsn: int
    ref: ArrowRef
    pack_index: int | None = None


@dataclass(frozen=True)
class SegmentPart:
    """Rows of one relation version in storage, and what whoever reads them adds."""

    segment: Segment
    commit: CommitStamp

    @property
    def relation(self) -> RelationVersion:
        return self.segment.relation

    @property
    def n_rows(self) -> int:
        return self.segment.n_rows


@dataclass(frozen=True)
class InlineMessages:
    """Logical messages by value, because they are few: no more than ``pipeline.transactions`` allows for a unit."""

    rows: pa.RecordBatch
    """``rows.MESSAGES_SCHEMA``, complete."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _inline_messages, (_message_of(self.rows),)

    @property
    def n_bytes(self) -> int:
        return int(self.rows.nbytes)


@dataclass(frozen=True)
class MemoryMessages:
    """Logical messages in ``rows.MESSAGES_SCHEMA``, complete, in the object store."""

    n_bytes: int
    ref: ArrowRef


@dataclass(frozen=True)
class SpilledMessages:
    """Logical messages in storage. Their reader calls ``rows.stamp_messages`` with ``commit_lsn`` and ``xid``.

    These are None for messages outside of transactions: the file has all of them.
    """

    file: MessageFile
    commit_lsn: Lsn | None = None
    xid: Xid | None = None

    @property
    def n_bytes(self) -> int:
        return self.file.n_bytes


MessagePart = InlineMessages | MemoryMessages | SpilledMessages


@dataclass(frozen=True)
class Undeliverable:
    """A place in a release unit: the transaction after it cannot be delivered, and nothing from there on is released.

    ``error`` names that transaction. ``n_transactions`` of the unit come before it. ``last_commit_lsn`` and ``end_lsn``
    are of the last of these, and 0/0 if there is none.
    """

    error: XidstreamError
    last_commit_lsn: Lsn = INVALID_LSN
    end_lsn: Lsn = INVALID_LSN
    n_transactions: int = 0


@dataclass(frozen=True)
class Sealed:
    """A complete transaction as its buffer holds it, before its place in the order is known.

    ``relations`` of the parts tell the tables; ``messages`` are its logical messages, in the order of the stream.
    ``transactions`` has one row for a transaction, many for a plain block, none where nothing was in it.
    """

    transactions: pa.RecordBatch
    memory: tuple[MemoryPart, ...]
    segments: tuple[SegmentPart, ...]
    messages: tuple[MessagePart, ...]
    n_rows: int
    n_bytes: int
    """The bytes of rows and messages: as Arrow in memory, and as files in storage, where rows are compressed."""
    undeliverable: Undeliverable | None = None
    """Set where the content ends before the unit does."""
    skipped: tuple[SkippedTransaction, ...] = ()
    """The unit's skipped transactions (``pipeline.poison``): nothing of them is here."""
    bad_tables: tuple[BadTable, ...] = ()
    """Tables of which rows were left out, for the sequencer to park. ``transactions`` tell of these rows, too."""

    @cached_property
    def transactions_bytes(self) -> int:
        return int(self.transactions.nbytes)

    @cached_property
    def memory_bytes(self) -> int:
        """What the unit takes that is not in the storage: rows, messages, its lines of ``_transactions``, the names of
        its parts, and itself."""
        messages = (p.n_bytes for p in self.messages if isinstance(p, (InlineMessages, MemoryMessages)))
        rows = sum(part.n_bytes for part in self.memory)
        parts = PART_BYTES * (len(self.memory) + len(self.segments))
        return rows + sum(messages) + self.transactions_bytes + parts + UNIT_BYTES

    def __reduce__(self) -> tuple[Any, ...]:
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return _sealed, ({**state, "transactions": _message_of(self.transactions)},)

    def stored_keys(self) -> list[str]:
        """The keys of all its parts that are in storage."""
        messages = [part.file.key for part in self.messages if isinstance(part, SpilledMessages)]
        return [part.segment.key for part in self.segments] + messages


def _message_of(batch: pa.RecordBatch) -> bytes:
    return bytes(batch.serialize())


def _inline_messages(message: bytes) -> InlineMessages:
    return InlineMessages(pa.ipc.read_record_batch(message, MESSAGES_SCHEMA))


def _sealed(state: dict[str, Any]) -> Sealed:
    transactions = pa.ipc.read_record_batch(state["transactions"], TRANSACTIONS_SCHEMA)
    return Sealed(**{**state, "transactions": transactions})


@dataclass(frozen=True)
class Batch:
    """Consecutive release units for the sink, in commit order; ``number`` counts from 0 within an epoch.

    ``end_lsn`` may be confirmed once the sink holds the batch. The LSNs are of transactions with content;
    a batch may also be empty of rows and still move the position. ``parked``: the tables that were parked up to
    ``last_commit_lsn``, also those that were resumed since.
    """

    number: int
    units: tuple[Sealed, ...]
    first_commit_lsn: Lsn
    last_commit_lsn: Lsn
    end_lsn: Lsn
    n_transactions: int
    n_rows: int
    n_bytes: int
    parked: tuple[ParkedTable, ...] = ()

    def segment_parts(self) -> Iterator[SegmentPart]:
        for unit in self.units:
            yield from unit.segments


@dataclass(frozen=True)
class Pace:
    """How a sink takes batches: one may be left to grow for ``hold_s`` seconds from now. But not where it has
    ``large_rows`` rows or a segment, and not where the sink is behind: the first transaction committed more than
    ``behind_s`` ago, by the source's clock and ours."""

    hold_s: float = 0.0
    large_rows: int = 0
    behind_s: float = 0.0


AT_ONCE: Final = Pace()


@dataclass(frozen=True)
class UnitEnd:
    """Where a release unit stands in the WAL, and how many transactions it has. ``Sealed`` does not say it.

    The commit LSNs are 0/0 where it has no transaction but messages outside of transactions.
    """

    first_commit_lsn: Lsn
    last_commit_lsn: Lsn
    end_lsn: Lsn
    n_transactions: int


@dataclass(frozen=True)
class JournalFile:
    """One file of the journal: consecutive release units that are committed, and that the sink does not hold yet.

    ``number`` counts the slot's files, from 0, over all epochs; ``epoch`` wrote it. The LSNs are of its transactions:
    0/0 where it has messages outside of transactions alone. ``stored_keys`` are the objects of its units that were
    files before, and now belong to the journal.
    """

    number: int
    epoch: str
    first_commit_lsn: Lsn
    last_commit_lsn: Lsn
    end_lsn: Lsn
    """The greatest end of its units: confirmed when the record names the file."""
    first_commit_timestamp_us: int
    """Microseconds since the Unix epoch, UTC; 0 without a transaction."""
    n_units: int
    n_transactions: int
    n_rows: int
    n_bytes: int
    """The bytes of the file, and of the objects that it names."""
    stored_keys: tuple[str, ...]
    file_bytes: int = 0
    """The bytes of the file alone."""
    memory_bytes: int = 0
    """The bytes that its rows take when they are loaded, and many messages; 0 if the file does not say."""


@dataclass(frozen=True)
class JournalSpan:
    """Files of the journal that one epoch wrote, with the numbers from ``first`` to ``last``."""

    epoch: str
    first: int
    last: int


@dataclass(frozen=True)
class SlotIdentity:
    """What a sink's application id and storage keys are made of.

    ``database``: the name that the database had when the storage began. A rename does not change it.
    """

    system_identifier: int
    database: str
    slot: str

    @property
    def application_id(self) -> str:
        return f"{self.system_identifier}/{self.database}/{self.slot}"


@dataclass(frozen=True)
class PrepareCover:
    """For which transactions this storage must have the PREPARE, if the PREPARE had any content.

    PostgreSQL 16 and 17 send COMMIT PREPARED alone for a transaction that only locked rows. It comes alone, too, if the
    PREPARE went to another consumer before this storage was first used. To tell the two cases apart, the state at that
    first use is kept: ``earlier`` are the transactions that were prepared then, and ``since_lsn`` was the end of the
    WAL. The default covers all transactions. It is right for a slot that had no two-phase then, because no PREPARE was
    sent to anybody.
    """

    since_lsn: Lsn = INVALID_LSN
    earlier: frozenset[Xid] = frozenset()

    def covers(self, xid: Xid, commit_lsn: Lsn) -> bool:
        return commit_lsn >= self.since_lsn and xid not in self.earlier


@dataclass(frozen=True)
class Beginning:
    """Where a storage began with a slot: up to there the slot was confirmed, or there it was created.

    ``is_anew``: a person said so, although there were signs of an earlier run (``against``, as clauses for people).
    """

    lsn: Lsn
    is_anew: bool = False
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Opened:
    """The slot as the reader found it when it opened it. ``target_lsn`` was the end of the WAL.

    ``cover`` is for a storage that is used for the first time now. ``history`` says where each earlier timeline ended
    on the way to ``timeline``.
    """

    identity: SlotIdentity
    confirmed_flush_lsn: Lsn
    target_lsn: Lsn
    server_version: int
    proto_version: int
    streaming: str
    two_phase: bool
    cover: PrepareCover
    timeline: int
    history: Mapping[int, Lsn]
    skips: Skips = NO_SKIPS
    """The skipped transactions that the slot may still send, or the journal has."""
    server: Mapping[str, str] = field(default_factory=dict)
    """libpq's options that lead to the slot's very server, where the DSN has several."""
    snapshots: Decision = Decision(takes_snapshots=False)  # noqa: RUF009 - frozen
    start_lsn: Lsn = INVALID_LSN
    """What the server was asked for: where this is further than ``confirmed_flush_lsn``, it sends what follows."""
    last_owner: int | None = None
    """The greatest number that an epoch had, or claimed, in the storage when the slot was this one's for certain. None:
    not known. An epoch with a higher one got the slot later."""
    gone_tables: frozenset[int] = frozenset()
    """Relids of parked tables that were dropped before ``gone_before``."""
    gone_before: Lsn = INVALID_LSN


@dataclass(frozen=True)
class Tenure:
    """One epoch's hold on a slot. Each one has a higher ``number`` than those before.

    A slot has one reader at a time, and the epoch that got it last is the rightful one. A writer with a lower number is
    late, and gives way. ``timeline``, ``history`` and ``wal_end`` say what the server had when the slot was opened.
    Nobody before can have read more from it. ``loop`` counts the epoch's batch loops, from 1: only the last one that
    opened the sink may take batches and report them. ``parked``: the tables that were parked up to what the sink held
    then, also those that were resumed since. Of later ones the batches tell.
    """

    number: int
    epoch: str
    timeline: int
    history: Mapping[int, Lsn]
    wal_end: Lsn
    loop: int = 0
    parked: tuple[ParkedTable, ...] = ()

    def reachable(self, timeline: int) -> Lsn | None:
        """Up to which LSN ``timeline`` is part of the server's history. None if it is no part of it.

        0 stands for a timeline that was not recorded; it counts as the present one.
        """
        if timeline in (0, self.timeline):
            return self.wal_end
        return self.history.get(timeline)


@dataclass(frozen=True)
class PreparedTransaction:
    """The durable record of a transaction between PREPARE and COMMIT or ROLLBACK PREPARED. The stamp is added by
    COMMIT PREPARED."""

    xid: Xid
    gid: str
    prepare_lsn: Lsn
    prepare_end_lsn: Lsn
    streamed: bool
    origin: str | None
    segments: tuple[Segment, ...]
    messages: tuple[MessageFile, ...] = ()
    poison: Poison | None = None
    """Why COMMIT PREPARED cannot release it. It does not matter to a ROLLBACK PREPARED."""
    bad_tables: tuple[BadTable, ...] = ()
    """The tables with a change that cannot be delivered. ``segments`` have rows of these tables, too."""
    damage: str | None = None
    """What is wrong with a record that was damaged in the storage. Only xid and ``prepare_end_lsn`` are known of it
    then."""

    def stored_keys(self) -> list[str]:
        """The keys of all that it keeps in storage, except its record."""
        return [s.key for s in self.segments] + [m.key for m in self.messages]

    def relids(self) -> set[int] | None:
        """The tables of its rows; None where they are not known."""
        if self.damage is not None or (self.poison is not None and not self.bad_tables):
            return None
        return {s.relation.relid for s in self.segments} | {each.relid for each in self.bad_tables}


RelationMap = Mapping[int, RelationVersion]


@dataclass(frozen=True)
class TransactionEnd:
    """What a COMMIT, stream commit or COMMIT PREPARED says of its transaction."""

    xid: Xid
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_timestamp_us: int
    """Microseconds since the Unix epoch, UTC."""
    streamed: bool = False
    gid: str | None = None
    origin: str | None = None


@dataclass(frozen=True)
class BufferedTransaction:
    """What a transaction amounts to after a block: for progress, and for tests of the memory bound."""

    xid: Xid
    n_rows: int
    n_bytes_in_memory: int
    n_segments: int
    n_bytes_spilled: int = 0
