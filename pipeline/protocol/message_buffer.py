"""CopyData messages one behind the other in one array, as Python and a compiled loop both append them.

``feed`` in ``pipeline.stream`` appends what needs a look; ``CopyLoop`` in ``pipeline.slot`` appends the messages that
need none, straight from libpq, as long as ``TRANSITIONS`` says so: rows, and the BEGIN and COMMIT of small
transactions. Neither package imports the other, so what they share is here: the arrays, the sums, and the table.

Invariants: the first ``n_messages`` of ``lengths`` sum up to ``n_bytes``, and the first ``n_bytes`` of ``payload`` are
those messages, each with its 25-byte XLogData header. What is ``whole`` ends behind a COMMIT, or a message between
transactions. An appender that finds no room changes nothing; ``append`` alone makes room.

Arrays come from ``Spares``, and whoever has copied what ``take`` gave away may give them back there.

Rejected: a list of bytes, joined when a block is cut, which is a Python object and a second copy for each row.
"""

from __future__ import annotations

import enum
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.protocol.spares import Spares

HEADER_BYTES: Final = 25
"""Of XLogData: 'w', Int64 start, Int64 end, Int64 send time."""

OUTSIDE: Final = 0
"""Between transactions, or in one that is read message by message."""
IN_PLAIN: Final = 1
"""Between BEGIN and COMMIT of a transaction that is gathered with its neighbours."""
IN_ROWS: Final = 2
"""In a stream block, or in a transaction that is gathered by itself."""
LOOK: Final = 255
"""The message must be looked at: it is not for a compiled loop."""


def _transitions() -> npt.NDArray[np.uint8]:
    table = np.full((3, 256), LOOK, np.uint8)
    table[OUTSIDE, ord("B")] = IN_PLAIN
    table[IN_PLAIN, list(b"IUD")] = IN_PLAIN
    table[IN_PLAIN, ord("C")] = OUTSIDE
    table[IN_ROWS, list(b"IUD")] = IN_ROWS
    table.flags.writeable = False
    return table


TRANSITIONS: Final = _transitions()
"""``uint8[3, 256]``: the mode that a message type leads to, by mode and type; ``LOOK`` for all others."""

# The places in ``sums``.
MODE: Final = 0
N_BYTES: Final = 1
N_MESSAGES: Final = 2
WHOLE_BYTES: Final = 3
WHOLE_MESSAGES: Final = 4
N_TRANSACTIONS: Final = 5
LAST_COMMIT_AT: Final = 6
LAST_COMMIT_BYTES: Final = 7
_N_SUMS: Final = 8

_Item = TypeVar("_Item", np.uint8, np.int32)

_FIRST_BYTES: Final = 128 << 10
"""From this size on the C library maps memory by itself (``actors.runtime.allocator``). What is never touched then
takes no memory. What is given away leaves no hole in the heap, however many transactions are open."""
_FIRST_MESSAGES: Final = 1024
_FAST_GROWTH_BYTES: Final = 512 << 10
_MOST_NEXT_BYTES: Final = 256 << 20
"""What comes behind a giant row gets no room for another: it would not be looked at, and a giant is a block alone."""
_NO_PAYLOAD: Final = np.empty(0, np.uint8)
_NO_LENGTHS: Final = np.empty(0, np.int32)


class Outcome(enum.IntEnum):
    """Why a compiled loop gave control back."""

    DRAINED = 0
    """The server has sent no more."""
    FULL = 1
    """``limit_bytes`` are reached."""
    MESSAGE = 2
    """One came that is not for the loop, or has no room."""
    ENDED = 3
    """The server ended COPY."""
    FAILED = 4
    """The connection failed; libpq has the message."""


