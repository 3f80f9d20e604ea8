"""Tables that had rows before their stream: the log folds to what the source held, at any commit since."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from psycopg import sql

from tests.e2e.conftest import Pipeline, to_arrow
from tests.fold import Log, Row, folded
from tests.postgres_fixtures import Database
from tests.processes import living_below
from tests.s3_server import S3Server
from tests.waiting_rows import waiting_rows
from xidstream import ChangeLog, ChangeStream, LogState, Mirror, SparkBatch
from xidstream.actors.cli.resync import resync_command
from xidstream.actors.cli.snapshots import request_command
from xidstream.actors.cli.tables import resume_command
from xidstream.actors.snapshots import coordinator, held_tables
from xidstream.pipeline import faultpoints
from xidstream.pipeline.errors import ComponentLost, PreconditionMissing, SinkFailed
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.ddl_trigger import prepare
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.spark.snapshot_visibility import without_contained

pytestmark = pytest.mark.e2e
OLDEST = pytest.param(16, marks=pytest.mark.slow)
"""The server's part of these tests runs on both versions in tests/postgres each time."""

MIRROR_POINTS = (
    "writing_base",
    "base_written",
    "base_committed",
    "committing_manifest",
    "manifest_committed",
)

TABLES = {
    "accounts": "id, balance, note",
    "history": "id, delta, at",
    "whole": "id, n, note",
    "documents": "id, title, body",
    "Orders": 'id, "Day", total',
    "empty": "id",
}
SCHEMA = """
    create table accounts (id bigint primary key, balance numeric(12,2), note text);
    create table history (id int, delta int, at timestamptz);
    alter table history replica identity full;
    create table whole (id bigint primary key, n int, note text);
    alter table whole replica identity full;
    insert into whole select i, i, null from generate_series(1, 12000) i;
    create table documents (id int primary key, title text, body text);
    alter table documents alter body set storage external;
    create table "Orders" (id int, "Day" date, total float8, primary key (id, "Day")) partition by range ("Day");
    create table orders_old partition of "Orders" for values from ('2020-01-01') to ('2025-01-01');
    create table orders_new (total float8, "Day" date not null, id int not null);
    alter table "Orders" attach partition orders_new for values from ('2025-01-01') to ('2030-01-01');
    create table empty (id int primary key);
    insert into accounts select i, i * 1.25, repeat('n', i % 50) from generate_series(1, 24000) i;
    insert into history select i % 100, i, now() from generate_series(1, 5000) i;
    insert into documents select i, 'title ' || i, repeat(md5(i::text), 400) from generate_series(1, 60) i;
    insert into "Orders" select i, date '2020-01-01' + i, i / 3.0 from generate_series(1, 3000) i;
"""


