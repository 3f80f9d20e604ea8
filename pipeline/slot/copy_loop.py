# Kernels are typed by their numba signatures.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,call-arg,var-annotated,unreachable"
"""The compiled loop between libpq and the array that a block is made of.

A row passes from libpq's buffer into ``MessageBuffer.payload`` without becoming a Python object: ``PQgetCopyData``, one
look at its type byte, one copy, ``PQfreemem``. psycopg does all the rest through the same libpq on the same connection,
so TLS, notices and errors work as they do without the loop. The caller gets all other messages as bytes: those for
which ``TRANSITIONS`` says ``LOOK`` (keepalives, control messages, messages that are not legal here), and a row for
which there is no room. In Python the same took 1.5 microseconds a row. Here it takes 0.4, most of them the kernel's.

libpq's functions are found through psycopg's own extension, which is linked with the copy of libpq that it uses. A
second copy, found by name, would not know the connection's struct.

Rejected: reading the socket behind libpq's back, which saves one more copy and does not work with TLS; ctypes, which
costs more for each call than it saves.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from psycopg import pq

from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.protocol.message_buffer import (
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
def _get_copy_data(typing_context, function, connection, cell):
    """``int PQgetCopyData(PGconn *, char **buffer, int async)``, without waiting; addresses are intp."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_INT, [_WORD, _WORD, _INT])
        call = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(call, [arguments[1], arguments[2], ir.Constant(_INT, 1)])

    return types.int32(types.intp, types.intp, types.intp), generate


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
        n = _get_copy_data(functions[0], connection, message.ctypes.data)
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


def _library() -> ctypes.CDLL:
    """The libpq that psycopg calls. An extension's handle finds the library that it is linked with, under any name."""
    if pq.__impl__ == "python":
        library: ctypes.CDLL = importlib.import_module("psycopg.pq._pq_ctypes").pq
        return library
    extension = importlib.import_module(f"psycopg_{pq.__impl__}.pq")
    return ctypes.CDLL(extension.__file__)


class CopyLoop:
    """The loop over one connection in COPY BOTH. The connection must outlive it. One thread at a time may use it."""

    def __init__(self, connection: int, get_copy_data: Any, consume_input: Any, freemem: Any) -> None:
        """``connection`` is the address of libpq's struct; the functions are ctypes functions. ``of`` finds them."""
        functions = (get_copy_data, consume_input, freemem)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        self._functions = np.array(addresses, np.int64)
        self._kept = functions  # an address keeps nothing alive
        self._connection = connection
        self._message = np.zeros(2, np.int64)
        self._small = np.zeros(_SMALL_BYTES, np.uint8)
        self._freemem = freemem

    @classmethod
    def of(cls, pgconn: pq.abc.PGconn) -> CopyLoop:
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
