"""What ends a table's generation, by the DDL that does it on a real server."""

from __future__ import annotations

import json

import pytest

from tests.postgres_fixtures import Database
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.snapshot.invalidation import reason_it_ended, renewed, signature_of
from xidstream.pipeline.snapshot.tables import PublishedSource

pytestmark = pytest.mark.postgres

PLAIN = (
    "DO $$ BEGIN CREATE ROLE other; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
    "CREATE TABLE t (id int PRIMARY KEY, v varchar(10), n int, d int)",
    "INSERT INTO t SELECT i, i, i, i FROM generate_series(1, 100) i",
    "CREATE PUBLICATION p FOR TABLE t",
)
PARTED = (
    "CREATE TABLE t (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)",
    "INSERT INTO t SELECT i, 1 + i % 2, i FROM generate_series(1, 100) i",
    "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
)


def source_of(database: Database) -> PublishedSource | None:
    return next((s for s in survey(database.connection, ["p"]) if s.name == "public.t"), None)


def reason_after(database: Database, setup: tuple[str, ...], statements: tuple[str, ...]) -> str | None:
    for statement in setup:
        database.execute(statement)
    before = source_of(database)
    assert before is not None
    then = json.loads(json.dumps(signature_of(before)))
    assert reason_it_ended(then, before) is None
    for statement in statements:
        database.execute(statement)
    return reason_it_ended(then, source_of(database))


@pytest.mark.parametrize(
    "statements",
    [
        ("ALTER TABLE t ADD c int",),
        ("ALTER TABLE t ADD c int", "ALTER TABLE t ALTER c SET DEFAULT 5"),
        ("ALTER TABLE t DROP COLUMN n",),
        ("VACUUM FULL t",),
        ("CLUSTER t USING t_pkey",),
        ("TRUNCATE t",),
        ("ANALYZE t",),
        ("CREATE INDEX ON t (n)", "REINDEX TABLE t"),
        ("ALTER TABLE t ALTER v TYPE varchar(20)",),
        ("ALTER TABLE t ALTER v TYPE text",),
        ("ALTER TABLE t ALTER n SET NOT NULL",),
        ("CREATE PUBLICATION q FOR TABLE t", "ALTER PUBLICATION p OWNER TO other"),
        ("GRANT SELECT ON t TO other", "GRANT SELECT (v) ON t TO other"),
        ("ALTER TABLE t OWNER TO other", "ALTER SCHEMA public OWNER TO other"),
        ("ALTER TABLE t SET (fillfactor = 70)", "ALTER TABLE t ALTER v SET STATISTICS 7"),
        ("ALTER TABLE t ALTER v SET DEFAULT 'x'", "ALTER TABLE t ALTER v SET STORAGE EXTERNAL"),
        ("ALTER TABLE t ADD CHECK (n > 0)", "ALTER TABLE t ENABLE ROW LEVEL SECURITY"),
        ("CREATE TABLE u (t int REFERENCES t)",),
        ("VACUUM (FREEZE, ANALYZE)", "VACUUM FULL pg_class", "VACUUM FULL pg_attribute"),
        ("ALTER PUBLICATION p ADD TABLES IN SCHEMA public",),
    ],
    ids=lambda statements: "; ".join(statements),
)
def test_the_snapshot_still_stands_after(database: Database, statements: tuple[str, ...]) -> None:
    assert reason_after(database, PLAIN, statements) is None


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (("ALTER TABLE t ADD c int DEFAULT 5",), "column c was added with a default"),
        (
            ("ALTER TABLE t ADD c int DEFAULT 5", "ALTER TABLE t ALTER c DROP DEFAULT"),
            "column c was added with a default",
        ),
        (("ALTER TABLE t ADD c float DEFAULT random()",), "column c was added, and the table was rewritten"),
        (
            ("ALTER TABLE t ADD c int DEFAULT 5", "VACUUM FULL t"),
            "column c was added, and the table was rewritten",
        ),
        (("ALTER TABLE t ALTER n TYPE bigint",), "the type of column n changed from integer to bigint"),
        (
            ("ALTER TABLE t ALTER v TYPE varchar(3) USING left(v, 1)",),
            "the type of column v changed from character varying(10) to character varying(3)",
        ),
        (("ALTER TABLE t ALTER n TYPE oid",), "the type of column n changed from integer to oid"),
        (("ALTER TABLE t RENAME n TO m",), "column n was renamed to m"),
        (("ALTER TABLE t DROP n", "ALTER TABLE t ADD n int"), "column n was dropped and added again"),
        (("ALTER TABLE t REPLICA IDENTITY FULL",), "its replica identity changed"),
        (
            ("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (n)"),
            "the columns of its replica identity changed",
        ),
        (
            ("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE t"),
            "the table was dropped and created again",
        ),
        (("DROP TABLE t",), "the table is not published any more"),
        (("ALTER PUBLICATION p DROP TABLE t",), "the table is not published any more"),
        (
            ("ALTER PUBLICATION p DROP TABLE t", "ALTER PUBLICATION p ADD TABLE t"),
            "it was dropped from its publication and added again",
        ),
        (("ALTER PUBLICATION p SET TABLE t (id, v)",), "it was dropped from its publication and added again"),
        (("ALTER PUBLICATION p SET TABLE t WHERE (id > 5)",), "the row filter of its publication changed"),
        (
            ("ALTER PUBLICATION p SET (publish = 'insert, update')",),
            "its publications leave out delete, truncate",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "; ".join(value),
)
def test_the_snapshot_does_not_stand_after(
    database: Database, statements: tuple[str, ...], reason: str
) -> None:
    found = reason_after(database, PLAIN, statements)
    assert found is not None and found.startswith(reason)


