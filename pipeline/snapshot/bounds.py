"""Which transactions of the stream a table's snapshot contains.

LSNs alone do not tell. A commit is in the WAL before other sessions see it, and with synchronous replication long
before. So a snapshot may lack a transaction whose commit LSN lies below the place where it was taken. What a session
sees is decided by transaction ids (``pg_current_snapshot()``): it sees those that had ended when it was taken, which
are the ones below ``xmax`` and not in ``xip``. ``valid_from`` is read behind the snapshot, so a commit above it is not
contained, whatever its id.

No commit has ``place`` or ``valid_from`` as its LSN. A server tells where its next record *begins*, and that may be the
COMMIT of a transaction that is open: whoever says that all is known up to there says it of that commit, too. So
``valid_from`` is one byte before where the WAL ended behind the snapshot, and ``place`` two bytes before where it ended
when the table was locked, because the two may be the same. Records begin at multiples of 8, so ``Lsn.next_record`` of
either is that position again.

The xid on the wire has 32 bits, ``xmin``, ``xmax`` and ``xip`` have 64 (``FullTransactionId``). All xids that are in
use lie within 2**31 of one another, so ``xmax`` says which epoch a wire's xid belongs to.

Subtransactions need no rule of their own: the stream names a transaction by its top-level xid, and ``xip`` lists
top-level xids alone (``pg_current_snapshot`` in ``src/backend/utils/adt/xid8funcs.c``). A prepared transaction is open
until COMMIT PREPARED, so it is in ``xip`` like any other.

Rejected: an exported snapshot of CREATE_REPLICATION_SLOT, which gives one LSN that decides, but serves once, dies with
its connection, and cannot be had for a table that is added later.
"""

from __future__ import annotations

from dataclasses import dataclass

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn, Xid

_EPOCH = 1 << 32
_HALF = 1 << 31


@dataclass(frozen=True)
class SnapshotBounds:
    """``place``: the ``_commit_lsn`` of the snapshot's rows, which no commit has. ``valid_from``: from here on the
    table's state is known; no commit has it either. ``xmin``, ``xmax``, ``xip`` (ascending) have 64 bits.
    ``taken_at_us``: Unix epoch, UTC."""

    place: Lsn
    valid_from: Lsn
    xmin: int
    xmax: int
    xip: tuple[int, ...]
    taken_at_us: int

    def __post_init__(self) -> None:
        if not self.place < self.valid_from:
            raise UsageError(f"a snapshot at {self.place} cannot be valid from {self.valid_from}")
        if not self.xmin <= self.xmax or any(not self.xmin <= xid < self.xmax for xid in self.xip):
            raise UsageError(
                f"not a snapshot: xmin {self.xmin}, xmax {self.xmax}, {len(self.xip)} xids between"
            )

    def widened(self, xid: Xid) -> int:
        """The 64-bit id of a transaction of the stream: the one of its 32 bits that is nearest to ``xmax``."""
        near = self.xmax - self.xmax % _EPOCH + xid
        if near - self.xmax > _HALF:
            return near - _EPOCH
        if self.xmax - near > _HALF:
            return near + _EPOCH
        return near

    def contains(self, xid: Xid, commit_lsn: Lsn) -> bool:
        """Whether the snapshot has what the transaction did. ``xid`` is its top-level id."""
        if commit_lsn > self.valid_from:
            return False
        wide = self.widened(xid)
        return wide < self.xmax and wide not in self.xip
