"""Finds the rows of a block, in the one pass over its messages that checks everything.

There are two kernels. ``measure`` looks at the first bytes of each message and says how many rows, transactions and
logical messages the block can hold, so that Python allocates exactly. ``scan`` then reads every byte that
has a structural meaning: the CopyData header, the type, relids, tuple tags, the kind and length of every value. It
checks each read against the message's end, and it checks that the message ends where its last value ends. The later
steps (``columns``, the codecs) rely on that. numba does not check array bounds, so **no later kernel may read a place
that ``scan`` has not passed**.

The grammar says which message may come where. ``scan`` gets it as a table (``PLAIN_BLOCK``, ``TRANSACTION_BLOCK``), and
adds what no table can hold: an origin directly follows its BEGIN, and a logical message is transactional exactly within
a transaction.

``scan`` does not store where values are, only where each row's tuple begins. That takes 4 bytes a row and not 8 a
value, which for a row of many nulls would be eight times the block. The column passes advance that cursor.

A kernel cannot raise with context, so it returns a code and writes where it stopped. ``bad_values`` turns that into an
exception. Wire layouts: PostgreSQL's manual, "Logical Replication Message Formats", and
``src/backend/replication/logical/proto.c``.

``scan`` reads rows itself, and has a step for each other kind of message. Rows in a step of their own took twice as
long, because LLVM does not inline a function of that size.

Each kernel module holds the helpers it calls: numba's cache on disk only follows the kernel's own file, and a helper
that changed in another file would leave a stale kernel in use. Signatures are explicit, because arrays from a zero-copy
object store are read-only, which is a distinct type to numba. A kernel declared for read-only arrays takes both kinds;
a kernel declared lazily would be compiled twice.
"""

# Kernels are typed by their numba signatures.
# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import numpy as np
from numba import njit, types

from xidstream.pipeline.decode import codes
from xidstream.pipeline.pgoutput.grammar import StreamState, table

PLAIN_BLOCK = table((StreamState.OUTSIDE, StreamState.IN_TRANSACTION), b"BCOIUDTM")
"""``moves`` of whole plain transactions. A block begins and ends in state 0."""
TRANSACTION_BLOCK = table((StreamState.IN_STREAM,), b"IUDTM")
"""``moves`` of one transaction, streamed or not: its origin and its ends are not in its blocks."""
_NOWHERE = 255  # grammar.ELSEWHERE, of which numba's cache would not see a change

_INSERT, _UPDATE_PREIMAGE, _UPDATE_POSTIMAGE, _DELETE, _TRUNCATE = range(5)  # rows.CHANGE_TYPES

_U8R = types.Array(types.uint8, 1, "C", readonly=True)
_I32R = types.Array(types.int32, 1, "C", readonly=True)


@njit
def _be32(payload, p):
    return (
        (np.int64(payload[p]) << 24)
        | (np.int64(payload[p + 1]) << 16)
        | (np.int64(payload[p + 2]) << 8)
        | np.int64(payload[p + 3])
    )


@njit
def _be64(payload, p):
    return (_be32(payload, p) << 32) | _be32(payload, p + 4)


@njit
def _terminator(payload, p, end):
    """The position of the first NUL byte at or after p, or -1."""
    while p < end:
        if payload[p] == 0:
            return p
        p += 1
    return -1


@njit(types.int64(_U8R, _I32R, types.boolean, types.int64[::1], types.int64[::1]), cache=True, nogil=True)
def measure(payload, lengths, streamed, counts, error):
    """Fill ``counts: int64[3]`` with upper bounds of rows, transactions and logical messages.

    Returns 0, or a code with ``error`` filled. Checks that every message has a header and a type byte, and that it lies
    inside the payload.
    """
    skip = codes.HEADER + (5 if streamed else 1)
    rows = transactions = logical = 0
    p = 0
    for m in range(len(lengths)):
        length = np.int64(lengths[m])
        error[codes.ERROR_MESSAGE] = m
        if length <= codes.HEADER or p + length > len(payload):
            return codes.MALFORMED
        kind = payload[p + codes.HEADER]
        if kind == 73 or kind == 68:  # I, D
            rows += 1
        elif kind == 85:  # U
            rows += 1
            if length > skip + 4 and payload[p + skip + 4] != 78:
                rows += 1
        elif kind == 84:  # T
            if length >= skip + 4:
                n = _be32(payload, p + skip)
                if n <= length // 4:
                    rows += n
        elif kind == 66:  # B
            transactions += 1
        elif kind == 77:  # M
            logical += 1
        p += length
    counts[0] = rows
    counts[1] = transactions
    counts[2] = logical
    return 0