@pytest.mark.parametrize(
    ("statements", "now"),
    [
        (("ALTER TABLE t RENAME TO clients",), "public.clients"),
        (("CREATE SCHEMA s", "ALTER TABLE t SET SCHEMA s"), "s.t"),
    ],
)
def test_a_table_that_was_renamed_is_told_by_its_new_name(
    database: Database, statements: tuple[str, ...], now: str
) -> None:
    """It said of public.t that it was renamed from public.t."""
    for statement in PLAIN:
        database.execute(statement)
    before = source_of(database)
    assert before is not None
    for statement in statements:
        database.execute(statement)
    with sql_connection(database.dsn(), "a test") as connection:
        (source,) = survey(connection, ["p"], within=[before.relation.relid])
    assert reason_it_ended(signature_of(before), source) == f"the table was renamed to {now}"


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (("CREATE TABLE t3 PARTITION OF t FOR VALUES IN (3)", "INSERT INTO t VALUES (1, 3)"), None),
        (("ALTER TABLE t ADD c int",), None),
        (("ANALYZE t", "VACUUM t1"), None),
        (
            ("CREATE TABLE t3 (LIKE t INCLUDING ALL)", "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES IN (3)"),
            "public.t3 was attached as a partition",
        ),
        (
            (
                "BEGIN",
                "CREATE TABLE t3 (id int NOT NULL, k int NOT NULL, v text)",
                "INSERT INTO t3 VALUES (1, 3)",
                "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES IN (3)",
                "COMMIT",
            ),
            "public.t3 was attached as a partition",
        ),
        (("ALTER TABLE t DETACH PARTITION t1",), "a partition was detached or dropped"),
        (("ALTER TABLE t DETACH PARTITION t1 CONCURRENTLY",), "a partition was detached or dropped"),
        (("DROP TABLE t1",), "a partition was detached or dropped"),
        (("TRUNCATE t1",), "partition public.t1 was truncated or rewritten"),
        (("ALTER TABLE t ADD c int DEFAULT 5",), "column c was added with a default"),
        (("ALTER TABLE t ALTER v TYPE varchar(3)",), "partition public.t1 was truncated or rewritten"),
        (("ALTER TABLE t RENAME v TO w",), "column v was renamed to w"),
        (
            ("ALTER PUBLICATION p SET (publish_via_partition_root = false)",),
            "the table is not published any more",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) or value is None else "; ".join(value),
)
def test_a_partitioned_table_after(
    database: Database, statements: tuple[str, ...], reason: str | None
) -> None:
    found = reason_after(database, PARTED, statements)
    assert found == reason if reason is None else found is not None and found.startswith(reason)


FULL = (*PLAIN, "ALTER TABLE t REPLICA IDENTITY FULL")