class Writers:
    """Threads that change the tables in short transactions, with savepoints and rollbacks; they can be held still."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._stop = threading.Event()
        self._still = threading.Lock()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed * 10 + i), i)) for i in range(2)
        ]
        self._locks = [threading.Lock() for _ in self._threads]
        for thread in self._threads:
            thread.start()

    def states(self) -> tuple[Lsn, dict[str, Counter[Row]]]:
        """The last LSN at which a transaction that is committed now can have its commit, and what the tables hold."""
        for lock in self._locks:
            lock.acquire()
        try:
            (lsn,) = self._database.execute("select pg_current_wal_insert_lsn()::text")[0]
            return Lsn.parse(lsn).before, contents(self._database)
        finally:
            for lock in self._locks:
                lock.release()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures, self._failures

    def _run(self, dice: random.Random, number: int) -> None:
        try:
            with self._database.connect() as session:
                while not self._stop.is_set():
                    with self._locks[number]:
                        self._transaction(session, dice, number)
                    # Enough for changes in every range and batch. More of them would only take time.
                    time.sleep(0.01)
        except BaseException as error:
            self._failures.append(error)

    def _transaction(self, session: psycopg.Connection[Any], dice: random.Random, number: int) -> None:
        session.execute(b"begin")
        for _ in range(dice.randint(1, 4)):
            inside = dice.random() < 0.3
            if inside:
                session.execute(b"savepoint a")
            statement = dice.choice(STATEMENTS)
            values = {
                # Writers have rows of their own: they never wait for each other.
                "mine": 2 * dice.randint(1, 9_999) + number,
                "new": 1_000_000 + 2 * dice.randint(0, 4_000_000) + number,
                "doc": 2 * dice.randint(1, 29) + number,
                "n": dice.randint(0, 10**6),
            }
            session.execute(sql.SQL(statement).format(**{k: sql.Literal(v) for k, v in values.items()}))
            if inside and dice.random() < 0.5:
                session.execute(b"rollback to savepoint a")
        session.execute(b"rollback" if dice.random() < 0.1 else b"commit")


STATEMENTS = (
    "update accounts set balance = balance + 1 where id = {mine}",
    "update accounts set id = {new} where id = {mine} and not exists (select from accounts where id = {new})",
    "insert into accounts values ({new}, {n}, 'new') on conflict (id) do update set note = 'again'",
    "delete from accounts where id = {mine}",
    "insert into history values ({mine}, {n}, now())",
    "delete from history where ctid = (select min(ctid) from history where id % 2 = {mine} % 2)",
    "update whole set n = {n} where id = {mine}",
    "update whole set id = {new}, note = 'moved' where id = {mine} and not exists (select from whole where id = {new})",
    "delete from whole where id = {mine}",
    "insert into whole values ({new}, {n}, 'new') on conflict do nothing",
    "update documents set title = title || '.' where id = {doc}",
    "update documents set body = repeat('b', 3000 + {n} % 100) where id = {doc}",
    'update "Orders" set total = {n} where id = {mine}',
    """update "Orders" set "Day" = "Day" + 1500 where id = {mine} and "Day" < '2025-01-01'""",
    """insert into "Orders" values ({new}, '2026-01-01', 1.5) on conflict do nothing""",
)


def contents(database: Database) -> dict[str, Counter[Row]]:
    return {
        table: Counter(database.execute(f'select {columns} from "{table}"'))
        for table, columns in TABLES.items()
    }


def settings(**more: Any) -> dict[str, Any]:
    return {"snapshot": "initial", "snapshot_connections": 2, **more}


def start(pipeline: Pipeline, **more: Any) -> Any:
    pipeline.query = (
        ChangeStream(pipeline.config(**settings(**more))).toDelta(str(pipeline.delta)).start(pipeline.spark)
    )
    return pipeline.query


def wait_until_taken(pipeline: Pipeline, n_tables: int) -> None:
    def taken() -> bool:
        lines = generations(pipeline)
        return len({line["table"] for line in lines if line["state"] == "finished"}) >= n_tables

    pipeline.wait_until(taken)


def generations(pipeline: Pipeline) -> list[dict[str, Any]]:
    folder = pipeline.delta / "_snapshots"
    if not DeltaTable.is_deltatable(str(folder)):
        return []
    found: list[dict[str, Any]] = DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    return found


def whole_up_to(pipeline: Pipeline) -> int:
    """The slot's watermark of ``_transactions``."""
    system_identifier = pipeline.database.execute("select system_identifier from pg_control_system()")[0][0]
    database = pipeline.database.execute("select current_database()")[0][0]
    table = DeltaTable(str(pipeline.delta / "_transactions"))
    return int(table.transaction_version(f"{system_identifier}/{database}/{pipeline.config().slot}") or 0)


def wait_until_delivered(pipeline: Pipeline, lsn: Lsn) -> None:
    def delivered() -> bool:
        found = pipeline.query.lastProgress["deliveredLsn"]
        return found is not None and Lsn.parse(found) >= lsn

    pipeline.wait_until(delivered)


def assert_folds(pipeline: Pipeline, states: list[tuple[Lsn, dict[str, Counter[Row]]]]) -> int:
    """At each of the states that all generations are valid for; returns how many those were."""
    logs = {table: Log(pipeline.delta, "public", table) for table in TABLES}
    n_compared = 0
    for lsn, tables in states:
        if lsn < max(log.bounds.valid_from for log in logs.values()):
            continue
        n_compared += 1
        for table, rows in tables.items():
            found = logs[table].at(lsn)
            assert found == rows, (table, str(lsn), list(found - rows)[:3], list(rows - found)[:3])
    return n_compared


def taken_amid_changes(
    pipeline: Pipeline, seed: int, n_states: int = 6, between: Callable[[], object] = lambda: None
) -> list[tuple[Lsn, dict[str, Counter[Row]]]]:
    """Take all tables while writers and a giant transaction change them. Returns states of the source; ``between`` is
    called between them when the tables are taken."""
    database = pipeline.database
    database.execute(SCHEMA)
    database.execute("create publication p for all tables with (publish_via_partition_root = true)")
    writers = Writers(database, seed)
    try:
        start(pipeline, publication="p")
        pipeline.wait_until_reading()
        with database.connect() as giant:
            giant.execute(b"begin")
            giant.execute(b"update accounts set note = 'giant' where id between 20001 and 24000")
            giant.execute(
                b"insert into accounts select i, 0, 'giant' from generate_series(10000001, 10030000) i"
            )
            states = [writers.states()]
            wait_until_taken(pipeline, len(TABLES))
            states += [writers.states() for _ in range(4)]
            giant.execute(b"commit")
        for _ in range(n_states):
            time.sleep(0.3)
            between()
            states.append(writers.states())
    finally:
        writers.stop()
    states.append(writers.states())
    # WAL goes on after the last commit. No table does it: the publication would have it taken, now and then.
    database.execute("create schema more")
    wait_until_delivered(pipeline, states[-1][0])
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    return states


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [OLDEST, 18], indirect=True)
@pytest.mark.parametrize("seed", [1])
def test_rows_from_before_and_changes_meanwhile_fold_to_the_source_at_every_state(
    pipeline: Pipeline, seed: int
) -> None:
    states = taken_amid_changes(pipeline, seed)
    assert assert_folds(pipeline, states) >= 10
    log = Log(pipeline.delta, "public", "accounts")
    assert log.n_snapshot_rows > 15_000, "the rows from before came by the snapshot"
    keys = {line["table"]: line["key"] for line in generations(pipeline)}
    assert keys["public.whole"] == ["id"] and keys["public.history"] is None
    assert_as_of(pipeline, states, random.Random(seed), n_commits=4)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("postgres_server", "seed"), [(18, 3)], indirect=["postgres_server"])
