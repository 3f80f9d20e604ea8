# Kernels are typed by their numba signatures.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,call-arg,var-annotated,unreachable"
"""The compiled loops between libpq and the array that a block is made of: over a stream, and over the rows of a COPY.

A row passes from libpq's buffer into ``MessageBuffer.payload`` without becoming a Python object: ``PQgetCopyData``, one
look at its type byte, one copy, ``PQfreemem``. psycopg does all the rest through the same libpq on the same connection,
so TLS, notices and errors work as they do without the loop. The caller gets all other messages as bytes: those for
which ``TRANSITIONS`` says ``LOOK`` (keepalives, control messages, messages that are not legal here), and a row for
which there is no room. In Python the same took 1.5 microseconds a row. Here it takes 0.4, most of them the kernel's.

libpq's functions are found through psycopg's own extension, which is linked with the copy of libpq that it uses. A
second copy, found by name, would not know the connection's struct.

``RowLoop`` does the same for ``COPY … TO STDOUT``, where each CopyData message is one row (the first has COPY's header
before it, and the last is its trailer) and none needs a look.

Rejected: reading the socket behind libpq's back, which saves one more copy and does not work with TLS; ctypes, which
costs more for each call than it saves.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from psycopg import pq

from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.pgoutput.message_buffer import (
    HEADER_BYTES,
    IN_PLAIN,
    LAST_COMMIT_AT,
    LAST_COMMIT_BYTES,
    LOOK,
    MODE,
    N_BYTES,
    N_MESSAGES,
    N_TRANSACTIONS,
    OUTSIDE,
    TRANSITIONS,
    WHOLE_BYTES,
    WHOLE_MESSAGES,
    MessageBuffer,
    Outcome,
)

_WORD = ir.IntType(64)
_INT = ir.IntType(32)
_BYTE = ir.IntType(8)
_XLOG_DATA: Final = ord("w")
_SMALL_BYTES: Final = 256
"""Most control messages are smaller. For a larger one ctypes' two calls cost more than the rest of taking it."""


@intrinsic
def _get_copy_data(typing_context, function, connection, cell, is_async):
    """``int PQgetCopyData(PGconn *, char **buffer, int async)``; addresses are intp. 1 does not wait, 0 does."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_INT, [_WORD, _WORD, _INT])
        call = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(call, arguments[1:])

    return types.int32(types.intp, types.intp, types.intp, types.int32), generate


@intrinsic
def _consume_input(typing_context, function, connection):
    """``int PQconsumeInput(PGconn *)``: 0 where the connection failed."""

    def generate(context, builder, signature, arguments):
        call = builder.inttoptr(arguments[0], ir.FunctionType(_INT, [_WORD]).as_pointer())
        return builder.call(call, [arguments[1]])

    return types.int32(types.intp, types.intp), generate


@intrinsic
def _free(typing_context, function, address):
    """``void PQfreemem(void *)``."""

    def generate(context, builder, signature, arguments):
        call = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [_WORD]).as_pointer())
        builder.call(call, [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _byte_at(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer()))

    return types.uint8(types.intp), generate


@intrinsic
def _copy(typing_context, target, source, n_bytes):
    def generate(context, builder, signature, arguments):
        to, of = (builder.inttoptr(each, _BYTE.as_pointer()) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@njit(
    types.int64(
        types.int64[::1],
        types.int64,
        types.uint8[::1],
        types.int32[::1],
        types.int64[::1],
        types.Array(types.uint8, 2, "C", readonly=True),
        types.int64,
        types.int64[::1],
        types.uint8[::1],
    ),
    cache=True,
    nogil=True,
)
def _gather(functions, connection, payload, lengths, sums, transitions, limit_bytes, message, small):
    """``functions``: addresses of PQgetCopyData, PQconsumeInput, PQfreemem. ``message`` receives the address and the
    length of a message for the caller. A message that fits is copied into ``small``, and its address is 0."""
    mode, n_bytes, n_messages = sums[MODE], sums[N_BYTES], sums[N_MESSAGES]
    outcome = 0
    asked = False
    while True:
        n = _get_copy_data(functions[0], connection, message.ctypes.data, np.int32(1))
        if n == 0:
            if asked:
                break
            asked = True
            if _consume_input(functions[1], connection) == 0:
                outcome = 4
                break
            continue
        if n < 0:
            outcome = 3 if n == -1 else 4
            break
        asked = False
        address = message[0]
        after = LOOK
        if n > HEADER_BYTES and _byte_at(address) == _XLOG_DATA:
            after = transitions[mode, _byte_at(address + HEADER_BYTES)]
        if after == LOOK or n_bytes + n > len(payload) or n_messages == len(lengths):
            message[1] = n
            if n <= len(small):
                _copy(small.ctypes.data, address, n)
                _free(functions[2], address)
                message[0] = 0
            outcome = 2
            break
        _copy(payload.ctypes.data + n_bytes, address, n)
        _free(functions[2], address)
        lengths[n_messages] = n
        if mode == IN_PLAIN and after == OUTSIDE:
            sums[LAST_COMMIT_AT], sums[LAST_COMMIT_BYTES] = n_bytes, n
            sums[N_TRANSACTIONS] += 1
            sums[WHOLE_BYTES], sums[WHOLE_MESSAGES] = n_bytes + n, n_messages + 1
        n_bytes += n
        n_messages += 1
        mode = after
        if n_bytes >= limit_bytes:
            outcome = 1
            break
    sums[MODE], sums[N_BYTES], sums[N_MESSAGES] = mode, n_bytes, n_messages
    return outcome


@njit(
    types.int64(
        types.int64[::1],
        types.int64,
        types.uint8[::1],
        types.int32[::1],
        types.int64[::1],
        types.int64,
    ),
    cache=True,
    nogil=True,
)
def _gather_rows(functions, connection, payload, lengths, sums, limit_bytes):
    """Append rows until one of the outcomes. ``sums``: bytes, rows, and address and length of the row that waits for
    room (0: none does)."""
    n_bytes, n_rows = sums[0], sums[1]
    outcome = 0
    asked = False
    while outcome == 0:
        n = sums[3]
        if sums[2] == 0:
            n = np.int64(_get_copy_data(functions[0], connection, sums.ctypes.data + 16, np.int32(1)))
            if n == 0:
                sums[2] = 0
                if asked:
                    break
                asked = True
                if _consume_input(functions[1], connection) == 0:
                    outcome = 4
                continue
            if n < 0:
                sums[2] = 0
                outcome = 3 if n == -1 else 4
                break
            asked = False
        if n_bytes + n > len(payload) or n_rows == len(lengths):
            sums[3] = n
            outcome = 2
            break
        _copy(payload.ctypes.data + n_bytes, sums[2], n)
        _free(functions[2], sums[2])
        sums[2] = 0
        lengths[n_rows] = n
        n_bytes += n
        n_rows += 1
        if n_bytes >= limit_bytes:
            outcome = 1
    sums[0], sums[1] = n_bytes, n_rows
    return outcome


def _library() -> ctypes.CDLL:
    """The libpq that psycopg calls. An extension's handle finds the library that it is linked with, under any name."""
    if pq.__impl__ == "python":
        library: ctypes.CDLL = importlib.import_module("psycopg.pq._pq_ctypes").pq
        return library
    extension = importlib.import_module(f"psycopg_{pq.__impl__}.pq")
    return ctypes.CDLL(extension.__file__)