@pytest.mark.parametrize(
    ("statements", "ends"),
    [
        (("REINDEX TABLE t",), False),
        (("REINDEX TABLE CONCURRENTLY t",), False),
        (("ALTER TABLE t RENAME CONSTRAINT t_pkey TO k",), False),
        (("ALTER TABLE t DROP CONSTRAINT t_pkey",), True),
        (("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (id)"), True),
        (("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (n)"), True),
        (("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE t ADD PRIMARY KEY (id) DEFERRABLE"), True),
    ],
    ids=lambda value: "; ".join(value) if isinstance(value, tuple) else None,
)
def test_under_full_the_primary_key_that_named_the_rows_must_stay(
    database: Database, statements: tuple[str, ...], ends: bool
) -> None:
    reason = reason_after(database, FULL, statements)
    assert reason == ("its primary key was dropped, or another one made" if ends else None)


def test_a_primary_key_that_a_keyless_table_under_full_gets_ends_nothing(database: Database) -> None:
    setup = (*FULL, "ALTER TABLE t DROP CONSTRAINT t_pkey")
    assert reason_after(database, setup, ("ALTER TABLE t ADD PRIMARY KEY (id)",)) is None


@pytest.mark.parametrize(
    ("statements", "ends"),
    [
        (("TRUNCATE t", "INSERT INTO t VALUES (7, 7)"), False),
        (("ALTER TABLE t SET UNLOGGED", "INSERT INTO t VALUES (7, 7)", "ALTER TABLE t SET LOGGED"), True),
        (("TRUNCATE t", "ALTER TABLE t SET UNLOGGED", "ALTER TABLE t SET LOGGED"), True),
        (("VACUUM FULL t", "CLUSTER t USING t_pkey"), False),
        (("VACUUM t", "ANALYZE t", "CREATE INDEX ON t (n)", "REINDEX TABLE t"), False),
        (("ALTER TABLE t ALTER n TYPE int USING n + 1",), True),
        (("TRUNCATE small",), True),
        (("ANALYZE small",), False),
    ],
    ids=lambda value: "; ".join(value) if isinstance(value, tuple) else "",
)
def test_rows_in_a_new_file_end_it_where_no_ddl_is_told_unless_the_toast_table_was_kept(
    database: Database, statements: tuple[str, ...], ends: bool
) -> None:
    for statement in (
        "CREATE TABLE t (id int PRIMARY KEY, n int, v text)",
        "CREATE TABLE small (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR ALL TABLES",
    ):
        database.execute(statement)
    table = "public.small" if "small" in statements[0] else "public.t"

    def found() -> PublishedSource:
        return next(source for source in survey(database.connection, ["p"]) if source.name == table)

    then = json.loads(json.dumps(signature_of(found())))
    for statement in statements:
        database.execute(statement)
    now = found()
    reason = reason_it_ended(then, now, is_witnessed=False)
    assert ("its rows are in a new file" in str(reason)) == ends, reason
    assert reason_it_ended(renewed(then, now) or then, now, is_witnessed=False) is None, "it is known by then"


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.parametrize(
    ("statement", "ends"),
    [
        ("ALTER TABLE t ALTER g SET EXPRESSION AS (n * 3)", True),
        ("ALTER TABLE t ALTER g DROP EXPRESSION", False),
        ("ALTER TABLE t ALTER hidden SET EXPRESSION AS (n * 3)", False),
        ("VACUUM FULL t", False),
    ],
)
def test_a_published_generated_column_whose_expression_changes_has_other_values(
    database: Database, statement: str, ends: bool
) -> None:
    setup = (
        "CREATE TABLE t (id int PRIMARY KEY, n int, g int GENERATED ALWAYS AS (n * 2) STORED)",
        "ALTER TABLE t ADD hidden int GENERATED ALWAYS AS (n * 2) STORED",
        "INSERT INTO t VALUES (1, 1)",
        "CREATE PUBLICATION p FOR TABLE t (id, n, g)",
    )
    assert reason_after(database, setup, (statement,)) == (
        "the expression of column g changed" if ends else None
    )


def test_a_filter_of_updates_alone_that_changes_ends_it(database: Database) -> None:
    for statement in (
        *PLAIN,
        "ALTER PUBLICATION p SET (publish = 'insert')",
        "CREATE PUBLICATION q FOR TABLE t WHERE (id > 5) WITH (publish = 'update, delete')",
    ):
        database.execute(statement)

    def now() -> PublishedSource:
        (source,) = survey(database.connection, ["p", "q"])
        return source

    then = signature_of(now())
    database.execute("ALTER PUBLICATION q SET TABLE t WHERE (id > 7)")
    assert reason_it_ended(then, now()) == "the row filter of its publication changed"


