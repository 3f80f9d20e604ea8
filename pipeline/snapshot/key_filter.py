"""Which rows of a table a repair reads from the source: conditions on columns of its key, as people write them.

    where     := condition (AND condition)*
    condition := column (= | < | <= | > | >=) literal | column BETWEEN literal AND literal | column IN (literal, …)
    literal   := a number | 'text' | TRUE | FALSE

Names follow PostgreSQL's rule: in lower case unless they are in double quotes. Two engines answer the same conditions:
PostgreSQL chooses the rows that are read, and Spark those that stay, so the two must never differ about a row. That is
why only columns of the key are let in (what is damaged may be any other value), and why ``bound`` brings each literal
into one form of its type, which both engines are given. No text of a person gets into SQL but as such a literal.

- Integers, dates, timestamps, booleans and ``numeric(p,s)`` have one order in both. A value that Spark has no room for
  (an infinity, NaN, a year that is not one of 1 to 9999) stands at that end of the order where PostgreSQL has it.
- ``uuid`` is stored as its text, whose order is that of its bytes.
- ``text`` and ``varchar`` are compared by their bytes, as under ``COLLATE "C"``, whatever the column's collation is.
- ``char(n)`` only with ``=`` and ``IN``: its order passes over blanks at the end in PostgreSQL alone.
- Other types are refused: floats (0 and -0 are equal, and have two texts), ``numeric`` without a precision (1.0 equals
  1.00), ``bytea``, enums, citext, and all that has rules of its own.

Rejected: an SQL parser for any condition (Spark and PostgreSQL differ about most functions); the server as the judge of
literals, which takes many spellings that Spark does not.

Plain values, used by the command line, the book of snapshots, the reader and the carrier.
"""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow.types as pt

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.schema import Column, RelationVersion
from xidstream.pipeline.schema.builtin_types import BY_OID
from xidstream.pipeline.schema.type_names import type_name

