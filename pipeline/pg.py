"""PostgreSQL's scalar identifiers as types: Lsn and Xid.

Both are subclasses of ``int``. So it costs nothing to compare, hash or pickle them or to put them in a numpy array.
They still print as PostgreSQL prints them, and mypy tells them apart. A wrapper class with a ``value`` field was
rejected: the reader compares LSNs for every transaction, and every Arrow and numpy call would have to unwrap it.
"""

from __future__ import annotations

import re
from typing import Final

from xidstream.pipeline.errors import UsageError

_LSN: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")

_RECORD_ALIGNMENT: Final = 8
"""``MAXALIGN``, on every platform that servers run on today."""
_WAL_PAGE_BYTES: Final = 8 << 10
_WAL_SEGMENT_BYTES: Final = 16 << 20
_SHORT_HEADER_BYTES: Final = 24
_LONG_HEADER_BYTES: Final = 40
"""The header's bytes on a segment's first page. On another page a record that began on the page before may end
there."""

POSTGRES_EPOCH_UNIX_US: Final = 946_684_800_000_000
"""Microseconds from the Unix epoch to PostgreSQL's, 2000-01-01 00:00:00 UTC: the zero of each time on the wire."""


class Lsn(int):
    """A position in the write-ahead log. It is an int, 0 to 2**64 - 1, as in the tables, and prints as ``0/16B3748``.

    ``Lsn(23803720)`` makes it from the number, and ``Lsn.parse("0/16B3748")`` from the text. ``int(lsn)`` and
    ``str(lsn)`` go back.
    """

    __slots__ = ()

    def __new__(cls, value: int) -> Lsn:
        if not 0 <= value < 1 << 64:
            raise UsageError(f"an LSN has 64 bits, got {value}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read PostgreSQL's text form (``pg_lsn`` input). Raises UsageError on anything else."""
        match = _LSN.fullmatch(text)
        if match is None:
            raise UsageError(f"not an LSN: {text!r}")
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    @property
    def before(self) -> Lsn:
        """One byte earlier, but not below 0: the last LSN at which a record that ends here can begin."""
        return self.minus(1)

    def minus(self, n_bytes: int) -> Lsn:
        """So many bytes earlier, but not below 0."""
        return Lsn(max(self - n_bytes, 0))

    @property
    def next_record(self) -> Lsn:
        """The first position, here or after, at which a record can begin. An insert position is one itself."""
        return Lsn(-(-self // _RECORD_ALIGNMENT) * _RECORD_ALIGNMENT)

    @property
    def record_end(self) -> Lsn:
        """The end of the last record before an insert position. A flush or a confirmation comes that far.

        They differ at the start of a page, where the insert position lies after the page's header already
        (``XLogBytePosToRecPtr`` in ``src/backend/access/transam/xlog.c``). The header is known by the sizes that
        servers have by default. On a server with others this is the position itself, which the next record passes.
        """
        is_first_of_segment = self % _WAL_SEGMENT_BYTES == _LONG_HEADER_BYTES
        if is_first_of_segment or self % _WAL_PAGE_BYTES == _SHORT_HEADER_BYTES:
            return Lsn(self - self % _WAL_PAGE_BYTES)
        return self

    def __str__(self) -> str:
        return f"{int(self) >> 32:X}/{int(self) & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Xid(int):
    """A transaction or subtransaction id, 0 to 2**32 - 1 (0 is InvalidTransactionId)."""

    __slots__ = ()

    def __new__(cls, value: int) -> Xid:
        if not 0 <= value < 1 << 32:
            raise UsageError(f"a transaction id has 32 bits, got {value}")
        return super().__new__(cls, value)

    def __str__(self) -> str:
        return str(int(self))

    def __repr__(self) -> str:
        return f"Xid({int(self)})"


INVALID_LSN: Final = Lsn(0)
