"""CopyData messages one after the other in one array. Python and a compiled loop both append to it.

``feed`` in ``pipeline.stream`` appends messages that Python must look at. ``CopyLoop`` in ``pipeline.postgres`` appends
all others straight from libpq, as long as ``TRANSITIONS`` allows it: rows, and the BEGIN and COMMIT of small
transactions. Neither package imports the other, so the things that they share are here: the arrays, the sums, and the
grammar's table for these messages.

Invariants: the first ``n_messages`` of ``lengths`` sum up to ``n_bytes``, and the first ``n_bytes`` of ``payload`` are
those messages, each with its 25-byte XLogData header. The ``whole`` part ends after a COMMIT, or after a message
between transactions. An appender that finds no room changes nothing; only ``append`` makes room.

Arrays come from ``Spares``. A caller that has copied the arrays from ``detach`` may release them there.

Rejected: a list of bytes that is joined when a block is cut. It would cost a Python object and a second copy for each
row.
"""

from __future__ import annotations

import enum
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.pgoutput.grammar import ELSEWHERE, StreamState, table
from xidstream.pipeline.pgoutput.spares import Spares

HEADER_BYTES: Final = 25
"""The header of XLogData: 'w', Int64 start, Int64 end, Int64 send time."""

OUTSIDE: Final = 0
"""Between transactions."""
IN_PLAIN: Final = 1
"""Between BEGIN and COMMIT of a transaction that is gathered with its neighbours."""
IN_ROWS: Final = 2
"""In a stream block, or in a transaction that is gathered by itself. Python must look at the end of either."""

TRANSITIONS: Final = table((StreamState.OUTSIDE, StreamState.IN_TRANSACTION, StreamState.IN_STREAM), b"BCIUD")
"""``uint8[3, 256]``: the mode that a message type leads to, by mode and type; ``LOOK`` for all others."""
LOOK: Final = ELSEWHERE
"""Python must look at the message; it is not for a compiled loop."""

# The indexes in ``sums``.
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
"""From this size on the C library maps each array separately (``actors.runtime.allocator``). Pages that are never
touched then take no memory. An array that is given away leaves no hole in the heap, however many transactions are
open."""
_FIRST_MESSAGES: Final = 1024
_FAST_GROWTH_BYTES: Final = 512 << 10
_MOST_NEXT_BYTES: Final = 256 << 20
"""A row after a giant one gets no room for another giant: it would not be looked at, and a giant is a block alone."""
_NO_PAYLOAD: Final = np.empty(0, np.uint8)
_NO_LENGTHS: Final = np.empty(0, np.int32)


class Outcome(enum.IntEnum):
    """Why a compiled loop gave control back."""

    DRAINED = 0
    """The server has sent no more."""
    FULL = 1
    """``limit_bytes`` are reached."""
    MESSAGE = 2
    """A message came that is not for the loop, or for which there is no room."""
    ENDED = 3
    """The server ended COPY."""
    FAILED = 4
    """The connection failed; libpq has the message."""


