"""The tables that the workload writes to, and values at the corners of every type.

``s`` and ``s2`` are published as schemas, so that tables created by the workload are published too; tables
with filters, column lists, generated columns and a published root have publications of their own.
Every table has ``id``; what else identifies its rows is in ``IDENTITY``.
"""

from __future__ import annotations

PUBLICATIONS = ("p", "p_filter", "p_root", "p_generated")

TYPES: dict[str, list[str]] = {
    "bool": ["true", "false"],
    "int2": ["-32768", "32767", "0"],
    "int4": ["-2147483648", "2147483647", "7"],
    "int8": ["-9223372036854775808", "9223372036854775807", "-1"],
    "oid": ["0", "4294967295"],
    "float4": ["'NaN'", "'Infinity'", "'-Infinity'", "1e-45", "3.4028235e38", "-0.0", "0.1"],
    "float8": ["'NaN'", "'Infinity'", "'-Infinity'", "5e-324", "1.7976931348623157e308", "0.1", "-0.0"],
    "numeric": ["'NaN'", "'Infinity'", "1e300", "0.000000000000000000000000000001", "-0", "123.4500"],
    "numeric(12,2)": ["'NaN'", "9999999999.99", "-0.01", "0"],
    "numeric(38,10)": ["1234567890123456789012345678.0123456789", "-0.0000000001", "'NaN'"],
    "numeric(50,5)": ["123456789012345678901234567890123456789012345.12345", "1"],
    "numeric(4,-2)": ["123400", "-99"],
    "text": ["''", "'a'", "E'tab\\t newline\\n \\\\ quote'''", "'é漢字🎉'", "repeat('x', 300)", "'NULL'"],
    "varchar(20)": ["'v'", "'twenty characters ok'"],
    "char(5)": ["'ab'", "''"],
    "name": ["'a_name'"],
    '"char"': ["'q'", "''"],
    "bytea": ["'\\x'", "'\\x00ff10'", "decode(repeat('ab', 200), 'hex')"],
    "date": ["'infinity'", "'-infinity'", "'0044-03-15 BC'", "'0001-01-01'", "'9999-12-31'", "'12345-01-01'",
             "'2024-02-29'"],
    "timestamp": ["'infinity'", "'-infinity'", "'4713-01-01 00:00:00 BC'", "'2024-02-29 23:59:59.999999'",
                  "'294276-12-31 23:59:59.999999'", "'1969-12-31 23:59:59.5'"],
    "timestamptz": ["'infinity'", "'-infinity'", "'0044-03-15 12:00:00+00 BC'", "'2024-06-30 12:00:00.1+05:30'",
                    "'0001-01-01 00:00:00+00'", "'9999-12-31 23:59:59.999999+00'"],
    "time": ["'24:00:00'", "'00:00:00.000001'"],
    "timetz": ["'12:00:00+05:30'"],
    "interval": ["'1 year -2 days 03:04:05.678'", "'-178000000 years'"],
    "uuid": ["'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-4fff-bfff-ffffffffffff'"],
    "json": ["'{\"a\" :  1}'", "'null'", "'[]'"],
    "jsonb": ["'{\"b\": [1, 2.50, \"x\"]}'", "'\"s\"'"],
    "inet": ["'192.168.0.1/24'", "'::1'"],
    "point": ["'(1.5,-2)'"],
    "int4range": ["'[1,5)'", "'empty'", "'(,)'"],
    "tsvector": ["'a:1 b:2'"],
    "bit(3)": ["B'101'"],
    "pg_lsn": ["'16/B374D848'"],
    "s.mood": ["'ok'", "'with space'"],
    "s.positive": ["1", "2147483647"],
    "s.price": ["12.50", "0.01"],
    "s.pair": ["'(1,\"x y\")'", "'(,)'"],
    "int4[]": ["'{}'", "'{1,NULL,-2147483648}'", "'{{1,2},{3,4}}'", "'[0:1]={5,6}'"],
    "int8[]": ["'{9223372036854775807,NULL}'"],
    "text[]": ["'{}'", "'{\"a,b\",\"\\\"q\\\"\",NULL,\"NULL\",\"\",é}'", "'{{a,b},{c,d}}'"],
    "bool[]": ["'{t,f,NULL}'"],
    "float8[]": ["'{NaN,Infinity,-0,1e-300}'", "'{NULL}'"],
    "numeric(8,3)[]": ["'{1.5,NULL}'", "'{NaN,1}'"],
    "timestamptz[]": ["'{\"2024-01-01 00:00:00+00\",NULL}'", "'{infinity}'"],
    "date[]": ["'{2024-01-01,NULL}'", "'{infinity,2024-01-01}'"],
    "uuid[]": ["'{00000000-0000-0000-0000-000000000000}'"],
    "bytea[]": ["'{\"\\\\x00ff\",NULL}'"],
    "jsonb[]": ["'{\"{\\\"a\\\": 1}\"}'"],
    "s.mood[]": ["'{ok,sad}'"],
}  # fmt: skip
"""Type → literals that it accepts; NULL goes with all of them."""


def type_columns() -> list[str]:
    return [f"c{i:02d}" for i in range(len(TYPES))]


