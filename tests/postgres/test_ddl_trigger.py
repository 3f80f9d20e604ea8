"""The event triggers of ``source prepare`` on real servers: what they tell, and that nobody's DDL fails by them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import TWO_PHASE, Scenario
from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream.actors.cli.main import main
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import DDL_PREFIX
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.catalog_watch import CatalogWatch
from xidstream.pipeline.postgres.ddl_trigger import (
    PREPARE,
    UNPREPARE,
    VERSION,
    TriggerState,
    installed,
    prepare,
    script,
    trigger_finding,
    unprepare,
)
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.snapshot.ddl import Ddl, KnownDdl, read_ddl
from xidstream.pipeline.snapshot.invalidation import reason_it_ended, signature_of
from xidstream.pipeline.snapshot.tables import PublishedSource

pytestmark = pytest.mark.postgres

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, v int)",
    "CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (0) TO (100)",
    "CREATE TYPE mood AS ENUM ('sad', 'glad')",
    "CREATE PUBLICATION p FOR ALL TABLES",
)


class Told:
    """A prepared database with a slot: ``told`` are the DDL messages that came since the last call."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.slot = f"s_{database.name}"
        for statement in TABLES:
            database.execute(statement)
        with sql_connection(database.dsn(), "test") as connection:
            assert prepare(connection)
        database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)

    def told(self) -> list[Ddl]:
        rows = self.database.execute(
            "SELECT xid::text::bigint, data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, "
            "'proto_version', '1', 'publication_names', 'p', 'messages', 'true')",
            self.slot,
        )
        prefix = DDL_PREFIX.encode() + b"\0"
        contents = [(bytes(data).partition(prefix)[2][4:], xid) for xid, data in rows if data[:1] == b"M"]
        read = [read_ddl(1, *each) for each in contents]
        return [each for each in read if each is not None]

    def after(self, *statements: str) -> list[Ddl]:
        for statement in statements:
            self.database.execute(statement)
        return self.told()

    def oid(self, table: str) -> int:
        return int(self.database.execute("SELECT to_regclass(%s)::oid::bigint", table)[0][0])

    def state(self) -> TriggerState:
        return installed(self.database.connection).state


@pytest.fixture
def source(database: Database) -> Told:
    return Told(database)


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    name = f"plain_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    for statement in ("REASSIGN OWNED BY {} TO postgres", "DROP OWNED BY {}", "DROP ROLE {}"):
        database.execute(statement.format(name))


ALTERATIONS = (
    ("ALTER TABLE {t} SET UNLOGGED", "UNLOGGED"),
    ("ALTER TABLE {t} ALTER v TYPE int USING v * 100", "written anew"),
    ("ALTER TABLE {t} RENAME TO other", "renamed to public.other"),
    ("ALTER TABLE {t} SET SCHEMA s", "renamed to s.{t}"),
    ("DROP TABLE {t}", "dropped"),
    ("ALTER TABLE {t} ADD c int DEFAULT 5", None),
    ("ALTER TABLE {t} ADD CHECK (id > 0)", None),
    ("ALTER TABLE {t} REPLICA IDENTITY FULL", None),
    ("ALTER TABLE {t} DROP COLUMN v", None),
    ("ALTER TABLE {t} OWNER TO CURRENT_USER", None),
    ("ALTER INDEX {t}_pkey RENAME TO other_pkey", None),
    ("ALTER TYPE mood RENAME VALUE 'sad' TO 'low'", None),
    ("ALTER PUBLICATION p SET (publish = 'insert')", None),
    ("ALTER SCHEMA s RENAME TO z", None),
)


