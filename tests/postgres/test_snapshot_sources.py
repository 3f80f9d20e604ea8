"""What a survey of the catalog says of a table, against what the stream says of it."""

from __future__ import annotations

import pytest

from tests.postgres_fixtures import Database
from tests.slot_changes import make_slot, slot_changes
from xidstream.pipeline.pg_rules import renamed_columns
from xidstream.pipeline.postgres.range_copy import copy_statement
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.snapshot.tables import PublishedSource, RangeTask, plan_ranges

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
    assert all(source.row_filter is None and not source.unpublished_operations for source in found.values())


def test_column_lists_and_filters_are_those_that_the_stream_applies(database: Database) -> None:
    make_slot(database)
    for statement in (
        "CREATE SCHEMA s",
        "CREATE TABLE a (id int PRIMARY KEY, b int, c text)",
        "CREATE TABLE b (id int PRIMARY KEY, v int)",
        "CREATE TABLE s.c (id int PRIMARY KEY, v int)",
        "CREATE TABLE root (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1)",
        "CREATE PUBLICATION p FOR TABLE a (c, id) WHERE (id < 10), root",
        "CREATE PUBLICATION q FOR TABLE b WHERE (id IN (1, 2))",
        "CREATE PUBLICATION r FOR TABLE b WHERE (id > 7), TABLES IN SCHEMA s WITH (publish = 'insert, delete')",
        "CREATE PUBLICATION via FOR TABLE root (k, id) WHERE (id > 5) WITH (publish_via_partition_root)",
        "INSERT INTO a SELECT i, i, 'x' FROM generate_series(1, 20) i",
        "INSERT INTO b SELECT i, i FROM generate_series(1, 20) i",
        "INSERT INTO s.c VALUES (1, 1)",
        "INSERT INTO root SELECT i, 1, 'x' FROM generate_series(1, 20) i",
    ):
        database.execute(statement)
    found = surveyed(database, "p", "q", "r", "via")
    changes = slot_changes(database, "p,q,r,via")
    assert {source.relation.relid: source.relation for source in found.values()} == changes.relations
    assert [c.name for c in found["public.a"].relation.columns] == ["id", "c"]
    assert found["public.a"].attnums == (1, 3)
    assert "public.leaf" not in found and [leaf.table for leaf in found["public.root"].leaves] == ["leaf"]
    for source in found.values():
        query = f"SELECT id::text FROM {source.name} WHERE {source.row_filter or 'true'}"
        expected = sorted(database.execute(query))
        streamed = [
            (change_id,)
            for transaction in changes.transactions
            for change_id in transaction.inserted_into(source.relation.relid)
        ]
        assert sorted(streamed) == expected, source.name
    assert found["public.b"].unpublished_operations == () and found["s.c"].unpublished_operations == (
        "update",
        "truncate",
    )
    assert found["s.c"].row_filter is None
    (leaf,) = (source for name, source in surveyed(database, "p").items() if name.endswith("leaf"))
    assert leaf.row_filter is None and len(leaf.relation.columns) == 3