def test_a_truncate_that_is_not_published_ends_it(database: Database) -> None:
    setup = (*PLAIN, "ALTER PUBLICATION p SET (publish = 'insert, update, delete')")
    found = reason_after(database, setup, ("TRUNCATE t",))
    assert found == "it was truncated or rewritten, and its publications leave out truncate"


TYPED = (
    "CREATE TYPE mood AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE TYPE place AS (x int, m mood)",
    "CREATE TABLE t (id int PRIMARY KEY, a mood, b moods, c place[])",
    "INSERT INTO t VALUES (1, 'sad', '{glad}', '{\"(1,sad)\"}')",
    "CREATE PUBLICATION p FOR TABLE t",
)


@pytest.mark.parametrize(
    ("column", "setup", "statement"),
    [
        ("a", (), "ALTER TYPE mood RENAME VALUE 'sad' TO 'low'"),
        ("b", ("ALTER TABLE t DROP COLUMN a",), "ALTER TYPE mood RENAME VALUE 'sad' TO 'low'"),
        (
            "c",
            ("ALTER TABLE t DROP COLUMN a, DROP COLUMN b",),
            "ALTER TYPE mood RENAME VALUE 'glad' TO 'high'",
        ),
        ("c", (), "ALTER TYPE place DROP ATTRIBUTE x"),
    ],
)
def test_a_type_whose_values_have_another_text_ends_the_snapshot(
    database: Database, column: str, setup: tuple[str, ...], statement: str
) -> None:
    """The server shows other text for rows that nobody changed, and the stream does not say so."""
    reason = reason_after(database, TYPED + setup, (statement,))
    assert reason is not None and f"the type of column {column} was altered" in reason


def test_a_new_label_of_an_enum_leaves_the_snapshot(database: Database) -> None:
    assert reason_after(database, TYPED, ("ALTER TYPE mood ADD VALUE 'calm' BEFORE 'glad'",)) is None


_NO_DIFFERENCE = "was altered in a way that leaves no difference in the catalog"


@pytest.mark.parametrize(
    ("statements", "about"),
    [
        (("ALTER TABLE t ALTER n TYPE int USING n * 100",), "column n"),
        (
            ("CREATE SCHEMA s", "ALTER TABLE t SET SCHEMA s", "ALTER TABLE s.t SET SCHEMA public"),
            "table public.t",
        ),
        (("ALTER TABLE t RENAME TO u", "ALTER TABLE u RENAME TO t"), "table public.t"),
        (("ALTER TABLE t RENAME n TO m", "ALTER TABLE t RENAME m TO n"), "column n"),
        (("ALTER TABLE t REPLICA IDENTITY FULL", "ALTER TABLE t REPLICA IDENTITY DEFAULT"), "table public.t"),
        (("ALTER SCHEMA public RENAME TO s", "ALTER SCHEMA s RENAME TO public"), "schema public"),
        (
            (
                "ALTER PUBLICATION p SET (publish = 'insert, update')",
                "DELETE FROM t",
                "ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')",
            ),
            "publication p",
        ),
        (("ALTER PUBLICATION p RENAME TO r", "ALTER PUBLICATION r RENAME TO p"), "publication p"),
    ],
    ids=lambda value: value if isinstance(value, str) else "; ".join(value),
)
def test_what_came_and_went_between_two_surveys_ends_it(
    database: Database, statements: tuple[str, ...], about: str
) -> None:
    reason = reason_after(database, PLAIN, statements)
    assert reason is not None and reason.startswith(f"{about} {_NO_DIFFERENCE}")


def test_a_publication_that_leaves_out_deletes_and_then_adds_truncates_missed_the_deletes(
    database: Database,
) -> None:
    """The last state publishes more than the first one did, so no value says that something was left out between."""
    setup = (*PLAIN, "ALTER PUBLICATION p SET (publish = 'insert, update, delete')")
    statements = (
        "ALTER PUBLICATION p SET (publish = 'insert')",
        "DELETE FROM t",
        "ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')",
    )
    reason = reason_after(database, setup, statements)
    assert reason is not None and reason.startswith(f"publication p {_NO_DIFFERENCE}")


