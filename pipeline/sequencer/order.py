"""The order of commits, and the position behind which everything is done.

One queue of entries in the order the server sent them. An entry is a *unit* (a transaction, or a plain block
of many), which must be filled by its buffer, taken by the sink and reported done; a *hold*, which must be
resolved (a PREPARE whose content must be durable first); or a *position* (a keepalive), which is done by
itself. Buffers finish in any order; only the head of the queue is released, so the order of release is the
order of commit.

    unit:      WAITING -> READY -> TAKEN -> DONE
    hold:      WAITING -> DONE
    position:  DONE

If a unit has a transaction that cannot be delivered, it becomes STUCK instead of DONE, as soon as the transactions
before that one are done. Nothing behind it is ever released. When it is the head of the queue, all that committed
before it is done, and ``undeliverable`` is its error.

``confirmed_lsn`` is the greatest position of the contiguous DONE prefix. It never goes back and never passes
an entry that is not done, in whatever order the sink reports. An illegal step raises IllegalTransition, with
the entry's story, and changes nothing.

``stages.commit_sequence`` calls this from one thread. The reader numbers the entries with *tickets*, from 0, in the
order of the stream. A gap in them is a lost message, and raises an error. Rejected: a heap ordered by commit LSN,
because it would hide a lost or repeated entry.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from xidstream.pipeline.errors import IllegalTransition, XidstreamError
from xidstream.pipeline.exchange import Batch, Sealed
from xidstream.pipeline.pg import INVALID_LSN, Lsn


class EntryState(enum.Enum):
    WAITING = "waiting"
    READY = "ready"
    TAKEN = "taken"
    DONE = "done"
    STUCK = "stuck"


class Kind(enum.Enum):
    UNIT = "unit"
    HOLD = "hold"
    POSITION = "position"


_LEGAL: dict[tuple[Kind, EntryState], frozenset[EntryState]] = {
    (Kind.UNIT, EntryState.WAITING): frozenset({EntryState.READY}),
    (Kind.UNIT, EntryState.READY): frozenset({EntryState.TAKEN, EntryState.STUCK}),
    (Kind.UNIT, EntryState.TAKEN): frozenset({EntryState.DONE, EntryState.STUCK}),
    (Kind.HOLD, EntryState.WAITING): frozenset({EntryState.DONE}),
}


@dataclass
class _Entry:
    ticket: int
    kind: Kind
    first_commit_lsn: Lsn
    last_commit_lsn: Lsn
    end_lsn: Lsn
    n_transactions: int
    state: EntryState = EntryState.WAITING
    content: Sealed | None = None
    batch_number: int | None = None

    def __repr__(self) -> str:
        return (
            f"<{self.kind.value} {self.ticket}: {self.state.value}, commits {self.first_commit_lsn} to "
            f"{self.last_commit_lsn}, end {self.end_lsn}, batch {self.batch_number}>"
        )

    def move(self, state: EntryState) -> None:
        if state not in _LEGAL.get((self.kind, self.state), frozenset()):
            raise IllegalTransition(f"{self!r} cannot become {state.value}")
        self.state = state


class CommitOrder:
    """``batch_rows`` and ``batch_bytes`` bound a batch. A unit that is larger is a batch of its own."""

    def __init__(self, *, batch_rows: int, batch_bytes: int) -> None:
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._entries: deque[_Entry] = deque()
        self._by_ticket: dict[int, _Entry] = {}
        self.next_ticket = 0
        self._last_commit_lsn = INVALID_LSN
        self._next_batch = 0
        self._taken: dict[int, list[_Entry]] = {}
        self.confirmed_lsn = INVALID_LSN
        self.done_ticket = -1
        """Every entry up to this one is done."""

    # -- from the reader -------------------------------------------------------------------------------

    def add_unit(
        self, ticket: int, first_commit_lsn: Lsn, last_commit_lsn: Lsn, end_lsn: Lsn, n_transactions: int
    ) -> None:
        """A unit takes its place. If its LSNs are 0, it holds messages and no transaction, and confirms nothing."""
        self._check_ticket(ticket)
        if first_commit_lsn:
            if not self._last_commit_lsn < first_commit_lsn <= last_commit_lsn:
                raise IllegalTransition(
                    f"commit {first_commit_lsn} (to {last_commit_lsn}) was sent after {self._last_commit_lsn}"
                )
            self._last_commit_lsn = last_commit_lsn
        self._append(_Entry(ticket, Kind.UNIT, first_commit_lsn, last_commit_lsn, end_lsn, n_transactions))

    def add_hold(self, ticket: int, end_lsn: Lsn) -> None:
        """Nothing from here on is confirmed before ``resolve``."""
        self._check_ticket(ticket)
        self._append(_Entry(ticket, Kind.HOLD, INVALID_LSN, INVALID_LSN, end_lsn, 0))

    def add_position(self, ticket: int, lsn: Lsn) -> None:
        """``lsn`` may be confirmed once all before it is done."""
        self._check_ticket(ticket)
        entry = _Entry(ticket, Kind.POSITION, INVALID_LSN, INVALID_LSN, lsn, 0, EntryState.DONE)
        self._append(entry)
        self._advance()

    # -- from buffers ----------------------------------------------------------------------------------

    def fill(self, ticket: int, content: Sealed) -> None:
        entry = self._entry(ticket)
        entry.move(EntryState.READY)
        entry.content = content
        halt = content.undeliverable
        if halt is None:
            return
        # From here on the entry stands for the transactions before the one that cannot be delivered.
        entry.last_commit_lsn, entry.end_lsn = halt.last_commit_lsn, halt.end_lsn
        entry.n_transactions = halt.n_transactions
        if not halt.n_transactions and not content.messages:
            entry.move(EntryState.STUCK)
            self._advance()

    def resolve(self, ticket: int) -> None:
        entry = self._entry(ticket)
        if entry.kind is not Kind.HOLD:
            raise IllegalTransition(f"{entry!r} is done by the sink alone")
        entry.move(EntryState.DONE)
        self._advance()

    # -- to and from the sink --------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        """The next units that are ready, consecutive and in commit order; None if the next one is not ready."""
        entries: list[_Entry] = []
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
        return self._batch(number, entries, n_rows, n_bytes)

    def batch_done(self, number: int) -> list[Sealed]:
        """The sink holds the batch. Returns its content: its segments are not needed any more."""
        if number not in self._taken:
            raise IllegalTransition(f"batch {number} was reported done; taken are {sorted(self._taken)}")
        entries = self._taken.pop(number)
        contents = []
        for entry in entries:
            assert entry.content is not None
            contents.append(entry.content)
            if entry.content.undeliverable is not None:
                entry.move(EntryState.STUCK)
            else:
                entry.move(EntryState.DONE)
                entry.content = None
        self._advance()
        return contents

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def undeliverable(self) -> XidstreamError | None:
        """Why nothing more will be released; None as long as there may be something to release or to confirm."""
        head = self._entries[0] if self._entries else None
        if head is None or head.state is not EntryState.STUCK:
            return None
        assert head.content is not None and head.content.undeliverable is not None
        return head.content.undeliverable.error

    @property
    def n_waiting(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> tuple[int, Kind, EntryState, Lsn] | None:
        """The first entry that is not done: its ticket, kind, state and last commit LSN; None if all are."""
        if not self._entries:
            return None
        entry = self._entries[0]
        return entry.ticket, entry.kind, entry.state, entry.last_commit_lsn

    def holds_before(self, ticket: int) -> bool:
        """Whether a hold that came before ``ticket`` is not resolved yet."""
        return any(
            e.kind is Kind.HOLD and e.state is EntryState.WAITING for e in self._entries if e.ticket < ticket
        )

    def _releasable(self) -> list[_Entry]:
        ready = []
        for entry in self._entries:
            if entry.kind is Kind.UNIT and entry.state not in (EntryState.TAKEN, EntryState.DONE):
                if entry.state is not EntryState.READY:
                    break
                ready.append(entry)
            if entry.content is not None and entry.content.undeliverable is not None:
                break
        return ready

    def _batch(self, number: int, entries: list[_Entry], n_rows: int, n_bytes: int) -> Batch:
        commits = [e for e in entries if e.last_commit_lsn]
        return Batch(
            number=number,
            units=tuple(e.content for e in entries if e.content is not None),
            first_commit_lsn=commits[0].first_commit_lsn if commits else INVALID_LSN,
            last_commit_lsn=commits[-1].last_commit_lsn if commits else INVALID_LSN,
            end_lsn=max(e.end_lsn for e in entries),
            n_transactions=sum(e.n_transactions for e in entries),
            n_rows=n_rows,
            n_bytes=n_bytes,
        )

    def _check_ticket(self, ticket: int) -> None:
        if ticket != self.next_ticket:
            raise IllegalTransition(f"entry {ticket} arrived where {self.next_ticket} was due")

    def _append(self, entry: _Entry) -> None:
        self.next_ticket += 1
        self._entries.append(entry)
        self._by_ticket[entry.ticket] = entry

    def _entry(self, ticket: int) -> _Entry:
        entry = self._by_ticket.get(ticket)
        if entry is None:
            raise IllegalTransition(f"entry {ticket} is unknown or already done")
        return entry

    def _advance(self) -> None:
        while self._entries and self._entries[0].state is EntryState.DONE:
            entry = self._entries.popleft()
            del self._by_ticket[entry.ticket]
            self.done_ticket = entry.ticket
            self.confirmed_lsn = max(self.confirmed_lsn, entry.end_lsn)
        if self._entries and self._entries[0].state is EntryState.STUCK:
            self.confirmed_lsn = max(self.confirmed_lsn, self._entries[0].end_lsn)