def test_the_state_as_of_two_hundred_random_commits_is_the_log_folded_in_plain_python(
    pipeline: Pipeline, seed: int
) -> None:
    """Base tables are refreshed meanwhile, and most refreshes die; a state begins with the newest base before it."""
    dice, n_died = random.Random(seed), 0

    def refresh() -> None:
        nonlocal n_died
        point = dice.choice([None, *MIRROR_POINTS])
        with pytest.MonkeyPatch.context() as patch:
            if point is not None:
                patch.setattr(faultpoints, "_plan", FaultPlan(f"{point}:error", None))
            try:
                Mirror(str(pipeline.delta)).refresh(pipeline.spark)
            except ComponentLost:
                n_died += 1

    states = taken_amid_changes(pipeline, seed, n_states=15, between=refresh)
    manifest = DeltaTable(str(pipeline.delta / "current" / "_manifest")).to_pyarrow_table(columns=["lsn"])
    moments = set(manifest["lsn"].to_pylist())
    print(f"seed {seed}: {n_died} refreshes died; base tables of {len(moments)} moments")
    assert n_died and len(moments) > 1
    assert_as_of(pipeline, states, dice, n_commits=200)


def assert_as_of(
    pipeline: Pipeline, states: list[tuple[Lsn, dict[str, Counter[Row]]]], dice: random.Random, n_commits: int
) -> None:
    """``ChangeLog.as_of`` is the source at its states, and the fold in plain Python at random commits."""
    logs = {table: Log(pipeline.delta, "public", table) for table in TABLES}
    known_from = max(log.bounds.valid_from for log in logs.values())
    change_log = ChangeLog(str(pipeline.delta))
    assert change_log.tables() == sorted(f"public.{table}" for table in TABLES)
    newest = change_log.as_of(pipeline.spark)
    assert newest.tables() == change_log.tables()
    assert newest.lsn == change_log.last_commit_lsn
    for table, rows in states[-1][1].items():
        assert rows_of(newest, table) == rows, table
    commits = [row.commit_lsn for row in change_log.transactions(pipeline.spark).collect()]
    for lsn in dice.sample(sorted(lsn for lsn in commits if lsn >= known_from), n_commits):
        table = dice.choice(list(TABLES))
        state = change_log.as_of(pipeline.spark, lsn=dice.choice([lsn, Lsn(lsn), str(Lsn(lsn))]))
        assert rows_of(state, table) == logs[table].at(lsn), (table, str(Lsn(lsn)))
    for lsn, tables in states[:: 1 if n_commits > 10 else 4]:
        if known_from <= lsn <= newest.lsn:
            table = dice.choice(list(TABLES))
            assert rows_of(change_log.as_of(pipeline.spark, lsn=lsn), table) == tables[table], (
                table,
                str(lsn),
            )
    with pytest.raises(PreconditionMissing, match=f"valid from {logs['accounts'].bounds.valid_from}"):
        change_log.as_of(pipeline.spark, lsn=logs["accounts"].bounds.valid_from - 1)["public.accounts"]
    assert_net_changes(pipeline, change_log, known_from, newest.lsn)


def rows_of(state: LogState, table: str) -> Counter[Row]:
    found = to_arrow(state[f"public.{table}"])
    assert found.column_names == [name.strip().strip('"') for name in TABLES[table].split(",")] or not len(
        found
    )
    return Counter(tuple(row.values()) for row in found.to_pylist())