_LoopT = TypeVar("_LoopT", bound="_Loop")


class _Loop:
    """A loop over one connection, which must outlive it. One thread at a time may use it."""

    def __init__(self, connection: int, get_copy_data: Any, consume_input: Any, freemem: Any) -> None:
        """``connection`` is the address of libpq's struct; the functions are ctypes functions. ``of`` finds them."""
        functions = (get_copy_data, consume_input, freemem)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        self._functions = np.array(addresses, np.int64)
        self._kept = functions  # an address keeps nothing alive
        self._connection = connection
        self._freemem = freemem

    @classmethod
    def of(cls: type[_LoopT], pgconn: pq.abc.PGconn) -> _LoopT:
        """Raises EnvironmentFault where psycopg's libpq cannot be found."""
        try:
            library = _library()
            functions = library.PQgetCopyData, library.PQconsumeInput, library.PQfreemem
        except (ImportError, OSError, AttributeError) as error:
            raise EnvironmentFault(
                f"libpq was not found in psycopg's {pq.__impl__!r} implementation: {error}",
                remedy="install psycopg[binary]",
            ) from error
        connection = pgconn.pgconn_ptr  # type: ignore[attr-defined]  # not in psycopg's protocol, in all its classes
        return cls(connection, *functions)


class CopyLoop(_Loop):
    """The loop over a stream: a connection in COPY BOTH."""

    def __init__(self, connection: int, get_copy_data: Any, consume_input: Any, freemem: Any) -> None:
        super().__init__(connection, get_copy_data, consume_input, freemem)
        self._message = np.zeros(2, np.int64)
        self._small = np.zeros(_SMALL_BYTES, np.uint8)

    def gather(self, into: MessageBuffer, limit_bytes: int) -> Outcome:
        """Append messages to ``into`` until one of the outcomes; Python's other threads run meanwhile."""
        return Outcome(
            _gather(
                self._functions,
                self._connection,
                into.payload,
                into.lengths,
                into.sums,
                TRANSITIONS,
                limit_bytes,
                self._message,
                self._small,
            )
        )

    def pop_message(self) -> bytes:
        """The message of ``Outcome.MESSAGE``: call it once, before ``gather`` again."""
        address, n_bytes = self._message.tolist()
        if not address:
            return self._small[:n_bytes].tobytes()
        try:
            return ctypes.string_at(address, n_bytes)
        finally:
            self._freemem(ctypes.c_void_p(address))


class RowLoop(_Loop):
    """The loop over the rows of one COPY OUT at a time.

    ``payload: uint8[]`` and ``lengths: int32[]`` are filled from their beginning. ``n_bytes`` and ``n_rows`` say how
    far. A row for which there is no room waits inside the loop, and is not lost: it comes first next time.
    """

    def __init__(self, connection: int, get_copy_data: Any, consume_input: Any, freemem: Any) -> None:
        super().__init__(connection, get_copy_data, consume_input, freemem)
        self._sums = np.zeros(4, np.int64)
        self._goes_on = False

    @property
    def n_bytes(self) -> int:
        return int(self._sums[0])

    @property
    def n_rows(self) -> int:
        return int(self._sums[1])

    @property
    def waiting_bytes(self) -> int:
        """The length of the row that waits for room. 0: none does."""
        return int(self._sums[3]) if self._sums[2] else 0

    def gather(
        self, payload: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32], limit_bytes: int
    ) -> Outcome:
        """Fill the arrays with rows until one of the outcomes; Python's other threads run meanwhile. ``MESSAGE`` where
        the next row has no room. After ``DRAINED`` it goes on where it was, in the same arrays."""
        if not self._goes_on:
            self._sums[:2] = 0
        outcome = Outcome(
            _gather_rows(self._functions, self._connection, payload, lengths, self._sums, limit_bytes)
        )
        self._goes_on = outcome is Outcome.DRAINED
        return outcome

    def drop_waiting(self) -> None:
        """Free the row that waits, when nobody will ask for it."""
        if address := int(self._sums[2]):
            self._sums[2] = 0
            self._freemem(ctypes.c_void_p(address))