def test_a_message_tells_of_ddl_and_whether_it_ends_a_snapshot_by_itself(source: Told) -> None:
    mark = installed(source.database.connection).mark
    assert mark is not None
    source.database.execute("CREATE SCHEMA s")
    for i, (statement, why) in enumerate(ALTERATIONS):
        table = f"t{i}"
        source.database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
        relid = source.oid(table)
        told = source.after(statement.format(t=table))
        assert told and {each.mark for each in told} == {mark}, statement
        assert {each.tag for each in told} == {" ".join(statement.split()[:2])}
        reasons = {each.reason(relid, f"public.{table}") for each in told} - {None}
        assert len(reasons) == (why is not None), (statement, reasons)
        assert why is None or why.format(t=table) in str(reasons)
        assert not any(each.reason(1, "public.t") for each in told), "another table"
    told = source.after("DROP SCHEMA public CASCADE")
    assert sum(len(each.tables) for each in told) > 10 and all(table.is_dropped for table in told[0].tables)


def test_what_alters_no_published_table_leaves_no_message(source: Told) -> None:
    quiet = (
        "CREATE TABLE u (id int)",
        "CREATE INDEX ON t (v)",
        "CREATE TEMP TABLE x (a int)",
        "ALTER TABLE x ADD b int",
        "ALTER TABLE x ALTER b TYPE bigint",
        "DROP TABLE x",
        "CREATE VIEW w AS SELECT 1 AS a",
        "DROP VIEW w",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP FUNCTION f",
        "COMMENT ON TABLE t IS 'orders'",
        "GRANT SELECT ON t TO PUBLIC",
        "TRUNCATE t",
        "VACUUM FULL t",
        "ANALYZE t",
    )
    assert source.after(*quiet) == []


def test_ddl_of_a_partition_names_what_it_is_a_part_of(source: Told) -> None:
    (rewritten, altered) = source.after("ALTER TABLE r1 SET UNLOGGED")
    for told in (rewritten, altered):
        assert told.reason(source.oid("r"), "public.r") and told.reason(source.oid("r1"), "public.r1")
    assert source.oid("r") in source.after("ALTER TABLE r1 SET LOGGED")[0].tables[0].above


def test_a_load_into_an_unlogged_table_between_two_looks_is_told_by_its_ddl_alone(source: Told) -> None:
    def published() -> PublishedSource:
        return next(s for s in survey(source.database.connection, ["p"]) if s.name == "public.t")

    then = json.loads(json.dumps(signature_of(published())))
    told = source.after(
        "ALTER TABLE t SET UNLOGGED",
        "INSERT INTO t SELECT generate_series(1, 100)",
        "ALTER TABLE t SET LOGGED",
    )
    assert reason_it_ended(then, published()) is None, "it looks like VACUUM FULL"
    assert "nobody knows" in str(reason_it_ended(then, published(), is_witnessed=False)), (
        "nor would its DDL be known"
    )
    assert "UNLOGGED" in str(told[0].reason(source.oid("t"), "public.t"))


def test_ddl_that_is_rolled_back_leaves_no_message(source: Told) -> None:
    assert source.after("BEGIN", "ALTER TABLE t SET UNLOGGED", "ROLLBACK") == []
    told = source.after(
        "BEGIN",
        "SAVEPOINT a",
        "ALTER TABLE t SET UNLOGGED",
        "ROLLBACK TO a",
        "ALTER TABLE t ADD kept int",
        "COMMIT",
    )
    assert [each.tables[0].rewritten for each in told] == [0]


def test_many_ddls_in_one_transaction_take_no_xid_of_their_own(source: Told) -> None:
    """Each would be a subtransaction's, and from 65 on every snapshot of the server would have to look them up."""
    with source.database.connect() as session:
        session.execute("BEGIN")
        for i in range(100):
            session.execute(f"ALTER TABLE t ADD c{i} int".encode())
        top = session.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        session.execute("COMMIT")
        behind = session.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert top is not None and behind is not None and behind[0] == top[0] + 1
    assert len(source.told()) == 100


