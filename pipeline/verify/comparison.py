"""Two frames of one table's rows, compared as multisets: by ranges of the key first, and by row where ranges differ.

Both frames go through one expression. So whatever form it gives a value, it gives the same form on both sides.

*Canonical.* A row is its columns, and what ``_text`` has of values that their types cannot hold. Floats are their text,
because Spark takes -0.0 for 0.0. Null counts by itself: Spark's hash passes over nulls, so which columns are null, and
which elements of an array, is hashed beside them.

*By range.* A row's hash has 64 bits (xxHash64). Of each range both sides give the number of rows, and the sums of the
hashes' upper and lower halves. Sums do not depend on the order, count duplicates, and cannot overflow. A difference
stays hidden with a probability of about 2**-64. It is no proof against somebody who chooses the values. One scan of
each side, and no row is moved.

*The ranges* are found in the source's rows: a sample of keys, sorted by Spark. Which range a row belongs to is the same
expression on both sides. So its literals decide how even the ranges are, and never what is found. Columns that have no
literal here, arrays, are compared as text.

*By row.* Of the ranges that differ, rows are grouped by all that they are, with +1 for the source's and -1 for the
log's. What is not 0 differs. By key it is a changed row, a missing or an extra one. A row that the log has twice is an
extra one.

Rejected: a join of both sides by key, which moves all rows, and takes doubled rows for equal ones.

Called by ``verifying``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from xidstream.pipeline.changelog.internal_columns import prepared
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.verify.result import DifferenceKind, Differences, DifferingRange, DifferingRow, Texts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

MOST_RANGES: Final = 128
"""Each is a branch of an expression that every row passes through; larger tables get larger ranges."""
_SAMPLES_PER_RANGE: Final = 30
_SEED: Final = 20
_LOWER_HALF: Final = 0xFFFFFFFF


@dataclass(frozen=True)
class Compared:
    """``differences``: None where both are equal."""

    source_rows: int
    log_rows: int
    n_ranges: int
    differences: Differences | None


def compare(
    source: DataFrame,
    log: DataFrame,
    shape: TableShape,
    *,
    source_rows: int,
    rows_per_range: int,
    n_shown: int,
    with_values: bool,
) -> Compared:
    """``source``, ``log``: columns of the table, and ``_text``. ``shape``: the source's; a column that ``log`` has not
    is null there. ``source_rows``: about how many there are. ``n_shown``: of how many rows keys are returned at most.
    """
    from pyspark.sql import functions as f

    ranged = _Ranged(shape)
    sides = [prepared(frame, shape) for frame in (source, log)]
    bounds = ranged.bounds(sides[0], source_rows, rows_per_range)
    number = ranged.number(bounds).alias("r")
    canonical = [each.alias(f"g{i}") for i, each in enumerate(_canonical(shape))]
    ours, theirs = (side.select(number, *canonical) for side in sides)
    of_source, of_log = _sums(ours, shape), _sums(theirs, shape)
    nothing = (0, 0, 0)
    numbers = [
        i for i in sorted({*of_source, *of_log}) if of_source.get(i, nothing) != of_log.get(i, nothing)
    ]
    n_source, n_log = (sum(each[0] for each in found.values()) for found in (of_source, of_log))
    if not numbers:
        return Compared(n_source, n_log, len(bounds) + 1, None)
    ranges = tuple(
        DifferingRange(
            ranged.columns,
            ranged.displayed(bounds[i - 1]) if i else None,
            ranged.displayed(bounds[i]) if i < len(bounds) else None,
            of_source.get(i, nothing)[0],
            of_log.get(i, nothing)[0],
        )
        for i in numbers
    )
    is_meant = f.col("r").isin(numbers)
    found = _by_row(
        ours.filter(is_meant),
        theirs.filter(is_meant),
        shape,
        ranges,
        n_shown if shape.key or with_values else 0,
        with_values,
    )
    return Compared(n_source, n_log, len(bounds) + 1, found)


# -- one form for both sides ---------------------------------------------------------------------------


def _canonical(shape: TableShape) -> list[Column]:
    """One for each column, and the last for ``_text``: what Spark can hash, group by and order."""
    from pyspark.sql import functions as f

    found = []
    for i, column in enumerate(shape.columns.values()):
        value = f.col(f"c{i}")
        found.append(value.cast(_comparable(column.type)))
    return [*found, f.when(f.size("text") > 0, f.array_sort(f.map_entries("text")))]


def _comparable(type_: DataType) -> DataType:
    from pyspark.sql import types as t

    if isinstance(type_, t.ArrayType):
        return t.ArrayType(_comparable(type_.elementType), type_.containsNull)
    return t.StringType() if isinstance(type_, (t.FloatType, t.DoubleType)) else type_


def _sums(rows: DataFrame, shape: TableShape) -> dict[int, tuple[int, int, int]]:
    """Range → the number of its rows, and the sums of both halves of their hashes."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    names = [f"g{i}" for i in range(len(shape.columns) + 1)]
    hashed = [f.array(*[f.col(name).isNull() for name in names])]
    for name, type_ in zip(names, [*(c.type for c in shape.columns.values()), None], strict=True):
        hashed.append(f.col(name))
        if isinstance(type_, t.ArrayType):
            hashed.append(f.transform(name, lambda each: each.isNull()))
    one = f.xxhash64(*hashed)
    sums = (
        rows.select("r", one.alias("h"))
        .groupBy("r")
        .agg(
            f.count(f.lit(1)),
            f.sum(f.shiftrightunsigned("h", 32)),
            f.sum(f.col("h").bitwiseAND(f.lit(_LOWER_HALF))),
        )
    )
    return {row[0]: (row[1], row[2], row[3]) for row in sums.collect()}


