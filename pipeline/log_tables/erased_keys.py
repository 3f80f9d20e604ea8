"""Which rows an erasure takes: keys as people write them, and the rows of a table that have one of them.

A key is conditions on columns of the table's key with ``=`` or ``IN``, joined by AND, in the grammar of
``snapshot.key_filter``: ``id = 4711``, ``tenant = 5 and day in ('2026-05-04', '2026-05-05')``. A row has the key if it
meets all of them. So fewer columns than the key has take more rows.

A column's values stand in several Delta columns where its type has changed (``delta.columns``), so a literal is brought
into the type of each, and compared there by equality alone. One that a type has no room for is in none of its rows. A
type where equality is not that of the text (floats) is refused, and so is a key in the place of the key's column where
``_text`` has it (an infinite date).

A delete has the columns of the key *of its time* alone. So a key must be given for each set of columns that ever named
the table's rows (``xidstream.versions``): else deletes and old rows would stay, and this refuses. Where the whole old
row is sent (REPLICA IDENTITY FULL), each column may stand in a condition.

No value is in a message, nor in ``repr``: whoever asks for an erasure does not want it in a log.

Plain values and pyarrow. Used by ``erased_rows`` and the mirror's ``erased_base``.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from xidstream.pipeline.errors import SinkFailed, Unsupported, UsageError
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.relation_history import VERSIONS
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS
from xidstream.pipeline.snapshot.key_filter import EQUAL, parse_key_filter

MOST_KEYS: Final = 100_000
"""All of them are in memory, and compared with each row."""
_CONTRACT: Final = frozenset(each.name for each in CONTRACT_FIELDS)
_HINT: Final = (
    'write conditions on columns of the table\'s key with = or IN, joined by AND, such as "id = 4711" or '
    "\"tenant = 5 and email = 'a@b'\"; texts stand in single quotes"
)
_CHARACTER: Final = re.compile(r"character\((\d+)\)")


@dataclass(frozen=True)
class ErasedKeys:
    """``by_columns``: the columns of some keys, in the order of their names → the keys' values, as texts."""

    by_columns: Mapping[tuple[str, ...], frozenset[tuple[str, ...]]] = field(repr=False)

    @property
    def n_keys(self) -> int:
        """Each value of an IN is one."""
        return sum(len(values) for values in self.by_columns.values())


def parse_keys(texts: Sequence[str], lines: Iterable[str] = ()) -> ErasedKeys:
    """``texts``: one key each. ``lines``: of a file, one key each; empty ones and those that begin with # are none.

    Raises UsageError, which tells the number of the key, and none of its values."""
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    numbered = [(f"--key number {i}", text) for i, text in enumerate(texts, 1)]
    numbered += [(f"line {i} of the file of keys", line) for i, line in enumerate(lines, 1)]
    for where, text in numbered:
        if not text.strip() or (where.startswith("line") and text.lstrip().startswith("#")):
            continue
        try:
            comparisons = parse_key_filter(text).comparisons
        except UsageError:
            raise UsageError(f"{where} is no key", remedy=_HINT) from None
        by_name = {each.column: each.values for each in comparisons}
        if any(each.operator != EQUAL for each in comparisons) or len(by_name) < len(comparisons):
            raise UsageError(f"{where} has a range, or a column twice", remedy=_HINT)
        names = tuple(sorted(by_name))
        found.setdefault(names, set()).update(itertools.product(*(by_name[name] for name in names)))
        if sum(map(len, found.values())) > MOST_KEYS:
            raise UsageError(f"more than {MOST_KEYS:,} keys are asked for", remedy="erase them in portions")
    if not found:
        raise UsageError("no key is given", remedy=_HINT)
    return ErasedKeys({names: frozenset(values) for names, values in found.items()})


@dataclass(frozen=True)
class StoredColumn:
    """A column of Delta that has values of a source's column, and their PostgreSQL type as ``type_names`` spells it."""

    name: str
    type: pa.DataType
    pg_type: str


