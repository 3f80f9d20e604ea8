"""The net rows of one refresh in this process's memory: by key, by slot, and against the rows of a file.

A *net row* says what became of one key: its last row, or that it has none any more. They come from Spark's fold, or
are the last words of a simple tail (``pipeline.mirror.tail_rows``). They are sorted here by the key, ranged columns
first. So the rows of one key are neighbours, and so are those of a slot (``pipeline.mirror.plan``), and the keys that
lie within a file's range of the first column. Slots and ranges are found by bisection: per file, not per row.

Equality of keys is Arrow's. It is that of PostgreSQL for every type but floats and arrays, so tables with those in
their keys are not for this module (``is_comparable``). A key with a null (a value that its column cannot hold) equals
nothing here: ``n_null_keys`` tells of them, and the table is then written as a whole.

Plain pyarrow, no Spark, no loop over rows. Called by ``swap``, ``local_swap`` and ``tail_rows`` of this package.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from xidstream.pipeline.changelog.arrow_rows import CHANGE, TAKE_AWAY, TEXT
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.plan import BaseFile, NetCounts

_INDEX: Final = "n"
_SLICE_ROWS: Final = 2_000
"""A slice of that many rows is cheaper to write as one than to copy together with others."""


class NetRows:
    """``rows``: the table's columns, ``_text`` and ``_change_type``, in commit order where a key has several: its last
    row counts. ``key``: the key's columns, ``ranged`` those that have ranges, at least one."""

    def __init__(self, rows: pa.Table, key: Sequence[str], ranged: RangedKey) -> None:
        self._rows = rows.combine_chunks()
        self._key = list(key)
        self._ranged = ranged.columns
        self._order = _last_words(self._rows, ranged.ahead_in(key))
        """The index of the last row of each key, in the order of the keys."""
        self._bounds = [_as_stored(pc.take(_whole(self._rows[name]), self._order)) for name in ranged.columns]
        """For each column that files have ranges of: its values, in ``_order``."""
        is_gone = pc.is_in(_whole(self._rows[CHANGE]), value_set=pa.array(TAKE_AWAY))
        self._is_set = pc.take(pc.invert(is_gone), self._order)
        """For each of ``_order``: whether its row is there afterwards. Otherwise it is gone."""
        sums = np.cumsum(self._is_set.to_numpy(zero_copy_only=False), dtype=np.int64)
        self._n_set_before = np.concatenate([np.zeros(1, np.int64), sums])
        """At i: how many of the first i of ``_order`` are there afterwards."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def n_null_keys(self) -> int:
        return sum(self._rows[name].null_count for name in self._key)

    def counts(self, files: Sequence[BaseFile]) -> NetCounts:
        """``files`` have ranges, and are in key order."""
        starts = self.slots(files)
        arriving = {}
        for i, (first, behind) in enumerate(pairwise(starts)):
            n = int(self._n_set_before[behind] - self._n_set_before[first])
            if n:
                arriving[i] = n
        touched = {i: n for i, file in enumerate(files) if (n := self._n_within(file))}
        return NetCounts(touched, arriving, len(self), self.n_null_keys, self._n_texts())

    def slots(self, files: Sequence[BaseFile]) -> list[int]:
        """``len(files) + 1`` places in the order of the key: the rows of slot i are those from the i-th up to the
        next."""
        indexes = range(len(self))
        lows = [file.range.low for file in files[1:] if file.range is not None]
        return [0, *(bisect_left(indexes, low, key=self._key_at) for low in lows), len(self)]

    def arriving(self, starts: Sequence[int], slots: Iterable[int], schema: pa.Schema) -> pa.Table:
        """The rows of the slots that are not gone, by key, in ``schema``."""
        chunks = [self._order.slice(0, 0)]
        for slot in slots:
            chunk = slice(starts[slot], starts[slot + 1])
            chunks.append(pc.filter(self._order[chunk], self._is_set[chunk]))
        return in_schema(_taken(self._rows, pa.concat_arrays(chunks)), schema)

    def keys_near(self, file: BaseFile) -> NearKeys:
        """The keys of all net rows that may have a row in the file."""
        first, behind = self._near(file)
        order, bound = self._order[first:behind], self._bounds[0][first:behind]
        is_within = self._is_within(file, first, behind)
        if is_within is not None:
            order, bound = pc.filter(order, is_within), pc.filter(bound, is_within)
        return NearKeys(self._rows.select(self._key).take(order), self._ranged[0], bound)

    # -- inside ----------------------------------------------------------------------------------------

    def _n_texts(self) -> int:
        texts = _whole(self._rows[TEXT])
        return (
            0
            if texts.null_count == len(texts)
            else int(pc.sum(texts.take(self._order).is_valid()).as_py() or 0)
        )

    def _key_at(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index].as_py() for column in self._bounds)

    def _near(self, file: BaseFile) -> tuple[int, int]:
        """The places of the rows within the file's range of the first column."""
        assert file.range is not None
        indexes, first = range(len(self)), self._bounds[0]

        def value(index: int) -> Any:
            return first[index].as_py()

        low, high = file.range.low[0], file.range.high[0]
        return bisect_left(indexes, low, key=value), bisect_right(indexes, high, key=value)

    def _n_within(self, file: BaseFile) -> int:
        """How many keys lie within the file's ranges of all columns."""
        first, behind = self._near(file)
        is_within = self._is_within(file, first, behind)
        return behind - first if is_within is None else int(pc.sum(is_within).as_py() or 0)

    def _is_within(self, file: BaseFile, first: int, behind: int) -> pa.Array | None:
        """Whether the keys of the places near the file lie within the ranges of its other columns. None: all do."""
        assert file.range is not None
        if first == behind or len(self._bounds) == 1:
            return None
        within = pa.repeat(pa.scalar(True), behind - first)
        for column, low, high in zip(self._bounds[1:], file.range.low[1:], file.range.high[1:], strict=True):
            part = column[first:behind]
            within = pc.and_(within, pc.and_(pc.greater_equal(part, low), pc.less_equal(part, high)))
        return within


