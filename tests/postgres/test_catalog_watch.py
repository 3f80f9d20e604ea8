"""A look at a real server's catalog: what it notices, what it leaves alone, and whom it finds with a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.postgres_fixtures import VERSIONS, Database
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.catalog_watch import CatalogWatch
from xidstream.pipeline.snapshot.proven import Proving

pytestmark = pytest.mark.postgres

SETUP = """
    CREATE TYPE mood AS ENUM ('sad', 'glad');
    CREATE TYPE place AS (x int, y int);
    CREATE TABLE t (id int PRIMARY KEY, v text DEFAULT 'x', m mood, p place, g int GENERATED ALWAYS AS (id * 2) STORED);
    CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id);
    CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (100);
    INSERT INTO t SELECT i, i FROM generate_series(1, 100) i;
    CREATE PUBLICATION p FOR TABLE t, r;
    CREATE ROLE {role}
"""


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def watch(database: Database) -> Iterator[CatalogWatch]:
    role = f"other_{database.name}"
    for statement in SETUP.format(role=role).split(";\n"):
        database.execute(statement)
    made = CatalogWatch(database.dsn(), ("p",), "s")
    yield made
    made.close()
    for statement in ("REASSIGN OWNED BY {} TO postgres", "DROP OWNED BY {}", "DROP ROLE {}"):
        database.execute(statement.format(role))


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t ADD c int DEFAULT 5",
        "ALTER TABLE t ALTER v TYPE text USING v || v",
        "ALTER TABLE t RENAME v TO w",
        "ALTER TABLE t SET SCHEMA pg_catalog",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "ALTER TABLE r DETACH PARTITION r1",
        "CREATE TABLE r2 PARTITION OF r FOR VALUES FROM (100) TO (200)",
        "TRUNCATE r",
        "DROP TABLE t",
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'low'",
        "ALTER TYPE place ADD ATTRIBUTE z int",
        "ALTER PUBLICATION p SET (publish = 'insert')",
        "ALTER PUBLICATION p SET TABLE t WHERE (id > 5)",
        "ALTER SCHEMA public RENAME TO other",
        "GRANT SELECT ON t TO PUBLIC",
    ],
)
def test_a_look_notices(database: Database, watch: CatalogWatch, statement: str) -> None:
    before = watch.look(None)
    assert before.sources is not None and [each.name for each in before.sources] == ["public.r1", "public.t"]
    assert watch.look(before.fingerprint).sources is None
    if "pg_catalog" in statement:
        statement = statement.replace("pg_catalog", "s")
        database.execute("CREATE SCHEMA s")
        before = watch.look(before.fingerprint)
    database.execute(statement)
    after = watch.look(before.fingerprint)
    assert after.fingerprint != before.fingerprint and after.sources is not None
    assert watch.look(after.fingerprint).sources is None


def test_a_look_notices_what_came_and_went(database: Database, watch: CatalogWatch) -> None:
    known = watch.look(None).fingerprint
    database.execute("ALTER TABLE t ALTER v SET NOT NULL")
    database.execute("ALTER TABLE t ALTER v DROP NOT NULL")
    assert watch.look(known).sources is not None


def test_a_look_leaves_alone_what_no_published_table_depends_on(
    database: Database, watch: CatalogWatch
) -> None:
    known = watch.look(None).fingerprint
    for statement in (
        "INSERT INTO t SELECT i, i FROM generate_series(1000, 2000) i",
        "ANALYZE t",
        "VACUUM (FREEZE) t",
        "VACUUM FREEZE pg_class",
        "VACUUM FULL pg_attribute",
        "CREATE INDEX ON t (v)",
        "CREATE TEMP TABLE mine AS SELECT * FROM t",
        "ALTER TABLE mine ADD c int",
        "COMMENT ON TABLE t IS 'orders'",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE VIEW v AS SELECT 1 AS a",
    ):
        database.execute(statement)
        assert watch.look(known).sources is None, statement


def test_a_look_names_whoever_may_have_altered_a_table_and_nobody_else(
    database: Database, watch: CatalogWatch
) -> None:
    with database.connect() as altering, database.connect() as writing, database.connect() as locking:
        writing.execute("BEGIN; INSERT INTO t VALUES (-1)")
        # It has written nothing, so it can have altered nothing.
        database.execute("CREATE TABLE u (id int)")
        locking.execute("BEGIN; LOCK TABLE u IN SHARE ROW EXCLUSIVE MODE")
        assert watch.look(None).look.holders == frozenset()
        altering.execute("BEGIN; ALTER TABLE r ADD c int")
        row = altering.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        assert watch.look(None).look.holders == {row[0]}
        altering.execute("PREPARE TRANSACTION 'altering'")
        try:
            assert watch.look(None).look.holders == {row[0]}, "prepared"
        finally:
            altering.execute("COMMIT PREPARED 'altering'")
        assert watch.look(None).look.holders == frozenset()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_commit_that_waits_for_a_standby_is_not_proven_before_others_see_it(
    own_postgres: Callable[..., EmbeddedPostgres], version: int
) -> None:
    server = own_postgres(version=version)
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE TABLE t (id int PRIMARY KEY)")
        admin.execute("CREATE PUBLICATION p FOR TABLE t")
        watch, proving = CatalogWatch(server.conninfo(), ("p",), "s"), Proving()
        first = watch.look(None)
        assert proving.note(first.look) == first.look.lsn and not first.look.waits_for_standby
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        with psycopg.connect(server.conninfo(), autocommit=True) as altering:
            # A session that has not read the new settings yet would wait for nobody.
            until(lambda: altering.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))
            thread = threading.Thread(
                target=altering.execute, args=("ALTER TABLE t ADD c int DEFAULT 5",), daemon=True
            )
            thread.start()
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            until(lambda: admin.execute(waiting).fetchone() == (1,))
            (end,) = admin.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("0/0",)
            unseen = watch.look(first.fingerprint)
            assert unseen.sources is None, "the ALTER is committed, and nobody sees it"
            assert unseen.look.lsn >= Lsn.parse(end) and unseen.look.waits_for_standby
            assert proving.note(unseen.look) == first.look.lsn
            admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("SELECT pg_reload_conf()")
            thread.join(20)
        seen = watch.look(first.fingerprint)
        assert seen.sources is not None and proving.note(seen.look) == seen.look.lsn
        watch.close()


def test_a_watch_connects_again_when_its_session_was_ended(database: Database, watch: CatalogWatch) -> None:
    known = watch.look(None).fingerprint
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    database.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
    with pytest.raises(ConnectionLost):
        watch.look(known)
    assert watch.look(known).sources is None
