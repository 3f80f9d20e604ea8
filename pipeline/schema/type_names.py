"""A column's PostgreSQL type as people write it: ``numeric(10,2)``, ``timestamp(3) with time zone``, ``text[]``.

What ``format_type`` of the server gives, worked out from what R and Y messages said, because the catalog shows today's
types, and the stream yesterday's. For people and tools only; no decision hangs on it. A domain has the name of its base
type, as in Y. A type that is neither built in nor named by a Y message is ``oid 12345``.

Source of oids and names: ``src/include/catalog/pg_type.dat``; of modifiers: ``format_type.c`` and the ``typmodout``
functions that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
    """Its precision; fields such as ``year to month`` are left out."""
    return f"({modifier & 0xFFFF})" if modifier >= 0 and modifier & 0xFFFF != 0xFFFF else ""


_NAMES: Final[dict[str, tuple[int, int, str]]] = {
    # The name in pg_type: (its oid, its array's oid, the name in SQL).
    "bool": (16, 1000, "boolean"),
    "bytea": (17, 1001, "bytea"),
    "char": (18, 1002, '"char"'),
    "name": (19, 1003, "name"),
    "int8": (20, 1016, "bigint"),
    "int2": (21, 1005, "smallint"),
    "int4": (23, 1007, "integer"),
    "text": (25, 1009, "text"),
    "oid": (26, 1028, "oid"),
    "xid": (28, 1011, "xid"),
    "json": (114, 199, "json"),
    "xml": (142, 143, "xml"),
    "point": (600, 1017, "point"),
    "lseg": (601, 1018, "lseg"),
    "path": (602, 1019, "path"),
    "box": (603, 1020, "box"),
    "polygon": (604, 1027, "polygon"),
    "line": (628, 629, "line"),
    "cidr": (650, 651, "cidr"),
    "float4": (700, 1021, "real"),
    "float8": (701, 1022, "double precision"),
    "circle": (718, 719, "circle"),
    "macaddr8": (774, 775, "macaddr8"),
    "money": (790, 791, "money"),
    "macaddr": (829, 1040, "macaddr"),
    "inet": (869, 1041, "inet"),
    "bpchar": (1042, 1014, "character"),
    "varchar": (1043, 1015, "character varying"),
    "date": (1082, 1182, "date"),
    "time": (1083, 1183, "time{} without time zone"),
    "timestamp": (1114, 1115, "timestamp{} without time zone"),
    "timestamptz": (1184, 1185, "timestamp{} with time zone"),
    "interval": (1186, 1187, "interval"),
    "timetz": (1266, 1270, "time{} with time zone"),
    "bit": (1560, 1561, "bit"),
    "varbit": (1562, 1563, "bit varying"),
    "numeric": (1700, 1231, "numeric"),
    "uuid": (2950, 2951, "uuid"),
    "pg_lsn": (3220, 3221, "pg_lsn"),
    "tsvector": (3614, 3643, "tsvector"),
    "tsquery": (3615, 3645, "tsquery"),
    "jsonb": (3802, 3807, "jsonb"),
    "int4range": (3904, 3905, "int4range"),
    "numrange": (3906, 3907, "numrange"),
    "tsrange": (3908, 3909, "tsrange"),
    "tstzrange": (3910, 3911, "tstzrange"),
    "daterange": (3912, 3913, "daterange"),
    "int8range": (3926, 3927, "int8range"),
    "jsonpath": (4072, 4073, "jsonpath"),
}
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
_BY_OID: Final = {oid: name for name, (oid, _, _) in _NAMES.items()}
_BY_ARRAY_OID: Final = {array: name for name, (_, array, _) in _NAMES.items()}


def type_name(column: Column) -> str:
    """Total: every column has one."""
    if column.type_oid in _BY_ARRAY_OID:
        return _spelt(_BY_ARRAY_OID[column.type_oid], column.type_modifier) + "[]"
    if column.type_oid in _BY_OID:
        return _spelt(_BY_OID[column.type_oid], column.type_modifier)
    base = column.base_type_name
    if base is None:
        return f"oid {column.type_oid}"
    # The modifier on the wire is not the base type's.
    return _spelt(base, -1) if base in _NAMES else base


def _spelt(name: str, modifier: int) -> str:
    suffix = _MODIFIERS[name](modifier) if name in _MODIFIERS else ""
    sql = _NAMES[name][2]
    return sql.format(suffix) if "{}" in sql else sql + suffix
