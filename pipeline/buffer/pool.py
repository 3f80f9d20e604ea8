"""Which buffer holds which transaction, how many buffers there should be, and which may go.

A buffer is an actor. It has two states: asked for, until its process is up (a second where there is room for it,
minutes where the cluster has to add a node), and placed. As many are wanted as transactions are open, not below
``minimum`` (the floor, which keeps latency) nor above ``maximum`` (the cap, which keeps cost).

Nobody waits for a buffer that is not placed. A new transaction gets a placed buffer without open transactions, and
where there is none it shares the one with the fewest; when a buffer comes up, or gets free, it takes over a
transaction from one that has several (``moves``): the youngest, which has the least to carry and the most to come.
A transaction therefore moves only from company into a buffer of its own, and nothing moves to and fro.

Considered and rejected: letting a new transaction wait for its own buffer within bounded credit. The bound is
reached in a fraction of a second of streaming and a node takes minutes, so it would share in the end, after a stall
of everyone; and commits of waiting transactions would have to be special. Sharing without moving was rejected, too:
what made the cluster grow would have no use of it.

A buffer beyond the floor that has been without a transaction, or asked for in vain and not wanted any more, for
``idle_after_s`` is given back. Those of the floor stay, because they are the ones near the reader, and small
transactions go to them first, so that the others can get idle however many small ones come.

Numbers stand for buffers; the shell maps them to actors. Those below ``minimum`` are the floor.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Xid


class PoolFull(UsageError):
    """No buffer may be started and none exists: the settings allow no work."""


@dataclass(frozen=True)
class Move:
    """An order to the shell: ``source`` gives the transaction up, ``target`` adopts it."""

    xid: Xid
    source: int
    target: int


@dataclass
class _Buffer:
    """``open`` in the order of arrival; ``held`` has also those that ended and are not in the sink yet."""

    idle_since_s: float
    placed: bool = False
    open: dict[Xid, None] = field(default_factory=dict)
    held: set[Xid] = field(default_factory=set)


@dataclass
class BufferPoolPolicy:
    minimum: int
    maximum: int
    idle_after_s: float
    _buffers: dict[int, _Buffer] = field(default_factory=dict)
    _owner: dict[Xid, int] = field(default_factory=dict)
    _n_open: int = 0
    _next_number: int = 0
    _turn: int = 0

    @property
    def buffers(self) -> tuple[int, ...]:
        """Placed and asked for."""
        return tuple(self._buffers)

    @property
    def n_placed(self) -> int:
        return sum(b.placed for b in self._buffers.values())

    @property
    def n_needed(self) -> int:
        """How many there should be, were there no cap."""
        return max(self.minimum, self._n_open)

    def allow(self, maximum: int) -> None:
        """Another cap. What is there already above it stays until it is idle."""
        self.maximum = max(maximum, self.minimum)

    def ask(self, now_s: float) -> list[int]:
        """Numbers of buffers to start now: they are asked for from here on."""
        wanted = min(self.n_needed, self.maximum)
        return [self._start(now_s) for _ in range(wanted - len(self._buffers))]

    def placed(self, number: int, now_s: float) -> None:
        """Its process is up. Unknown numbers were given back meanwhile."""
        buffer = self._buffers.get(number)
        if buffer is not None:
            buffer.placed, buffer.idle_since_s = True, now_s

    def assign(self, xid: Xid, now_s: float) -> int:
        """The buffer of a transaction, a new one's too: always one that is placed. Raises PoolFull if none is."""
        if xid in self._owner:
            return self._owner[xid]
        candidates = [(len(b.open), len(b.held), n) for n, b in self._buffers.items() if b.placed]
        if not candidates:
            raise PoolFull("no buffer was started")
        number = min(candidates)[2]
        self._give(xid, number)
        self._n_open += 1
        return number

    def moves(self) -> list[Move]:
        """Transactions that get a buffer of their own now; the policy counts them there from here on."""
        orders = []
        free = [n for n, b in self._buffers.items() if b.placed and not b.open]
        for target in free:
            source = max(self._buffers, key=lambda n: len(self._buffers[n].open))
            crowd = self._buffers[source].open
            if len(crowd) < 2:
                break
            xid = next(reversed(crowd))
            del crowd[xid]
            self._buffers[source].held.discard(xid)
            self._give(xid, target)
            orders.append(Move(xid, source, target))
        return orders

    def owner(self, xid: Xid) -> int | None:
        return self._owner.get(xid)

    def end(self, xid: Xid) -> None:
        """It committed, was prepared or rolled back; its buffer owns its rows until ``release``."""
        number = self._owner[xid]
        if xid in self._buffers[number].open:
            del self._buffers[number].open[xid]
            self._n_open -= 1

    def release(self, xid: Xid, now_s: float) -> None:
        """The transaction has left its buffer."""
        number = self._owner.get(xid)
        if number is None:
            return
        self.end(xid)
        del self._owner[xid]
        buffer = self._buffers[number]
        buffer.held.discard(xid)
        if not buffer.held:
            buffer.idle_since_s = now_s

    def for_plain_block(self) -> int:
        """A buffer for a block of small transactions: of the floor if one is free, else the first that is."""
        placed = [n for n, b in self._buffers.items() if b.placed]
        if not placed:
            raise PoolFull("no buffer was started")
        free = [n for n in placed if not self._buffers[n].open]
        of_floor = [n for n in free if n < self.minimum]
        candidates = of_floor or free[:1] or placed
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def take_idle(self, now_s: float, busy: Container[int] = ()) -> list[int]:
        """Numbers of buffers to give back now; they are forgotten here. ``busy`` have rows that no one else has."""
        wanted = self._wanted(now_s)
        gone = [
            n
            for n, b in self._buffers.items()
            if n >= self.minimum
            and n not in wanted
            and not b.held
            and now_s - b.idle_since_s >= self.idle_after_s
            and n not in busy
        ]
        for number in gone:
            del self._buffers[number]
        return gone

    def _wanted(self, now_s: float) -> set[int]:
        """Of those asked for, the first ones are still wanted where open transactions share."""
        pending = [n for n, b in self._buffers.items() if not b.placed]
        wanted = pending[: max(self.n_needed - self.n_placed, 0)]
        for number in wanted:
            self._buffers[number].idle_since_s = now_s
        return set(wanted)

    def _give(self, xid: Xid, number: int) -> None:
        self._owner[xid] = number
        self._buffers[number].open[xid] = None
        self._buffers[number].held.add(xid)

    def _start(self, now_s: float) -> int:
        number = self._next_number
        self._next_number += 1
        self._buffers[number] = _Buffer(now_s)
        return number
