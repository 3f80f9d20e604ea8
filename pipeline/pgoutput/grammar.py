"""The order of pgoutput's messages: a table of states and types, and rules about the open streams.

``TRANSITIONS`` says for each state which types may arrive and to which state they lead. A type that is not in the row
is illegal. A table cannot hold the rules about xids, so these are in code:

- S(first) opens a stream that is not open. S(not first) continues a stream that is open.
- c and p end a stream that is open. A with subxid = xid discards one. A of a subtransaction, or of an xid that was
  never seen, changes nothing (a server may send it, PostgreSQL 18 even to clients of protocol 1).
- P names the xid of its b. P may come without a b: PostgreSQL 18 sends it so for a transaction that only locked rows,
  which left nothing to decode. Then its xid is not that of an open stream. The xids of B and b are not those of an open
  stream either.
- O comes at most once, and in a stream only in its first block.
- M is transactional within a transaction, and not transactional outside of one. The server sends the other kind as soon
  as it has decoded it, and never in the middle of a transaction.
- K and r are always legal. An open stream of that xid ends with them. The reason: a prepared transaction that we
  acknowledged stays in the server's reorder buffer. Memory pressure after a restart may stream it once more, before
  only K or r follows (``DecodePrepare``, ``ReorderBufferSkipPrepare``, ``ReorderBufferFinishPrepared``). The holder of
  the prepared transaction drops the repetition.

An illegal message raises IllegalTransition and changes nothing. The error tells the story: the state, the message, its
LSN and xid, and the control messages before it.

An example, in which three transactions come in turns. A block of a stream may lie between any two others, but never
inside of one, nor inside of a plain transaction::

    message                 state after it    open streams
    S 740 (first)           IN_STREAM         740
    E                       OUTSIDE           740
    B 760                   IN_TRANSACTION    740            a small transaction, whole: no S before its C
    C                       OUTSIDE           740
    S 750 (first)           IN_STREAM         740, 750
    E                       OUTSIDE           740, 750
    S 740 (not first)       IN_STREAM         740, 750
    E                       OUTSIDE           740, 750
    A 740/741               OUTSIDE           740, 750       a savepoint: 740 goes on
    A 750/750               OUTSIDE           740
    S 750 (not first)       illegal           740            "it continues a stream that is not open"
    c 740                   OUTSIDE           none

The cutter is the caller. ``on_control`` takes the messages that lead to another state: B, C, S, E, c, A, b, P, K, r, p,
and also an origin. ``check`` is asked about the others. Rows mostly come without any call, because compiled loops take
them. ``table`` gives these loops what they must know of the order, so that it is written down only here. A Grammar
lives as long as its connection, because after a reconnect the server starts every stream anew (fact 24). Which
streams are open stands in the ledger of the reader's process (``stream.ledger``). The Grammar is given it as
``Streams``, opens and closes the streams there, and has no list of its own.

Rejected: checking rows here as well, because one call is most of what the reader can spend on a row; and treating an
unknown A as a violation, because the server does send it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.errors import IllegalTransition, UsageError
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.pgoutput.messages import MessageType

_M = MessageType


class StreamState(enum.Enum):
    """Where in the stream the next message is."""

    OUTSIDE = "outside of any transaction"
    IN_TRANSACTION = "between BEGIN and COMMIT"
    IN_PREPARE = "between BEGIN PREPARE and PREPARE"
    IN_STREAM = "in a stream block"


def _staying(state: StreamState) -> dict[int, StreamState]:
    """The types that may come anywhere within a transaction and do not end it."""
    kinds = (_M.ORIGIN, _M.RELATION, _M.TYPE, _M.INSERT, _M.UPDATE, _M.DELETE, _M.TRUNCATE, _M.MESSAGE)
    return dict.fromkeys(kinds, state)


TRANSITIONS: Final[Mapping[StreamState, Mapping[int, StreamState]]] = {
    StreamState.OUTSIDE: {
        _M.BEGIN: StreamState.IN_TRANSACTION,
        _M.BEGIN_PREPARE: StreamState.IN_PREPARE,
        _M.STREAM_START: StreamState.IN_STREAM,
        _M.STREAM_COMMIT: StreamState.OUTSIDE,
        _M.STREAM_ABORT: StreamState.OUTSIDE,
        _M.STREAM_PREPARE: StreamState.OUTSIDE,
        _M.PREPARE: StreamState.OUTSIDE,
        _M.COMMIT_PREPARED: StreamState.OUTSIDE,
        _M.ROLLBACK_PREPARED: StreamState.OUTSIDE,
        _M.MESSAGE: StreamState.OUTSIDE,
        # No server sends these two here, and they would be right for what follows.
        _M.RELATION: StreamState.OUTSIDE,
        _M.TYPE: StreamState.OUTSIDE,
    },
    StreamState.IN_TRANSACTION: {**_staying(StreamState.IN_TRANSACTION), _M.COMMIT: StreamState.OUTSIDE},
    StreamState.IN_PREPARE: {**_staying(StreamState.IN_PREPARE), _M.PREPARE: StreamState.OUTSIDE},
    StreamState.IN_STREAM: {**_staying(StreamState.IN_STREAM), _M.STREAM_STOP: StreamState.OUTSIDE},
}

ELSEWHERE: Final = 255
"""In a ``table``: the message is not for the loop, or not legal."""


def table(states: Sequence[StreamState], kinds: bytes) -> npt.NDArray[np.uint8]:
    """``TRANSITIONS`` for a compiled loop that takes ``kinds`` alone, as a read-only ``uint8[len(states), 256]``.

    By the index of a state in ``states`` and by type byte: the index of the state that follows, or ``ELSEWHERE``. The
    loop gets it as an argument: a constant would be kept in numba's cache, whatever becomes of this file.
    """
    moves = np.full((len(states), 256), ELSEWHERE, np.uint8)
    for i, state in enumerate(states):
        for kind in kinds:
            after = TRANSITIONS[state].get(kind)
            if after in states:
                moves[i, kind] = states.index(after)
    moves.flags.writeable = False
    return moves


_OPENING: Final = frozenset((_M.BEGIN, _M.BEGIN_PREPARE, _M.STREAM_START))
_CLOSING: Final = frozenset((_M.COMMIT, _M.PREPARE, _M.STREAM_STOP))
_ENDING_STREAM: Final = frozenset(
    (_M.STREAM_COMMIT, _M.STREAM_PREPARE, _M.COMMIT_PREPARED, _M.ROLLBACK_PREPARED)
)
_STORY_LENGTH: Final = 8


class Streams(Protocol):
    """The open streams, each by its top-level xid."""

    @property
    def n_streams(self) -> int:
        """How many are open."""

    def stream_lsn(self, xid: Xid) -> Lsn | None:
        """The LSN at which its first block started; None where no stream of it is open."""

    def open_stream(self, xid: Xid, lsn: Lsn) -> None: ...

    def close_stream(self, xid: Xid) -> None:
        """Nothing where none is open."""


class Grammar:
    """The validator of one connection's message order."""

    __slots__ = ("_moves", "_origin_allowed", "_story", "_streams", "state", "xid")

    def __init__(self, streams: Streams) -> None:
        self.state = StreamState.OUTSIDE
        """Where in the stream the next message is."""
        self.xid: Xid | None = None
        """The xid of the present transaction or stream block, if the caller gave it."""
        self._moves = TRANSITIONS[StreamState.OUTSIDE]
        """The row of the table for ``state``."""
        self._streams = streams
        """The open streams. Nobody else opens or closes one."""
        self._origin_allowed = False
        """Whether an origin may come: once, in a transaction or in the first block of a stream."""
        self._story: deque[tuple[int, Xid | None, Lsn]] = deque(maxlen=_STORY_LENGTH)
        """The last control messages, for the text of an error: type byte, xid, LSN."""

    def check(self, kind: int, *, transactional: bool | None = None, lsn: Lsn = INVALID_LSN) -> None:
        """Whether a message that leads nowhere else may come: a row, T, R, Y, O or M. Changes nothing.

        ``transactional`` is M's flag, where the caller knows it. Raises IllegalTransition.
        """
        if kind not in self._moves:
            raise self._illegal(kind, None, lsn, "it cannot come here")
        if transactional is not None and transactional is (self.state is StreamState.OUTSIDE):
            raise self._illegal(
                kind, None, lsn, "it is transactional" if transactional else "it is not transactional"
            )

    def on_control(
        self,
        kind: int,
        xid: Xid | None = None,
        *,
        first: bool | None = None,
        subxid: Xid | None = None,
        lsn: Lsn = INVALID_LSN,
    ) -> StreamState:
        """Take a message by its type byte and return the new state.

        ``xid`` is the top-level xid. It is needed for S, c, A, p, b, P, K, r. It may be left out for B; then B's rule
        is not checked. ``first`` is needed for S, and ``subxid`` for A. Raises IllegalTransition; then nothing has
        changed. Raises UsageError if a needed argument is missing.
        """
        state = self._moves.get(kind)
        if state is None:
            raise self._illegal(kind, xid, lsn, "it cannot come here")
        if kind != _M.BEGIN or xid is not None:
            self._check_xid(kind, xid, first, subxid, lsn)
        # Nothing below can fail.
        if kind in _OPENING:
            self.xid = xid
            self._origin_allowed = first is not False
            if first and xid is not None:
                self._streams.open_stream(xid, lsn)
        elif kind in _CLOSING:
            self.xid = None
        elif kind == _M.ORIGIN:
            self._origin_allowed = False
        elif xid is not None and (kind in _ENDING_STREAM or xid == subxid):
            self._streams.close_stream(xid)
        if state is not self.state:
            self.state = state
            self._moves = TRANSITIONS[state]
        self._story.append((kind, xid, lsn))
        return state

    def _check_xid(
        self, kind: int, xid: Xid | None, first: bool | None, subxid: Xid | None, lsn: Lsn
    ) -> None:
        """Check the rules that are not in the table. Raises or returns, and changes nothing."""
        if kind == _M.ORIGIN:
            if not self._origin_allowed:
                raise self._illegal(kind, xid, lsn, "an origin comes once, at the start of its transaction")
            return
        if kind not in _NEEDS_XID:
            return
        if xid is None:
            raise UsageError(f"the xid of {_title(kind)} is needed")
        if kind == _M.STREAM_START:
            if first is None:
                raise UsageError("whether a STREAM START is the first of its transaction is needed")
            is_open = self._streams.stream_lsn(xid) is not None
            if first and is_open:
                raise self._illegal(
                    kind, xid, lsn, "it claims to be the first block of a stream that is open already"
                )
            if not first and not is_open:
                raise self._illegal(kind, xid, lsn, "it continues a stream that is not open")
        elif kind == _M.STREAM_ABORT:
            if subxid is None:
                raise UsageError("the subxid of STREAM ABORT is needed")
        elif kind in (_M.STREAM_COMMIT, _M.STREAM_PREPARE):
            if self._streams.stream_lsn(xid) is None:
                raise self._illegal(kind, xid, lsn, "it ends a stream that is not open")
        elif kind == _M.PREPARE:
            if self.state is StreamState.OUTSIDE:
                if self._streams.stream_lsn(xid) is not None:
                    raise self._illegal(kind, xid, lsn, "a stream of this xid is open")
            elif xid != self.xid:
                raise self._illegal(kind, xid, lsn, f"its BEGIN PREPARE named xid {self._number(self.xid)}")
        elif kind in (_M.BEGIN, _M.BEGIN_PREPARE) and self._streams.stream_lsn(xid) is not None:
            raise self._illegal(kind, xid, lsn, "a stream of this xid is open")

    # -- the story of an error -------------------------------------------------------------------------

    def _illegal(self, kind: int, xid: Xid | None, lsn: Lsn, why: str) -> IllegalTransition:
        current = "" if self.xid is None else f" of xid {self._number(self.xid)}"
        stream_lsn = None if xid is None else self._streams.stream_lsn(xid)
        opened = "" if stream_lsn is None else f", whose stream started at {stream_lsn}"
        before = ", ".join(self._event(*event) for event in self._story) or "nothing"
        return IllegalTransition(
            f"illegal {self._event(kind, xid, lsn)}{opened}: {why}; state: {self.state.value}{current}, "
            f"{self._streams.n_streams} open streams; before it came: {before}"
        )

    @classmethod
    def _event(cls, kind: int, xid: Xid | None, lsn: Lsn) -> str:
        of = "" if xid is None else f" of xid {cls._number(xid)}"
        return f"{_title(kind)}{of} at {Lsn(lsn)}"

    @staticmethod
    def _number(xid: Xid | None) -> str:
        return "unknown" if xid is None else str(int(xid))


_NEEDS_XID: Final = _OPENING | _ENDING_STREAM | {_M.STREAM_ABORT, _M.PREPARE}


def _title(kind: int) -> str:
    try:
        return MessageType(kind).title
    except ValueError:
        return f"message of type 0x{kind:02x}"
