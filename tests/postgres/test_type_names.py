"""The names of types, against the server's own ``format_type``."""

from __future__ import annotations

import pytest

from tests.postgres_fixtures import Database
from xidstream.pipeline.schema import Column
from xidstream.pipeline.schema.type_names import type_name

pytestmark = pytest.mark.postgres

DECLARED = """
    numeric, numeric(10,2), numeric(5,-2), numeric(3,5), varchar, varchar(7), char(3), "char", name, text, boolean,
    smallint, integer, bigint, oid, xid, real, double precision, bytea, date, time, time(2), timetz(3), timestamp,
    timestamp(0), timestamptz, timestamptz(6), interval, interval(4), bit(5), bit varying, bit varying(9), uuid, json,
    jsonb, xml, inet, cidr, macaddr, macaddr8, money, point, line, lseg, box, path, polygon, circle, tsvector, tsquery,
    int4range, int8range, numrange, tsrange, tstzrange, daterange, jsonpath, pg_lsn
"""


def declared() -> list[str]:
    outside = DECLARED.replace("\n", " ").replace(",2)", ";2)").replace(",-2)", ";-2)").replace(",5)", ";5)")
    plain = [name.strip().replace(";", ",") for name in outside.split(",")]
    return plain + [f"{name}[]" for name in plain]


def test_every_built_in_type_is_named_as_the_server_names_it(database: Database) -> None:
    columns = ", ".join(f"c{i} {name}" for i, name in enumerate(declared()))
    if database.version < 15:
        pytest.skip("negative scales are of 15 and later")
    database.connection.execute(f"CREATE TABLE every_type ({columns})".encode())
    found = database.connection.execute(
        "SELECT attname, atttypid, atttypmod, format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = 'every_type'::regclass AND attnum > 0 ORDER BY attnum"
    ).fetchall()
    assert len(found) == len(declared()) > 100
    wrong = {
        name: (type_name(Column(name, oid, modifier, False)), said)
        for name, oid, modifier, said in found
        if type_name(Column(name, oid, modifier, False)) != said
    }
    assert not wrong