@njit
def _find(relids, relid):
    """Index in the sorted ``relids``, or -1."""
    low = 0
    high = len(relids)
    while low < high:
        middle = (low + high) >> 1
        if relids[middle] < relid:
            low = middle + 1
        else:
            high = middle
    if low < len(relids) and relids[low] == relid:
        return low
    return -1


@njit
def _walk(payload, p, end, n_columns, error):
    """Pass over one TupleData from its column count on. Returns the position after it, or a code."""
    if p + 2 > end:
        return codes.MALFORMED
    n = (np.int64(payload[p]) << 8) | np.int64(payload[p + 1])
    if n != n_columns:
        error[codes.ERROR_DETAIL] = n
        return codes.COLUMN_COUNT
    p += 2
    for c in range(n):
        if p >= end:
            return codes.MALFORMED
        kind = payload[p]
        if kind == 116:  # t
            if p + 5 > end:
                return codes.MALFORMED
            p += 5 + _be32(payload, p + 1)
            if p > end:
                return codes.MALFORMED
        elif kind == 110 or kind == 117:  # n, u
            p += 1
        else:
            error[codes.ERROR_DETAIL] = c
            return codes.BINARY if kind == 98 else codes.UNKNOWN_KIND
    return p


@njit
def _misplaced(moves, kind):
    """The code for a message that may not come here."""
    for state in range(len(moves)):
        if moves[state, kind] != _NOWHERE:
            return codes.NESTED if kind == 66 else codes.OUTSIDE  # B
    return codes.UNKNOWN_TYPE


@njit
def _put(relation, owner, ordinal, cursor, message, n_rows, r, own, first_row_ordinal, first_value, m):
    """Write where row ``n_rows`` belongs and where its values begin. Returns the number of rows with it."""
    relation[n_rows] = r
    owner[n_rows] = own
    ordinal[n_rows] = first_row_ordinal + n_rows
    cursor[n_rows] = first_value
    message[n_rows] = m
    return n_rows + 1


# fmt: off
@njit
def _truncate(
    payload, p, end, relids, change, form, relation, owner, ordinal, cursor, message,
    n_rows, own, first_row_ordinal, m, error,
):
    # fmt: on
    """A row for each relation of T; the place after them or a code, and the number of rows."""
    if p + 5 > end:
        return codes.MALFORMED, n_rows
    n = _be32(payload, p)
    p += 5  # the options (CASCADE, RESTART IDENTITY) change nothing here: the tables are listed
    if p + 4 * n > end:
        return codes.MALFORMED, n_rows
    for _ in range(n):
        relid = _be32(payload, p)
        p += 4
        r = _find(relids, relid)
        if r < 0:
            error[codes.ERROR_RELATION] = relid
            return codes.UNKNOWN_RELATION, n_rows
        if n_rows >= len(change):
            return codes.TOO_MANY, n_rows
        change[n_rows] = _TRUNCATE
        form[n_rows] = codes.NO_TUPLE
        n_rows = _put(relation, owner, ordinal, cursor, message, n_rows, r, own, first_row_ordinal, 0, m)
    return p, n_rows


