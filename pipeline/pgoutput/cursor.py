"""A checked walk through one message of variable length.

No step may leave the message. Each step compares the bytes it needs with the bytes that are left, before it reads
or allocates. It raises MalformedMessage with the message's type, the LSN and the field's name. ``parser`` describes the
layouts with these steps and need not check any bounds.

Each step takes the name of its field. That costs nothing on success, and an error says where the bytes went wrong. The
bytes themselves are never quoted, except for one structural byte.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any, Final

from xidstream.pipeline.errors import MalformedMessage, PoisonedChange
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import MessageType

Buffer = bytes | memoryview

# An unsigned field of the wire is in range because of its width, so the checks of Lsn() and Xid() are left out.
lsn_of: Final[Callable[[int], Lsn]] = partial(int.__new__, Lsn)
xid_of: Final[Callable[[int], Xid]] = partial(int.__new__, Xid)

_U32: Final = Struct("!I")
_U64: Final = Struct("!Q")
_I16: Final = Struct("!h")
_I32: Final = Struct("!i")

_NAME_CHUNK: Final = 256


def malformed(title: str, lsn: Lsn, what: str) -> MalformedMessage:
    return MalformedMessage(f"malformed {title} message at {Lsn(lsn)}: {what}")


class MessageCursor:
    """A position in one message of variable length. Every step is checked against the message's end."""

    __slots__ = ("_data", "_end", "_lsn", "_position", "_title")

    def __init__(self, data: Buffer, offset: int, kind: MessageType, lsn: Lsn) -> None:
        self._data = data
        self._position = offset
        self._end = len(data)
        self._title = kind.title
        self._lsn = lsn
        type_byte = self.byte("its type")
        if type_byte != kind:
            raise self.malformed(f"type byte 0x{type_byte:02x}")

    def malformed(self, what: str) -> MalformedMessage:
        return malformed(self._title, self._lsn, what)

    @property
    def remaining(self) -> int:
        return self._end - self._position

    def _advance(self, n_bytes: int, what: str) -> int:
        position = self._position
        if n_bytes > self._end - position:
            raise self.malformed(f"it ends within {what}")
        self._position = position + n_bytes
        return position

    def fields(self, layout: Struct, what: str) -> tuple[Any, ...]:
        return layout.unpack_from(self._data, self._advance(layout.size, what))

    def byte(self, what: str) -> int:
        return self._data[self._advance(1, what)]

    def u32(self, what: str) -> int:
        value: int = self.fields(_U32, what)[0]
        return value

    def lsn(self, what: str) -> Lsn:
        return lsn_of(self.fields(_U64, what)[0])

    def stream_xid(self, in_stream: bool) -> Xid | None:
        return xid_of(self.u32("its xid")) if in_stream else None

    def name(self, what: str) -> str:
        """A null-terminated string that places are named by. Raises PoisonedChange where it is not valid UTF-8.

        Only a SQL_ASCII database sends such a one: everywhere else the server converts. An escape would do for
        people, but might be the name of another table or column, and mix the two.
        """
        try:
            return str(self._terminated(what), "utf-8")
        except UnicodeDecodeError:
            # The decoder's own error quotes the bytes, so it is not kept as the cause.
            raise PoisonedChange(
                f"{self._title} message at {Lsn(self._lsn)}: {what} is not valid UTF-8, as in a SQL_ASCII database",
                remedy="leave it out of the publication, or rename it, and read from a new slot: changes that were "
                "made under the old name keep it",
            ) from None

    def label(self, what: str) -> str:
        """A null-terminated string that nothing is found by; each byte that is not valid UTF-8 becomes ``\\xNN``."""
        return str(self._terminated(what), "utf-8", "backslashreplace")

    def _terminated(self, what: str) -> Buffer:
        start = self._position
        end = self._find_zero(start)
        if end < 0:
            raise self.malformed(f"{what} is not terminated")
        self._position = end + 1
        return self._data[start:end]

    def _find_zero(self, start: int) -> int:
        # A memoryview cannot search, and copying all of it for one name could copy a gigabyte.
        while start < self._end:
            found = bytes(self._data[start : start + _NAME_CHUNK]).find(b"\0")
            if found >= 0:
                return start + found
            start += _NAME_CHUNK
        return -1

    def counted_bytes(self, what: str) -> bytes:
        """An Int32 length and as many bytes."""
        n_bytes = self.fields(_I32, f"the length of {what}")[0]
        if n_bytes < 0:
            raise self.malformed(f"{what} has the length {n_bytes}")
        start = self._advance(n_bytes, what)
        return bytes(self._data[start : start + n_bytes])

    def count(self, smallest: int, what: str) -> int:
        """An Int16 number of items of at least ``smallest`` bytes each. They must fit in the rest of the message."""
        n = self.fields(_I16, f"the number of {what}")[0]
        if n < 0 or n * smallest > self.remaining:
            raise self.malformed(f"{n} {what} in {self.remaining} bytes")
        return int(n)

    def finish(self) -> None:
        if self._position != self._end:
            raise self.malformed(f"{self.remaining} bytes left over")