def test_the_triggers_fire_for_roles_without_rights_and_under_replica(source: Told, role: str) -> None:
    source.database.execute(
        "REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text"
        f"{', boolean' if source.database.version >= 17 else ''}) FROM PUBLIC"
    )
    source.database.execute(f"ALTER TABLE t OWNER TO {role}")
    source.database.execute("SET session_replication_role = replica")
    assert source.after("ALTER TABLE t ADD c int")
    source.database.execute("RESET session_replication_role")
    with psycopg.connect(source.database.dsn(user=role), autocommit=True) as session:
        warned: list[str] = []
        session.add_notice_handler(lambda notice: warned.append(notice.message_primary or ""))
        session.execute("SET search_path = public")
        session.execute("ALTER TABLE t ADD d int")
        assert warned == [] and len(source.told()) == 1
        # The function's owner may not write messages: the DDL succeeds, and the session is told.
        source.database.execute(f"GRANT USAGE, CREATE ON SCHEMA xidstream TO {role}")
        source.database.execute(f"ALTER FUNCTION xidstream.note_ddl() OWNER TO {role}")
        session.execute("ALTER TABLE t ADD e int")
        assert ["was revoked" in each for each in warned] == [True] and source.told() == []


def test_nobody_has_his_own_operators_run_with_the_owners_rights(source: Told, role: str) -> None:
    source.database.execute(f"CREATE SCHEMA theirs AUTHORIZATION {role}")
    source.database.execute(f"ALTER TABLE t OWNER TO {role}")
    with psycopg.connect(source.database.dsn(user=role), autocommit=True) as session:
        session.execute("SET search_path = theirs, pg_catalog")
        session.execute(
            "CREATE FUNCTION theirs.matches(text, text) RETURNS boolean LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'theirs ran'; END $$"
        )
        session.execute(
            "CREATE OPERATOR theirs.~ (LEFTARG = text, RIGHTARG = text, FUNCTION = theirs.matches)"
        )
        source.told()
        session.execute("ALTER TABLE public.t ADD c int")
    assert len(source.told()) == 1


def test_a_function_that_somebody_has_put_there_is_not_kept_with_its_owner(
    database: Database, role: str
) -> None:
    """He could change it after our back, and have it run with the rights of whoever runs DDL."""
    database.execute(f"CREATE SCHEMA xidstream AUTHORIZATION {role}")
    with psycopg.connect(database.dsn(user=role), autocommit=True) as session:
        session.execute(
            "CREATE FUNCTION xidstream.note_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'"
        )
    with sql_connection(database.dsn(), "test") as connection:
        assert prepare(connection)
    owner = "SELECT proowner::regrole::text FROM pg_proc WHERE proname = 'note_ddl'"
    assert database.execute(owner) == [("postgres",)]


def test_ddl_succeeds_where_the_function_is_broken_within(source: Told) -> None:
    """What it looks up may fail some day; here a version of it that asks for a column that is not there."""
    created = next(each for each in PREPARE if each.startswith("CREATE FUNCTION"))
    broken = created.replace("c.relpersistence", "c.gone").replace("CREATE", "CREATE OR REPLACE", 1)
    source.database.execute(broken)
    warned: list[str] = []
    source.database.connection.add_notice_handler(lambda notice: warned.append(notice.message_primary or ""))
    told = source.after("ALTER TABLE t ADD c int", "ALTER TABLE t ALTER c TYPE bigint")
    assert [(each.tag, each.mark, each.tables) for each in told] == 3 * [("ALTER TABLE", None, ())], (
        "that is told"
    )
    assert len(warned) == 3 and all("xidstream was not told of ALTER TABLE" in each for each in warned)
    assert source.state() is TriggerState.CHANGED