def test_a_row_from_before_is_read_where_its_insert_would_come(database: Database) -> None:
    """Publications of updates and deletes alone, filtered or not, bring no row that no INSERT brings."""
    make_slot(database)
    for statement in (
        "CREATE TABLE a (id int PRIMARY KEY, v int)",
        "CREATE TABLE b (id int PRIMARY KEY, v int)",
        "CREATE TABLE c (id int PRIMARY KEY, v int)",
        "CREATE PUBLICATION inserts FOR TABLE a WHERE (v > 15), b WHERE (v > 15) WITH (publish = 'insert')",
        "CREATE PUBLICATION others FOR TABLE a, c WHERE (id > 18) WITH (publish = 'update, delete')",
        "CREATE PUBLICATION more FOR TABLE b WHERE (id < 3) WITH (publish = 'insert, update')",
        "INSERT INTO a SELECT i, i FROM generate_series(1, 20) i",
        "INSERT INTO b SELECT i, i FROM generate_series(1, 20) i",
        "INSERT INTO c SELECT i, i FROM generate_series(1, 20) i",
    ):
        database.execute(statement)
    publications = ("inserts", "others", "more")
    found = surveyed(database, *publications)
    changes = slot_changes(database, ",".join(publications))
    for name, n_rows in (("public.a", 5), ("public.b", 7)):
        source = found[name]
        rows = [row for each in changes.transactions for row in each.inserted_into(source.relation.relid)]
        read = database.execute(f"SELECT id::text FROM {name} WHERE {source.row_filter}")
        assert sorted((row,) for row in rows) == sorted(read) and len(read) == n_rows
    assert found["public.a"].change_filters == (None, None)
    assert found["public.b"].change_filters == ("((id < 3))", None)
    assert found["public.c"].row_filter == "((id > 18))", "where no INSERT comes, all filters count"


def test_under_full_the_primary_key_names_rows_where_it_is_checked_at_once_and_published(
    database: Database,
) -> None:
    for statement in (
        "CREATE TABLE plain (v text, id int, k int, PRIMARY KEY (k, id))",
        "CREATE TABLE keyless (id int)",
        "CREATE TABLE later (id int PRIMARY KEY DEFERRABLE)",
        "CREATE TABLE hidden (id int PRIMARY KEY, v int)",
        "CREATE TABLE including (id int, v int, PRIMARY KEY (id) INCLUDE (v))",
        "CREATE TABLE root (id int NOT NULL, k int NOT NULL) PARTITION BY LIST (k)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1)",
        "ALTER TABLE root ADD PRIMARY KEY (id, k)",
        "CREATE TABLE half (id int NOT NULL, k int NOT NULL) PARTITION BY LIST (k)",
        "CREATE TABLE half_1 PARTITION OF half FOR VALUES IN (1)",
        "ALTER TABLE ONLY half ADD PRIMARY KEY (id, k)",
        "CREATE TABLE by_default (id int PRIMARY KEY)",
        "CREATE TABLE unique_only (id int NOT NULL UNIQUE)",
    ):
        database.execute(statement)
    tables = ["plain", "keyless", "later", "hidden", "including", "root", "half", "unique_only"]
    for table in tables:
        database.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    database.execute(
        f"CREATE PUBLICATION p FOR TABLE {', '.join(t for t in tables if t != 'hidden')}, by_default, hidden (v) "
        "WITH (publish_via_partition_root, publish = 'insert')"
    )
    found = surveyed(database, "p")
    keys = {
        name.removeprefix("public."): source.primary_key and source.primary_key.columns
        for name, source in found.items()
    }
    assert keys == {
        "plain": ("id", "k"),
        "keyless": None,
        "later": None,
        "hidden": None,
        "including": ("id",),
        "root": ("id", "k"),
        "half": None,
        "by_default": None,
        "unique_only": None,
    }


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_generated_columns_are_published_where_18_was_told_to(database: Database) -> None:
    make_slot(database)
    for statement in (
        "CREATE TABLE g (id int PRIMARY KEY, s int GENERATED ALWAYS AS (id + 1) STORED)",
        "ALTER TABLE g ADD w int GENERATED ALWAYS AS (id + 2) VIRTUAL",
        "CREATE TABLE h (id int PRIMARY KEY, s int GENERATED ALWAYS AS (id + 1) STORED)",
        "CREATE PUBLICATION p FOR TABLE g WITH (publish_generated_columns = stored)",
        "CREATE PUBLICATION q FOR TABLE h (id, s)",
        "INSERT INTO g VALUES (1)",
        "INSERT INTO h VALUES (1)",
    ):
        database.execute(statement)
    found = surveyed(database, "p", "q")
    told = slot_changes(database, "p,q").relations
    assert {source.relation.relid: source.relation for source in found.values()} == told
    assert [[c.name for c in found[name].relation.columns] for name in ("public.g", "public.h")] == [
        ["id", "s"],
        ["id", "s"],
    ]