@njit
def _logical(payload, p, end, inside, logical, n_logical, owner, m, error):
    """M after its xid; the place after it, or a code. ``inside``: it comes within a transaction."""
    if p + 9 > end:
        return codes.MALFORMED
    flags = np.int64(payload[p])
    error[codes.ERROR_DETAIL] = flags
    if flags > 1:
        return codes.BAD_FLAGS
    if flags == 1 and not inside:
        return codes.OUTSIDE
    if flags == 0 and inside:
        return codes.NESTED
    zero = _terminator(payload, p + 9, end)
    if zero < 0 or zero + 5 > end:
        return codes.MALFORMED
    if n_logical >= len(logical):
        return codes.TOO_MANY
    size = _be32(payload, zero + 1)
    logical[n_logical, codes.LOGICAL_LSN] = _be64(payload, p + 1)
    logical[n_logical, codes.LOGICAL_TRANSACTIONAL] = flags
    logical[n_logical, codes.LOGICAL_OWNER] = owner
    logical[n_logical, codes.LOGICAL_PREFIX_START] = p + 9
    logical[n_logical, codes.LOGICAL_PREFIX_LENGTH] = zero - p - 9
    logical[n_logical, codes.LOGICAL_CONTENT_START] = zero + 5
    logical[n_logical, codes.LOGICAL_CONTENT_LENGTH] = size
    logical[n_logical, codes.LOGICAL_MESSAGE] = m
    return zero + 5 + size


@njit
def _begin(payload, p, end, transactions, n_transactions):
    """B; the place after it, or a code."""
    if p + 20 != end:
        return codes.MALFORMED
    if n_transactions >= len(transactions):
        return codes.TOO_MANY
    transactions[n_transactions, codes.TX_COMMIT_LSN] = _be64(payload, p)
    transactions[n_transactions, codes.TX_XID] = _be32(payload, p + 16)
    transactions[n_transactions, codes.TX_ORIGIN_START] = 0
    transactions[n_transactions, codes.TX_ORIGIN_LENGTH] = -1
    return end


@njit
def _commit(payload, p, end, transactions, own, error):
    """C of the transaction ``own``; the place after it, or a code."""
    if p + 25 != end:
        return codes.MALFORMED
    error[codes.ERROR_DETAIL] = payload[p]
    if payload[p] != 0:
        return codes.BAD_FLAGS
    if _be64(payload, p + 1) != transactions[own, codes.TX_COMMIT_LSN]:
        return codes.COMMIT_MISMATCH
    transactions[own, codes.TX_END_LSN] = _be64(payload, p + 9)
    transactions[own, codes.TX_TIMESTAMP] = _be64(payload, p + 17)
    return end


@njit
def _origin(payload, p, end, transactions, own):
    """O of the transaction ``own``; the place after it, or a code."""
    zero = _terminator(payload, p + 8, end)
    if zero < 0:
        return codes.MALFORMED
    transactions[own, codes.TX_ORIGIN_START] = p + 8
    transactions[own, codes.TX_ORIGIN_LENGTH] = zero - p - 8
    return zero + 1


