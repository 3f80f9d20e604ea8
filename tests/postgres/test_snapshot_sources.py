"""What a survey of the catalog says of a table, against what the stream says of it."""

from __future__ import annotations

import pytest

from tests.postgres_fixtures import Database
from tests.slot_changes import make_slot, slot_changes
from xidstream.pipeline.slot.snapshot_sources import survey
from xidstream.pipeline.snapshot.tables import PublishedSource

pytestmark = pytest.mark.postgres


STRANGE = (
    "CREATE SCHEMA other",
    'CREATE SCHEMA "Über""all"',
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TYPE other.pair AS (a int, b text)",
    "CREATE DOMAIN small AS int CHECK (VALUE < 100)",
    "CREATE DOMAIN other.smaller AS small CHECK (VALUE < 10)",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE DOMAIN moods AS mood",
    "CREATE TABLE plain (id bigint PRIMARY KEY, v text)",
    'CREATE TABLE "Über""all"."T 1" ("Id" int, "select" text, PRIMARY KEY ("Id"))',
    "CREATE TABLE typed (a small, b other.smaller, c price, d moods, e mood, f other.pair, g mood[], n small[])",
    "ALTER TABLE typed ADD h numeric(5,-2), ADD i varchar(7), ADD j interval(3), ADD k timestamptz(2)",
    "ALTER TABLE typed ADD l information_schema.sql_identifier, ADD m int4multirange",
    "CREATE TABLE dropped (a int, b text, c int PRIMARY KEY, d text)",
    "ALTER TABLE dropped DROP COLUMN b",
    "ALTER TABLE dropped ADD COLUMN b int",
    "CREATE TABLE generated (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, v text)",
    "CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, c int, UNIQUE (b, a) INCLUDE (c))",
    "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b_a_c_key",
    "CREATE TABLE lost_index (a int NOT NULL, b int)",
    "CREATE UNIQUE INDEX lost_index_a ON lost_index (a)",
    "ALTER TABLE lost_index REPLICA IDENTITY USING INDEX lost_index_a",
    "DROP INDEX lost_index_a",
    "CREATE TABLE whole (a int PRIMARY KEY, b text)",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "CREATE TABLE nothing (a int PRIMARY KEY, b text)",
    "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    "CREATE TABLE keyless (a int, b text)",
    "CREATE TABLE deferred (a int PRIMARY KEY DEFERRABLE, b text)",
    "CREATE TABLE including (a int, b int, PRIMARY KEY (a) INCLUDE (b))",
    "CREATE TABLE parent (a int PRIMARY KEY)",
    "CREATE TABLE child (b text) INHERITS (parent)",
    "CREATE TABLE other.parted (id int, k int, v small, PRIMARY KEY (id, k)) PARTITION BY RANGE (k)",
    "CREATE TABLE parted_1 PARTITION OF other.parted FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parted_2 (junk int, v small, k int NOT NULL, id int NOT NULL, PRIMARY KEY (id, k))",
    "ALTER TABLE parted_2 DROP COLUMN junk",
    "ALTER TABLE other.parted ATTACH PARTITION parted_2 FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE parted_3 PARTITION OF other.parted FOR VALUES FROM (20) TO (30) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_3a PARTITION OF parted_3 FOR VALUES FROM (0) TO (1000)",
    "CREATE TABLE half_key (id int NOT NULL, k int NOT NULL) PARTITION BY LIST (k)",
    "CREATE TABLE half_key_1 PARTITION OF half_key FOR VALUES IN (1)",
    "ALTER TABLE ONLY half_key ADD PRIMARY KEY (id, k)",
    "CREATE UNLOGGED TABLE unlogged (a int)",
    "CREATE TEMPORARY TABLE temporary (a int)",
    "CREATE VIEW seen AS SELECT 1 AS a",
    "CREATE MATERIALIZED VIEW stored AS SELECT 1 AS a",
)
INSERTS = (
    "INSERT INTO plain VALUES (1, 'x')",
    'INSERT INTO "Über""all"."T 1" VALUES (1, \'x\')',
    "INSERT INTO typed (a) VALUES (1)",
    "INSERT INTO dropped (c) VALUES (1)",
    "INSERT INTO generated (id) VALUES (1)",
    "INSERT INTO by_index VALUES (1, 1)",
    "INSERT INTO lost_index VALUES (1)",
    "INSERT INTO whole VALUES (1)",
    "INSERT INTO nothing VALUES (1)",
    "INSERT INTO keyless VALUES (1)",
    "INSERT INTO deferred VALUES (1)",
    "INSERT INTO including VALUES (1, 1)",
    "INSERT INTO parent VALUES (1)",
    "INSERT INTO child VALUES (2)",
    "INSERT INTO other.parted (id, k) VALUES (1, 1), (1, 11), (1, 21)",
    "INSERT INTO half_key VALUES (1, 1)",
    "INSERT INTO unlogged VALUES (1)",
)


def surveyed(database: Database, *publications: str) -> dict[str, PublishedSource]:
    return {source.name: source for source in survey(database.connection, publications)}


@pytest.mark.parametrize("via_root", [False, True], ids=["leaves", "root"])
def test_each_strange_table_is_surveyed_as_the_stream_declares_it(database: Database, via_root: bool) -> None:
    make_slot(database)
    for statement in STRANGE:
        database.execute(statement)
    database.execute(
        f"CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = {str(via_root).lower()})"
    )
    for statement in INSERTS:
        database.execute(statement)
    found = surveyed(database, "p")
    told = slot_changes(database).relations
    assert {source.relation.relid: source.relation for source in found.values()} == told
    assert len(told) == (16 if via_root else 18)
    if via_root:
        leaves = [f"{leaf.schema}.{leaf.table}" for leaf in found["other.parted"].leaves]
        assert sorted(leaves) == ["public.parted_1", "public.parted_2", "public.parted_3a"]
    assert all(source.row_filter is None and not source.left_out for source in found.values())