@dataclass(frozen=True)
class _Group:
    """Keys in the types of some Delta columns, one for each column of theirs. ``arrays``: the values of each."""

    columns: tuple[str, ...]
    values: frozenset[tuple[Any, ...]] = field(repr=False)
    arrays: tuple[pa.Array, ...] = field(repr=False)


class RowsOfKeys:
    """The keys in the types of one table's columns. ``stored_columns``: the source's columns → the Delta columns of
    each, the newest first. ``key``: the columns by which rows of the table are told apart.

    Raises UsageError for a value that is none of its column's newest type, and for a type that cannot be compared."""

    def __init__(
        self,
        keys: ErasedKeys,
        stored_columns: Mapping[str, Sequence[StoredColumn]],
        key: Sequence[str],
        table: str,
    ) -> None:
        self.stored_columns = stored_columns
        self.key = tuple(key)
        self._groups = [
            group
            for names, values in keys.by_columns.items()
            for group in _groups(names, values, stored_columns, table)
        ]

    @property
    def columns(self) -> list[str]:
        """The Delta columns that are compared."""
        return list(dict.fromkeys(name for group in self._groups for name in group.columns))

    def among(self, rows: pa.RecordBatch) -> pa.Array:
        """Which rows have one of the keys: booleans, none of them null. A column that ``rows`` lacks has no value."""
        there = set(rows.schema.names)
        found = np.zeros(rows.num_rows, bool)
        for group in self._groups:
            if there.issuperset(group.columns):
                found |= _matches(rows, group)
        return pa.array(found)

    def literals(self) -> list[list[tuple[str, list[Any]]]]:
        """For keys of the same Delta columns: each column with its values in these keys, as Python has them."""
        return [
            [(name, array.to_pylist()) for name, array in zip(group.columns, group.arrays, strict=True)]
            for group in self._groups
        ]


def rows_of_keys(
    keys: ErasedKeys, columns: Sequence[TableColumn], properties: Mapping[str, str], label: str
) -> RowsOfKeys:
    """The keys for a table of the log with these columns and properties. ``label``: ``schema.table``.

    Raises UsageError as ``RowsOfKeys``, and where a column is not one of the key, or keys for some rows are missing."""
    try:
        versions = json.loads(properties.get(VERSIONS) or "[]")
        named = [(Lsn(v["since"]), None if v["key"] is None else tuple(v["key"])) for v in versions]
        stored_columns = _stored_columns_of(columns, versions)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SinkFailed(
            f"the properties of the Delta table of {label} do not say which columns it has",
            remedy=f"put {VERSIONS} back as it was",
        ) from None
    ever = {name for _, key in named for name in (stored_columns if key is None else key)} or set(
        stored_columns
    )
    for names in keys.by_columns:
        if unknown := [name for name in names if name not in ever]:
            raise UsageError(
                f"column {', '.join(unknown)} is not one of the key of table {label}: {', '.join(sorted(ever))}",
                remedy="give conditions on columns of the key: deletes and old rows have no others",
            )
    for since, key in named:
        if key and not any(set(names) <= set(key) for names in keys.by_columns):
            raise UsageError(
                f"the rows of table {label} from {since} on are named by {', '.join(key)}, and no key with these "
                "columns is given",
                remedy="the table has had several keys: give the same rows by each of them, with a --key of its own",
            )
    last = next((key for _, key in reversed(named) if key), None)
    return RowsOfKeys(keys, stored_columns, last or sorted(stored_columns), label)


def _stored_columns_of(
    columns: Sequence[TableColumn], versions: Sequence[Mapping[str, Any]]
) -> dict[str, list[StoredColumn]]:
    by_name = {column.name: column for column in columns if column.name not in _CONTRACT}
    found: dict[str, dict[str, StoredColumn]] = {}
    for version in reversed(versions):
        for source, recorded in version["columns"].items():
            name = str(recorded["column"])
            if name in by_name:
                there = found.setdefault(source, {})
                there.setdefault(name, StoredColumn(name, by_name[name].type, str(recorded["type"])))
    if not versions:
        for column in by_name.values():
            found.setdefault(column.source, {})[column.name] = StoredColumn(column.name, column.type, "")
    return {source: list(there.values()) for source, there in found.items()}