class MessageBuffer:
    """``payload: uint8[capacity]``, ``lengths: int32[capacity]``, ``sums: int64[8]`` (indexes above): all writable.

    A buffer without messages has no arrays before ``make_room``, because the arrays that were given away last are often
    back by then."""

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
        self._sums = self.sums.data  # a memoryview returns Python's own numbers and is twice as fast
        self._start_anew(0, 0)

    def make_room(self) -> None:
        """Make room for the first messages if there is no room yet."""
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
        """The number of whole transactions."""
        return int(self._sums[N_TRANSACTIONS])

    @property
    def mode(self) -> int:
        return int(self._sums[MODE])

    @mode.setter
    def mode(self, mode: int) -> None:
        self._sums[MODE] = mode

    def append(self, data: bytes | memoryview) -> None:
        """Append one message; make room for it if there is none."""
        sums = self._sums
        at, i, n = sums[N_BYTES], sums[N_MESSAGES], len(data)
        if at + n > len(self._payload) or i >= len(self._lengths):
            self._grow(at + n, i + 1)
        self._payload[at : at + n] = data
        self._lengths[i] = n
        sums[N_BYTES] = at + n
        sums[N_MESSAGES] = i + 1

    def end_transaction(self, commit: bytes | memoryview) -> None:
        """Append a COMMIT, after which everything here is whole."""
        self._sums[LAST_COMMIT_AT], self._sums[LAST_COMMIT_BYTES] = self.n_bytes, len(commit)
        self._sums[N_TRANSACTIONS] += 1
        self.add_whole(commit)

    def add_whole(self, data: bytes | memoryview) -> None:
        """Append a message that is whole by itself, or that makes all messages before it whole."""
        self.append(data)
        self._sums[WHOLE_BYTES], self._sums[WHOLE_MESSAGES] = self.n_bytes, self.n_messages

    def message(self, i: int) -> bytes:
        start = int(self.lengths[:i].sum())
        return bytes(self._payload[start : start + self._lengths[i]])

    def kinds(self, n: int) -> bytes:
        """The pgoutput types of the first ``n`` messages, or of all if there are fewer."""
        lengths = self.lengths[: min(n, self.n_messages)].astype(np.int64)
        return bytes(self.payload[np.cumsum(lengths) - lengths + HEADER_BYTES])

    @property
    def last_commit(self) -> bytes | None:
        """The last COMMIT of the whole transactions; None if there is none."""
        if not self.n_transactions:
            return None
        at = self._sums[LAST_COMMIT_AT]
        return bytes(self._payload[at : at + self._sums[LAST_COMMIT_BYTES]])

    def detach(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Detach all messages, read-only. The next messages go into other arrays."""
        payload, lengths = self.payload, self.lengths
        n_bytes, n_messages = self.n_bytes, self.n_messages
        self._start_anew(n_bytes, n_messages)
        return _read_only(payload[:n_bytes]), _read_only(lengths[:n_messages])

    def detach_whole(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Detach the whole transactions, as ``detach`` does, and keep the beginning of the next one."""
        payload, lengths, mode = self.payload, self.lengths, self.mode
        n_bytes, n_messages = self.n_bytes, self.n_messages
        whole_bytes, whole_messages = self.whole_bytes, self.whole_messages
        self._start_anew(n_bytes, n_messages)
        self._grow(n_bytes - whole_bytes, n_messages - whole_messages)
        self._fill(payload[whole_bytes:n_bytes], lengths[whole_messages:n_messages])
        self.mode = mode
        return _read_only(payload[:whole_bytes]), _read_only(lengths[:whole_messages])

    def move_from(self, source: MessageBuffer, first: int) -> None:
        """Move the messages of ``source`` from ``first`` on into this buffer, which is empty. Drop the earlier ones."""
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
        """Start without arrays. The next ones will have room for as much again, so that one huge row does not leave its
        room behind for good. There are few sizes, so that an array that was given back fits the next request."""
        self.sums[:] = 0
        self._next_bytes, self._next_messages = (
            _room(_FIRST_BYTES, min(n_bytes, _MOST_NEXT_BYTES)),
            _room(_FIRST_MESSAGES, n_messages),
        )
        self._use(_NO_PAYLOAD, _NO_LENGTHS)

    def _grow(self, n_bytes: int, n_messages: int) -> None:
        """Grow payload and lengths, each by itself, because rows may be short or long."""
        payload, lengths = self.payload, self.lengths
        if n_bytes > len(payload):
            self._use(self._spares.allocate(_room(len(payload) or self._next_bytes, n_bytes)), lengths)
            self.payload[: self.n_bytes] = payload[: self.n_bytes]
            self._spares.release(payload)
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
        # Grow fast at first, for few copies on the way to a block. Grow slower beyond, where NumPy asks for huge
        # pages, touched or not.
        capacity *= 4 if capacity <= _FAST_GROWTH_BYTES else 2
    return capacity


def _read_only(array: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    array.flags.writeable = False
    return array