class MessageBuffer:
    """``payload: uint8[capacity]``, ``lengths: int32[capacity]``, ``sums: int64[8]`` (places above): all writable.

    Without a message it has no arrays before ``make_room``: what was given away last is often back by then."""

    __slots__ = (
        "_lengths",
        "_next_bytes",
        "_next_messages",
        "_payload",
        "_spares",
        "_sums",
        "lengths",
        "payload",
        "sums",
    )

    def __init__(self, spares: Spares) -> None:
        self._spares = spares
        self.sums = np.zeros(_N_SUMS, np.int64)
        self._sums = self.sums.data  # a memoryview's items are Python's own numbers, and twice as fast
        self._start_anew(0, 0)

    def make_room(self) -> None:
        """For the first messages, where there is none for any."""
        if not len(self._payload):
            self._grow(1, 1)

    @property
    def n_bytes(self) -> int:
        return int(self._sums[N_BYTES])

    @property
    def n_messages(self) -> int:
        return int(self._sums[N_MESSAGES])

    @property
    def whole_bytes(self) -> int:
        return int(self._sums[WHOLE_BYTES])

    @property
    def whole_messages(self) -> int:
        return int(self._sums[WHOLE_MESSAGES])

    @property
    def n_transactions(self) -> int:
        """Whole ones."""
        return int(self._sums[N_TRANSACTIONS])

    @property
    def mode(self) -> int:
        return int(self._sums[MODE])

    @mode.setter
    def mode(self, mode: int) -> None:
        self._sums[MODE] = mode

    def append(self, data: bytes | memoryview) -> None:
        """Take one message, making room where there is none."""
        sums = self._sums
        at, i, n = sums[N_BYTES], sums[N_MESSAGES], len(data)
        if at + n > len(self._payload) or i >= len(self._lengths):
            self._grow(at + n, i + 1)
        self._payload[at : at + n] = data
        self._lengths[i] = n
        sums[N_BYTES] = at + n
        sums[N_MESSAGES] = i + 1

    def end_transaction(self, commit: bytes | memoryview) -> None:
        """With its COMMIT everything here is whole."""
        self._sums[LAST_COMMIT_AT], self._sums[LAST_COMMIT_BYTES] = self.n_bytes, len(commit)
        self._sums[N_TRANSACTIONS] += 1
        self.add_whole(commit)

    def add_whole(self, data: bytes | memoryview) -> None:
        """A message that is whole by itself, or makes all before it whole."""
        self.append(data)
        self._sums[WHOLE_BYTES], self._sums[WHOLE_MESSAGES] = self.n_bytes, self.n_messages

    def message(self, i: int) -> bytes:
        start = int(self.lengths[:i].sum())
        return bytes(self._payload[start : start + self._lengths[i]])

    def kinds(self, n: int) -> bytes:
        """The pgoutput types of the first ``n`` messages, or of as many as there are."""
        lengths = self.lengths[: min(n, self.n_messages)].astype(np.int64)
        return bytes(self.payload[np.cumsum(lengths) - lengths + HEADER_BYTES])

    @property
    def last_commit(self) -> bytes | None:
        """The last COMMIT of the whole transactions; None where there is none."""
        if not self.n_transactions:
            return None
        at = self._sums[LAST_COMMIT_AT]
        return bytes(self._payload[at : at + self._sums[LAST_COMMIT_BYTES]])

    def take(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Give everything away, read-only; what comes next goes into arrays of its own."""
        payload, lengths = self.payload, self.lengths
        n_bytes, n_messages = self.n_bytes, self.n_messages
        self._start_anew(n_bytes, n_messages)
        return _read_only(payload[:n_bytes]), _read_only(lengths[:n_messages])

    def take_whole(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Give the whole transactions away, as ``take`` does, and keep the beginning of the next."""
        payload, lengths, mode = self.payload, self.lengths, self.mode
        n_bytes, n_messages = self.n_bytes, self.n_messages
        whole_bytes, whole_messages = self.whole_bytes, self.whole_messages
        self._start_anew(n_bytes, n_messages)
        self._grow(n_bytes - whole_bytes, n_messages - whole_messages)
        self._fill(payload[whole_bytes:n_bytes], lengths[whole_messages:n_messages])
        self.mode = mode
        return _read_only(payload[:whole_bytes]), _read_only(lengths[:whole_messages])

    def take_from(self, source: MessageBuffer, first: int) -> None:
        """Move the messages of ``source`` from ``first`` on to this one, which is empty; those before are dropped."""
        at = int(source.lengths[:first].sum())
        self._grow(source.n_bytes - at, source.n_messages - first)
        self._fill(source.payload[at : source.n_bytes], source.lengths[first : source.n_messages])
        source._start_anew(0, 0)

    # -- inside ----------------------------------------------------------------------------------------

    def _fill(self, payload: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]) -> None:
        self.payload[: len(payload)] = payload
        self.lengths[: len(lengths)] = lengths
        self._sums[N_BYTES], self._sums[N_MESSAGES] = len(payload), len(lengths)

    def _start_anew(self, n_bytes: int, n_messages: int) -> None:
        """Soon with room for as much again: one huge row must not leave its room behind for good. Of few sizes, so that
        what is given back fits what is asked for."""
        self.sums[:] = 0
        self._next_bytes, self._next_messages = (
            _room(_FIRST_BYTES, min(n_bytes, _MOST_NEXT_BYTES)),
            _room(_FIRST_MESSAGES, n_messages),
        )
        self._use(_NO_PAYLOAD, _NO_LENGTHS)

    def _grow(self, n_bytes: int, n_messages: int) -> None:
        """Each by itself: rows may be short or long."""
        payload, lengths = self.payload, self.lengths
        if n_bytes > len(payload):
            self._use(self._spares.take(_room(len(payload) or self._next_bytes, n_bytes)), lengths)
            self.payload[: self.n_bytes] = payload[: self.n_bytes]
            self._spares.give(payload)
        if n_messages > len(lengths):
            self._use(
                self.payload, np.empty(_room(len(lengths) or self._next_messages, n_messages), np.int32)
            )
            self.lengths[: self.n_messages] = lengths[: self.n_messages]

    def _use(self, payload: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]) -> None:
        self.payload, self.lengths = payload, lengths
        self._payload, self._lengths = payload.data, lengths.data


def _room(capacity: int, needed: int) -> int:
    while capacity < needed:
        # Few copies on the way to a block; but not beyond it, where NumPy asks for huge pages, touched or not.
        capacity *= 4 if capacity <= _FAST_GROWTH_BYTES else 2
    return capacity


def _read_only(array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    array.flags.writeable = False
    return array