def _groups(
    names: tuple[str, ...],
    values: frozenset[tuple[str, ...]],
    stored_columns: Mapping[str, Sequence[StoredColumn]],
    table: str,
) -> Iterable[_Group]:
    for i, name in enumerate(names):
        newest = stored_columns[name][0]
        if any(_typed(key[i], newest) is None for key in values):
            raise UsageError(
                f"a value for column {name} of table {table} is none of its type, {newest.pg_type or newest.type}",
                remedy="write it as PostgreSQL shows it: numbers as they are, all others in single quotes",
            )
    for columns in itertools.product(*(stored_columns[name] for name in names)):
        typed = frozenset(
            key
            for texts in values
            if None not in (key := tuple(_typed(text, c) for text, c in zip(texts, columns, strict=True)))
        )
        if typed:
            arrays = tuple(pa.array(sorted({key[i] for key in typed}), c.type) for i, c in enumerate(columns))
            yield _Group(tuple(c.name for c in columns), typed, arrays)


def _matches(rows: pa.RecordBatch, group: _Group) -> Any:
    columns = [rows.column(rows.schema.get_field_index(name)) for name in group.columns]
    found = np.ones(rows.num_rows, bool)
    for column, values in zip(columns, group.arrays, strict=True):
        if column.type != values.type:
            if pt.is_dictionary(column.type):
                column = column.dictionary_decode()
            column = column.cast(values.type)
        found &= pc.is_in(column, value_set=values).to_numpy(zero_copy_only=False)
    if len(columns) > 1:
        for i in np.flatnonzero(found):
            found[i] = tuple(column[int(i)].as_py() for column in columns) in group.values
    return found


# -- a literal in a type --------------------------------------------------------------------------------


def _typed(text: str, column: StoredColumn) -> Any:
    """The value, as Python has it; None where the type has no such value."""
    try:
        return _converted(text, column.type, column.pg_type)
    except (ValueError, ArithmeticError):
        return None


def _converted(text: str, type_: pa.DataType, pg_type: str) -> Any:
    if pt.is_integer(type_):
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise ValueError
        return pa.scalar(int(text), type_).as_py()
    if pt.is_boolean(type_):
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else None
    if pt.is_decimal(type_):
        if not re.fullmatch(r"[+-]?[0-9]*\.?[0-9]*", text):
            raise ValueError
        traps = [decimal.Inexact, decimal.InvalidOperation]
        with decimal.localcontext(decimal.Context(prec=type_.precision, traps=traps)):
            return decimal.Decimal(text).quantize(decimal.Decimal(1).scaleb(-type_.scale))
    if pt.is_string(type_) or pt.is_large_string(type_):
        if pg_type == "uuid":
            return str(uuid.UUID(text))
        padded = _CHARACTER.fullmatch(pg_type)
        return text.rstrip(" ").ljust(int(padded[1])) if padded else text
    if pt.is_date32(type_):
        return datetime.date.fromisoformat(text)
    if pt.is_timestamp(type_):
        return _timestamp(text, has_zone=type_.tz is not None)
    if pt.is_binary(type_) and text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    raise Unsupported(
        f"no row can be erased by a column of type {pg_type or type_}",
        remedy="give conditions on other columns of the key",
    )


def _timestamp(text: str, *, has_zone: bool) -> datetime.datetime:
    # Python before 3.11 wants a zone's minutes, and no Z.
    text = re.sub(r"([+-]\d\d)$", r"\1:00", text.replace("Z", "+00:00")) if has_zone else text
    value = datetime.datetime.fromisoformat(text)
    if has_zone != (value.tzinfo is not None):
        raise ValueError
    return value.astimezone(datetime.timezone.utc) if has_zone else value
