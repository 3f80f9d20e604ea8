"""Which column of a growing table takes which column of a relation version: the rule of schema evolution.

One rule serves two purposes: a Delta table that lives longer than its source's definition, and the union of the
relation versions inside one batch. ``map_columns`` decides. ``Conform`` carries it out on record batches, in the
executors, so this module imports pyarrow alone.

The rule. A target column belongs to one source column, ``source``. (Case is ignored, because Delta refuses names that
differ in case only.) A source column goes to that one of its target columns that has exactly its type. If there is
none, it goes to the first that holds every value of its type exactly (``holds``). If there is none either, it goes to a
new column: under its own name if that is free, else under ``<column>__<delta type>``, e.g. ``price__decimal_20_4``.
Nothing is ever rewritten or dropped, and a column that the version does not have is null. The same history of versions
gives the same columns, and a replay, however it is cut, finds what the first pass added.

Formats differ in three things, and a ``ColumnRules`` says how: which type a column has for values of a type of the
contract; which of its types a column may be widened to; and which types a file may have for it as it is. A Delta table
has all of the contract's types, and is never widened: few writers and readers have Delta's type widening.

Rejected: text as the common type, because one ALTER would turn a number into text for all time.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.types as pt

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS

_CONTRACT: Final = {f.name.lower() for f in CONTRACT_FIELDS}
_INTEGER_DIGITS: Final = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_INTEGER_BITS: Final = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}
_NAMES: Final = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
}
_NUMBERS: Final = {_NAMES[type_]: type_ for type_ in (*_INTEGER_DIGITS, pa.float32(), pa.float64())}


def delta_type_name(type_: pa.DataType) -> str:
    """Delta's name of a type of the contract, e.g. ``long``, ``decimal(20,4)``, ``array<string>``."""
    if pt.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if pt.is_timestamp(type_):
        return "timestamp_ntz" if type_.tz is None else "timestamp"
    if pt.is_list(type_):
        return f"array<{delta_type_name(type_.value_type)}>"
    if pt.is_map(type_):
        return f"map<{delta_type_name(type_.key_type)},{delta_type_name(type_.item_type)}>"
    return _NAMES[type_]


def type_named(name: str) -> pa.DataType:
    """The number type, or list of one, that ``delta_type_name`` names. Raises ValueError for any other name."""
    if match := re.fullmatch(r"array<(.+)>", name):
        return pa.list_(type_named(match[1]))
    if match := re.fullmatch(r"decimal\((\d+),(\d+)\)", name):
        return pa.decimal128(int(match[1]), int(match[2]))
    found = _NUMBERS.get(name)
    if found is None:
        raise ValueError(f"no type of numbers is called {name}")
    return found


def holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether ``wide`` has every value of ``narrow`` exactly. Nothing becomes text, and text becomes nothing else."""
    if wide == narrow:
        return True
    if pt.is_list(wide) and pt.is_list(narrow):
        return holds(wide.value_type, narrow.value_type)
    bits = _INTEGER_BITS.get(narrow)
    if bits is not None:
        if wide in _INTEGER_BITS:
            return _INTEGER_BITS[wide] >= bits
        if pt.is_decimal(wide):
            return bool(wide.precision - wide.scale >= _INTEGER_DIGITS[narrow])
        # A float4 has 24 bits of mantissa, a float8 has 53.
        return (wide == pa.float32() and bits <= 16) or (wide == pa.float64() and bits <= 32)
    if narrow == pa.float32():
        return bool(wide == pa.float64())
    if pt.is_decimal(wide) and pt.is_decimal(narrow):
        return bool(
            wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale
        )
    return False


def shows(newest: pa.DataType, of: pa.DataType) -> bool:
    """Whether a column's newest type can hold or show the values of an earlier type ``of``. If not, they are of a
    column of that name which is no more: it was dropped, and another one added."""
    if newest == pa.string() or (pt.is_decimal(newest) and pt.is_decimal(of)):
        return True
    return holds(newest, of) or holds(of, newest)


@dataclass(frozen=True)
class ColumnRules:
    """``stored``: the type of a column for values of a type of the contract. ``widens(wide, narrow)``: whether a column
    may become ``wide``. ``reads(column, file)``: whether a file may have that type for the column."""

    stored: Callable[[pa.DataType], pa.DataType]
    widens: Callable[[pa.DataType, pa.DataType], bool]
    reads: Callable[[pa.DataType, pa.DataType], bool] = operator.eq


def _same(type_: pa.DataType) -> pa.DataType:
    return type_


def _never(wide: pa.DataType, narrow: pa.DataType) -> bool:
    return False


DELTA: Final = ColumnRules(_same, _never)
UNSTORED: Final = ColumnRules(_same, holds)
"""For a union that is not stored yet: a column takes the wider of two types."""


@dataclass(frozen=True)
class TableColumn:
    """A column of the growing table; ``source`` is the name of the source column whose values it holds."""

    name: str
    type: pa.DataType
    source: str

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=True)


@dataclass(frozen=True)
class ColumnMapping:
    """``columns``: the table after its additions; ``names``: the target of each incoming column, in order."""

    columns: tuple[TableColumn, ...]
    additions: tuple[TableColumn, ...]
    names: tuple[str, ...]

    @property
    def targets(self) -> tuple[TableColumn, ...]:
        """The target of each incoming column, in order."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.names)

    def is_verbatim(self, incoming: pa.Schema, rules: ColumnRules = DELTA) -> bool:
        """Whether each column of ``incoming`` goes to the one of its own name, and of a type that readers take for it:
        a Parquet file in that layout is then a file of the table as it is, because readers find columns by name, and
        what it lacks is null."""
        types = {column.name: column.type for column in self.columns}
        return all(
            name == field.name and rules.reads(types[name], field.type)
            for name, field in zip(self.names, incoming, strict=True)
        )