def assert_net_changes(pipeline: Pipeline, log: ChangeLog, since: Lsn, until: Lsn) -> None:
    """The net changes of a table with changed keys, and of one with large values, take one state to the other."""
    for table in ("accounts", "documents"):
        before, after = (
            {
                row["id"]: row
                for row in to_arrow(log.as_of(pipeline.spark, lsn=lsn)[f"public.{table}"]).to_pylist()
            }
            for lsn in (since, until)
        )
        changes = log.changes(pipeline.spark, f"public.{table}", since=since, until=until, net=True)
        for row in to_arrow(changes).to_pylist():
            was, now = before.pop(row["id"], None), after.pop(row["id"], None)
            kind = "insert" if was is None else "delete" if now is None else "update"
            assert row["_change_type"] == kind
            assert since < row["_commit_lsn"] <= until
            assert row["_unchanged"] is None
            if now is not None:
                assert now == {name: row[name] for name in now}
        assert before == after, "what has no net change is as it was"


# -- losses ------------------------------------------------------------------------------------------------


def kill(actor: str) -> None:
    """SIGKILL the processes of a kind of Ray actor."""
    processes = [each.process for each in living_below() if each.name.startswith(f"ray::{actor}")]
    assert processes, f"there is no {actor}"
    for process in processes:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_killed_reader_costs_ranges_a_killed_holder_its_table_and_a_killed_slot_reader_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_tables, "plan_ranges", partial(held_tables.plan_ranges, range_bytes=256 << 10))
    database = pipeline.database
    database.execute("create table t (id int primary key, body text)")
    database.execute("insert into t select i, repeat('x', 100) from generate_series(1, 60000) i")
    database.execute("create publication p for table t")
    start(pipeline, snapshot_bytes_per_s=1 << 20, snapshot_connections=1)

    def read() -> tuple[int, int]:
        snapshots = pipeline.query.lastProgress["snapshots"]
        tables = snapshots["tables"] if snapshots else []
        return (tables[0]["rangesRead"], tables[0]["ranges"]) if tables else (0, 0)

    pipeline.wait_until(lambda: read()[0] >= 3)
    n_read, n_ranges = read()
    assert n_ranges > 20
    assert pipeline.query.lastProgress["snapshots"]["heldWalBytes"] is not None
    kill("SnapshotReader")
    kill("SlotReader")
    database.execute("update t set body = 'new' where id % 1000 = 7")
    pipeline.wait_until(lambda: read()[0] > n_read + 1)
    assert n_read < read()[0] < n_ranges, "what was read before stays, and there is more to read"
    kill("SnapshotHolder")
    # The name that it exported is gone, and the readers' next range finds it out.
    pipeline.wait_until(lambda: read()[0] < n_read)
    wait_until_taken(pipeline, 1)
    (line,) = generations(pipeline)
    assert line["state"] == "finished"
    database.execute("delete from t where id = 1000")
    (lsn,) = database.execute("select pg_current_wal_insert_lsn()::text")[0]
    database.execute("create table more ()")
    wait_until_delivered(pipeline, Lsn.parse(lsn))
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    assert Log(pipeline.delta, "public", "t").at(Lsn.parse(lsn)) == Counter(
        database.execute("select * from t")
    )


# -- later ---------------------------------------------------------------------------------------------------


