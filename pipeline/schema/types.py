"""PostgreSQL type -> Arrow type, decided by R (and, for a domain, by the base type that Y names) alone.

Never by a catalog query: the catalog shows today's types, the stream yesterday's rows. What is not in the
tables below is PostgreSQL's own text, lossless.

``Codec`` says how the decoder turns PostgreSQL's text into the Arrow type; the decoder holds one routine
for each, so a new native type is one row here and one routine there.

Source: the packing of a numeric's modifier from ``numeric_typmod_precision`` and ``numeric_typmod_scale`` in
``src/backend/utils/adt/numeric.c``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import pyarrow as pa

from xidstream.pipeline.schema.builtin_types import BY_ARRAY_OID, BY_OID

_VARHDRSZ: Final = 4
MAX_DECIMAL_PRECISION: Final = 38
"""Spark's and Arrow decimal128's."""


class Codec(enum.Enum):
    """How text becomes a value."""

    TEXT = "text"
    BOOL = "bool"
    INTEGER = "integer"
    FLOAT = "float"
    DECIMAL = "decimal"
    BYTEA = "bytea"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    ARRAY = "array"


@dataclass(frozen=True)
class ColumnType:
    """``element`` is set for ARRAY alone."""

    codec: Codec
    arrow: pa.DataType
    element: ColumnType | None = None


_TEXT: Final = ColumnType(Codec.TEXT, pa.string())
_FIXED: Final[dict[str, ColumnType]] = {
    "bool": ColumnType(Codec.BOOL, pa.bool_()),
    "int2": ColumnType(Codec.INTEGER, pa.int16()),
    "int4": ColumnType(Codec.INTEGER, pa.int32()),
    "int8": ColumnType(Codec.INTEGER, pa.int64()),
    # An oid is unsigned and Spark has no unsigned types: the next wider signed one holds all of it.
    "oid": ColumnType(Codec.INTEGER, pa.int64()),
    "float4": ColumnType(Codec.FLOAT, pa.float32()),
    "float8": ColumnType(Codec.FLOAT, pa.float64()),
    "bytea": ColumnType(Codec.BYTEA, pa.binary()),
    "date": ColumnType(Codec.DATE, pa.date32()),
    "timestamp": ColumnType(Codec.TIMESTAMP, pa.timestamp("us")),
    "timestamptz": ColumnType(Codec.TIMESTAMPTZ, pa.timestamp("us", tz="UTC")),
}
_LISTS: Final = frozenset(
    (*_FIXED, "numeric", "char", "name", "text", "bpchar", "varchar", "json", "jsonb", "uuid")
)
"""The types whose arrays are lists. An array of another type is its text."""


@lru_cache(maxsize=4096)
def column_type(type_oid: int, type_modifier: int, base_type_name: str | None) -> ColumnType:
    """The native type of a column, or text. Total: no oid raises."""
    element_name = BY_ARRAY_OID.get(type_oid)
    if element_name in _LISTS:
        element = _scalar(element_name, type_modifier)
        return ColumnType(Codec.ARRAY, pa.list_(element.arrow), element)
    name = BY_OID.get(type_oid, base_type_name)
    if name is None:
        return _TEXT
    # A domain's own modifier is not on the wire, so a domain over numeric(10,2) has no precision here.
    return _scalar(name, type_modifier if type_oid in BY_OID else -1)


def _scalar(name: str, type_modifier: int) -> ColumnType:
    if name == "numeric":
        return _numeric(type_modifier)
    return _FIXED.get(name, _TEXT)


def _numeric(type_modifier: int) -> ColumnType:
    if type_modifier < _VARHDRSZ:
        return _TEXT
    packed = type_modifier - _VARHDRSZ
    precision = packed >> 16 & 0xFFFF
    # The scale is an 11 bit two's complement number since PostgreSQL 15.
    scale = ((packed & 0x7FF) ^ 1024) - 1024
    if not 1 <= precision <= MAX_DECIMAL_PRECISION or not 0 <= scale <= precision:
        return _TEXT
    return ColumnType(Codec.DECIMAL, pa.decimal128(precision, scale))
