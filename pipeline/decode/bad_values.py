"""What the kernels report, told as errors: message type, LSN, relation, column, never a value.

``BadValue`` is how a codec says which rows of a column cannot be read. It never leaves the package: ``tables`` makes
notes of it (``pipeline.poison``), because whether a bad row matters is known only when its transaction ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.decode import codes
from xidstream.pipeline.errors import (
    IllegalTransition,
    MalformedMessage,
    ProtocolViolation,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion


class BadValue(Exception):
    """Rows of the column in hand hold what its type does not allow; ``reason`` never quotes it.

    ``rows: int64[k]`` are all such rows up to the last of them, ascending. Later ones may follow that no codec has
    looked at yet.
    """

    def __init__(self, rows: int | npt.NDArray[np.int64], reason: str = "malformed for its type") -> None:
        super().__init__(rows, reason)
        self.rows = np.atleast_1d(np.asarray(rows, np.int64))
        self.reason = reason


class BlockStory:
    """Where a message of a block is, for errors. Borrows ``payload`` and ``lengths``."""

    def __init__(self, payload: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int32]) -> None:
        self._payload = payload
        self._lengths = lengths

    def _offset(self, message: int) -> int:
        return int(self._lengths[:message].sum(dtype=np.int64))

    def lsn(self, message: int) -> Lsn:
        """The start LSN of the message's header; 0/0 on some message types, or where there is no header."""
        offset = self._offset(message) + 1
        return Lsn(int.from_bytes(self._payload[offset : offset + 8].tobytes(), "big"))

    def lsns(self, messages: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """``lsn`` of many messages."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        offsets = ends[messages] - self._lengths[messages] + 1
        raw = self._payload[offsets[:, None] + np.arange(8)]
        return np.ascontiguousarray(raw).view(">i8").ravel().astype(np.int64)

    def describe(self, message: int) -> str:
        offset = self._offset(message) + codes.HEADER
        if offset >= len(self._payload) or self._lengths[message] <= codes.HEADER:
            return f"message {message} of the block at LSN {self.lsn(message)}"
        code = int(self._payload[offset])
        kind = repr(chr(code)) if 32 <= code < 127 else f"0x{code:02x}"
        return f"message {kind} at LSN {self.lsn(message)}"


def scan_fault(
    code: int, error: npt.NDArray[np.int64], story: BlockStory, relations: tuple[RelationVersion, ...]
) -> XidstreamError:
    """The exception for a negative result of a kernel in ``scan``."""
    where = story.describe(int(error[codes.ERROR_MESSAGE]))
    about = int(error[codes.ERROR_RELATION])
    detail = int(error[codes.ERROR_DETAIL])
    if code == codes.UNKNOWN_RELATION:
        return ProtocolViolation(f"{where} is about relation {about}, which no R message declared")
    if code == codes.COLUMN_COUNT:
        relation = relations[about]
        return ProtocolViolation(
            f"{where} has a tuple of {detail} columns, but {relation.name} has {len(relation.columns)}"
        )
    if code == codes.BINARY:
        relation = relations[about]
        return Unsupported(
            f"{where}: {relation.name} column {relation.columns[detail].name} came in binary",
            remedy="start replication without the `binary` option",
        )
    if code == codes.UNFINISHED:
        return IllegalTransition(f"a plain block ends inside a transaction, after {where}")
    if code in _ILLEGAL:
        return IllegalTransition(f"{where} {_ILLEGAL[code]}")
    return MalformedMessage(f"{where} {_MALFORMED[code].format(detail=detail)}")


_ILLEGAL = {
    codes.OUTSIDE: "is outside a transaction",
    codes.NESTED: "is inside a transaction, where it may not be",
    codes.MISPLACED_ORIGIN: "does not directly follow its transaction's B",
    codes.COMMIT_MISMATCH: "has another commit LSN than its transaction's B",
    codes.FOREIGN_XID: "names another top-level transaction than its block's",
    codes.UNKNOWN_TYPE: "has no place in this kind of block",
}
_MALFORMED = {
    codes.MALFORMED: "does not end where its content ends",
    codes.BAD_HEADER: "does not begin with a CopyData header",
    codes.UNKNOWN_TAG: "has the tuple tag 0x{detail:02x}, which it may not have",
    codes.UNKNOWN_KIND: "has a value of unknown kind in column {detail}",
    codes.BAD_FLAGS: "has unknown flags 0x{detail:02x}",
    codes.TOO_MANY: "is one more than was counted",
}