@pytest.mark.parametrize(
    "statements",
    [
        (
            "ALTER TABLE t DETACH PARTITION t1",
            "DELETE FROM t1",
            "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES IN (1)",
        ),
        (
            "ALTER TABLE t DETACH PARTITION d",
            "DELETE FROM d",
            "ALTER TABLE t ATTACH PARTITION d FOR VALUES IN (3)",
        ),
    ],
    ids=["a leaf", "a partition with partitions of its own"],
)
def test_a_partition_that_was_away_between_two_surveys_ends_it(
    database: Database, statements: tuple[str, ...]
) -> None:
    deep = (
        "CREATE TABLE d PARTITION OF t FOR VALUES IN (3) PARTITION BY RANGE (id)",
        "CREATE TABLE d1 PARTITION OF d DEFAULT",
        "INSERT INTO t SELECT i, 3, i FROM generate_series(1, 100) i",
    )
    reason = reason_after(database, (*PARTED, *deep), statements)
    assert (
        reason is not None
        and _NO_DIFFERENCE in reason
        and reason.startswith(("table public.t1", "partition"))
    )


@pytest.mark.parametrize(
    "columns", ["id int, k int", "id int DEFAULT 5, k int, v timestamptz", "k int, id int"]
)
def test_a_table_without_texts_that_is_filled_and_attached_in_one_transaction_ends_it(
    database: Database, columns: str
) -> None:
    """Such a table has no TOAST table, so its ATTACH comes only two commands after its CREATE."""
    setup = (
        f"CREATE TABLE t ({columns}, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
    )
    made = "BEGIN; CREATE TABLE t3 (LIKE t INCLUDING ALL); INSERT INTO t3 (id, k) VALUES (1, 3); "
    made += "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES IN (3); COMMIT"
    assert reason_after(database, setup, (made,)) == "public.t3 was attached as a partition"


@pytest.mark.parametrize(
    "columns", ["id int, k int", "id int DEFAULT 5, k int, v text", "id int, k int, v text"]
)
def test_a_partition_that_is_made_as_one_leaves_the_snapshot(database: Database, columns: str) -> None:
    setup = (
        f"CREATE TABLE t ({columns}, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
    )
    made = (
        "BEGIN; CREATE TABLE t3 PARTITION OF t FOR VALUES IN (3); INSERT INTO t (id, k) VALUES (1, 3); COMMIT"
    )
    assert reason_after(database, setup, (made, "CREATE TABLE t4 PARTITION OF t DEFAULT")) is None


def test_a_grant_and_a_later_revoke_are_two_harmless_changes(database: Database) -> None:
    """The last survey counts: compared with the snapshot's own, the catalog row would be the same but for its xmin."""
    for statement in PLAIN:
        database.execute(statement)
    before = source_of(database)
    assert before is not None
    then = signature_of(before)
    for statement in ("GRANT SELECT ON t TO other", "REVOKE SELECT ON t FROM other"):
        database.execute(statement)
        now = source_of(database)
        assert now is not None
        assert reason_it_ended(then, now) is None
        then = renewed(then, now) or pytest.fail("nothing changed")


@pytest.mark.parametrize(
    ("setup", "statement", "reason"),
    [
        (
            (),
            "ALTER TABLE t ALTER g DROP EXPRESSION",
            "column g was not published before, so the log lacks its values",
        ),
        (
            (),
            "ALTER PUBLICATION p SET (publish_generated_columns = stored)",
            "column g was not published before, so the log lacks its values",
        ),
        (
            ("ALTER PUBLICATION p SET (publish_generated_columns = stored)",),
            "ALTER PUBLICATION p SET (publish_generated_columns = none)",
            "column g is not published any more",
        ),
    ],
)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_generated_column_that_comes_into_the_stream_or_leaves_it_ends_it(
    database: Database, setup: tuple[str, ...], statement: str, reason: str
) -> None:
    made = (
        "CREATE TABLE t (id int PRIMARY KEY, n int, g int GENERATED ALWAYS AS (n * 2) STORED)",
        "INSERT INTO t VALUES (1, 1)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    assert reason_after(database, (*made, *setup), (statement,)) == reason