def until(lsn_of: Database) -> Lsn:
    (lsn,) = lsn_of.execute("select pg_current_wal_insert_lsn()::text")[0]
    lsn_of.execute("select pg_logical_emit_message(true, 'test', 'behind')")
    return Lsn.parse(lsn)


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [OLDEST, 18], indirect=True)
def test_a_table_that_is_added_changed_or_asked_for_is_taken_while_the_run_goes_on(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_LOOK_S", 0.5)
    database = pipeline.database
    for statement in (
        "create table a (id int primary key, n int)",
        "create table b (id int primary key, n int)",
        "insert into a select i, i from generate_series(1, 500) i",
        "insert into b select i, i from generate_series(1, 500) i",
        "create publication p for table a",
    ):
        database.execute(statement)
    start(pipeline)
    wait_until_taken(pipeline, 1)

    def states() -> list[tuple[str, int, str]]:
        return sorted((line["table"], line["generation"], line["state"]) for line in generations(pipeline))

    assert states() == [("public.a", 1, "finished")]
    # Z wrote to the table before it was published: without a wait for it the first row would be lost.
    with database.connect() as z:
        z.execute(b"begin")
        z.execute(b"insert into b values (1001, 0)")
        database.execute("alter publication p add table b")
        time.sleep(2)
        z.execute(b"insert into b values (1002, 0)")
        assert states() == [("public.a", 1, "finished")], "it waits for Z"
        z.execute(b"commit")
    pipeline.wait_until(lambda: ("public.b", 1, "finished") in states())
    database.execute("update b set n = -n where id % 7 = 0")

    request_command(pipeline.config(), ["public.a"])
    pipeline.wait_until(lambda: ("public.a", 2, "finished") in states())
    database.execute("alter table a alter n type text using 'n' || n")
    database.execute("insert into a values (2000, 'new')")
    pipeline.wait_until(lambda: ("public.a", 3, "finished") in states())
    assert ("public.a", 2, "ended") in states()
    lsn = until(database)
    wait_until_delivered(pipeline, lsn)
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    assert Log(pipeline.delta, "public", "b").at(lsn.before) == Counter(database.execute("select * from b"))
    log = Log(pipeline.delta, "public", "a")
    rows = Counter(dict.fromkeys(database.execute("select * from a"), 1))
    assert (
        Counter({(row[0], row[log.columns.index("n__string")]): n for row, n in log.at(lsn.before).items()})
        == rows
    )
    table = DeltaTable(str(pipeline.delta / "public.a"))
    before, after = json.loads(table.metadata().configuration["xidstream.versions"])
    assert before["columns"]["n"] == {"type": "integer", "column": "n"}
    assert after["columns"]["n"] == {"type": "text", "column": "n__string"}
    for row in table.to_pyarrow_table().to_pylist():
        version = after if row["_commit_lsn"] >= after["since"] else before
        assert row["_commit_lsn"] >= before["since"] and row[version["columns"]["n"]["column"]] is not None


UNSEEN_DDL = (
    "alter table t alter n type int using n * 100",
    """alter table t rename to u; create table t (id int primary key, n int);
       insert into t select id, -n from u; drop table u""",
    """alter publication p set (publish = 'insert, update'); delete from t where id % 3 = 0;
       alter publication p set (publish = 'insert, update, delete, truncate')""",
)


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [OLDEST, 18], indirect=True)
def test_what_is_read_at_once_behind_a_ddl_is_the_source_or_refused_and_stays_so_when_the_run_has_stopped(
    pipeline: Pipeline,
) -> None:
    """Each DDL changes older rows without a word in the stream, and is followed at once by a commit."""
    database = pipeline.database
    for statement in (
        "create table t (id int primary key, n int)",
        "insert into t select i, i from generate_series(1, 200) i",
        "create publication p for all tables",
    ):
        database.execute(statement)
    start(pipeline)
    wait_until_taken(pipeline, 1)
    log = ChangeLog(str(pipeline.delta))
    pipeline.wait_until(lambda: can_read(pipeline, log, "public.t"))
    history: dict[Lsn, Counter[Row]] = {log.wait(): Counter(database.execute("select id, n from t"))}
    n_equal = 0

    def read() -> None:
        nonlocal n_equal
        try:
            state = log.as_of(pipeline.spark)
            rows = Counter(tuple(row) for row in state["public.t"].select("id", "n").collect())
        except PreconditionMissing:
            return  # whether a read comes in such a moment is chance
        else:
            known = max((lsn for lsn in history if lsn <= state.lsn), default=None)
            assert known is not None and rows == history[known], (str(state.lsn), str(known))
            n_equal += 1

    for number, ddl in enumerate(UNSEEN_DDL):
        database.execute(f"begin; {ddl}; insert into t values ({1000 + number}, 7); commit")
        rows = Counter(database.execute("select id, n from t"))
        history[until(database).before] = rows
        for _ in range(3):
            read()
        if number == 2:
            # The stop comes before the next snapshot of the table.
            break
        n = len(history)
        wait_until_delivered(pipeline, until(database))
        pipeline.wait_until(lambda: log.proven_lsn >= max(history) and can_read(pipeline, log, "public.t"))
        read()
        assert n_equal and len(history) == n
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    read()
    # What was proven once is answered for ever, whatever has ended the snapshot since.
    first = min(history)
    found = log.as_of(pipeline.spark, lsn=first)["public.t"].select("id", "n").collect()
    assert Counter(tuple(row) for row in found) == history[first]
    second = sorted(history)[1]
    with pytest.raises(PreconditionMissing, match="it is known again from"):
        log.as_of(pipeline.spark, lsn=second)["public.t"]


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [OLDEST, 18], indirect=True)
def test_a_load_into_an_unlogged_table_is_noticed_by_its_ddl_and_history_stands_up_to_it(
    pipeline: Pipeline,
) -> None:
    """SET UNLOGGED, a load and SET LOGGED between two looks at the catalog look like VACUUM FULL."""
    database = pipeline.database
    for statement in (
        "create table t (id int primary key, n int)",
        "insert into t select i, i from generate_series(1, 200) i",
        "create publication p for all tables",
    ):
        database.execute(statement)
    with sql_connection(database.dsn(), "test") as connection:
        assert prepare(connection)
    start(pipeline)
    wait_until_taken(pipeline, 1)
    log = ChangeLog(str(pipeline.delta))
    pipeline.wait_until(lambda: can_read(pipeline, log, "public.t"))
    for i in range(3):  # so many looks have found the triggers
        database.execute(f"update t set n = n + 1 where id = {1 + i}")
        log.wait()
    database.execute("insert into t values (1000, 7)")
    before, rows = until(database).before, Counter(database.execute("select id, n from t"))
    with database.connect() as session:
        session.execute("alter table t set unlogged")
        session.execute("insert into t select i, i from generate_series(2001, 2100) i")
        session.execute("alter table t set logged")
    pipeline.wait_until(lambda: ("public.t", 2, "finished") in _told(pipeline))
    database.execute("insert into t values (3000, 7)")
    lsn = until(database)
    wait_until_delivered(pipeline, lsn)
    pipeline.wait_until(lambda: log.proven_lsn >= lsn.before and can_read(pipeline, log, "public.t"))
    assert rows_at(pipeline, log, "public.t") == Counter(database.execute("select id, n from t"))
    found = log.as_of(pipeline.spark, lsn=before)["public.t"].select("id", "n").collect()
    assert Counter(tuple(row) for row in found) == rows, "nothing was proven so far before the DDL came"
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    messages = DeltaTable(str(pipeline.delta / "_messages")).to_pyarrow_table()
    assert set(messages["prefix"].to_pylist()) == {"test"}


