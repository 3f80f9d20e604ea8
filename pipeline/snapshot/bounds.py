"""Which transactions of the stream a table's snapshot contains.

LSNs alone do not tell. A commit is in the WAL before other sessions see it, and with synchronous replication long
before. So a snapshot may lack a transaction whose commit LSN lies below the place where it was taken. What a session
sees is decided by transaction ids (``pg_current_snapshot()``): it sees those that had ended when it was taken, which
are the ones below ``xmax`` and not in ``xip``. ``valid_from`` is read after the snapshot, so a commit above it is not
contained, whatever its id.

No commit has ``snapshot_lsn`` or ``valid_from`` as its LSN. A server tells where its next record *begins*, and that may
be the COMMIT of a transaction that is open: whoever says that all is known up to there says it of that commit, too. So
``valid_from`` is one byte before where the WAL ended after the snapshot, and ``snapshot_lsn`` two bytes before where it
ended when the table was locked, because the two may be the same. Records begin at multiples of 8, so
``Lsn.next_record`` of either is that position again.

The xid on the wire has 32 bits, ``xmin``, ``xmax`` and ``xip`` have 64 (``FullTransactionId``). All xids that are in
use lie within 2**31 of one another, so ``xmax`` says which epoch a wire's xid belongs to. That is true of transactions
that were in use when the snapshot was taken. A log may be older than the last 2**31 xids (25 days with 1,000 a second),
and of its oldest rows the id says nothing. So the snapshot has an LSN of the log, too. All that committed up to
``contained_upto`` is contained, whatever its id, and nobody need read it.

Which LSN that may be:

- What the snapshot does not see has an id of at least ``xmin``, even where its commit record is written already (it
  still flushes, or waits for a synchronous standby) or is prepared.
- A checkpoint begins at ``redo_lsn``, and notes ``next_xid`` after that (``CreateCheckPoint`` in
  ``src/backend/access/transam/xlog.c``). So an id of at least ``next_xid`` was given out after ``redo_lsn``, and its
  transaction's commit record is behind it, too.
- If ``next_xid`` is at most ``xmin``, all that is not seen committed after ``redo_lsn``.

``pg_control_checkpoint()`` tells both. Where a transaction has been open since before the last checkpoint, it tells
nothing. Then the LSN of an earlier snapshot of the slot holds as well, because a later one sees all that it saw
(``sees_all_of``). Positions do not tell which one is earlier: of two tables in hand at the same time the later snapshot
may be committed first, and know of a checkpoint that is older than both. The wire's ids are enough, if no more than
2**31 have passed since. (Rejected: the WAL's end, read before the snapshot: commits that wait for a standby lie below
it. The slot's ``restart_lsn``: it moves past such commits.)

- Of one table more can be known. Where the snapshot waited for the table's writers, it has all changes of the table
  that committed below ``snapshot_lsn``. A writer holds its lock until others see its commit. So at the moment when the
  WAL ended there, it held it still, and was waited for, or its commit was to be seen (``postgres.table_snapshot``). Of
  other tables that says nothing, so no later snapshot takes it over (``whole_upto``).

An example. A table is locked when the WAL ends at 0/5008 (``snapshot_lsn`` is 0/5006). The snapshot is taken with xmin
740, xmax 760 and xip 740 and 752, and then the WAL ends at 0/5200 (``valid_from`` is 0/51FF)::

    xid  commit_lsn  contained?
    735  0/4F00      yes: below xmin, it had ended
    745  0/5100      yes: below xmax and not in xip, it ended before the snapshot was taken
    752  0/51A0      no: it was open for the snapshot, though its COMMIT is in the WAL before 0/5200
    740  0/6000      no: it was open
    765  0/5180      no: not below xmax, it began after the snapshot
    745  0/7000      no: after valid_from this is another transaction, of another epoch of xids

Subtransactions need no rule of their own: the stream names a transaction by its top-level xid, and ``xip`` lists
top-level xids alone (``pg_current_snapshot`` in ``src/backend/utils/adt/xid8funcs.c``). A prepared transaction is open
until COMMIT PREPARED, so it is in ``xip`` like any other.

Rejected: an exported snapshot of CREATE_REPLICATION_SLOT, which gives one LSN that decides, but serves once, dies with
its connection, and cannot be had for a table that is added later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid

_EPOCH = 1 << 32
_HALF = 1 << 31


@dataclass(frozen=True)
class Checkpoint:
    """``redo_lsn``: where it begins in the WAL. ``next_xid``: which id, of 64 bits, was to be given out next, asked
    after that."""

    redo_lsn: Lsn
    next_xid: int


@dataclass(frozen=True)
class SnapshotBounds:
    """``snapshot_lsn``: the ``_commit_lsn`` of the snapshot's rows, which no commit has. ``valid_from``: from here on
    the table's state is known; no commit has it either. ``xmin``, ``xmax``, ``xip`` (ascending) have 64 bits.
    ``taken_at_us``: Unix epoch, UTC. ``contained_upto``: all that committed up to this LSN is contained; 0/0 where none
    is known. ``writers_upto``: the same of the snapshot's own table alone."""

    snapshot_lsn: Lsn
    valid_from: Lsn
    xmin: int
    xmax: int
    xip: tuple[int, ...]
    taken_at_us: int
    contained_upto: Lsn = INVALID_LSN
    writers_upto: Lsn = INVALID_LSN

    def __post_init__(self) -> None:
        if not self.snapshot_lsn < self.valid_from:
            raise UsageError(f"a snapshot at {self.snapshot_lsn} cannot be valid from {self.valid_from}")
        if self.whole_upto > self.valid_from:
            raise UsageError(f"a snapshot valid from {self.valid_from} cannot contain {self.whole_upto}")
        if not self.xmin <= self.xmax or any(not self.xmin <= xid < self.xmax for xid in self.xip):
            raise UsageError(
                f"not a snapshot: xmin {self.xmin}, xmax {self.xmax}, {len(self.xip)} xids between"
            )

    @property
    def whole_upto(self) -> Lsn:
        """All changes of the snapshot's table that committed up to this LSN are contained."""
        return max(self.contained_upto, self.writers_upto)

    def knowing(self, checkpoint: Checkpoint | None, earlier: Lsn = INVALID_LSN) -> SnapshotBounds:
        """These bounds with what the server's last checkpoint tells, and ``earlier``, an older snapshot's
        ``contained_upto``."""
        known = [self.contained_upto, earlier]
        if checkpoint is not None and checkpoint.next_xid <= self.xmin:
            known.append(checkpoint.redo_lsn.before)
        return replace(self, contained_upto=max(known))

    def sees_all_of(self, other: SnapshotBounds) -> bool:
        """Whether each transaction that had ended for ``other`` had ended for this snapshot, too."""
        open_here = {xid for xid in self.xip if xid < other.xmax}
        return other.xmax <= self.xmax and open_here <= set(other.xip)

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
        if commit_lsn <= self.whole_upto:
            return True
        wide = self.widened(xid)
        return wide < self.xmax and wide not in self.xip