EQUAL: Final = "="
RANGES: Final = ("<", "<=", ">", ">=")
BY_BYTES: Final = frozenset({"text", "varchar", "bpchar"})
"""Types that are compared by their bytes."""

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<string>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+")
    |(?P<word>[^\W\d][\w$]*)
    |(?P<operator><=|>=|=|<|>|\(|\)|,))""",
    re.VERBOSE,
)
_PLAIN_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?")
_PLAIN_NAME: Final = re.compile(r"[a-z_][a-z0-9_$]*")
_WORDS: Final = frozenset({"and", "between", "in", "true", "false"})
_HINT: Final = (
    "write conditions on key columns with =, <, <=, >, >=, BETWEEN … AND … or IN (…), joined by AND, such as "
    '"id between 100 and 200" or "day = \'2026-05-04\' and id in (1, 2)"'
)


@dataclass(frozen=True)
class Comparison:
    """``column``: its name in PostgreSQL. ``operator``: ``=`` (one of ``values``) or one of ``RANGES`` (of the only
    value). ``values``: what the literals say, without quotes."""

    column: str
    operator: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        literals = [_literal(value) for value in self.values]
        if len(literals) > 1:
            return f"{_name(self.column)} in ({', '.join(literals)})"
        return f"{_name(self.column)} {self.operator} {literals[0]}"


@dataclass(frozen=True)
class KeyFilter:
    """Rows that meet all ``comparisons``, of which there is at least one. As text it can be parsed again."""

    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.comparisons))

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(dict.fromkeys(each.column for each in self.comparisons))


@dataclass(frozen=True)
class Repair:
    """A snapshot that reads the rows of ``key_filter`` alone, and carries all others over from generation ``number``,
    which stood when it was asked for."""

    key_filter: KeyFilter
    number: int


@dataclass(frozen=True)
class BoundComparison:
    """A comparison with a column of a relation. ``values`` are in the one form of ``type``, a name of pg_type."""

    column: Column
    type: str
    operator: str
    values: tuple[str, ...]


# -- the grammar ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Token:
    """``value``: of a name or literal. ``at``: the index of its first character."""

    kind: str
    value: str
    at: int


def parse_key_filter(text: str) -> KeyFilter:
    """Raises UsageError, which points at the place."""
    return _Parser(text).parsed()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._read())
        self._i = 0

    def _read(self) -> Iterator[_Token]:
        at, end = 0, len(self._text.rstrip())
        while at < end:
            match = _TOKEN.match(self._text, at)
            if match is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                raise self._wrong(at, "this is no part of a condition")
            kind = str(match.lastgroup)
            value, start = match[kind], match.start(kind)
            if "\0" in value:
                raise self._wrong(start, "no value has a NUL character")
            if kind == "string":
                value = value[1:-1].replace("''", "'")
            elif kind == "quoted":
                value = value[1:-1].replace('""', '"')
            elif kind == "word":
                value = value.lower()
            yield _Token(kind, value, start)
            at = match.end()
        yield _Token("end", "", end)

    def parsed(self) -> KeyFilter:
        found = [*self._condition()]
        while self._takes("word", "and"):
            found += self._condition()
        if self._next.kind != "end":
            raise self._wrong(self._next.at, "AND or the end is expected")
        return KeyFilter(tuple(found))

    def _condition(self) -> list[Comparison]:
        token = self._take()
        if token.kind != "quoted" and (token.kind != "word" or token.value in _WORDS):
            raise self._wrong(token.at, "the name of a key column is expected")
        column, operator = token.value, self._take()
        if operator.kind == "operator" and operator.value in (EQUAL, *RANGES):
            return [Comparison(column, operator.value, (self._literal(),))]
        if (operator.kind, operator.value) == ("word", "between"):
            low = self._literal()
            self._demand("word", "and")
            return [Comparison(column, ">=", (low,)), Comparison(column, "<=", (self._literal(),))]
        if (operator.kind, operator.value) == ("word", "in"):
            self._demand("operator", "(")
            values = [self._literal()]
            while self._takes("operator", ","):
                values.append(self._literal())
            self._demand("operator", ")")
            return [Comparison(column, EQUAL, tuple(dict.fromkeys(values)))]
        raise self._wrong(operator.at, "=, <, <=, >, >=, BETWEEN or IN is expected")

    def _literal(self) -> str:
        token = self._take()
        if token.kind in ("number", "string") or (token.kind == "word" and token.value in ("true", "false")):
            return token.value
        raise self._wrong(token.at, "a number or a text in single quotes is expected")

    @property
    def _next(self) -> _Token:
        return self._tokens[self._i]

    def _take(self) -> _Token:
        token = self._next
        self._i = min(self._i + 1, len(self._tokens) - 1)
        return token

    def _takes(self, kind: str, value: str) -> bool:
        is_there = (self._next.kind, self._next.value) == (kind, value)
        if is_there:
            self._take()
        return is_there

    def _demand(self, kind: str, value: str) -> None:
        if not self._takes(kind, value):
            raise self._wrong(self._next.at, f"{value.upper()} is expected")

    def _wrong(self, at: int, what: str) -> UsageError:
        here = self._text[at : at + 20]
        where = f"at {here!r} (character {at + 1})" if here.strip() else "at its end"
        return UsageError(f"--where cannot be read {where}: {what}", remedy=_HINT)


def _literal(value: str) -> str:
    if _PLAIN_NUMBER.fullmatch(value) or value in ("true", "false"):
        return value
    return "'" + value.replace("'", "''") + "'"


def _name(column: str) -> str:
    if _PLAIN_NAME.fullmatch(column) and column not in _WORDS:
        return column
    return '"' + column.replace('"', '""') + '"'


# -- literals of a type --------------------------------------------------------------------------------


def bound(
    key_filter: KeyFilter, relation: RelationVersion, key: Sequence[str] | None
) -> tuple[BoundComparison, ...]:
    """The comparisons with their columns, and the literals in the one form of each type. ``key``: the names of the
    columns that name a row, as the log has them.

    Raises UsageError where there is no key, a column is not one of it, or a literal is none of its type.
    """
    whole = f"take the whole table again: `xidstream snapshot request --table {relation.name}`"
    if not key:
        raise UsageError(f"table {relation.name} has no key, so --where cannot name rows of it", remedy=whole)
    by_name = {column.source_name: column for column in relation.columns if column.name in key}
    found = []
    for each in key_filter.comparisons:
        column = by_name.get(each.column)
        if column is None:
            raise UsageError(
                f"column {each.column} is not one of the key of table {relation.name}: {', '.join(by_name)}",
                remedy=f"give conditions on these alone; or {whole}",
            )
        type_, form = _form_of(column)
        if form is None or (each.operator in RANGES and type_ == "bpchar"):
            takes = "no condition but = and IN" if form else "no condition"
            raise UsageError(
                f"--where takes {takes} on column {each.column} of table {relation.name}: its type is "
                f"{type_name(column)}",
                remedy=f"give conditions on other columns of the key; or {whole}",
            )
        try:
            values = tuple(dict.fromkeys(form(value) for value in each.values))
        except (ValueError, ArithmeticError):
            raise UsageError(
                f"a value for column {each.column} of table {relation.name} is none of its type, {type_name(column)}",
                remedy=_FORMS.get(type_, "give one that the column can have"),
            ) from None
        found.append(BoundComparison(column, type_, each.operator, values))
    return tuple(found)


def ranged_filter(
    relation: RelationVersion,
    key: Sequence[str] | None,
    columns: Sequence[str],
    first: Sequence[str | None] | None,
    end: Sequence[str | None] | None,
) -> KeyFilter | None:
    """The filter for a range of the key, from ``first`` on and before ``end`` (None: no limit), by its first column.
    ``columns``: of the limits, as the log calls them. None where no filter can say it."""
    column = next((each for each in relation.columns if columns and each.name == columns[0]), None)
    if column is None or (first is None and end is None):
        return None
    # With further columns some rows with the limit's own first value are within.
    limits = ((">=", first), ("<" if len(columns) == 1 else "<=", end))
    found = []
    for operator, limit in limits:
        if limit is not None:
            value = limit[0] or ""
            if _form_of(column)[0] == "timestamptz":
                value += "+00:00"
            found.append(Comparison(column.source_name, operator, (value,)))
    wanted = KeyFilter(tuple(found))
    try:
        bound(wanted, relation, key)
    except UsageError:
        return None
    return wanted


_Form = Callable[[str], str]
_FORMS: Final = {
    "bool": "write true or false",
    "date": "write it as '2026-05-04', of the years 1 to 9999",
    "timestamp": "write it as '2026-05-04 12:00:00.5', of the years 1 to 9999",
    "timestamptz": "write it with its zone, as '2026-05-04 12:00:00.5+00:00', of the years 1 to 9999",
    "numeric": "write a number with no more digits than the column has",
    "uuid": "write it as '0b5ce9b1-0d3f-4c5b-9f0e-6f3f8b1a2c3d'",
    "bpchar": "write no more characters than the column has",
}
"""Type → what to do about a literal that is not of it."""


def _form_of(column: Column) -> tuple[str, _Form | None]:
    """The column's type, and what brings a literal into its one form, or raises ValueError or ArithmeticError; None for
    a type that no condition can be on."""
    name = BY_OID.get(column.type_oid, column.base_type_name or "")
    if name in ("int2", "int4", "int8", "oid"):
        bits = {"int2": 15, "int4": 31, "int8": 63, "oid": 32}[name]
        low = 0 if name == "oid" else -(1 << bits)
        return name, lambda text: _integer(text, low, 1 << bits)
    if name == "numeric":
        arrow = column.type.arrow
        if not pt.is_decimal(arrow):
            return name, None
        return name, lambda text: _numeric(text, arrow.precision, arrow.scale)
    if name == "bpchar":
        length = column.type_modifier - 4
        if column.type_oid != 1042 or length <= 0:  # a domain's length is not on the wire
            return name, None
        return name, lambda text: _blank_padded(text, length)
    forms: dict[str, _Form] = {
        "bool": _boolean,
        "date": lambda text: datetime.date.fromisoformat(text).isoformat(),
        "timestamp": lambda text: _timestamp(text, has_zone=False),
        "timestamptz": lambda text: _timestamp(text, has_zone=True),
        "uuid": _uuid,
        "text": _text,
        "varchar": _text,
    }
    return name, forms.get(name)


def _integer(text: str, low: int, end: int) -> str:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not low <= int(text) < end:
        raise ValueError
    return str(int(text))


def _numeric(text: str, precision: int, scale: int) -> str:
    if not re.fullmatch(r"[+-]?[0-9]*\.?[0-9]*", text):
        raise ValueError
    traps = [decimal.Inexact, decimal.InvalidOperation]
    with decimal.localcontext(decimal.Context(prec=precision, traps=traps)):
        value = decimal.Decimal(text).quantize(decimal.Decimal(1).scaleb(-scale))
    return f"{value:f}" if value else f"{abs(value):f}"


def _text(text: str) -> str:
    text.encode()  # what a terminal gave that is no text cannot be sent
    return text


def _boolean(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower()


def _timestamp(text: str, *, has_zone: bool) -> str:
    # Python before 3.11 wants a zone's minutes, and 3 or 6 digits after the point.
    match = re.fullmatch(
        r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?(?:(Z)|([+-]\d\d)(?::?(\d\d))?)?",
        text,
    )
    if match is None or has_zone != bool(match[5] or match[6]):
        raise ValueError
    day, minute, second, fraction, _, hours, minutes = match.groups()
    zone = f"{hours or '+00'}:{minutes or '00'}" if has_zone else ""
    value = datetime.datetime.fromisoformat(
        f"{day}T{minute or '00:00'}:{second or '00'}.{(fraction or '').ljust(6, '0')}{zone}"
    )
    if has_zone:
        value = value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    return value.isoformat(" ", "microseconds") + ("+00:00" if has_zone else "")


def _uuid(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
        raise ValueError
    return str(uuid.UUID(text))


def _blank_padded(text: str, length: int) -> str:
    value = _text(text).rstrip(" ")
    if len(value) > length:
        raise ValueError
    return value.ljust(length)