def _told(pipeline: Pipeline) -> list[tuple[str, int, str]]:
    return [(line["table"], line["generation"], line["state"]) for line in generations(pipeline)]


def can_read(pipeline: Pipeline, log: ChangeLog, table: str) -> bool:
    try:
        log.as_of(pipeline.spark)[table]
    except PreconditionMissing:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_table_that_the_role_may_not_read_is_told_and_the_others_go_on_until_it_may(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """With FOR ALL TABLES any developer makes such a table."""
    database = pipeline.database
    role = f"reader_{database.name}"
    for statement in (
        f"create role {role} login replication",
        f"grant create on database {database.name} to {role}",
        "create table a (id int primary key, n int)",
        "insert into a select i, i from generate_series(1, 500) i",
        f"grant select on a to {role}",
        "create publication p for all tables",
    ):
        database.execute(statement)
    try:
        start(pipeline, dsn=database.server.conninfo(database.name, user=role))
        wait_until_taken(pipeline, 1)
        database.execute("create table secret (id int primary key, n int)")
        database.execute("insert into secret values (1, 1)")
        pipeline.wait_until(lambda: "public.secret: the role lacks" in caplog.text)
        database.execute("insert into a values (1000, 1)")
        wait_until_delivered(pipeline, until(database))
        log = ChangeLog(str(pipeline.delta))
        log.wait()
        assert ("public.a", "finished") in {(g["table"], g["state"]) for g in generations(pipeline)}
        assert rows_at(pipeline, log, "public.a") == Counter(database.execute("select id, n from a"))
        database.execute(f"grant select on secret to {role}")
        pipeline.wait_until(lambda: can_read(pipeline, log, "public.secret"))
        assert rows_at(pipeline, log, "public.secret") == {(1, 1): 1}
        pipeline.query.stop()
        assert pipeline.query.exception() is None
    finally:
        database.execute(f"drop owned by {role}")
        database.execute(f"drop role {role}")


def rows_at(pipeline: Pipeline, log: ChangeLog, table: str) -> Counter[Row]:
    found = log.as_of(pipeline.spark)[table].select("id", "n").collect()
    return Counter(tuple(row) for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_parked_table_is_refused_until_its_next_snapshot_and_the_other_is_read_all_the_while(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator, "_LOOK_S", 0.5)
    database = pipeline.database
    for table in "ab":
        database.execute(f"create table {table} (id int primary key, n int)")
        database.execute(f"insert into {table} select i, i from generate_series(1, 500) i")
    database.execute("create publication p for all tables")
    start(pipeline, on_poison="park")
    wait_until_taken(pipeline, 2)

    def insert_into_both(first: int) -> Lsn:
        with database.connect() as session:
            session.execute(b"begin")
            for table in "ab":
                rows = f"select i, i from generate_series({first}, {first + 99}) i"
                session.execute(f"insert into {table} (id, n) {rows}".encode())
            session.execute(b"commit")
        lsn = until(database)
        wait_until_delivered(pipeline, lsn)
        return lsn.before

    insert_into_both(1000)
    database.execute('alter table b add column "_SEQ" int')
    insert_into_both(2000)

    def as_of(table: str) -> Counter[Row]:
        log = ChangeLog(str(pipeline.delta))
        state = log.as_of(pipeline.spark, lsn=log.wait())
        return Counter(tuple(row) for row in state[table].select("id", "n").collect())

    assert as_of("public.a") == Counter(database.execute("select id, n from a"))
    with pytest.raises(PreconditionMissing, match=r"public.b .* was parked at commit LSN .*_SEQ"):
        as_of("public.b")
    assert {(line["table"], line["state"]) for line in generations(pipeline)} == {
        ("public.a", "finished"), ("public.b", "finished"), ("public.b", "ended"),
    }  # fmt: skip
    assert "table public.b is parked since commit LSN" in caplog.text
    pipeline.query.stop()
    assert pipeline.query.exception() is None

    database.execute('alter table b rename "_SEQ" to mended')
    database.execute("insert into b values (5000, 5000, 1)")
    resume_command(pipeline.config(), "public.b")
    start(pipeline, on_poison="park")
    pipeline.wait_until(
        lambda: ("public.b", 2) in {(g["table"], g["generation"]) for g in generations(pipeline)}
    )
    insert_into_both(3000)
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    for table in "ab":
        assert as_of(f"public.{table}") == Counter(database.execute(f"select id, n from {table}"))


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [16], indirect=True)
def test_a_run_with_only_ends_when_all_tables_are_taken_and_the_next_one_goes_on_from_there(
    pipeline: Pipeline,
) -> None:
    database = pipeline.database
    for statement in (
        "create table a (id int primary key, n int)",
        "insert into a select i, i from generate_series(1, 500) i",
        "create publication p for table a",
    ):
        database.execute(statement)
    start(pipeline, snapshot="only")
    assert pipeline.query.awaitTermination(120)
    (line,) = generations(pipeline)
    assert whole_up_to(pipeline) >= line["valid_from"], "nothing has committed since, and its state is known"
    database.execute("update a set n = 0 where id <= 100")
    for _ in range(2):
        query = (
            ChangeStream(pipeline.config())
            .toDelta(str(pipeline.delta))
            .trigger(availableNow=True)
            .start(pipeline.spark)
        )
        assert query.awaitTermination(120), query.lastProgress
        assert generations(pipeline) == [line], (
            "the decision was kept, and a finished table is not read again"
        )
    log = Log(pipeline.delta, "public", "a")
    assert log.n_snapshot_rows == 500
    assert log.at(until(database)) == Counter(database.execute("select * from a"))


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_slot_that_was_there_before_takes_no_snapshot_unless_it_is_asked_for(pipeline: Pipeline) -> None:
    database = pipeline.database
    for statement in (
        "create table a (id int primary key)",
        "insert into a values (1)",
        "create publication p for table a",
    ):
        database.execute(statement)
    slot = pipeline.config().slot
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    database.execute("insert into a values (2)")

    def run(**more: Any) -> None:
        query = (
            ChangeStream(pipeline.config(**more))
            .toDelta(str(pipeline.delta))
            .trigger(availableNow=True)
            .start(pipeline.spark)
        )
        assert query.awaitTermination(120), query.lastProgress

    run()
    assert not (pipeline.delta / "_snapshots").exists()
    run(snapshot="initial")
    log = Log(pipeline.delta, "public", "a")
    assert log.n_snapshot_rows == 2
    assert log.at(until(database)) == Counter([(1,), (2,)]), "the row that came both ways counts once"


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_slot_that_was_lost_is_healed_by_one_command_and_the_tables_are_the_source_again(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    database = pipeline.database
    for statement in (
        "create table a (id int primary key, v int)",
        "insert into a select i, i from generate_series(1, 100) i",
        "create publication p for table a",
    ):
        database.execute(statement)
    config = pipeline.config(sink=f"delta:{pipeline.delta}")

    def run() -> None:
        query = ChangeStream(config).trigger(availableNow=True).start(pipeline.spark)
        assert query.awaitTermination(120), query.lastProgress

    run()
    database.execute("update a set v = -v where id <= 10")
    run()
    n_before = len(DeltaTable(str(pipeline.delta / "public.a")).to_pyarrow_table())
    database.execute("select pg_drop_replication_slot(%s)", config.slot)
    # Nobody can read these any more.
    database.execute("delete from a where id > 90")
    database.execute("insert into a values (1000, 1)")
    resync_command(config, discard_journal=False)
    said = capsys.readouterr().out
    assert said.startswith("lost: ") and "what committed between is in no table" in said
    database.execute("update a set v = 7 where id = 50")
    run()
    log = Log(pipeline.delta, "public", "a")
    assert log.generation["generation"] == 2
    source = Counter(tuple(row) for row in database.execute("select id, v from a"))
    assert log.at(until(database)) == source
    assert len(DeltaTable(str(pipeline.delta / "public.a")).to_pyarrow_table()) > n_before, (
        "the history stays"
    )


# -- into a function -----------------------------------------------------------------------------------------


class Collected:
    """What a function got: of each table the last snapshot's rows and the changes after it, in the order of the
    calls."""

    def __init__(self) -> None:
        self.before: dict[str, list[dict[str, Any]]] = {}
        self.changes: dict[str, list[dict[str, Any]]] = {}
        self.snapshots: list[tuple[str, int]] = []
        self.fail_at: str | None = None

    def __call__(self, batch: SparkBatch) -> None:
        for table in batch.tables:
            rows = sorted(
                to_arrow(batch.dataframe(table)).to_pylist(), key=lambda r: (r["_commit_lsn"], r["_seq"])
            )
            if table == self.fail_at:
                self.fail_at = None
                raise ValueError("on purpose")
            if batch.snapshot is None:
                self.changes.setdefault(table, []).extend(rows)
                continue
            assert (batch.snapshot.table, batch.tables) == (table, [table])
            assert batch.transactions.count() == batch.messages.count() == 0
            assert {row["_change_type"] for row in rows} <= {"snapshot"}
            assert not self.changes, "all tables come before the first change"
            self.snapshots.append((table, batch.snapshot.generation))
            self.before[table] = rows

    def rows(self, table: str, columns: list[str], key: list[str] | None) -> Counter[Row]:
        return folded(columns, key, self.before[table], self.changes.get(table, []))


@pytest.fixture(params=["folder", "s3"])
def function_storage(request: pytest.FixtureRequest, pipeline: Pipeline) -> Iterator[str]:
    if request.param == "folder":
        yield str(pipeline.storage)
        return
    server = S3Server()
    yield server.uri("storage")
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_function_gets_the_rows_from_before_first_and_of_the_changes_what_they_lack(
    pipeline: Pipeline, function_storage: str
) -> None:
    database = pipeline.database
    database.execute(SCHEMA)
    database.execute("create publication p for all tables with (publish_via_partition_root = true)")
    config = pipeline.config(snapshot="initial", snapshot_connections=2, storage=function_storage)
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", config.slot)
    collected = Collected()
    collected.fail_at = "public.documents"
    writers = Writers(database, 2)
    try:
        time.sleep(1)  # changes that the snapshots contain, and that the stream has too
        with pytest.raises(SinkFailed):
            ChangeStream(config).foreachBatch(collected).start(pipeline.spark).awaitTermination(180)
        first = list(collected.snapshots)
        assert ("public.documents", 1) not in first and not collected.changes
        pipeline.query = ChangeStream(config).foreachBatch(collected).start(pipeline.spark)
        pipeline.wait_until(lambda: bool(collected.changes))
        time.sleep(1)
    finally:
        writers.stop()
    lsn = until(database)
    wait_until_delivered(pipeline, lsn)
    pipeline.query.stop()
    assert pipeline.query.exception() is None
    assert sorted(collected.snapshots) == [(f"public.{table}", 1) for table in sorted(TABLES)], "each once"
    state = contents(database)
    for table, columns in TABLES.items():
        names = [name.strip().strip('"') for name in columns.split(",")]
        key = None if table == "history" else ["id", "Day"] if table == "Orders" else ["id"]
        assert collected.rows(f"public.{table}", names, key) == state[table], table
    assert waiting_rows(function_storage) == [], "nothing is left where they waited"
    again = pipeline.config(storage=function_storage)
    pipeline.query = ChangeStream(again).foreachBatch(collected).start(pipeline.spark)
    collected.changes.clear()
    database.execute("insert into empty values (7)")
    pipeline.wait_until(lambda: "public.empty" in collected.changes)
    pipeline.query.stop()
    assert len(collected.snapshots) == len(TABLES), "what the function had, it does not get again"


def test_the_expression_in_spark_is_the_rule_of_what_a_snapshot_contains(spark: Any) -> None:
    dice = random.Random(7)
    for upto in (0, 100, 149, 200):
        xmax = dice.choice([5, 1000, 2**32 + 10, 2**32 - 1, 7 * 2**32 + 2**31])
        xmin = max(xmax - 20, 0)
        xip = tuple(sorted(dice.sample(range(xmin, xmax), min(5, xmax - xmin))))
        bounds = SnapshotBounds(Lsn(99), Lsn(200), xmin, xmax, xip, 0, Lsn(upto))
        rows = [
            (lsn, (xmax + offset) % 2**32)
            for lsn in (50, 100, 150, 200, 201, 300)
            for offset in (*range(-30, 10), -(2**31) + 1, 2**31 - 1)
        ]
        frame = spark.createDataFrame(rows, "_commit_lsn long, _xid long")
        found = sorted((row[0], row[1]) for row in without_contained(frame, bounds).collect())
        assert found == sorted(row for row in rows if not bounds.contains(Xid(row[1]), Lsn(row[0]))), bounds
