"""The order of commits, and the positions after which everything is safe.

One queue of entries in the order the server sent them (``entries``). A *unit* (a transaction, or a plain block of many)
must get its content from its buffer, be taken by the sink and be reported done. A *hold* must be resolved (a PREPARE
whose content must be durable first). A *position* (a keepalive) is done by itself. Buffers finish in any order; only
the head of the queue is released, so the order of release is the order of commit.

Where the sink is behind, units at the head are written to the journal (``journal``): they leave the queue then, and the
journal releases them, in front of the queue. A unit that the sink has taken may be written, too.

``confirmed_lsn`` is the greatest position of the contiguous prefix that sink and journal hold together;
``delivered_lsn`` is that of the sink alone. Neither ever goes back or passes an entry that is not done, in whatever
order the sink reports.

A unit is *settled* when its content and that of all units before it is there: then ``parking`` takes out of it what is
of a parked table. So all that is released or written was settled in the order of commits.

Where many small units wait, neighbours become one (``joining``). It has the last of their tickets: a ticket that is
missing in the queue is one that was joined. Positions that are neighbours are one entry, too.

If a unit has a transaction that cannot be delivered, it becomes STUCK instead of DONE, as soon as the transactions
before that one are done. Nothing after it is ever released, and neither it nor what is behind it is written to the
journal. When it is the head of all, everything that committed before it is done, and ``undeliverable`` is its error.

An example. Three transactions of 1,000 rows commit at 0/100, 0/200 and 0/300, and a keepalive says that the WAL ends
at 0/380; ``batch_rows`` is 1,500::

    ticket  entry              what happens                                     confirmed_lsn
    0       unit, ends 0/108   its buffer is slow: WAITING                      0/0
    1       unit, ends 0/208   has content: READY, but ticket 0 is before it    0/0
    2       unit, ends 0/308   has content: READY                               0/0
    3       position 0/380     DONE by itself, but after three units           0/0
            ticket 0 gets content; next_batch() is batch 0 with ticket 0 alone,
            because two units are more than 1,500 rows                          0/0
            next_batch() is batch 1 with ticket 1                               0/0
            batch_done(1): ticket 1 is DONE, and ticket 0 is not                0/0
            batch_done(0): the prefix up to ticket 1 is done                    0/208
            batch 2 with ticket 2 is done: the position follows at once         0/380

If ticket 1 had a row that cannot be decoded, it would become STUCK: ticket 0 is delivered, 0/108 is confirmed, and the
run ends with the error of ticket 1. Ticket 2 is never released.

``commits.commit_sequence`` calls this from one thread. The reader numbers the entries with *tickets*, from 0, in the
order of the stream. A gap in them is a lost message, and raises an error. Rejected: a heap ordered by commit LSN,
because it would hide a lost or repeated entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import pyarrow as pa

from xidstream.pipeline.commits.entries import Entry, EntryKind, EntryState, Head, head_of
from xidstream.pipeline.commits.joining import JoinRule, first_run, joined_entry
from xidstream.pipeline.commits.journal import Journal
from xidstream.pipeline.commits.parking import Parking
from xidstream.pipeline.errors import IllegalTransition, XidstreamError
from xidstream.pipeline.exchange import Batch, JournalFile, Pace, Sealed, UnitEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid


class CommitOrder:
    """``batch_rows`` and ``batch_bytes`` bound a batch. A unit that is larger is a batch of its own.

    ``journal`` has what earlier epochs left, which confirmed everything up to ``confirmed_lsn``, and ``parking`` the
    tables that they parked.
    """

    def __init__(
        self,
        *,
        batch_rows: int,
        batch_bytes: int,
        journal: Journal | None = None,
        confirmed_lsn: Lsn = INVALID_LSN,
        parking: Parking | None = None,
    ) -> None:
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self.join_rule = JoinRule()
        """The rule by which neighbouring units become one."""
        self._n_arrived = 0
        """Units that became ready since there was nothing to join."""
        self.journal = Journal() if journal is None else journal
        """Units that are written to the storage and not delivered. They stand in front of the queue."""
        self.parking = Parking() if parking is None else parking
        """The parked tables, and what is left out of each unit because of them."""
        self._unsettled: deque[Entry] = deque()
        """The units whose turn to be settled has not come, in order. All are in ``_entries`` as well."""
        self._dropped_keys: list[str] = []
        """Segments of parked tables that were taken out of settled units. ``take_dropped_keys`` empties it."""
        self._entries: deque[Entry] = deque()
        """The queue: every entry that is neither done as part of the prefix nor in the journal, in order."""
        self._by_ticket: dict[int, Entry] = {}
        """The entries of the queue by ticket. A joined unit has the last of its tickets."""
        self.next_ticket = 0
        """The ticket that the next entry must have."""
        self._last_commit_lsn = self.journal.last_commit_lsn
        """The commit LSN of the last transaction that has a place. The next one must be greater."""
        self._next_batch = 0
        """The number of the next batch."""
        self._taken: dict[int, list[Entry]] = {}
        """The entries of each batch that was given out and is not reported done, by its number."""
        self._confirmed_lsn = confirmed_lsn
        """The end of the done prefix of the queue. What the journal holds may lie beyond it (``confirmed_lsn``)."""
        self.done_ticket = -1
        """Every entry up to this one is done, or in the journal."""
        self._writing: list[Entry] = []
        """The entries that are being written to a journal file. They stay in the queue until ``written``."""
        self.waiting_bytes = 0
        """The memory of the units in the queue that are ready or taken."""
        self._arrived_lsn = confirmed_lsn
        """The greatest end LSN of a unit that has its content."""

    # -- from the reader -------------------------------------------------------------------------------

    def add_unit(
        self,
        ticket: int,
        first_commit_lsn: Lsn,
        last_commit_lsn: Lsn,
        end_lsn: Lsn,
        n_transactions: int,
        *,
        message: str = "COMMIT",
        xid: Xid | None = None,
    ) -> None:
        """A unit takes its place. If its LSNs are 0, it holds messages and no transaction, and confirms nothing.
        ``message`` and ``xid`` are for people (``head``)."""
        self._check_ticket(ticket)
        if first_commit_lsn:
            if not self._last_commit_lsn < first_commit_lsn <= last_commit_lsn:
                raise IllegalTransition(
                    f"commit {first_commit_lsn} (to {last_commit_lsn}) was sent after {self._last_commit_lsn}"
                )
            self._last_commit_lsn = last_commit_lsn
        end = UnitEnd(first_commit_lsn, last_commit_lsn, end_lsn, n_transactions)
        entry = Entry(ticket, EntryKind.UNIT, end, message=message, xid=xid)
        self._append(entry)
        self._unsettled.append(entry)

    def add_hold(
        self, ticket: int, end_lsn: Lsn, *, message: str = "PREPARE", xid: Xid | None = None
    ) -> None:
        """Nothing from here on is confirmed before ``resolve``. ``message`` and ``xid`` as in ``add_unit``."""
        self._check_ticket(ticket)
        self._append(Entry(ticket, EntryKind.HOLD, _at(end_lsn), message=message, xid=xid))

    def add_position(self, ticket: int, lsn: Lsn) -> None:
        """``lsn`` may be confirmed once all before it is done."""
        self._check_ticket(ticket)
        if self._entries and self._entries[-1].kind is EntryKind.POSITION:
            last = self._entries.pop()
            del self._by_ticket[last.ticket]
            lsn = max(lsn, last.end_lsn)
        self._append(Entry(ticket, EntryKind.POSITION, _at(lsn), EntryState.DONE))
        self._advance()

    # -- from buffers ----------------------------------------------------------------------------------

    def content_arrived(self, ticket: int, content: Sealed, now_s: float = 0.0) -> None:
        entry = self._entry(ticket)
        entry.move(EntryState.READY)
        entry.content, entry.ready_s = content, now_s
        self._arrived_lsn = max(self._arrived_lsn, entry.end_lsn)
        self._n_arrived += 1
        halt = content.undeliverable
        if halt is None:
            self.waiting_bytes += entry.memory_bytes
        self._settle()
        if halt is None:
            return
        # From here on the entry stands for the transactions before the one that cannot be delivered.
        first_commit_lsn = entry.end.first_commit_lsn
        entry.end = UnitEnd(first_commit_lsn, halt.last_commit_lsn, halt.end_lsn, halt.n_transactions)
        if not halt.n_transactions and not content.messages:
            entry.move(EntryState.STUCK)
            self._advance()

    def take_dropped_keys(self) -> list[str]:
        """The keys of segments of parked tables, which nobody is going to read. They are given once."""
        dropped, self._dropped_keys = self._dropped_keys, []
        return dropped

    def resolve(self, ticket: int) -> None:
        entry = self._entry(ticket)
        if entry.kind is not EntryKind.HOLD:
            raise IllegalTransition(f"{entry!r} is done by the sink alone")
        entry.move(EntryState.DONE)
        self._advance()

    # -- joined where they wait ------------------------------------------------------------------------

    def to_join(self) -> list[Entry]:
        """Neighbouring units that may become one; empty where few wait. They stay where they are until ``joined``."""
        if not self.join_rule.is_due(len(self._entries), self._n_arrived):
            return []
        written = self._writing[-1].ticket if self._writing else -1
        newest = islice(reversed(self._entries), self.join_rule.looked_at)
        entries = [entry for entry in newest if entry.ticket > written][::-1]
        unsettled = self._first_unsettled
        run = self._first_run(entry for entry in entries if entry.ticket < unsettled)
        if not run and self._unsettled and self.parking.may_join(self._unsettled[0].end):
            run = self._first_run(entry for entry in entries if entry.ticket >= unsettled)
        if not run:
            self._n_arrived = 0
        return run

    def joined(self, run: list[Entry], contents: list[Sealed], content: Sealed) -> None:
        """``content`` is that of the whole run, whose ``contents`` it was made of. Nothing is done where the sink or
        the journal has taken a unit of the run meanwhile, or where the turn of some of them has come."""
        first, last = run[0].ticket, run[-1].ticket
        unsettled = self._first_unsettled
        is_as_it_was = all(
            self._by_ticket.get(entry.ticket) is entry
            and entry.state is EntryState.READY
            and entry.content is was
            for entry, was in zip(run, contents, strict=True)
        )
        is_written = bool(self._writing) and first <= self._writing[-1].ticket
        if not is_as_it_was or is_written or first < unsettled <= last:
            return
        joined = joined_entry(run, content)
        self.waiting_bytes += joined.memory_bytes - sum(entry.memory_bytes for entry in run)
        for entry in _put_in_place(self._entries, joined, first):
            del self._by_ticket[entry.ticket]
        self._by_ticket[last] = joined
        if first >= unsettled:
            _put_in_place(self._unsettled, joined, first)

    # -- to and from the sink --------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """The next units that are ready, consecutive and in commit order; None if the next one is not ready."""
        entries: list[Entry] = []
        n_rows = n_bytes = 0
        for entry in self._releasable():
            content = entry.content
            assert content is not None
            too_much = (
                n_rows + content.n_rows > self._batch_rows or n_bytes + content.n_bytes > self._batch_bytes
            )
            if entries and too_much:
                break
            entries.append(entry)
            n_rows += content.n_rows
            n_bytes += content.n_bytes
        if not entries:
            return None
        number = self._next_batch
        self._next_batch += 1
        for entry in entries:
            entry.move(EntryState.TAKEN)
            entry.batch_number = number
        self._taken[number] = entries
        return _batch(number, entries, n_rows, n_bytes, self.parking)

    def is_pressing(self, pace: Pace, now_us: int) -> bool:
        """Whether the next batch is none that ``pace`` leaves to grow, or is full. ``now_us``: microseconds since
        1970."""
        n_rows = n_bytes = 0
        is_first = True
        for entry in self._releasable():
            content = entry.content
            assert content is not None
            if is_first and content.transactions.num_rows:
                is_first = False
                committed_us = content.transactions.column("commit_timestamp").cast(pa.int64())[0].as_py()
                if now_us - committed_us > pace.behind_s * 1e6:
                    return True
            n_rows += content.n_rows
            n_bytes += content.n_bytes
            if content.segments or n_rows >= pace.large_rows:
                return True
            if n_rows >= self._batch_rows or n_bytes >= self._batch_bytes:
                return True
        return False

    def batch_done(self, number: int) -> list[Sealed]:
        """The sink holds the batch. Returns its content; what the journal names of it is still needed."""
        if number not in self._taken:
            raise IllegalTransition(f"batch {number} was reported done; taken are {sorted(self._taken)}")
        entries = self._taken.pop(number)
        contents = []
        for entry in entries:
            assert entry.content is not None
            contents.append(entry.content)
            if entry.is_stuck_behind:
                entry.move(EntryState.STUCK)
            else:
                entry.move(EntryState.DONE)
                if entry.ticket in self._by_ticket:
                    self.waiting_bytes -= entry.memory_bytes
                entry.content = None
        self._advance()
        return contents

    def put_back(self) -> None:
        """The driver that took batches and did not report them done is lost: they are released again, in other cuts."""
        for entries in self._taken.values():
            for entry in entries:
                entry.move(EntryState.READY)
                entry.batch_number = None
        self._taken.clear()

    # -- to and from the journal -----------------------------------------------------------------------

    @property
    def oldest_ready_s(self) -> float | None:
        """Since when the first unit has been ready that the journal could take; None if there is none."""
        head = self._entries[0] if self._entries else None
        return head.ready_s if head is not None and _may_be_written(head) else None

    @property
    def unconfirmed_wal_bytes(self) -> int:
        """The bytes of WAL from what is confirmed to the last unit that has its content."""
        return max(0, self._arrived_lsn - self._confirmed_lsn)

    def to_write(self, file_bytes: int, file_units: int) -> list[Entry]:
        """The units that the next file takes: those at the head that are ready or taken, of about ``file_bytes`` in
        memory. They stay where they are until ``written``."""
        entries: list[Entry] = []
        n_bytes = 0
        for entry in self._entries:
            if entry.state is EntryState.DONE:
                continue
            if not _may_be_written(entry) or n_bytes >= file_bytes or len(entries) >= file_units:
                break
            entries.append(entry)
            n_bytes += entry.memory_bytes
        self._writing = entries
        return entries

    def written(self, file: JournalFile, entries: list[Entry], absorbed: Sequence[JournalFile] = ()) -> bool:
        """``file`` is durable, with ``entries`` after what ``absorbed`` had. Entries that the sink has taken by now
        stay with the sink. Returns False and changes nothing if the sink has taken something of ``absorbed``: then the
        file is useless, and ``entries`` are to be written again."""
        self._writing = []
        if all(entry.state is EntryState.DONE for entry in entries):
            self.journal.drop(file)
            return True
        if not self.journal.still_last(absorbed):
            return False
        if not self.journal:
            self.journal.reach(self._confirmed_lsn)
        # Those of them that are done have left the queue already. What lies between them is done.
        while self._entries and self._entries[0].ticket <= entries[-1].ticket:
            entry = self._entries[0]
            if entry.content is not None:
                self.waiting_bytes -= entry.memory_bytes
            self._pop_head()
        self.journal.append(file, entries, absorbed)
        self._advance()
        return True

    def not_written(self) -> None:
        """The entries that ``to_write`` gave are in no file."""
        self._writing = []

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def confirmed_lsn(self) -> Lsn:
        return max(self._confirmed_lsn, self.delivered_lsn)

    @property
    def delivered_lsn(self) -> Lsn:
        """The sink holds everything up to here."""
        return (
            self.journal.delivered_lsn
            if self.journal
            else max(self._confirmed_lsn, self.journal.delivered_lsn)
        )

    @property
    def free_ticket(self) -> int:
        """No buffer's memory is needed for anything up to this ticket."""
        needed = [entry.ticket for entry in self._writing[:1]]
        if (first := self.journal.first_ticket_in_memory) is not None:
            needed.append(first)
        return min([self.done_ticket, *(ticket - 1 for ticket in needed)])

    @property
    def undeliverable(self) -> XidstreamError | None:
        """Why nothing more will be released; None as long as there may be something to release or to confirm."""
        return self.journal.error if self.journal else self._stuck_head

    @property
    def unwritable(self) -> XidstreamError | None:
        """Why nothing more can be written to the journal, in a run that has no sink."""
        head = self._entries[0] if self._entries else None
        if head is None or not head.is_stuck_behind:
            return None
        assert head.content is not None and head.content.undeliverable is not None
        return head.content.undeliverable.error

    @property
    def n_waiting(self) -> int:
        return len(self._entries) + self.journal.n_units

    @property
    def head(self) -> Head | None:
        """The first entry that is not done; None if all are."""
        if self.journal:
            return self.journal.head
        return next((head_of(entry) for entry in self._entries if entry.state is not EntryState.DONE), None)

    def holds_before(self, ticket: int) -> bool:
        """Whether a hold that came before ``ticket`` is not resolved yet."""
        return any(
            e.kind is EntryKind.HOLD and e.state is EntryState.WAITING
            for e in self._entries
            if e.ticket < ticket
        )

    @property
    def _stuck_head(self) -> XidstreamError | None:
        head = self._entries[0] if self._entries else None
        return self.unwritable if head is not None and head.state is EntryState.STUCK else None

    def _releasable(self) -> Iterator[Entry]:
        for entry in chain(self.journal.entries(), self._entries):
            if entry.kind is EntryKind.UNIT and entry.state not in (EntryState.TAKEN, EntryState.DONE):
                if entry.state is not EntryState.READY:
                    return
                yield entry
            if entry.is_stuck_behind:
                return

    @property
    def _first_unsettled(self) -> int:
        """The ticket of the first unit whose turn has not come."""
        return self._unsettled[0].ticket if self._unsettled else self.next_ticket

    def _first_run(self, entries: Iterable[Entry]) -> list[Entry]:
        return first_run(entries, self.join_rule, self._batch_rows, self._batch_bytes)

    def _check_ticket(self, ticket: int) -> None:
        if ticket != self.next_ticket:
            raise IllegalTransition(f"entry {ticket} arrived where {self.next_ticket} was due")

    def _append(self, entry: Entry) -> None:
        self.next_ticket += 1
        self._entries.append(entry)
        self._by_ticket[entry.ticket] = entry

    def _entry(self, ticket: int) -> Entry:
        entry = self._by_ticket.get(ticket)
        if entry is None:
            raise IllegalTransition(f"entry {ticket} is unknown or already done")
        return entry

    def _settle(self) -> None:
        while self._unsettled and (content := self._unsettled[0].content) is not None:
            entry = self._unsettled.popleft()
            settled = self.parking.settle(content, entry.end)
            if settled.content is content:
                continue
            if not entry.is_stuck_behind:
                self.waiting_bytes -= content.memory_bytes - settled.content.memory_bytes
            entry.content, entry.parked_rows = settled.content, settled.parked_rows
            self._dropped_keys += settled.keys

    def _pop_head(self) -> None:
        entry = self._entries.popleft()
        self.parking.count(entry.parked_rows)
        del self._by_ticket[entry.ticket]
        self.done_ticket = entry.ticket
        self._confirmed_lsn = max(self._confirmed_lsn, entry.end_lsn)

    def _advance(self) -> None:
        self.journal.advance()
        while self._entries and self._entries[0].state is EntryState.DONE:
            self._pop_head()
        if self._entries and self._entries[0].state is EntryState.STUCK:
            stuck = self._entries[0]
            parked_rows, stuck.parked_rows = stuck.parked_rows, ()
            self.parking.count(parked_rows)
            self._confirmed_lsn = max(self._confirmed_lsn, stuck.end_lsn)


