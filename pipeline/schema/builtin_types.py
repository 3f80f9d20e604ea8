"""The built-in types that columns have: oid, the oid of its array, and its name in SQL.

R messages name a column's type by its oid alone. The native types (types.py), their names for people (type_names.py)
and the conditions on a key (snapshot/key_filter.py) take it from here. A type that is not here is text, and has the
name that a Y message gave it.

Source: ``src/include/catalog/pg_type.dat``. The oids of built-in types never change.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class BuiltinType(NamedTuple):
    """``sql`` is as ``format_type`` writes it. ``{}`` is where a modifier goes that does not end the name."""

    oid: int
    array_oid: int
    sql: str


BUILTIN_TYPES: Final[dict[str, BuiltinType]] = {
    # By pg_type.typname.
    "bool": BuiltinType(16, 1000, "boolean"),
    "bytea": BuiltinType(17, 1001, "bytea"),
    "char": BuiltinType(18, 1002, '"char"'),
    "name": BuiltinType(19, 1003, "name"),
    "int8": BuiltinType(20, 1016, "bigint"),
    "int2": BuiltinType(21, 1005, "smallint"),
    "int4": BuiltinType(23, 1007, "integer"),
    "text": BuiltinType(25, 1009, "text"),
    "oid": BuiltinType(26, 1028, "oid"),
    "xid": BuiltinType(28, 1011, "xid"),
    "json": BuiltinType(114, 199, "json"),
    "xml": BuiltinType(142, 143, "xml"),
    "point": BuiltinType(600, 1017, "point"),
    "lseg": BuiltinType(601, 1018, "lseg"),
    "path": BuiltinType(602, 1019, "path"),
    "box": BuiltinType(603, 1020, "box"),
    "polygon": BuiltinType(604, 1027, "polygon"),
    "line": BuiltinType(628, 629, "line"),
    "cidr": BuiltinType(650, 651, "cidr"),
    "float4": BuiltinType(700, 1021, "real"),
    "float8": BuiltinType(701, 1022, "double precision"),
    "circle": BuiltinType(718, 719, "circle"),
    "macaddr8": BuiltinType(774, 775, "macaddr8"),
    "money": BuiltinType(790, 791, "money"),
    "macaddr": BuiltinType(829, 1040, "macaddr"),
    "inet": BuiltinType(869, 1041, "inet"),
    "bpchar": BuiltinType(1042, 1014, "character"),
    "varchar": BuiltinType(1043, 1015, "character varying"),
    "date": BuiltinType(1082, 1182, "date"),
    "time": BuiltinType(1083, 1183, "time{} without time zone"),
    "timestamp": BuiltinType(1114, 1115, "timestamp{} without time zone"),
    "timestamptz": BuiltinType(1184, 1185, "timestamp{} with time zone"),
    "interval": BuiltinType(1186, 1187, "interval"),
    "timetz": BuiltinType(1266, 1270, "time{} with time zone"),
    "bit": BuiltinType(1560, 1561, "bit"),
    "varbit": BuiltinType(1562, 1563, "bit varying"),
    "numeric": BuiltinType(1700, 1231, "numeric"),
    "uuid": BuiltinType(2950, 2951, "uuid"),
    "pg_lsn": BuiltinType(3220, 3221, "pg_lsn"),
    "tsvector": BuiltinType(3614, 3643, "tsvector"),
    "tsquery": BuiltinType(3615, 3645, "tsquery"),
    "jsonb": BuiltinType(3802, 3807, "jsonb"),
    "int4range": BuiltinType(3904, 3905, "int4range"),
    "numrange": BuiltinType(3906, 3907, "numrange"),
    "tsrange": BuiltinType(3908, 3909, "tsrange"),
    "tstzrange": BuiltinType(3910, 3911, "tstzrange"),
    "daterange": BuiltinType(3912, 3913, "daterange"),
    "int8range": BuiltinType(3926, 3927, "int8range"),
    "jsonpath": BuiltinType(4072, 4073, "jsonpath"),
}
BY_OID: Final = {type_.oid: name for name, type_ in BUILTIN_TYPES.items()}
BY_ARRAY_OID: Final = {type_.array_oid: name for name, type_ in BUILTIN_TYPES.items()}
"""The oid of an array → the name of its elements' type."""