def test_status_tells_what_is_there_and_prepare_mends_it(source: Told) -> None:
    database = source.database
    assert source.state() is TriggerState.CURRENT
    assert [each.status.value for each in trigger_finding(database.connection)] == ["ok"]
    mark = installed(database.connection).mark
    with sql_connection(database.dsn(), "test") as connection:
        assert not prepare(connection) and installed(connection).mark == mark
        for statement, state in (
            ("ALTER EVENT TRIGGER xidstream_drop DISABLE", TriggerState.DISABLED),
            ("ALTER EVENT TRIGGER xidstream_drop ENABLE", TriggerState.DISABLED),
            ("DROP EVENT TRIGGER xidstream_rewrite", TriggerState.CHANGED),
            ("ALTER FUNCTION xidstream.note_ddl() SECURITY INVOKER", TriggerState.CHANGED),
            ("COMMENT ON FUNCTION xidstream.note_ddl() IS 'mine'", TriggerState.CHANGED),
            (
                "COMMENT ON FUNCTION xidstream.note_ddl() IS 'xidstream source prepare, version 0'",
                TriggerState.OLDER,
            ),
            (
                f"COMMENT ON FUNCTION xidstream.note_ddl() IS 'xidstream source prepare, version {VERSION + 1}'",
                TriggerState.NEWER,
            ),
        ):
            database.execute(statement)
            assert source.state() is state, statement
            (finding,) = trigger_finding(database.connection)
            assert "recommended" in finding.text and finding.status.value == "ok"
            assert prepare(connection) and source.state() is TriggerState.CURRENT
        assert installed(connection).mark != mark
        unprepare(connection)
        assert source.state() is TriggerState.ABSENT
        assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'xidstream'") == [(0,)]
        unprepare(connection)
    assert source.after("ALTER TABLE t ADD c int") == []


def test_the_mark_shows_that_the_triggers_were_off_for_a_while(source: Told) -> None:
    before = installed(source.database.connection).mark
    source.database.execute("ALTER EVENT TRIGGER xidstream_ddl DISABLE")
    source.database.execute("ALTER EVENT TRIGGER xidstream_ddl ENABLE ALWAYS")
    now = installed(source.database.connection)
    assert now.state is TriggerState.CURRENT and now.mark != before
    assert {each.mark for each in source.after("ALTER TABLE t ADD c int")} == {now.mark}


def test_a_look_at_the_catalog_tells_the_mark_while_the_triggers_are_as_they_were_installed(
    source: Told,
) -> None:
    watch = CatalogWatch(source.database.dsn(), ("p",), source.slot)
    try:
        assert watch.look(None).mark == installed(source.database.connection).mark is not None
        source.database.execute("ALTER EVENT TRIGGER xidstream_ddl DISABLE")
        assert watch.look(None).mark is None
    finally:
        watch.close()


