"""Which files of a base table a refresh replaces, and what by: decided from numbers alone, without Spark or Delta.

The files of a base table are cut by ranges of the key. Each one's lowest and highest value of each key column stand in
the Delta log. A refresh knows its *net rows*: one for each key that changed. A file is *touched* if one of these keys
lies within its ranges. Only touched files are read and written again. Two facts of a net row are used, which need not
agree:

- Its key may lie within the ranges of several files (those of keys with several columns overlap). All of them are
  touched: the key's former row is in one of them. This is what a right result depends on.
- It has one *slot*: the last file, in the order of lowest keys, that begins at or below it. There its new row goes.
  This is what keeps the ranges narrow, and nothing else depends on it. Of a key with several columns a file's lowest
  tuple is not known, only each column's lowest value, which together are at or below it.

``plan_swap`` makes groups of files that are replaced together. A file that has grown beyond one and a half times the
target is cut, by ranges, into files of about the target. Small neighbours are joined. New rows between files, or after
the last one, become a file of their own, unless the file in front of them is small.

An example. A base table has three files with keys 1 to 1,000, 1,001 to 2,000 and 2,001 to 3,000, and a target of 1,000
rows a file. Net rows: 5 is updated, 1,500 is deleted, 2,500 to 2,509 are updated, and 3,001 to 4,200 are new. All three
files are touched. Slots: 5 goes to the first file, 2,500 to 2,509 to the third, and so do the 1,200 new rows, because
the third file is the last that begins below them. The first file is written again with 1,000 rows, the second with 999.
The third would have 2,200, more than 1.5 times the target: it is cut into three. If only 5 had changed, the other two
files would stay as they are.

Rejected: a hash of the key in place of ranges. It scatters neighbours over all files, so every refresh touches all.
Also rejected: to write only new files with the changed rows and leave the old ones, since Delta's deletion vectors,
which would mark the old rows, can be read but not written by deltalake.

Called by ``pipeline.mirror.swap`` and, for its parts, by the other modules of ``pipeline.mirror``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SMALL: Final = 0.5
"""The part of the target below which a file is joined with its neighbour when one of the two is written anyway."""
LARGE: Final = 1.5
"""The multiple of the target above which a file is cut when it is written anyway."""
MOST_GROUPS: Final = 64
"""In one Spark job: each is a branch of its plan, and a plan's making takes longer with each branch."""
FILE_ROWS: Final = 1_000_000
"""The most rows of a file, whatever its bytes: a touched file costs its rows, and narrow rows take few bytes."""
_ROW_BYTES: Final = 100
"""The bytes of a row in Parquet, for a table of which nothing is known."""


@dataclass(frozen=True)
class KeyRange:
    """``low[i] <= value <= high[i]`` for the i-th key column that has statistics, of each row of the file."""

    low: tuple[Any, ...]
    high: tuple[Any, ...]

    def meets(self, other: KeyRange) -> bool:
        """Whether a key may lie within both."""
        sides = zip(self.low, self.high, other.low, other.high, strict=True)
        return all(low <= other_high and other_low <= high for low, high, other_low, other_high in sides)


@dataclass(frozen=True)
class BaseFile:
    """``path`` is relative to the table's directory. ``range`` is None where the log has no statistics of it."""

    path: str
    size_bytes: int
    n_rows: int
    range: KeyRange | None


@dataclass(frozen=True)
class FileGroup:
    """``files``, indexes of the table's files, are replaced by ``n_files`` new ones, which also take the new rows of
    ``slots``. There may be no old files, and the new ones may turn out to be fewer."""

    files: tuple[int, ...]
    slots: tuple[int, ...]
    bytes: int
    n_files: int = 1


@dataclass(frozen=True)
class NetCounts:
    """Counts of net rows: how many keys lie within each touched file's ranges; how many new rows each slot gets; how
    many net rows there are; how many of their keys have a null (no range tells where those are, and no join finds
    them), and how many rows have a text."""

    touched: dict[int, int]
    arriving: dict[int, int]
    n_keys: int
    n_null_keys: int
    n_texts: int