def _put_in_place(entries: deque[Entry], joined: Entry, first_ticket: int) -> list[Entry]:
    """Put ``joined`` in place of all from ``first_ticket`` to its own, which are near the end. Returns these."""
    popped: list[Entry] = []
    while entries and entries[-1].ticket >= first_ticket:
        popped.append(entries.pop())
    entries.append(joined)
    entries.extend(entry for entry in reversed(popped) if entry.ticket > joined.ticket)
    return [entry for entry in popped if entry.ticket <= joined.ticket]


def _may_be_written(entry: Entry) -> bool:
    is_ready = entry.kind is EntryKind.UNIT and entry.state in (EntryState.READY, EntryState.TAKEN)
    return is_ready and not entry.is_stuck_behind


def _at(lsn: Lsn) -> UnitEnd:
    return UnitEnd(INVALID_LSN, INVALID_LSN, lsn, 0)


def _batch(number: int, entries: list[Entry], n_rows: int, n_bytes: int, parking: Parking) -> Batch:
    commits = [e.end for e in entries if e.last_commit_lsn]
    return Batch(
        number=number,
        units=tuple(e.content for e in entries if e.content is not None),
        first_commit_lsn=commits[0].first_commit_lsn if commits else INVALID_LSN,
        last_commit_lsn=commits[-1].last_commit_lsn if commits else INVALID_LSN,
        end_lsn=max(e.end_lsn for e in entries),
        n_transactions=sum(e.end.n_transactions for e in entries),
        n_rows=n_rows,
        n_bytes=n_bytes,
        parked=parking.parked_up_to(commits[-1].last_commit_lsn) if commits else (),
    )