def _taken(rows: pa.Table, indexes: pa.Array) -> pa.Table:
    """The rows at ``indexes``; neighbours that came in the order of their keys are not copied."""
    numbers = indexes.to_numpy()
    if len(numbers) and np.all(np.diff(numbers) == 1):
        return rows.slice(int(numbers[0]), len(numbers))
    return rows.take(indexes)


def _last_words(rows: pa.Table, names: Sequence[str]) -> pa.Array:
    """The places of each key's last row, by key."""
    columns = [_whole(rows[name]) for name in names]
    first = _as_stored(columns[0])
    if pt.is_integer(first.type) and not first.null_count and _ascends(first.to_numpy()):
        return pa.array(np.arange(rows.num_rows, dtype=np.uint64))
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in names])
    return _last_of_each(order, columns)


def _ascends(values: npt.NDArray[Any]) -> bool:
    """Whether each is greater than the one before."""
    return bool(np.all(values[1:] > values[:-1]))


def _last_of_each(order: pa.Array, columns: Sequence[pa.Array]) -> pa.Array:
    """``order`` (stable, by ``columns``) without the rows after which another one with the same values comes.

    A null equals nothing.
    """
    if len(order) < 2:
        return order
    is_same = pa.repeat(pa.scalar(True), len(order) - 1)
    for column in columns:
        values = pc.take(column, order)
        is_same = pc.and_(is_same, pc.equal(values[:-1], values[1:]).fill_null(False))
    if not pc.any(is_same).as_py():
        return order
    return pc.filter(order, pa.concat_arrays([pc.invert(is_same), pa.array([True])]))


@dataclass(frozen=True)
class NearKeys:
    """The keys of net rows near one file. ``keys``: of the key's columns. They are in the order of the column
    ``first``, whose values ``bound`` has as ``KeyRange`` has them."""

    keys: pa.Table
    first: str
    bound: pa.Array

    def without(self, rows: pa.Table) -> pa.Table:
        """``rows`` in their order, without those with one of the keys. ``rows``: a chunk of the file.

        Arrow's ``is_in`` and join make a hash table of the keys each time. So a chunk is compared with the keys within
        its own range alone, which are few where the file is in the order of its key; and numbers, which most keys
        are, are looked up by bisection.
        """
        if not self.keys.num_rows or not rows.num_rows:
            return rows
        values = _as_stored(_whole(rows[self.first]))
        if self.keys.num_columns == 1 and pt.is_integer(values.type):
            return _but(rows, _indexes_of(values.to_numpy(), self.bound.to_numpy()))
        ends = pc.min_max(values)
        behind = bisect_right(self.bound, ends["max"].as_py(), key=_value)
        begin = bisect_left(self.bound, ends["min"].as_py(), key=_value)
        return _but(rows, _indexes_in(rows, self.keys.slice(begin, behind - begin)))


def _value(scalar: pa.Scalar) -> Any:
    return scalar.as_py()


def _indexes_of(values: npt.NDArray[Any], ascending: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The places of the values that are in ``ascending``. Few are looked for in many, if these ascend as well."""
    if len(ascending) < len(values) and _ascends(values):
        indexes = np.minimum(np.searchsorted(values, ascending), len(values) - 1)
        return np.extract(values[indexes] == ascending, indexes)
    indexes = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.flatnonzero(ascending[indexes] == values)


def _indexes_in(rows: pa.Table, keys: pa.Table) -> npt.NDArray[np.int64]:
    """The places of the rows whose key is in ``keys``, ascending."""
    names = keys.column_names
    if not keys.num_rows:
        return np.zeros(0, np.int64)
    if len(names) == 1:
        is_new = _whole(pc.is_in(rows[names[0]], value_set=_whole(keys[names[0]])))
        return np.flatnonzero(is_new.to_numpy(zero_copy_only=False))
    # Names of our own: a key's column may be called as the place.
    parts = [f"k{i}" for i in range(len(names))]
    there = rows.select(names).rename_columns(parts)
    there = there.append_column(_INDEX, pa.array(np.arange(rows.num_rows)))
    new = there.join(keys.rename_columns(parts), parts, join_type="left semi")[_INDEX]
    return np.sort(new.to_numpy())


def _but(rows: pa.Table, indexes: npt.NDArray[np.int64]) -> pa.Table:
    """``rows`` without those at ``indexes``, which ascend. Nothing is copied where these are few."""
    if len(indexes) * _SLICE_ROWS <= rows.num_rows:
        ends = pairwise([-1, *indexes.tolist(), rows.num_rows])
        return pa.concat_tables([rows.slice(last + 1, index - last - 1) for last, index in ends])
    is_kept = np.ones(rows.num_rows, bool)
    is_kept[indexes] = False
    return rows.filter(pa.array(is_kept))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def _as_stored(values: pa.Array) -> pa.Array:
    """A key's values as ``KeyRange`` has them."""
    if pt.is_date32(values.type):
        return values.cast(pa.int32())
    if pt.is_timestamp(values.type):
        return values.cast(pa.int64())
    return values
