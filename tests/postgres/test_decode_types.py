"""Values of every type through a real pgoutput stream, with the server as judge.

What a column should hold is asked of the server twice, independently of the decoder: in the binary format,
which psycopg turns into Python values, and as the raw text of the type's output function.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg import pq

from tests.postgres_fixtures import Database
from xidstream.pipeline.decode import decode_plain_block, decode_transaction_block
from xidstream.pipeline.schema import Codec, Column, RelationVersion, ReplicaIdentity, rows

pytestmark = pytest.mark.postgres

SESSION = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c bytea_output=hex "
    "-c client_encoding=UTF8"
)


def open_slot(database: Database) -> None:
    """Decoding starts here, and takes every table."""
    database.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    database.execute(f"SELECT pg_create_logical_replication_slot('slot_{database.name}', 'pgoutput')")


def stream(database: Database, *, streaming: bool = False) -> Iterator[bytes]:
    """CopyData messages from the slot's creation to a mark that is written now."""
    database.execute("SELECT pg_logical_emit_message(true, 'the end', '')")
    immediate = " -c debug_logical_replication_streaming=immediate" if streaming else ""
    options = "proto_version '2', publication_names 'everything', messages 'true'"
    if streaming:
        options += ", streaming 'on'"
    dsn = database.dsn(replication="database", options=SESSION + immediate)
    # contextlib's closing, not psycopg's own block: that would send COMMIT into the running copy.
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        pgconn = connection.pgconn
        command = f"START_REPLICATION SLOT slot_{database.name} LOGICAL 0/0 ({options})"
        result = pgconn.exec_(command.encode())
        assert result.status == pq.ExecStatus.COPY_BOTH, pgconn.error_message
        ended = False
        while True:
            size, data = pgconn.get_copy_data(1)
            if size == 0:
                assert select.select([pgconn.socket], [], [], 60)[0], "the server went silent"
                pgconn.consume_input()
                continue
            assert size > 0, pgconn.error_message
            message = bytes(data)
            if message[:1] != b"w":
                continue
            yield message
            ended |= message[25:26] == b"M" and b"the end\0" in message
            if ended and message[25:26] in b"Cc":
                return


class Relations:
    """What R and Y messages declared so far."""

    def __init__(self) -> None:
        self.known: dict[int, RelationVersion] = {}
        self._types: dict[int, str] = {}

    def take(self, body: bytes) -> None:
        """``body`` follows the type byte and the xid of an R message."""
        relid = int.from_bytes(body[:4], "big")
        schema, table, rest = body[4:].split(b"\0", 2)
        identity, n_columns = struct.unpack(">cH", rest[:3])
        rest = rest[3:]
        columns = []
        for _ in range(n_columns):
            flags = rest[0]
            name, rest = rest[1:].split(b"\0", 1)
            oid, modifier = struct.unpack(">Ii", rest[:8])
            rest = rest[8:]
            columns.append(Column(name.decode(), oid, modifier, bool(flags & 1), self._types.get(oid)))
        self.known[relid] = RelationVersion(
            relid, schema.decode(), table.decode(), ReplicaIdentity(identity.decode()), tuple(columns)
        )

    def take_type(self, body: bytes) -> None:
        schema, name, _ = body[4:].split(b"\0")
        qualified = f"{schema.decode()}.{name.decode()}" if schema else name.decode()
        self._types[int.from_bytes(body[:4], "big")] = qualified


@dataclass
class Received:
    tables: dict[str, pa.Table]
    """By table, in internal layout."""
    relations: dict[str, RelationVersion]

    def columns(self, table: str) -> dict[str, list[Any]]:
        return self.tables[table].to_pydict()  # type: ignore[no-any-return]


def as_block(messages: list[bytes]) -> tuple[Any, Any]:
    payload = np.frombuffer(b"".join(messages), np.uint8)
    return payload, np.array([len(message) for message in messages], np.int32)


def receive(database: Database, *, streaming: bool = False) -> Received:
    """Decode all that was committed; of a streamed transaction, the one that there is."""
    relations = Relations()
    block: list[bytes] = []
    streamed: list[bytes] = []
    xid = 0
    inside = False
    for message in stream(database, streaming=streaming):
        kind = message[25:26]
        if kind == b"S":
            # Without an xid of its own for the mark: its transaction has no rows.
            inside, top = True, int.from_bytes(message[26:30], "big")
        elif kind == b"E":
            inside = False
        elif kind in b"RY":
            body = message[30:] if inside else message[26:]
            relations.take(body) if kind == b"R" else relations.take_type(body)
        elif kind in b"IUDT" and inside:
            assert xid in (0, top)
            xid = top
            streamed.append(message)
        elif kind in b"IUDTBCO" or (kind == b"M" and not inside):
            block.append(message)
    if streaming:
        tables = decode_transaction_block(
            *as_block(streamed), relations.known, streamed=True, xid=xid, first_ordinal=0
        ).tables
    else:
        tables = decode_plain_block(*as_block(block), relations.known).tables
    for table in tables:
        table.batch.validate(full=True)
        assert table.batch.schema == rows.internal_schema(table.relation)
    return Received(
        {t.relation.table: pa.Table.from_batches([t.batch]) for t in tables},
        {t.relation.table: t.relation for t in tables},
    )