def in_key_order(files: Iterable[BaseFile]) -> list[BaseFile] | None:
    """The files by their lowest key; None if one of them has no range, and the table must be written as a whole."""
    files = list(files)
    if any(file.range is None for file in files):
        return None
    return sorted(files, key=lambda file: (file.range.low, file.range.high, file.path) if file.range else ())


def row_bytes(files: Iterable[BaseFile]) -> float:
    """The bytes of a row of the table, in its files."""
    files = list(files)
    n_rows = sum(file.n_rows for file in files)
    return sum(file.size_bytes for file in files) / n_rows if n_rows else _ROW_BYTES


def n_files_for(size: float, target: float) -> int:
    """How many files of about the target's size, in bytes or in rows, take so much."""
    return 1 if size <= LARGE * target else math.ceil(size / target)


def plan_swap(
    files: Sequence[BaseFile], touched: Mapping[int, int], arriving: Mapping[int, int], target_bytes: int
) -> list[FileGroup]:
    """``files`` are in key order. ``touched``: for the index of each touched file, how many of the keys lie within its
    ranges. ``arriving``: for each slot, how many net rows that are not gone have their place there. ``target_bytes``:
    of a file, which has no more than about ``FILE_ROWS`` rows all the same.
    """
    bytes_a_row = row_bytes(files)
    target_bytes = min(target_bytes, int(FILE_ROWS * bytes_a_row))
    small = SMALL * target_bytes
    groups: list[FileGroup] = []
    for i, file in enumerate(files):
        n_new = arriving.get(i, 0)
        # A row that was there before replaces itself.
        n_more = max(0, n_new - min(touched.get(i, 0), file.n_rows))
        if i in touched or (n_new and file.size_bytes < small):
            groups.append(FileGroup((i,), (i,), file.size_bytes + int(n_more * bytes_a_row)))
        elif n_new:
            groups.append(FileGroup((), (i,), int(n_new * bytes_a_row)))
    joined = _joined(groups, files, target_bytes)
    return [FileGroup(g.files, g.slots, g.bytes, n_files_for(g.bytes, target_bytes)) for g in joined]


def _joined(groups: Sequence[FileGroup], files: Sequence[BaseFile], target_bytes: int) -> list[FileGroup]:
    """Groups with small neighbours in them: other groups, and files that would have been kept."""
    small = SMALL * target_bytes
    done: list[FileGroup] = []
    taken: set[int] = {i for group in groups for i in group.files}
    for group in groups:
        last = done[-1] if done else None
        near = last is not None and group.slots[0] - last.slots[-1] <= 1
        if (
            near
            and last is not None
            and min(last.bytes, group.bytes) < small
            and last.bytes + group.bytes <= target_bytes
        ):
            done[-1] = group = _union(last, group)
        else:
            done.append(group)
        # The next file, if it is small and nobody else's.
        following = group.slots[-1] + 1
        if (
            group.files
            and following < len(files)
            and following not in taken
            and files[following].size_bytes < small
            and group.bytes + files[following].size_bytes <= target_bytes
        ):
            taken.add(following)
            done[-1] = _union(group, FileGroup((following,), (following,), files[following].size_bytes))
    return done


def _union(a: FileGroup, b: FileGroup) -> FileGroup:
    return FileGroup(a.files + b.files, tuple(sorted({*a.slots, *b.slots})), a.bytes + b.bytes)


def removed(files: Sequence[BaseFile], groups: Iterable[FileGroup]) -> list[BaseFile]:
    """The files that the groups replace."""
    return [files[i] for group in groups for i in group.files]


def jobs(groups: Sequence[FileGroup]) -> list[Sequence[FileGroup]]:
    """The groups in portions, each for one Spark job."""
    return [groups[i : i + MOST_GROUPS] for i in range(0, len(groups), MOST_GROUPS)]


def kept_versions(named: Collection[int], present: int) -> list[int]:
    """The versions of a base table whose files stay: those that the manifest names, and the present one, which the
    next refresh starts from even if the manifest does not name it yet."""
    return sorted({*named, present})