def test_what_publishes_a_table_has_another_name_when_it_was_dropped_and_added_again(
    database: Database,
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b int)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    seen = [surveyed(database, "p")["public.t"].published_as]
    for statement in (
        "ALTER PUBLICATION p SET TABLE t (id, a)",
        "ALTER PUBLICATION p SET TABLE t (id, b)",
        "ALTER PUBLICATION p SET TABLE t WHERE (id > 1)",
        "ALTER PUBLICATION p SET TABLE t WHERE (id > 2)",
        "ALTER PUBLICATION p DROP TABLE t; ALTER PUBLICATION p ADD TABLE t WHERE (id > 2)",
        "ALTER PUBLICATION p ADD TABLES IN SCHEMA public",
    ):
        for each in statement.split(";"):
            database.execute(each)
        source = surveyed(database, "p")["public.t"]
        assert source.published_as not in seen
        seen.append(source.published_as)
    assert source.row_filter is None
    again = surveyed(database, "p")["public.t"]
    assert again == source


def test_a_table_that_somebody_has_locked_does_not_keep_the_survey_waiting(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    database.execute("INSERT INTO t SELECT generate_series(1, 10000)")
    database.execute("VACUUM t")
    with database.connect() as other, other.transaction():
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        (source,) = surveyed(database, "p").values()
    assert source.leaves[0].n_pages == 45
    (source,) = surveyed(database, "p").values()
    assert source.leaves[0].n_pages == 45 and source.n_bytes > 45 * 8192


def test_a_survey_within_one_table_says_the_same_as_one_of_all(database: Database) -> None:
    for statement in STRANGE:
        database.execute(statement)
    for via_root in ("true", "false"):
        database.execute("DROP PUBLICATION IF EXISTS p")
        database.execute(
            f"CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root = {via_root})"
        )
        for name, source in surveyed(database, "p").items():
            relid = source.relation.relid
            within = survey(database.connection, ["p"], within=[relid])
            assert [found for found in within if found.relation.relid == relid] == [source], name


def test_a_column_that_is_had_under_another_name_has_it_in_the_survey_and_in_the_stream(
    database: Database,
) -> None:
    database.execute('CREATE SCHEMA "a.b"')
    table = '"a.b".c'
    database.execute(
        f'CREATE TABLE {table} (id int, "_XID" int, "Name" text, name text, PRIMARY KEY (id, "_XID"))'
    )
    database.execute(f"ALTER TABLE {table} ADD late int DEFAULT 5")
    database.execute(f"CREATE PUBLICATION p FOR TABLE {table}")
    make_slot(database)
    database.execute(f"INSERT INTO {table} VALUES (1, 2, 'x', 'y')")
    names = renamed_columns(
        ['"a.b".c._XID=source_xid', '"a.b".c.Name=name_2', '"a.b".c.late=newer', "a.b.c.id=no"]
    )
    (source,) = survey(database.connection, ["p"], column_names=names)
    assert source.relation.clash is None
    assert [c.name for c in source.relation.columns] == ["id", "source_xid", "name_2", "name", "newer"]
    assert source.relation.key == ("id", "source_xid")
    told = slot_changes(database, column_names=names).relations
    assert told == {source.relation.relid: source.relation}
    assert RelationVersion.from_json(source.relation.to_json()) == source.relation
    copy = copy_statement(RangeTask(source, "s", plan_ranges(source.leaves, by_range=True)[0]))
    assert 'SELECT "id", "_XID", "Name", "name", "late" FROM' in copy
    (own,) = survey(database.connection, ["p"])
    assert own.relation.clash is not None and len(own.relation.to_json()["columns"][0]) == 5
