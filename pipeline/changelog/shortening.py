"""How far the change log of one table may be cut, and what it answers then. Plain values: no Spark, no Delta.

A *cut* at LSN C removes files whose changes have commit LSNs up to C. The Delta commit that removes them carries C as
an application transaction of the table (``locations.cut_id``). So whoever opens the table sees both or neither, and a
crash leaves no state in between. After C every change is there.

A state is made from a *start* and the changes after it. A snapshot is one: it answers from its ``valid_from`` on, and
needs the changes after its ``contained_upto``. A base table is one: it answers from its LSN on, and needs the changes
after that. A start is usable as long as what it needs lies at or above the cut.

**The promise.** Of a cut for the LSN W, which the retention asks for: every state at W or later that could be read
before can be read afterwards, and so can all changes after W. Below W some may be gone, and an error says so.

So for each generation that stands somewhere from W on, the cut goes no further than what its best start needs: of those
that answer at W already, or where the generation begins if that is later. Where there is none but the table's first
snapshot, next to nothing could be cut, however old the log is. So a cut may bring a start with it: the *fold* of the
table at the cut (``log_fold``), which answers from there on. It is made where the files of changes that go for it have
as many bytes as the rows that it is made from (``fold_for``): so what folds write in a year is no more than what the
stream wrote, and a log has no more than twice the table and what is to be kept.

A table with a base table gets no fold. The mirror makes its starts.

An example. The first snapshot answers from 100 on, and needs what lies after 90. The second one answers from 500 on,
and needs what lies after 480. There is a base table at 300::

    W     cut   usable starts         states
    200    90   first, base, second   from 100 on
    400   300   base, second          from 300 on
    600   480   second                from 500 on

A file goes if all of its changes lie at or below the cut, and it has no row of a snapshot that is usable still. Files
that straddle the cut stay until a later cut. So do those of which the Delta log does not say what they have.

Rejected: a row in ``_snapshots`` that tells the cut, because a crash between its commit and the removal leaves the two
apart. Rewriting files that straddle the cut: each of them would be written once more, for a few rows.

Called by ``pipeline.sinks.log_shortening``, which cuts, and tells what consumers hold back; and by ``change_log``,
which says what can be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.log_fold import LogFold, fold_lsn
from xidstream.pipeline.changelog.log_table import LogFile


@dataclass(frozen=True)
class Start:
    """A state to start from. ``answers_from``: the first LSN that it answers. ``needs``: the changes after this LSN
    are needed."""

    answers_from: int
    needs: int

    def is_usable(self, cut: int) -> bool:
        return self.needs >= cut


@dataclass(frozen=True)
class Stretch:
    """Where a generation stands: from ``first`` up to ``last``, both included. ``snapshot_lsn``: of its snapshot's
    rows. ``starts``: its snapshot comes first."""

    first: int
    last: float
    snapshot_lsn: int
    starts: tuple[Start, ...]


def stretches_of(
    generations: Sequence[TableGeneration], bases: Iterable[tuple[int, int]], fold: LogFold | None = None
) -> list[Stretch]:
    """``generations``: of one table, in the order of their snapshots. ``bases``: the place of the snapshot that a base
    table comes from, and its LSN. ``fold``: what the log has; None for none."""
    known = [(snapshot_lsn, Start(lsn, lsn)) for snapshot_lsn, lsn in bases]
    if fold is not None:
        known.append((fold.snapshot_lsn, Start(fold.answers_from, fold.lsn)))
    found = []
    for i, each in enumerate(generations):
        bounds = each.bounds
        last = math.inf if each.until is None else int(each.until)
        if i + 1 < len(generations):
            last = min(last, int(generations[i + 1].bounds.valid_from) - 1)
        first, snapshot_lsn = int(bounds.valid_from), int(bounds.snapshot_lsn)
        if first <= last:
            starts = [Start(first, int(bounds.contained_upto))]
            starts += [
                each for of, each in known if of == snapshot_lsn and first <= each.answers_from <= last
            ]
            found.append(Stretch(first, last, snapshot_lsn, tuple(starts)))
    return found


def best_starts(wanted: int, stretches: Iterable[Stretch]) -> list[tuple[Stretch, Start]]:
    """The start of each generation that stands somewhere from ``wanted`` on that needs the least of the log."""
    found = []
    for stretch in stretches:
        if stretch.last >= wanted:
            at = max(stretch.first, wanted)
            starts = [start for start in stretch.starts if start.answers_from <= at]
            found.append((stretch, max(starts, key=lambda start: start.needs)))
    return found


def cut_for(wanted: int, stretches: Sequence[Stretch], needed: Iterable[int] = ()) -> int:
    """The furthest cut that keeps the promise for ``wanted``. ``needed``: LSNs after which somebody needs all
    changes."""
    starts = (start.needs for _, start in best_starts(wanted, stretches))
    return max(0, min([wanted, *needed, *starts]))


def fold_for(
    files: Sequence[LogFile], stretches: Sequence[Stretch], cut: int, upto: int
) -> tuple[Stretch, int] | None:
    """The generation and the LSN of a fold that is worth it; None for none. ``cut``: the furthest one without it, which
    ``upto`` allows. ``upto``: the fold lies no further."""
    lsn = fold_lsn(upto)
    stretch = next((each for each in stretches if each.first <= lsn <= each.last), None)
    if stretch is None or lsn <= cut:
        return None
    folded = [with_fold(each, lsn) if each is stretch else each for each in stretches]
    if cut_for(lsn, folded) < lsn:
        return None  # a later generation needs what lies before
    start = max((each for each in stretch.starts if each.answers_from <= lsn), key=lambda each: each.needs)
    snapshot_lsn = stretch.snapshot_lsn if start is stretch.starts[0] else start.needs
    gone = removable(files, folded, lsn)
    of_start = [file for file in gone if file.min_lsn == file.max_lsn == snapshot_lsn]
    n_bytes = sum(file.n_bytes for file in of_start)
    return (stretch, lsn) if sum(file.n_bytes for file in gone) >= max(1, 2 * n_bytes) else None


def with_fold(stretch: Stretch, lsn: int) -> Stretch:
    return replace(stretch, starts=(*stretch.starts, Start(lsn, lsn)))


def removable(
    files: Iterable[LogFile], stretches: Sequence[Stretch], cut: int, fold: int = 0
) -> list[LogFile]:
    """What a cut removes of ``files``. ``fold``: the LSN of the fold whose rows the log has; 0 for none."""
    snapshot_lsns = [stretch.snapshot_lsn for stretch in stretches if stretch.starts[0].is_usable(cut)]
    snapshot_lsns += [fold] if fold >= cut else []
    return [
        file
        for file in files
        if file.max_lsn <= cut
        and not any(file.min_lsn <= snapshot_lsn <= file.max_lsn for snapshot_lsn in snapshot_lsns)
    ]


def held_back(
    files: Sequence[LogFile],
    stretches: Sequence[Stretch],
    wanted: int,
    base: int | None,
    consumers: Mapping[str, int],
    fold: int = 0,
    *,
    may_fold: bool = True,
) -> dict[str, int]:
    """How many bytes of ``files`` would go but for each of ``consumers``, were it the only one: their positions, by
    name. ``base``: the LSN after which a mirror needs all; None without one. ``fold`` as ``removable`` has it.
    ``may_fold``: the table can be folded."""
    cut = cut_for(wanted, stretches, () if base is None else (base,))
    found = fold_for(files, stretches, cut, wanted) if base is None and may_fold else None
    if found is None:
        gone = removable(files, stretches, cut, fold)
    else:
        stretch, lsn = found
        gone = removable(
            files, [with_fold(each, lsn) if each is stretch else each for each in stretches], lsn
        )
    return {
        name: sum(file.n_bytes for file in gone if file.max_lsn > position)
        for name, position in consumers.items()
    }


def lsn_for_bytes(files: Iterable[LogFile], most_bytes: int) -> int:
    """The LSN for which a cut would leave at most so many bytes of ``files``, if all up to there could go. 0 where
    nothing need go."""
    n_bytes = 0
    for file in sorted(files, key=lambda file: file.max_lsn, reverse=True):
        n_bytes += file.n_bytes
        if n_bytes > most_bytes:
            return file.max_lsn
    return 0


def oldest_state(stretches: Iterable[Stretch], cut: int) -> int | None:
    """The first LSN whose state can be read; None where none can."""
    return min(
        (start.answers_from for each in stretches for start in each.starts if start.is_usable(cut)),
        default=None,
    )
