"""The fold of a log: the table's rows at a cut, which stand in the log in the place of what was cut.

A fold at LSN F is the state of one table at F. Its rows are in the log's own Delta table, as a snapshot's are
(``_change_type`` is ``snapshot``), with F as their ``_commit_lsn``. It is a start like a base table
(``shortening``): it answers from F on, and needs the changes after F. Nobody who reads changes sees its rows.

**One commit** adds the rows, removes what they take the place of, and tells cut and fold, as application transactions
of the table (``locations.fold_id``). So a crash leaves the log of before, or the shorter one, and some files without a
name, which go like those of a failed snapshot. The fold belongs to the generation whose snapshot it comes from: where
that ends, the fold ends. A table has one fold at most. The next one, at a later cut, takes its place.

**F is no commit's LSN**, nor a snapshot's. Records begin at multiples of 8, and snapshots take the two positions before
one (``snapshot.bounds``). So a fold takes the third one before it.

An erasure makes a fold, too, of a base table whose state would go with its rows (``pipeline.erasure.kept_states``). It
has the state of a commit, whose LSN a fold cannot have. So it lies some bytes behind, where no other record can begin,
and ``fold/from`` tells that it answers from that commit on. A log that only an older xidstream reads loses these few
positions, and no state of another moment is in their place.

How many rows it has is told, too, so that rows which another tool took are missed. The version of an application
transaction never falls, and a table may have fewer rows than before. So there are two sums over all folds of the table:
with the last one, and without it.

Rejected: a generation of its own, with a line in ``_snapshots``, as a repair makes one (``carrying``). Its line comes
after its rows, in another commit. In between the rows that it stands for must be there, and so must those that it
takes the place of. And what ends the one generation would have to end the other. A row count in the table's properties
is a commit of its own.

Plain values. Called by ``change_log``, ``table_at``, and ``folding``, which writes the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xidstream.pipeline.log_tables.locations import fold_id

_ALIGNMENT = 8
_BEFORE_RECORD = 3


@dataclass(frozen=True)
class LogFold:
    """``snapshot_lsn``: of the snapshot of the generation that it belongs to. ``n_rows``: at the commit; what an
    erasure took since, its own marks tell. ``since``: the LSN of the state, where the fold lies after it; None:
    ``lsn``."""

    snapshot_lsn: int
    lsn: int
    n_rows: int
    since: int | None = None

    @property
    def answers_from(self) -> int:
        """The first LSN whose state it has."""
        return self.lsn if self.since is None else self.since


def fold_lsn(upto: int) -> int:
    """The last position at or below ``upto`` that a fold may have; 0 or less where there is none."""
    lsn = upto - upto % _ALIGNMENT + _ALIGNMENT - _BEFORE_RECORD
    return lsn if lsn <= upto else lsn - _ALIGNMENT


def fold_behind(lsn: int) -> int:
    """The position for a fold of the state at ``lsn``: no commit has it, and none lies in between."""
    return lsn if lsn % _ALIGNMENT else lsn + _ALIGNMENT - _BEFORE_RECORD


def fold_of(watermark: Callable[[str], int | None], application_id: str) -> LogFold | None:
    """The fold that a table tells. ``watermark``: the version of its application transaction of that name."""
    name = fold_id(application_id)
    lsn = watermark(name)
    if not lsn:
        return None
    snapshot_lsn, n_rows, n_before = (
        watermark(f"{name}/{each}") or 0 for each in ("place", "rows", "rows_before")
    )
    since = watermark(f"{name}/from")
    # An earlier fold's may be left: this one's is in the record that ends here.
    is_its_own = since is not None and lsn - _ALIGNMENT < since < lsn
    return LogFold(snapshot_lsn, lsn, n_rows - n_before, since if is_its_own else None)


def fold_marks(fold: LogFold, watermark: Callable[[str], int | None], application_id: str) -> dict[str, int]:
    """The application transactions of the commit that brings ``fold``, by those of before."""
    name = fold_id(application_id)
    n_before = watermark(f"{name}/rows") or 0
    return {
        name: fold.lsn,
        f"{name}/place": fold.snapshot_lsn,
        f"{name}/rows": n_before + fold.n_rows,
        f"{name}/rows_before": n_before,
        **({} if fold.since is None else {f"{name}/from": fold.since}),
    }