_TYPE_COLUMNS = ", ".join(f"{c} {t}" for c, t in zip(type_columns(), TYPES, strict=True))

_SETUP = f"""
CREATE SCHEMA s; CREATE SCHEMA s2; CREATE SCHEMA f; CREATE SCHEMA r; CREATE SCHEMA hidden;
CREATE TABLE hidden.tick (at bigint);
CREATE TYPE s.mood AS ENUM ('sad', 'ok', 'with space');
CREATE DOMAIN s.positive AS int CHECK (VALUE > 0);
CREATE DOMAIN s.price AS numeric(10,2);
CREATE TYPE s.pair AS (a int, b text);

CREATE TABLE s.plain (id bigint PRIMARY KEY, k int, note text, amount numeric(12,2));
CREATE TABLE s.full_ (id bigint PRIMARY KEY, k int, note text, at timestamptz);
ALTER TABLE s.full_ REPLICA IDENTITY FULL;
CREATE TABLE s.by_index (id bigint, k bigint NOT NULL UNIQUE, note text);
ALTER TABLE s.by_index REPLICA IDENTITY USING INDEX by_index_k_key;
CREATE TABLE s.log (id bigint, note text);
ALTER TABLE s.log REPLICA IDENTITY NOTHING;
CREATE TABLE s.toast (id bigint PRIMARY KEY, small text, big text, big2 bytea);
ALTER TABLE s.toast ALTER big SET STORAGE EXTERNAL, ALTER big2 SET STORAGE EXTERNAL;
CREATE TABLE s.toast_full (id bigint PRIMARY KEY, small text, big text);
ALTER TABLE s.toast_full ALTER big SET STORAGE EXTERNAL;
ALTER TABLE s.toast_full REPLICA IDENTITY FULL;
CREATE TABLE s.toast_key (id text PRIMARY KEY, small int, other text);
ALTER TABLE s.toast_key ALTER id SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL;
ALTER TABLE s.toast_key SET (toast_tuple_target = 128);
CREATE TABLE s.switching (id bigint PRIMARY KEY, k bigint NOT NULL UNIQUE, note text);
CREATE TABLE s.types (id bigint PRIMARY KEY, {_TYPE_COLUMNS});
CREATE TABLE s.a (id bigint PRIMARY KEY, note text);
CREATE TABLE s.b (id bigint PRIMARY KEY REFERENCES s.a, note text);
CREATE TABLE s."Odd ""N"" äme" (id bigint PRIMARY KEY, "A col" text, "select" int);
CREATE TABLE s.leafy (id bigint, k int, note text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k);
CREATE TABLE s.leafy_low PARTITION OF s.leafy FOR VALUES FROM (MINVALUE) TO (100);
CREATE TABLE s.leafy_high PARTITION OF s.leafy FOR VALUES FROM (100) TO (MAXVALUE);
CREATE TABLE s.ddl1 (id bigint PRIMARY KEY, note text);
CREATE TABLE s.ddl2 (id bigint PRIMARY KEY, note text);
ALTER TABLE s.ddl2 REPLICA IDENTITY FULL;
CREATE TABLE s.ddl3 (id bigint PRIMARY KEY, note text);
CREATE TABLE s2.moved (id bigint PRIMARY KEY, note text);

CREATE TABLE f.filtered (id bigint PRIMARY KEY, k int, note text);
ALTER TABLE f.filtered REPLICA IDENTITY FULL;
CREATE TABLE f.listed (id bigint PRIMARY KEY, secret text, note text);
CREATE TABLE f.generated (id bigint PRIMARY KEY, k int, twice bigint GENERATED ALWAYS AS (k * 2) STORED);

CREATE TABLE r.root (id bigint, k int, note text, PRIMARY KEY (id, k)) PARTITION BY RANGE (k);
CREATE TABLE r.low PARTITION OF r.root FOR VALUES FROM (MINVALUE) TO (100);
CREATE TABLE r.high (note text, junk int, k int NOT NULL, id bigint NOT NULL, PRIMARY KEY (id, k));
ALTER TABLE r.high DROP COLUMN junk;
ALTER TABLE r.root ATTACH PARTITION r.high FOR VALUES FROM (100) TO (MAXVALUE);

CREATE PUBLICATION p FOR TABLES IN SCHEMA s, s2;
CREATE PUBLICATION p_filter FOR TABLE f.filtered WHERE (k > 50), TABLE f.listed (id, note);
CREATE PUBLICATION p_root FOR TABLE r.root WITH (publish_via_partition_root);
SELECT pg_replication_origin_create('upstream ' || current_database());
"""

IDENTITY = {"s.by_index": "k", "s.leafy_low": "id", "s.leafy_high": "id"}
"""Identity column where it is not ``id``."""


def set_up_statements(version: int) -> str:
    generated = " WITH (publish_generated_columns = stored)" if version >= 18 else ""
    return _SETUP + f"CREATE PUBLICATION p_generated FOR TABLE f.generated{generated};\n"


def tear_down_statement(database: str) -> str:
    """An origin belongs to the whole cluster, not to its database."""
    return f"SELECT pg_replication_origin_drop('upstream {database}')"