def map_columns(
    columns: Sequence[TableColumn], incoming: pa.Schema, rules: ColumnRules = DELTA
) -> ColumnMapping:
    """Find a target for each column of ``incoming`` (table columns and contract columns).

    Raises SinkFailed if a contract column is there with another type, because then the table is not ours.
    """
    table = list(columns)
    additions: list[TableColumn] = []
    names: list[str] = []
    # A name with a suffix must not be that of another incoming column, or of one that is there already.
    taken = {c.name.lower() for c in table} | {n.lower() for n in incoming.names}
    for field in (each.with_type(rules.stored(each.type)) for each in incoming):
        lower = field.name.lower()
        own = [i for i, c in enumerate(table) if c.source.lower() == lower]
        fitting = [i for i in own if table[i].type == field.type] or [
            i for i in own if holds(table[i].type, field.type)
        ]
        if fitting:
            names.append(table[fitting[0]].name)
            continue
        if lower in _CONTRACT and own:
            raise SinkFailed(
                f"column {field.name} has type {delta_type_name(table[own[0]].type)}, not "
                f"{delta_type_name(field.type)}: the table was not written by this sink",
                remedy="give the sink a root of its own",
            )
        widenable = [i for i in own if rules.widens(field.type, table[i].type)]
        if widenable:
            i = widenable[0]
            table[i] = TableColumn(table[i].name, field.type, table[i].source)
            names.append(table[i].name)
            continue
        name = field.name
        if any(c.name.lower() == lower for c in table):
            name = _suffixed(field.name, field.type, taken)
        taken.add(name.lower())
        target = TableColumn(name, field.type, field.name)
        table.append(target)
        additions.append(target)
        names.append(name)
    return ColumnMapping(tuple(table), tuple(additions), tuple(names))


def map_all_columns(
    columns: Sequence[TableColumn], schemas: Iterable[pa.Schema], rules: ColumnRules = DELTA
) -> tuple[tuple[TableColumn, ...], list[ColumnMapping]]:
    """The table's columns when it can take every layout, and where each layout's go."""
    table = tuple(columns)
    mappings = []
    for schema in schemas:
        mapping = map_columns(table, schema, rules)
        table = mapping.columns
        mappings.append(mapping)
    return table, mappings


def _suffixed(column: str, type_: pa.DataType, taken: set[str]) -> str:
    suffix = re.sub(r"[^a-z0-9]+", "_", delta_type_name(type_).lower()).strip("_")
    if pt.is_timestamp(type_) and type_.tz is None:
        suffix = "timestamp_ntz"
    base = name = f"{column}__{suffix}"
    number = 2
    while name.lower() in taken:
        name = f"{base}_{number}"
        number += 1
    return name


@dataclass(frozen=True)
class Conform:
    """Brings record batches of one relation version into the table's columns. It pickles, for the executors.

    ``sources[i]`` is the index in the batch of the i-th column of ``schema``, or -1 if the batch has none.
    """

    schema: pa.Schema
    sources: tuple[int, ...]

    @classmethod
    def of(cls, columns: Sequence[TableColumn], names: Sequence[str]) -> Conform:
        """``names``: for each column of the batch, its target among ``columns``."""
        index = {name: i for i, name in enumerate(names)}
        return cls(pa.schema([c.field for c in columns]), tuple(index.get(c.name, -1) for c in columns))

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for field, source in zip(self.schema, self.sources, strict=True):
            if source < 0:
                arrays.append(pa.nulls(batch.num_rows, field.type))
                continue
            array = batch.column(source)
            if array.type != field.type:
                try:
                    array = array.cast(field.type)
                except pa.ArrowException as error:
                    # Arrow's message quotes the value.
                    raise SinkFailed(
                        f"column {field.name}: cannot cast {array.type} to {field.type} "
                        f"({type(error).__name__})"
                    ) from None
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)