# -- ranges --------------------------------------------------------------------------------------------

_Bound = tuple[str | None, ...]


class _Ranged:
    """The columns that ranges are made of, in forms that have an order, and literals: the key's, else the first."""

    def __init__(self, shape: TableShape) -> None:
        self.columns = shape.key or tuple(shape.columns)[:1]
        order = list(shape.columns)
        self._indexes = [order.index(name) for name in self.columns]
        self._types = [shape.columns[name].type for name in self.columns]

    def bounds(self, rows: DataFrame, n_rows: int, rows_per_range: int) -> list[_Bound]:
        """Where ranges begin, but for the first, ascending."""
        n_ranges = min(MOST_RANGES, -(-n_rows // rows_per_range))
        if n_ranges < 2:
            return []
        names = [f"o{i}" for i in range(len(self._indexes))]
        ordered = rows.select(*[each.alias(name) for each, name in zip(self._ordered(), names, strict=True)])
        wanted = n_ranges * _SAMPLES_PER_RANGE
        if n_rows > wanted:
            ordered = ordered.sample(wanted / n_rows, _SEED)
        sorted_ = ordered.distinct().orderBy(*names)
        sample = [tuple(row) for row in sorted_.select(*[_as_string(name) for name in names]).collect()]
        step = max(1, len(sample) // n_ranges)
        return [bound for bound in sample[step::step] if None not in bound][: n_ranges - 1]

    def number(self, bounds: Sequence[_Bound]) -> Column:
        """A row's range: a search in ``bounds``, as a tree of branches."""
        from pyspark.sql import functions as f

        ordered = self._ordered()
        key = (
            ordered[0] if len(ordered) == 1 else f.struct(*[e.alias(f"o{i}") for i, e in enumerate(ordered)])
        )
        literals = [self._literal(bound) for bound in bounds]

        def tree(first: int, last: int) -> Column:
            if first == last:
                return f.lit(first)
            middle = (first + last) // 2
            return f.when(key < literals[middle], tree(first, middle)).otherwise(tree(middle + 1, last))

        return tree(0, len(bounds))

    def displayed(self, bound: _Bound) -> _Bound:
        """For people: a time as ISO, in UTC."""
        return tuple(
            _iso(text) if _is_time(type_) else text for text, type_ in zip(bound, self._types, strict=True)
        )

    def _ordered(self) -> list[Column]:
        from pyspark.sql import functions as f
        from pyspark.sql import types as t

        found = []
        for i, type_ in zip(self._indexes, self._types, strict=True):
            value = f.col(f"c{i}")
            if _is_time(type_):
                value = f.unix_micros(value.cast("timestamp"))
            elif isinstance(type_, t.BinaryType):
                value = f.hex(value)
            elif isinstance(type_, t.ArrayType):
                value = value.cast("string")
            found.append(value)
        return found

    def _literal(self, bound: _Bound) -> Column:
        from pyspark.sql import functions as f
        from pyspark.sql import types as t

        parts = []
        for text, type_ in zip(bound, self._types, strict=True):
            is_text = isinstance(type_, (t.BinaryType, t.ArrayType))
            as_: Any = "string" if is_text else "bigint" if _is_time(type_) else type_
            parts.append(f.lit(text).cast(as_))
        return parts[0] if len(parts) == 1 else f.struct(*[p.alias(f"o{i}") for i, p in enumerate(parts)])


def _is_time(type_: DataType) -> bool:
    from pyspark.sql import types as t

    return isinstance(type_, (t.TimestampType, t.TimestampNTZType))


def _iso(micros: str | None) -> str | None:
    if micros is None:
        return None
    try:
        epoch = datetime.datetime(1970, 1, 1)
        return (epoch + datetime.timedelta(microseconds=int(micros))).isoformat(" ")
    except OverflowError:
        return f"{micros} µs from 1970"


def _as_string(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.col(name).cast("string").alias(name)


# -- rows ----------------------------------------------------------------------------------------------


def _by_row(
    source: DataFrame,
    log: DataFrame,
    shape: TableShape,
    ranges: tuple[DifferingRange, ...],
    n_shown: int,
    with_values: bool,
) -> Differences:
    from pyspark.sql import functions as f

    names = list(shape.columns)
    canonical = [f"g{i}" for i in range(len(names) + 1)]
    signed = source.withColumn("n", f.lit(1)).unionByName(log.withColumn("n", f.lit(-1)))
    rows = signed.groupBy("r", *canonical).agg(f.sum("n").alias("n")).filter("n <> 0")
    texts = [
        _value_text(i, name, shape.columns[name].type, canonical[-1]).alias(f"t{i}")
        for i, name in enumerate(names)
    ]
    rows = rows.select("r", "n", *canonical, *texts)
    order = ["r", *[f"g{names.index(name)}" for name in shape.key or ()]]
    by = order if shape.key else [*order, *canonical]
    # The key's text tells keys apart whose values their type cannot hold.
    by += [f"t{names.index(name)}" for name in shape.key or ()]

    def of(is_side: Column) -> Column:
        values = f.struct(
            *[f.struct(f.col(f"g{i}"), f.col(f"t{i}")).alias(f"v{i}") for i in range(len(names))]
        )
        return f.max(f.when(is_side, values))

    keyed = rows.groupBy(*by).agg(
        f.sum(f.when(f.col("n") > 0, f.col("n")).otherwise(0)).alias("missing"),
        f.sum(f.when(f.col("n") < 0, -f.col("n")).otherwise(0)).alias("extra"),
        of(f.col("n") > 0).alias("source"),
        of(f.col("n") < 0).alias("log"),
    )
    is_changed = (f.col("missing") > 0) & (f.col("extra") > 0)
    differ = [~f.col(f"source.v{i}").eqNullSafe(f.col(f"log.v{i}")) for i in range(len(names))]
    keyed = keyed.withColumn("is_changed", is_changed).persist()
    try:
        n_changed = f.least("missing", "extra")
        totals = keyed.agg(
            f.sum(f.col("missing") - n_changed),
            f.sum(f.col("extra") - n_changed),
            f.sum(n_changed),
            *[f.sum((f.col("is_changed") & each).cast("long")) for each in differ],
        ).first()
        assert totals is not None
        shown = keyed.orderBy(*order, *[name for name in by if name not in order]).limit(n_shown)
        changed = f.array(*[f.when(f.col("is_changed") & each, f.lit(i)) for i, each in enumerate(differ)])
        values = [
            f.when(f.col(side).isNotNull(), f.array(*[f.col(f"{side}.v{i}.t{i}") for i in range(len(names))]))
            for side in ("source", "log")
        ]
        listed = shown.select("missing", "extra", "is_changed", changed, *values).collect() if n_shown else []
    finally:
        keyed.unpersist()
    counted = {name: int(n) for name, n in zip(names, totals[3:], strict=True) if n}
    displayed = tuple(_differing_row(row, names, shape.key, with_values) for row in listed)
    return Differences(int(totals[0]), int(totals[1]), int(totals[2]), counted, ranges, displayed)


def _value_text(i: int, name: str, type_: DataType, texts: str) -> Column:
    """A column's value for people: PostgreSQL's text where the log has that, else Spark's."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    value = f.col(f"g{i}")
    own = f.concat(f.lit("\\x"), f.lower(f.hex(value))) if isinstance(type_, t.BinaryType) else value
    text = f.map_from_entries(f.col(texts))[f.lit(name)]
    return f.coalesce(text, own.cast("string"))


def _differing_row(
    row: Any, names: Sequence[str], key: tuple[str, ...] | None, with_values: bool
) -> DifferingRow:
    missing, extra, is_changed, changed, source, log = row
    kind = (
        DifferenceKind.CHANGED if is_changed else DifferenceKind.MISSING if missing else DifferenceKind.EXTRA
    )
    found = dict(zip(names, source if source is not None else log, strict=True))
    columns = tuple(names[i] for i in changed if i is not None)

    def values(side: Sequence[str | None] | None) -> Texts | None:
        return dict(zip(names, side, strict=True)) if with_values and side is not None else None

    return DifferingRow(
        kind,
        {name: found[name] for name in key} if key else None,
        columns,
        max(missing, extra),
        values(source),
        values(log),
    )
