"""Which buffer holds which transaction, how many buffers there should be, and which may go.

A buffer is an actor. It has two states. It is *asked for* until its process is up: that takes a second if there is
room for it, and minutes if the cluster has to add a node. Then it is *placed*. There should be one buffer for each open
transaction, but at least ``minimum`` (the floor, which keeps latency low) and at most ``maximum`` (the cap, which
limits cost).

Nobody waits for a buffer that is not placed. A new transaction gets a placed buffer without open transactions. If there
is none, it shares the buffer that has the fewest. When a buffer comes up or becomes free, it takes over a transaction
from one that has several (``moves``). It takes the youngest, which has the fewest rows to carry over and the most still
to come. So a transaction moves only out of a shared buffer into one of its own, and nothing moves back and forth.

Rejected: to let a new transaction wait for its own buffer, within bounded credit. Streaming reaches that bound in a
fraction of a second, and a node takes minutes. So the transaction would share in the end, after everyone had stalled,
and the commits of waiting transactions would need rules of their own. Also rejected: to share without moving. Then the
transactions that made the cluster grow would have no use of the new nodes.

A buffer beyond the floor is given back after ``idle_after_s`` without a transaction. So is one that was asked for in
vain, and is not wanted any more. Buffers of the floor stay, because they are near the reader. Small transactions go to
them first, so that the others can become idle however many small ones come.

The rows of a transaction that has ended stay in its buffer until the sink holds them, and so do blocks of small
transactions. Tickets of the commit order say until when: the shell gives the ticket of each end and of each plain
block, and later the ticket that is done.

Numbers stand for buffers, and the shell maps them to actors. Numbers below ``minimum`` are the floor. A transaction is
its record in the reader's ledger, and the number of its buffer stands there. After its end only a count remains here.

An example with a floor of 1 and a cap of 3. Transactions 1, 2 and 3 come while only buffer 0 is placed, and share it;
buffers 1 and 2 are asked for. Buffer 1 comes up and takes over 3, the youngest. 1 commits with ticket 7: buffer 0 holds
2 and the rows of 1. Buffer 2 comes up, but nobody shares any more, so nothing moves. At ``done(7)`` the rows of 1 leave
buffer 0. Buffer 2 has had nothing for ``idle_after_s``, and is given back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.stream.ledger import TransactionRecord


class PoolFull(UsageError):
    """No buffer may be started and none exists: the settings allow no work."""


@dataclass(frozen=True)
class Move:
    """An order to the shell: ``source`` gives the transaction up, ``target`` adopts it."""

    record: TransactionRecord
    source: int
    target: int


@dataclass
class _Buffer:
    idle_since_s: float
    """Since when it has held nothing, or since it was asked for."""
    placed: bool = False
    """Whether its process is up."""
    plain_ticket: int = -1
    """The ticket of its last plain block."""
    open: dict[TransactionRecord, None] = field(default_factory=dict)
    """Its open transactions, in the order of arrival."""
    n_held: int = 0
    """How many transactions it holds rows of: those that are open, and those that ended and are not in the sink."""


@dataclass
class BufferPoolPolicy:
    minimum: int
    """The floor: so many buffers are always there."""
    maximum: int
    """The cap: there are never more."""
    idle_after_s: float
    """After so long without a transaction a buffer beyond the floor is given back."""
    _buffers: dict[int, _Buffer] = field(default_factory=dict)
    """The buffers that were asked for and not given back, by number."""
    _ended: deque[tuple[int, int]] = field(default_factory=deque)
    """The ticket and the buffer of each committed or prepared transaction that the sink does not have, in the order of
    the tickets."""
    _rolled_back: list[int] = field(default_factory=list)
    """The buffer of each transaction that was rolled back since the last ``done``."""
    _done_ticket: int = -1
    """The sink holds everything up to this ticket."""
    _n_open: int = 0
    """How many transactions are open."""
    _next_number: int = 0
    """The number of the next buffer: none is used twice."""
    _turn: int = 0
    """Counts plain blocks, which go round the free buffers."""

    @property
    def n_placed(self) -> int:
        return sum(b.placed for b in self._buffers.values())

    @property
    def n_needed(self) -> int:
        """How many there should be, were there no cap."""
        return max(self.minimum, self._n_open)

    def allow(self, maximum: int) -> None:
        """Set another cap. Buffers that are above it already stay until they are idle."""
        self.maximum = max(maximum, self.minimum)

    def ask(self, now_s: float) -> list[int]:
        """The numbers of the buffers to start now. They count as asked for from here on."""
        wanted = min(self.n_needed, self.maximum)
        return [self._start(now_s) for _ in range(wanted - len(self._buffers))]

    def placed(self, number: int, now_s: float) -> None:
        """The process of this buffer is up. A number that is unknown here was given back in the meantime."""
        buffer = self._buffers.get(number)
        if buffer is not None:
            buffer.placed, buffer.idle_since_s = True, now_s

    def assign(self, record: TransactionRecord) -> int:
        """The buffer of a transaction, which may be new: always a placed one. Raises PoolFull if there is none."""
        if record.buffer is not None:
            return record.buffer
        candidates = [(len(b.open), b.n_held, n) for n, b in self._buffers.items() if b.placed]
        if not candidates:
            raise PoolFull("no buffer was started")
        number = min(candidates)[2]
        self._give_to(record, number)
        self._n_open += 1
        return number

    def moves(self) -> list[Move]:
        """The transactions that get a buffer of their own now. The policy counts them there from here on."""
        orders = []
        free = [n for n, b in self._buffers.items() if b.placed and not b.open]
        for target in free:
            source = max(self._buffers, key=lambda n: len(self._buffers[n].open))
            crowd = self._buffers[source].open
            if len(crowd) < 2:
                break
            record = next(reversed(crowd))
            del crowd[record]
            self._buffers[source].n_held -= 1
            self._give_to(record, target)
            orders.append(Move(record, source, target))
        return orders

    def end(self, record: TransactionRecord, ticket: int) -> None:
        """The transaction was committed or prepared with this ``ticket``, or rolled back (-1). Its buffer may take
        another one, but keeps the rows until the ticket is ``done``."""
        number = record.buffer
        assert number is not None, f"transaction {int(record.xid)} has no buffer"
        del self._buffers[number].open[record]
        self._n_open -= 1
        record.ticket = ticket
        if ticket < 0:
            self._rolled_back.append(number)
        else:
            self._ended.append((ticket, number))

    def for_plain_block(self, ticket: int) -> int:
        """A buffer for a block of small transactions: a free one of the floor, else the first free one."""
        placed = [n for n, b in self._buffers.items() if b.placed]
        if not placed:
            raise PoolFull("no buffer was started")
        free = [n for n in placed if not self._buffers[n].open]
        of_floor = [n for n in free if n < self.minimum]
        candidates = of_floor or free[:1] or placed
        self._turn += 1
        number = candidates[self._turn % len(candidates)]
        self._buffers[number].plain_ticket = ticket
        return number

    def done(self, ticket: int, now_s: float) -> None:
        """The sink holds everything up to ``ticket``. Transactions that ended by then leave their buffers."""
        self._done_ticket = ticket
        gone, self._rolled_back = self._rolled_back, []
        while self._ended and self._ended[0][0] <= ticket:
            gone.append(self._ended.popleft()[1])
        for number in gone:
            buffer = self._buffers[number]
            buffer.n_held -= 1
            if not buffer.n_held:
                buffer.idle_since_s = now_s

    def remove_idle(self, now_s: float) -> list[int]:
        """The numbers of the buffers to end now: the sink holds all of their rows. They are forgotten here."""
        wanted = self._wanted(now_s)
        gone = [
            n
            for n, b in self._buffers.items()
            if n >= self.minimum
            and n not in wanted
            and not b.n_held
            and b.plain_ticket <= self._done_ticket
            and now_s - b.idle_since_s >= self.idle_after_s
        ]
        for number in gone:
            del self._buffers[number]
        return gone

    def _wanted(self, now_s: float) -> set[int]:
        """The buffers that are asked for and still wanted, because open transactions share: the first ones."""
        pending = [n for n, b in self._buffers.items() if not b.placed]
        wanted = pending[: max(self.n_needed - self.n_placed, 0)]
        for number in wanted:
            self._buffers[number].idle_since_s = now_s
        return set(wanted)

    def _give_to(self, record: TransactionRecord, number: int) -> None:
        record.buffer = number
        self._buffers[number].open[record] = None
        self._buffers[number].n_held += 1

    def _start(self, now_s: float) -> int:
        number = self._next_number
        self._next_number += 1
        self._buffers[number] = _Buffer(now_s)
        return number
