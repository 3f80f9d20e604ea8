"""The numbers that kernels and Python agree on.

**A number here never changes its meaning**: append, do not renumber. Numba compiles globals into kernels as constants,
and its cache on disk only notices a change of the kernel's own file. So a kernel that was compiled before the change
would go on with the old numbers. (Enums were rejected: numba resolves each member at compile time, slowly.)
"""

from __future__ import annotations

from typing import Final

HEADER: Final = 25
"""Bytes of a CopyData ``w`` header: the byte 'w', start LSN, end LSN, time."""

# Codes that the kernels of `scan` return instead of a number of rows.
MALFORMED: Final = -1
"""The message is shorter or longer than its content, or a count in it is impossible."""
BAD_HEADER: Final = -2
UNKNOWN_TYPE: Final = -3
"""A message type that has no place in this kind of block."""
UNKNOWN_RELATION: Final = -4
COLUMN_COUNT: Final = -5
UNKNOWN_TAG: Final = -6
"""A tuple tag that its message may not have."""
UNKNOWN_KIND: Final = -7
"""The kind of a value is not n, u, t or b."""
BINARY: Final = -8
OUTSIDE: Final = -9
"""A row, origin, commit or transactional message outside B..C."""
NESTED: Final = -10
"""A B, or a message that is not transactional, inside B..C."""
MISPLACED_ORIGIN: Final = -11
COMMIT_MISMATCH: Final = -12
UNFINISHED: Final = -13
"""The block ends inside a transaction."""
BAD_FLAGS: Final = -14
FOREIGN_XID: Final = -15
"""A logical message in a streamed block names another top-level transaction."""
TOO_MANY: Final = -16
"""More rows than `measure` counted. This cannot happen; if it does, the kernel must not write out of bounds."""

# The `form` of a row says which tuple it has.
NEW: Final = 0
NEW_AFTER_OLD: Final = 1
"""A new tuple whose old tuple is the row before it."""
OLD_KEY: Final = 2
OLD_FULL: Final = 3
NO_TUPLE: Final = 4

# Columns of `transactions: int64[n, 6]` and `logical: int64[n, 8]`.
TX_XID, TX_COMMIT_LSN, TX_END_LSN, TX_TIMESTAMP, TX_ORIGIN_START, TX_ORIGIN_LENGTH = range(6)
(
    LOGICAL_LSN,
    LOGICAL_TRANSACTIONAL,
    LOGICAL_OWNER,
    LOGICAL_PREFIX_START,
    LOGICAL_PREFIX_LENGTH,
    LOGICAL_CONTENT_START,
    LOGICAL_CONTENT_LENGTH,
    LOGICAL_MESSAGE,
) = range(8)

# Places of `error: int64[4]`.
ERROR_MESSAGE, ERROR_RELATION, ERROR_DETAIL = range(3)
"""Index of the message; index of the relation or the relid; column, column count or byte."""

# Values of `length` that are not a number of bytes.
NULL: Final = -1
"""SQL NULL, or absent from a key-only tuple."""
UNCHANGED: Final = -2
"""Unchanged TOAST that no old tuple fills."""
TEXT: Final = -4
"""A length of TEXT or below marks a value of TEXT - length bytes that the native type cannot hold."""