# fmt: off
@njit(
    types.int64(
        _U8R, _I32R, types.Array(types.uint8, 2, "C", readonly=True), types.boolean, types.int64, types.int64,
        types.int64[::1], types.int64[::1],
        types.int8[::1], types.uint8[::1], types.int32[::1], types.uint32[::1], types.int64[::1],
        types.int32[::1], types.int32[::1], types.int64[:, ::1], types.int64[:, ::1], types.int64[::1],
    ),
    cache=True,
    nogil=True,
)
def scan(
    payload, lengths, moves, streamed, xid, first_ordinal, relids, n_columns,
    change, form, relation, owner, ordinal, cursor, message,
    transactions, logical, error,
):
    # fmt: on
    """Check the block and find its rows. Returns their number, or a code with ``error`` filled.

    ``moves``: PLAIN_BLOCK or TRANSACTION_BLOCK. ``streamed`` says that messages have an Int32 xid. ``relids`` (sorted)
    and ``n_columns`` have one entry per relation. For each row, in stream order, the kernel writes ``change``
    (rows.CHANGE_TYPES), ``form`` (codes.NEW ...), ``relation`` (index in relids), ``owner`` (subxid, 0 when not
    streamed; in a plain block the transaction's index), ``ordinal``, ``cursor`` (position of the first value) and
    ``message`` (index).
    """
    plain, capacity, state = len(moves) > 1, len(change), 0
    n_rows = n_transactions = n_logical = 0
    begun_at = -2  # the message that B was
    own = np.int64(0)
    first_row_ordinal = first_ordinal  # that row 0 would have, counted back from the transaction's first
    last_relid = r = np.int64(-1)
    p = np.int64(0)
    for m in range(len(lengths)):
        start = p
        end = p + np.int64(lengths[m])
        error[codes.ERROR_MESSAGE] = m
        if payload[start] != 119:  # w
            return codes.BAD_HEADER
        kind = payload[start + codes.HEADER]
        after = moves[state, kind]
        if after == _NOWHERE:
            error[codes.ERROR_DETAIL] = kind
            return _misplaced(moves, kind)
        p = start + codes.HEADER + 1
        if streamed:
            if p + 4 > end:
                return codes.MALFORMED
            own = _be32(payload, p)
            p += 4
        if kind == 73 or kind == 85 or kind == 68:  # I, U, D
            if p + 5 > end:
                return codes.MALFORMED
            relid = _be32(payload, p)
            if relid != last_relid:
                r = _find(relids, relid)
                if r < 0:
                    error[codes.ERROR_RELATION] = relid
                    return codes.UNKNOWN_RELATION
                last_relid = relid
            error[codes.ERROR_RELATION] = r
            tag = payload[p + 4]
            p += 5
            shape = codes.NEW
            if tag != 78:  # not N: an old tuple, K or O
                error[codes.ERROR_DETAIL] = tag
                if kind == 73 or (tag != 75 and tag != 79):
                    return codes.UNKNOWN_TAG
                if n_rows >= capacity:
                    return codes.TOO_MANY
                change[n_rows] = _DELETE if kind == 68 else _UPDATE_PREIMAGE
                form[n_rows] = codes.OLD_KEY if tag == 75 else codes.OLD_FULL
                n_rows = _put(relation, owner, ordinal, cursor, message, n_rows, r, own, first_row_ordinal, p + 2, m)
                p = _walk(payload, p, end, n_columns[r], error)
                if p < 0:
                    return p
                shape = codes.NEW_AFTER_OLD
                if kind == 85:
                    if p >= end:
                        return codes.MALFORMED
                    error[codes.ERROR_DETAIL] = payload[p]
                    if payload[p] != 78:
                        return codes.UNKNOWN_TAG
                    p += 1
            elif kind == 68:
                error[codes.ERROR_DETAIL] = tag
                return codes.UNKNOWN_TAG
            if kind != 68:
                if n_rows >= capacity:
                    return codes.TOO_MANY
                change[n_rows] = _INSERT if kind == 73 else _UPDATE_POSTIMAGE
                form[n_rows] = shape
                n_rows = _put(relation, owner, ordinal, cursor, message, n_rows, r, own, first_row_ordinal, p + 2, m)
                p = _walk(payload, p, end, n_columns[r], error)
        elif kind == 84:  # T
            p, n_rows = _truncate(
                payload, p, end, relids, change, form, relation, owner, ordinal, cursor, message, n_rows, own,
                first_row_ordinal, m, error,
            )  # fmt: skip
        elif kind == 77:  # M
            if streamed and own != xid:
                return codes.FOREIGN_XID
            inside = not plain or state != 0
            p = _logical(payload, p, end, inside, logical, n_logical, n_transactions - 1, m, error)
            n_logical += 1
        elif kind == 66:  # B
            p = _begin(payload, p, end, transactions, n_transactions)
            own = np.int64(n_transactions)
            n_transactions += 1
            first_row_ordinal = -n_rows
            begun_at = m
        elif kind == 67:  # C
            p = _commit(payload, p, end, transactions, own, error)
        else:  # O
            if begun_at != m - 1:
                return codes.MISPLACED_ORIGIN
            p = _origin(payload, p, end, transactions, own)
        if p < 0:
            return p
        if p != end:
            return codes.MALFORMED
        state = after
    return n_rows if state == 0 else codes.UNFINISHED