def test_what_a_standby_keeps_unseen_is_not_proven_before_a_look_has_seen_it(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    """ALTER PUBLICATION … SET holds no lock that tells of it, and was found a look too late."""
    server = own_postgres()
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        source = Told(Database(server, "postgres", admin))
        watch = CatalogWatch(server.conninfo(), ("p",), source.slot)
        first = watch.look(None)
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        admin.execute("SELECT pg_reload_conf()")
        with psycopg.connect(server.conninfo(), autocommit=True) as altering:
            statement = "ALTER PUBLICATION p SET (publish = 'insert')"
            thread = threading.Thread(target=altering.execute, args=(statement,), daemon=True)
            thread.start()
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            wait_until(lambda: admin.execute(waiting).fetchone() == (1,))
            known = KnownDdl(Lsn(0))
            assert known.add(source.told()), "the stream has it"
            unseen = watch.look(first.fingerprint)
            assert unseen.sources is None and not unseen.look.holders
            assert known.proves(unseen.look.lsn, unseen.snapshot) == 0, (
                "before its commit, which is told as 0/1 here"
            )
            admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("SELECT pg_reload_conf()")
            thread.join(20)
        seen = watch.look(first.fingerprint)
        assert seen.sources is not None and known.proves(seen.look.lsn, seen.snapshot) == seen.look.lsn
        watch.close()


def test_a_role_that_may_not_is_told_so_and_nothing_is_left_behind(database: Database, role: str) -> None:
    database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {role}")
    with sql_connection(database.dsn(user=role), "test") as connection:
        with pytest.raises(PreconditionMissing, match="permission denied to create event trigger"):
            prepare(connection)
        assert installed(connection).state is TriggerState.ABSENT
    assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'xidstream'") == [(0,)]


def test_the_commands_install_tell_and_remove_and_say_who_may(
    database: Database, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str, dsn: str = database.dsn(), status: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["source", *arguments, *(["--dsn", dsn] if dsn else [])])
        assert ended.value.code == status
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "absent" in said("status")
    assert "`xidstream source prepare --print`" in said("prepare", dsn=database.dsn(user=role), status=3)
    assert "current (version 1)" in said("prepare") and "nothing to do" in said("prepare")
    assert "current (version 1)" in said("status", dsn=database.dsn(user=role)), "any role may ask"
    assert "removed" in said("unprepare") and "absent" in said("status")
    assert said("prepare", "--print", dsn="") == script(PREPARE)
    assert said("unprepare", "--print", dsn="") == script(UNPREPARE)


def test_the_printed_sql_is_what_is_run(database: Database) -> None:
    database.connection.execute(script(PREPARE).encode())
    assert installed(database.connection).state is TriggerState.CURRENT
    database.execute("CREATE TABLE xidstream.theirs (id int)")
    database.connection.execute(script(UNPREPARE).encode())
    assert installed(database.connection).state is TriggerState.ABSENT
    assert database.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'xidstream'") == [(1,)]


def prepare_in(scenario: Scenario) -> None:
    with sql_connection(scenario.database.dsn(), "test") as connection:
        prepare(connection)


def told_in(scenario: Scenario) -> list[tuple[int, str]]:
    """Commit LSN and tag of the DDL messages that reached the sink's side."""
    found = (read_ddl(m.commit_lsn, m.content) for m in scenario.sink.messages if m.prefix == DDL_PREFIX)
    return [(int(each.commit_lsn), each.tag) for each in found if each is not None]


@TWO_PHASE
def test_ddl_in_a_streamed_transaction_is_told_at_its_commit_and_before_its_rows_count(
    scenario: Scenario,
) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    prepare_in(scenario)
    scenario.open()
    session = scenario.session(
        "INSERT INTO t SELECT i, repeat('x', 50) FROM generate_series(1, 200) i",
        "ALTER TABLE t ADD c int",
        "INSERT INTO t SELECT i, repeat('x', 50), 1 FROM generate_series(201, 400) i",
    )
    scenario.read()
    assert told_in(scenario) == [], "not committed"
    session.execute("COMMIT")
    scenario.agree()
    (transaction,) = scenario.transactions
    assert transaction.streamed and told_in(scenario) == [(transaction.commit_lsn, "ALTER TABLE")]


@TWO_PHASE
def test_ddl_in_a_prepared_transaction_is_told_at_commit_prepared(scenario: Scenario) -> None:
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    prepare_in(scenario)
    scenario.open(two_phase=True)
    for gid, end in (("gone", "ROLLBACK"), ("kept", "COMMIT")):
        session = scenario.session("INSERT INTO t VALUES (1)", "ALTER TABLE t ADD c int")
        session.execute(f"PREPARE TRANSACTION '{gid}'".encode())
        session.close()
        scenario.read()
        assert told_in(scenario) == [], "only prepared"
        scenario.run(f"{end} PREPARED '{gid}'")
        scenario.read()
    scenario.agree()
    (transaction,) = scenario.transactions
    assert told_in(scenario) == [(transaction.commit_lsn, "ALTER TABLE")]


@TWO_PHASE
def test_ddl_in_a_subtransaction_that_is_rolled_back_is_told_only_if_it_was_streamed_before(
    scenario: Scenario,
) -> None:
    """Fact 10: such a message does not name its subtransaction. It ends a generation too many at worst."""
    scenario.run("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    prepare_in(scenario)
    scenario.open()
    scenario.run(
        "BEGIN",
        "INSERT INTO t VALUES (1)",
        "SAVEPOINT a",
        "ALTER TABLE t SET UNLOGGED",
        "ROLLBACK TO a",
        "INSERT INTO t VALUES (2)",
        "COMMIT",
    )
    scenario.read()
    scenario.twin.pipeline.read_until(scenario.flush())
    twins = [m for m in scenario.twin.sink.messages if m.prefix == DDL_PREFIX]
    assert twins == [] and {tag for _, tag in told_in(scenario)} <= {"ALTER TABLE"}
    assert scenario.ids() == [1, 2]