CORNERS: dict[str, list[str]] = {
    "bool": ["t", "f"],
    "int2": ["0", "-32768", "32767"],
    "int4": ["0", "-2147483648", "2147483647"],
    "int8": ["0", "-9223372036854775808", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "float4": ["0", "-0", "1.1", "3.4028235e38", "1e-45", "NaN", "Infinity", "-Infinity", "123456.79",
               "1e15"],
    "float8": ["0", "-0", "0.1", "1.7976931348623157e308", "5e-324", "NaN", "Infinity", "-Infinity",
               "0.30000000000000004", "123456789012345680", "1e22", "9007199254740993"],
    "numeric(12,2)": ["0", "-0.01", "9999999999.99", "-9999999999.99", "NaN", "1.5", "0.10"],
    "numeric(38,0)": ["9" * 38, "-" + "9" * 38, "1" + "0" * 37, "0", "18446744073709551616",
                      "9223372036854775808"],
    "numeric(38,38)": ["0." + "9" * 38, "-0." + "0" * 37 + "1", "0"],
    "numeric(20,5)": ["123456789012345.12345", "-1", "0.00001"],
    "numeric(3,0)": ["999", "-1"],
    "numeric": ["1.500", "NaN", "Infinity", "-Infinity", "1e-30", "1e40"],
    "numeric(50,2)": ["1", "NaN"],
    "numeric(3,-2)": ["12300", "-99900"],
    "numeric(2,5)": ["0.00012"],
    "text": ["", " ", "NULL", "ünïcødé 🐘", "tab\tnew\nline\\", "x" * 9000],
    "varchar(5)": ["", "abcde"],
    "char(5)": ["a", ""],
    '"char"': ["a", ""],
    "name": ["some name"],
    "bytea": ["", "\\x00ff", "\\x" + bytes(range(256)).hex()],
    "date": ["0001-01-01", "9999-12-31", "1970-01-01", "2000-02-29", "1900-02-28", "1582-10-10", "infinity",
             "-infinity", "0001-12-31 BC", "4713-01-01 BC", "10000-01-01", "5874897-12-31"],
    "timestamp": ["0001-01-01", "9999-12-31 23:59:59.999999", "1970-01-01 00:00:00.000001",
                  "2024-02-29 12:00:00.1",
                  "1969-12-31 23:59:59.999999", "infinity", "-infinity", "4713-01-01 00:00:00 BC",
                  "294276-12-31 23:59:59.999999", "2016-12-31 23:59:60"],
    "timestamp(3)": ["2024-01-01 00:00:00.1239"],
    "timestamptz": ["0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00", "2024-01-01 00:00:00+05:30",
                    "1890-01-01 00:00:00 Europe/Berlin", "infinity", "-infinity", "0001-01-01 00:00:00+01",
                    "10000-01-01 00:00:00+00"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"a" : [1, null]}', "null"],
    "jsonb": ['{"b": 1, "a": "é"}', "null"],
    "interval": ["1 year 2 mons -3 days 04:05:06.7"],
    "time": ["24:00:00"],
    "timetz": ["01:02:03+04"],
    "inet": ["10.0.0.1/8"],
    "money": ["1.50"],
    "int4range": ["[1,5)", "empty"],
    "bit(3)": ["101"],
    "xml": ["<a/>"],
    "point": ["(1,2)"],
    "bool[]": ["{}", "{t,NULL,f}"],
    "int2[]": ["{1,-2}"],
    "int4[]": ["{}", "{1,NULL,-2147483648}", "{{1,2},{3,4}}", "[0:1]={1,2}", "{NULL}"],
    "int8[]": ["{9223372036854775807}"],
    "oid[]": ["{4294967295}"],
    "float4[]": ["{1.1,NaN}"],
    "float8[]": ["{0.1,-Infinity,NULL}"],
    "numeric(10,2)[]": ["{1.50,NULL}", "{NaN,1}", "{}"],
    "numeric[]": ["{1.500,NaN}"],
    "text[]": ["{}", '{"a \\"b\\"","",NULL,"NULL","null","{x}",",","\\\\","é"}', '{{a},{b}}', '{" "}',
               "{a b}"],
    "varchar(9)[]": ["{a,NULL}"],
    "char(3)[]": ["{a,bcd}"],
    '"char"[]': ["{a}"],
    "name[]": ["{n}"],
    "bytea[]": ['{"\\\\x00ff",NULL,""}'],
    "date[]": ["{2024-01-01,NULL}", "{2024-01-01,infinity}", "{0001-01-01 BC}"],
    "timestamp[]": ['{"2024-01-01 00:00:00.5",NULL}', "{infinity}"],
    "timestamptz[]": ['{"2024-01-01 00:00:00+02"}'],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "json[]": ['{"{\\"a\\": 1}"}'],
    "jsonb[]": ['{"{\\"a\\": [1, 2]}"}'],
    "interval[]": ['{"1 day"}'],
    "mood": ["sad", "it's"],
    "mood[]": ["{sad}"],
    "pair": ['(1,"a b")'],
    "small": ["7"],
    "words": ["some words"],
    "whens": ["infinity", "2024-01-01"],
    "price": ["1.25"],
    "smalls": ["{1,2}"],
    "small[]": ["{1,2}"],
    "nested": ["8"],
}  # fmt: skip
BEYOND_NATIVE = {
    "numeric(12,2)": ["NaN"],
    "date": ["infinity", "-infinity", "0001-12-31 BC", "4713-01-01 BC", "10000-01-01", "5874897-12-31"],
    "timestamp": ["infinity", "-infinity", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999"],
    "timestamptz": ["infinity", "-infinity", "0001-01-01 00:00:00+01", "10000-01-01 00:00:00+00"],
    "int4[]": ["{{1,2},{3,4}}", "[0:1]={1,2}"],
    "numeric(10,2)[]": ["{NaN,1}"],
    "text[]": ["{{a},{b}}"],
    "date[]": ["{2024-01-01,infinity}", "{0001-01-01 BC}"],
    "timestamp[]": ["{infinity}"],
    "whens": ["infinity"],
}
"""Those of CORNERS that must be null in their column and in ``text``; no others may be."""
MADE = """
CREATE TYPE mood AS ENUM ('sad', 'it''s');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN small AS int4;
CREATE DOMAIN words AS varchar(20);
CREATE DOMAIN whens AS date;
CREATE DOMAIN price AS numeric(10, 2);
CREATE DOMAIN smalls AS int4[];
CREATE DOMAIN nested AS small;
"""
NATIVE_THROUGH_DOMAINS = {"small": pa.int32(), "whens": pa.date32(), "nested": pa.int32()}


def _make_types(database: Database) -> None:
    for statement in MADE.strip().splitlines():
        database.execute(statement)


def test_corner_values_of_every_type_are_what_the_server_says(database: Database) -> None:
    types = list(CORNERS)
    _make_types(database)
    try:
        database.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:  # built without libxml
        types.remove("xml")
    columns = ", ".join(f"c{i} {each}" for i, each in enumerate(types))
    database.execute(f"CREATE TABLE corners (id int PRIMARY KEY, {columns})")
    open_slot(database)
    n = max(len(CORNERS[each]) for each in types) + 1  # the last row is all null
    for r in range(n):
        values = [CORNERS[each][r] if r < len(CORNERS[each]) else None for each in types]
        casts = ", ".join(f"%s::{each}" for each in types)
        database.execute(f"INSERT INTO corners VALUES (%s, {casts})", r, *values)

    received = receive(database)
    table, relation = received.tables["corners"], received.relations["corners"]
    assert table.num_rows == n
    got = received.columns("corners")
    kept: list[dict[str, str]] = [dict(each or ()) for each in table.column(4).to_pylist()]
    with database.connect(options=SESSION) as judge:
        raw = judge.execute("SELECT * FROM corners ORDER BY id").pgresult
        assert raw is not None
        for i, each in enumerate(types):
            name, codec = f"c{i}", relation.columns[i + 1].type.codec
            for r in range(n):
                text = raw.get_value(r, i + 1)
                value = got[name][r]
                where = f"{each} row {r}: server has {text!r}, decoded {value!r}"
                if text is None:
                    assert value is None, where
                    assert name not in kept[r], where
                elif CORNERS[each][r] in BEYOND_NATIVE.get(each, ()):
                    assert value is None, where
                    assert kept[r].pop(name) == text.decode(), where
                elif codec is Codec.TEXT:
                    assert value == text.decode(), where
                else:
                    assert _same(value, _ask(judge, name, each, r)), where
        assert not any(kept)


def _ask(judge: psycopg.Connection[Any], column: str, type_: str, row: int) -> Any:
    # psycopg has Python classes of its own for these elements; here they are strings.
    cast = "::text[]" if type_ in ("uuid[]", "json[]", "jsonb[]", "numeric[]") else ""
    cursor = judge.cursor(binary=True)
    found = cursor.execute(f"SELECT {column}{cast} FROM corners WHERE id = {row}".encode()).fetchone()
    assert found is not None
    return found[0]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


def test_domains_over_native_types_are_native(database: Database) -> None:
    _make_types(database)
    names = [
        each for each in CORNERS if each in MADE.replace("CREATE DOMAIN ", "").replace(" AS ", " ").split()
    ]
    domains = [each for each in names if f"DOMAIN {each} " in MADE]
    assert set(NATIVE_THROUGH_DOMAINS) < set(domains)
    database.execute("CREATE TABLE d (" + ", ".join(f"{each}_ {each}" for each in domains) + ")")
    open_slot(database)
    database.execute("INSERT INTO d DEFAULT VALUES")
    relation = receive(database).relations["d"]
    got = {column.name[:-1]: column.type.arrow for column in relation.columns}
    assert got == {each: NATIVE_THROUGH_DOMAINS.get(each, pa.string()) for each in domains}


@pytest.mark.parametrize("streaming", [False, True])
def test_toast_and_replica_identities(database: Database, streaming: bool) -> None:
    toast = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) i)"
    database.execute("CREATE TABLE by_key (id text PRIMARY KEY, doc text, n int)")
    database.execute("CREATE TABLE by_all (id int PRIMARY KEY, doc text, days date[], n int)")
    database.execute("ALTER TABLE by_all REPLICA IDENTITY FULL")
    database.execute("ALTER TABLE by_key ALTER id SET STORAGE EXTERNAL")
    database.execute("ALTER TABLE by_key ALTER doc SET STORAGE EXTERNAL")
    database.execute("ALTER TABLE by_all ALTER doc SET STORAGE EXTERNAL")
    long_key = "k" * 2600  # toasted, and still small enough for the index once compressed
    database.execute(f"INSERT INTO by_key VALUES ('a', {toast}, 1), (%s, {toast}, 2)", long_key)
    database.execute(f"INSERT INTO by_all VALUES (1, {toast}, '{{2024-01-01}}', 1)")
    ((doc,),) = database.execute(f"SELECT {toast}")
    open_slot(database)
    with database.connection.transaction():
        database.execute("UPDATE by_key SET n = 10 WHERE id = 'a'")
        database.execute("UPDATE by_key SET id = 'b' WHERE id = 'a'")
        database.execute("UPDATE by_key SET n = 20 WHERE id = %s", long_key)
        database.execute("DELETE FROM by_key WHERE id = 'b'")
        database.execute("UPDATE by_all SET n = 11")
        database.execute("DELETE FROM by_all")
        database.execute("TRUNCATE by_all, by_key")
    received = receive(database, streaming=streaming)
    by_all, by_key = received.columns("by_all"), received.columns("by_key")

    assert [rows.CHANGE_TYPES[i] for i in by_all["change_type"]] == [
        "update_preimage",
        "update_postimage",
        "delete",
        "truncate",
    ]
    assert by_all["doc"] == [doc, doc, doc, None]
    assert by_all["n"] == [1, 11, 11, None]
    assert by_all["unchanged"] == [None] * 4

    assert [rows.CHANGE_TYPES[i] for i in by_key["change_type"]] == [
        "update_postimage",  # the key did not change
        "update_preimage",
        "update_postimage",
        "update_preimage",  # nor did this one, but a toasted key is sent whenever the row is
        "update_postimage",
        "delete",
        "truncate",
    ]
    assert by_key["id"] == ["a", "a", "b", long_key, long_key, "b", None]
    assert by_key["doc"] == [None] * 7
    assert by_key["n"] == [10, None, 10, None, 20, None, None]
    assert by_key["unchanged"] == [["doc"], None, ["doc"], None, ["doc"], None, None]
    assert sorted(by_key["ordinal"] + by_all["ordinal"]) == list(range(11))


def test_logical_messages_of_a_plain_stream(database: Database) -> None:
    database.execute("CREATE TABLE t (a int)")
    open_slot(database)
    database.execute("SELECT pg_logical_emit_message(false, 'loose', %s::bytea)", b"\0\xff")
    with database.connection.transaction():
        database.execute("INSERT INTO t VALUES (1)")
        database.execute("SELECT pg_logical_emit_message(true, 'bound', 'x')")
    relations = Relations()
    block = []
    for message in stream(database):
        if message[25:26] == b"R":
            relations.take(message[26:])
        else:
            block.append(message)
    decoded = decode_plain_block(*as_block(block), relations.known)
    assert decoded.messages is not None
    got = decoded.messages.to_pydict()
    assert got["prefix"] == ["loose", "bound", "the end"]
    assert got["content"] == [b"\0\xff", b"x", b""]
    assert got["transactional"] == [False, True, True]
    assert got["commit_lsn"] == [None, *decoded.stamp.commit_lsn.tolist()]
    assert got["xid"] == [None, *decoded.stamp.xid.tolist()]
    assert decoded.transactions.to_pydict()["tables"] == [["public.t"], []]
