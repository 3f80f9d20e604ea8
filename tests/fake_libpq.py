"""A libpq of the tests' own: PQgetCopyData, PQconsumeInput and PQfreemem as callbacks, for the compiled loops.

A stream can thereby be taken through the loop without a server, and ``events_of`` is the slot reader's own use of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from xidstream.pipeline.pgoutput.message_buffer import Outcome
from xidstream.pipeline.postgres.copy_loop import CopyLoop, RowLoop
from xidstream.pipeline.stream import StreamCutter, StreamEvent

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p


class Server:
    """Gives ``messages`` as libpq does: ``arrivals[i]`` of them for each PQconsumeInput, then -1 or -2 at ``end``."""

    def __init__(self, messages: Sequence[bytes], *, arrivals: Sequence[int] = (), end: int = 0) -> None:
        self._waiting = list(messages)
        self._arrivals = list(arrivals)
        self._here = 0 if arrivals else len(messages)
        self._end = end
        self.fails = False
        self.n_allocated = 0
        get = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(self._get)
        consume = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._consume)
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._free)
        self.loop = CopyLoop(1, get, consume, free)
        self.rows = RowLoop(1, get, consume, free)

    def _get(self, connection: int, cell: int, is_async: int) -> int:
        assert connection == 1
        if not self._here:
            assert is_async or not self._waiting, "a loop that waits would wait for ever"
            return self._end if not self._waiting else 0
        self._here -= 1
        data = self._waiting.pop(0)
        address = _libc.malloc(len(data))
        ctypes.memmove(address, data, len(data))
        ctypes.c_void_p.from_address(cell).value = address
        self.n_allocated += 1
        return len(data)

    def _consume(self, connection: int) -> int:
        if self._arrivals:
            self._here = min(self._here + self._arrivals.pop(0), len(self._waiting))
        return 0 if self.fails else 1

    def _free(self, address: int) -> None:
        _libc.free(ctypes.c_void_p(address))
        self.n_allocated -= 1


def events_of(
    cutter: StreamCutter, messages: Sequence[bytes], block_bytes: int
) -> Iterator[Sequence[StreamEvent]]:
    """The events that ``messages`` complete, by the compiled loop and what it gives out."""
    loop = Server(messages).loop
    while True:
        outcome = loop.gather(cutter.target, block_bytes)
        yield cutter.settle()
        if outcome is Outcome.DRAINED:
            return
        if outcome is Outcome.MESSAGE:
            yield cutter.feed(loop.pop_message())
