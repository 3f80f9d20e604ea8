"""A column's PostgreSQL type as people write it: ``numeric(10,2)``, ``timestamp(3) with time zone``, ``text[]``.

What ``format_type`` of the server gives, worked out from what R and Y messages said, because the catalog shows today's
types, and the stream yesterday's. For people and tools only; no decision hangs on it. A domain has the name of its base
type, as in Y. A type that is neither built in nor named by a Y message is ``oid 12345``.

Source: ``format_type.c`` and the ``typmodout`` functions that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from xidstream.pipeline.schema.builtin_types import BUILTIN_TYPES, BY_ARRAY_OID, BY_OID
from xidstream.pipeline.schema.relation import Column

_VARHDRSZ: Final = 4


def _length(modifier: int) -> str:
    return f"({modifier - _VARHDRSZ})" if modifier >= _VARHDRSZ else ""


def _bits(modifier: int) -> str:
    return f"({modifier})" if modifier >= 0 else ""


def _numeric(modifier: int) -> str:
    if modifier < _VARHDRSZ:
        return ""
    packed = modifier - _VARHDRSZ
    scale = ((packed & 0x7FF) ^ 1024) - 1024
    return f"({packed >> 16 & 0xFFFF},{scale})"


def _interval(modifier: int) -> str:
    """The type's precision; fields such as ``year to month`` are left out."""
    return f"({modifier & 0xFFFF})" if modifier >= 0 and modifier & 0xFFFF != 0xFFFF else ""


_MODIFIERS: Final[dict[str, Callable[[int], str]]] = {
    "bpchar": _length,
    "varchar": _length,
    "numeric": _numeric,
    "time": _bits,
    "timetz": _bits,
    "timestamp": _bits,
    "timestamptz": _bits,
    "interval": _interval,
    "bit": _bits,
    "varbit": _bits,
}


def type_name(column: Column) -> str:
    """Total: every column has one."""
    if column.type_oid in BY_ARRAY_OID:
        return _spelt(BY_ARRAY_OID[column.type_oid], column.type_modifier) + "[]"
    if column.type_oid in BY_OID:
        return _spelt(BY_OID[column.type_oid], column.type_modifier)
    base = column.base_type_name
    if base is None:
        return f"oid {column.type_oid}"
    # The modifier on the wire is not the base type's.
    return _spelt(base, -1) if base in BUILTIN_TYPES else base


def _spelt(name: str, modifier: int) -> str:
    suffix = _MODIFIERS[name](modifier) if name in _MODIFIERS else ""
    sql = BUILTIN_TYPES[name].sql
    return sql.format(suffix) if "{}" in sql else sql + suffix
