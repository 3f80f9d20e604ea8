"""The open transactions of the reader's process: one record for each top-level transaction, in one ledger.

The job: all that the reader knows of one open transaction stands in its ``TransactionRecord``. The parts are given the
ledger or a record, and keep no map by xid of their own: ``Grammar`` and ``OpenStreams`` on the thread that reads,
``EventRouter``, ``BufferPool`` and ``BufferPoolPolicy`` on the thread that sends.

Two threads write, and the queue of events is between them. So a record has two halves, and each attribute is written by
one thread alone. The halves do not end together: a stream ends for the reading thread with the commit message, and for
the sending thread some blocks later, with the call that carries the commit.

An example. 740 is streamed and committed, 750 is streamed and rolled back before any of its rows was cut, and 760 is
not streamed and outgrows a block::

    reading thread              sending thread              records (reading half | sending half)
    S 740                                                   740 (open | -)
    S 750                                                   740 (open | -), 750 (open | -)
    block 1 of 740 is cut                                   740 (open | -), 750 (open | -)
    A 750/750                                               740 (open | -)          nothing of 750 was cut: it is gone
    c 740                       block 1 to buffer 0         740 (ended | buffer 0)
    B 760 and many rows         block 1 of 760 to buffer 1  740 (ended | buffer 0), 760 (- | buffer 1)
                                commit of 740, ticket 0     760 (- | buffer 1)

Invariants:
- Who removes a record: the reading thread where nothing of the transaction was cut, for then the sending thread never
  hears of it; else the sending thread, with the transaction's end. They cannot both do so.
- A transaction that is not streamed gets its record with its first block. Until then it is the cutter's current one,
  and there is never more than one of these.
- Within an epoch an xid comes again only after its end: the server's snapshots would not hold otherwise. A record
  whose stream has ended gives way to a new one all the same, so that nothing old counts for the new transaction.
- Single operations of a dict are atomic between threads. Whoever walks over all records takes a copy (``records``).

What stays after the end is counted by ticket, not by xid: bytes that the sink has not taken (``Backlog``), and how many
ended transactions a buffer still holds (``BufferPoolPolicy``).

Rejected: two ledgers, one for each thread, because then no place says what is known of a transaction; and a lock,
because nothing here needs two operations at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xidstream.pipeline.exchange import BufferedTransaction
from xidstream.pipeline.pg import Lsn, Xid

if TYPE_CHECKING:
    from xidstream.pipeline.stream.pending import PendingMessages
    from xidstream.pipeline.stream.stream_events import TransactionBlock


@dataclass(eq=False, slots=True)
class TransactionRecord:
    """One open top-level transaction. Records are told apart by identity."""

    xid: Xid

    # -- the reading thread's half ---------------------------------------------------------------------

    stream_lsn: Lsn | None = None
    """The LSN at which its first stream block started. None where no stream of it is open."""
    pending: PendingMessages | None = None
    """Its messages that are not cut yet, its relations, and which subtransactions were rolled back. None before the
    first stream block and after the stream's end."""

    # -- the sending thread's half ---------------------------------------------------------------------

    n_bytes: int = 0
    """Raw bytes of its blocks so far."""
    n_steps: int = 0
    """How many blocks its buffers got. They fail where one is missing."""
    n_rolled_back: int = 0
    """How many subtransactions its blocks have told as rolled back."""
    streamed: bool = True
    """Whether the server streams it. Else it is a plain one that outgrew a block, or a two-phase one."""
    tables: set[str] = field(default_factory=set)
    """The tables of its blocks by name. The versions are not kept: they take what ``RelationBook`` bounds."""
    since_s: float = 0.0
    """When its first block was sent, on the monotonic clock."""
    buffer: int | None = None
    """The number of the buffer that has its rows. None before its first block."""
    held: BufferedTransaction = field(init=False)
    """The last report of its buffer about what it holds of it."""
    ticket: int | None = None
    """The ticket of its end in the commit order; -1 where it was rolled back. None while it is open."""
    sealed: Any = None
    """The reference to its ``Sealed``, from the call that carried its commit until the sequencer's entry is made."""

    def __post_init__(self) -> None:
        self.held = BufferedTransaction(self.xid, 0, 0, 0)

    def note(self, event: TransactionBlock) -> None:
        """A block of it is sent."""
        if not self.n_bytes:
            self.since_s = time.monotonic()
        self.streamed = event.streamed
        self.n_bytes += event.block.n_bytes
        self.n_rolled_back += len(event.aborted)
        self.tables.update(version.name for version in event.block.relations.versions.values())

    def next_step(self) -> int:
        """The number of the next block, from 0 on."""
        self.n_steps += 1
        return self.n_steps - 1

    @property
    def is_buffered(self) -> bool:
        """Whether a buffer has blocks of it, and its end is not sent. A two-phase one without a row has a buffer too,
        for as long as its PREPARE takes to be sent."""
        return self.n_steps > 0 and self.ticket is None


class TransactionLedger:
    def __init__(self) -> None:
        self._records: dict[Xid, TransactionRecord] = {}
        """The record of each open transaction. Both threads add and remove."""
        self.streams: dict[TransactionRecord, None] = {}
        """The records whose stream is open, in the order of their first blocks. The reading thread's alone."""

    # -- for any thread --------------------------------------------------------------------------------

    def get(self, xid: Xid) -> TransactionRecord | None:
        return self._records.get(xid)

    def records(self) -> list[TransactionRecord]:
        """A copy, so that other threads may add and remove meanwhile."""
        return list(self._records.values())

    def remove(self, xid: Xid) -> None:
        """The transaction has ended. See the module for which thread may say so."""
        self._records.pop(xid, None)

    # -- the reading thread ----------------------------------------------------------------------------

    @property
    def n_streams(self) -> int:
        return len(self.streams)

    def stream_lsn(self, xid: Xid) -> Lsn | None:
        """Where the open stream of ``xid`` started; None where none is open."""
        record = self._records.get(xid)
        return None if record is None else record.stream_lsn

    def open_stream(self, xid: Xid, lsn: Lsn) -> None:
        record = self._records[xid] = TransactionRecord(xid, stream_lsn=lsn)
        self.streams[record] = None

    def close_stream(self, xid: Xid) -> None:
        """Nothing more comes in the stream of ``xid``, where one is open. What is gathered of it is still there."""
        record = self._records.get(xid)
        if record is not None and record.stream_lsn is not None:
            record.stream_lsn = None
            del self.streams[record]

    def take_pending(self, xid: Xid) -> PendingMessages | None:
        """What is gathered of a stream that has ended; None where there was none. The reading half ends with it."""
        record = self._records.get(xid)
        if record is None:
            return None
        pending, record.pending = record.pending, None
        return pending

    # -- the sending thread ----------------------------------------------------------------------------

    def of(self, xid: Xid) -> TransactionRecord:
        """Its record, which is a new one with the first block of a transaction that is not streamed."""
        record = self._records.get(xid)
        if record is None:
            record = self._records[xid] = TransactionRecord(xid)
        return record
