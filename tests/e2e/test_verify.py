"""``verify`` beside a run: the source's rows under a snapshot against the log's state, at that very moment."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.e2e.conftest import Pipeline
from tests.e2e.test_command_line import run
from tests.postgres.test_decode_types import CORNERS, MADE
from tests.postgres_fixtures import Database
from tests.standbys import standby_of
from tests.waiting import wait_until
from xidstream import ChangeLog, ChangeStream
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.postgres.ddl_trigger import prepare
from xidstream.pipeline.verify.result import (
    DifferenceKind,
    Differences,
    DifferingRow,
    TableVerification,
    Verdict,
    Verification,
)

pytestmark = pytest.mark.e2e
on_18 = pytest.mark.parametrize("postgres_server", [18], indirect=True)

SCHEMA = """
    create table accounts (id bigint primary key, balance numeric(12,2), note text, seen timestamptz);
    insert into accounts select i, i, 'note ' || i, now() from generate_series(1, 5000) i;
    create table whole (n int, x float8, note text);
    alter table whole replica identity full;
    insert into whole select i % 50, case when i % 2 = 0 then 0.0 else '-0' end, null
    from generate_series(1, 1000) i;
    create table hidden (id int primary key);
    insert into hidden values (1);
"""


MORE_TABLES = """
    create table pairs (a int, b text, n float8, primary key (a, b));
    insert into pairs select i % 7, 'b' || i, i from generate_series(1, 2000) i;
    create table twins (n int, x float8);
    alter table twins replica identity full;
    insert into twins select i % 50, 0 from generate_series(1, 1000) i;
    create table nothing (id int primary key);
"""


def make_corners(database: Database) -> None:
    """Each type at its corners: half of the rows come with the snapshot, and half through the stream."""
    for statement in MADE.strip().splitlines():
        database.execute(statement)
    types = list(CORNERS)
    try:
        database.execute("select '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:  # built without libxml
        types.remove("xml")
    columns = ", ".join(f"c{i} {each}" for i, each in enumerate(types))
    database.execute(f"create table corners (id int primary key, {columns})")


def insert_corners(database: Database, part: int) -> None:
    types = list(CORNERS)
    (n_columns,) = database.execute(
        "select count(*) from pg_attribute where attrelid = 'corners'::regclass and attnum > 1"
    )[0]
    if n_columns < len(types):
        types.remove("xml")
    n = max(len(CORNERS[each]) for each in types) + 1
    for r in range(n):
        if r % 2 == part:
            values = [CORNERS[each][r] if r < len(CORNERS[each]) else None for each in types]
            casts = ", ".join(f"%s::{each}" for each in types)
            database.execute(f"insert into corners values (%s, {casts})", r, *values)


class Load:
    """Threads that write to the tables until ``stop``, some of which do not wait for the disk."""

    STATEMENTS = (
        "update accounts set balance = balance + 1, seen = now() where id = {a}",
        "delete from accounts where id = {a}",
        "insert into accounts values ({a}, {b}, 'new', now()) on conflict do nothing",
        "update accounts set id = -id where id = {a}",
        "insert into whole values ({b} % 50, 0.1 * {b}, 'x'), ({b} % 50, 0.1 * {b}, 'x')",
        "delete from whole where ctid = (select ctid from whole limit 1)",
    )

    def __init__(self, connect: Callable[..., psycopg.Connection[Any]], n: int = 3) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.n_commits = 0
        self._threads = [threading.Thread(target=self._run, args=(connect, i), daemon=True) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def _run(self, connect: Callable[..., psycopg.Connection[Any]], number: int) -> None:
        dice = random.Random(number)
        try:
            with connect() as session:
                session.execute(f"set synchronous_commit = {'on' if number else 'off'}".encode())
                while not self._stop.wait(0.02):
                    statement = dice.choice(self.STATEMENTS).format(
                        a=dice.randint(1, 5000), b=dice.randint(1, 99)
                    )
                    with suppress(psycopg.errors.UniqueViolation):  # of two that move one key
                        session.execute(statement.encode())
                    self.n_commits += 1
        except BaseException as error:
            self._failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures, self._failures


@contextmanager
def damaged(table: Path, change: Callable[[pa.Table], pa.Table | None]) -> Iterator[None]:
    """One data file of a Delta table, the first that ``change`` gives something for, is another one meanwhile."""
    for path in map(Path, DeltaTable(str(table)).file_uris()):
        before = path.read_bytes()
        changed = change(pq.read_table(path))
        if changed is not None:
            pq.write_table(changed, path, store_schema=False)
            try:
                yield
            finally:
                path.write_bytes(before)
            return
    raise AssertionError("no file has what is to be damaged")


def replaced(column: str, value: object, **where: Any) -> Callable[[pa.Table], pa.Table | None]:
    """The newest row that is meant gets another value."""

    def change(rows: pa.Table) -> pa.Table | None:
        index = place_of(rows, **where)
        if index is None:
            return None
        i = rows.schema.get_field_index(column)
        values = rows.column(i).to_pylist()
        values[index] = value
        return rows.set_column(i, rows.schema.field(i), pa.array(values, rows.schema.field(i).type))

    return change


def without(**where: Any) -> Callable[[pa.Table], pa.Table | None]:
    def change(rows: pa.Table) -> pa.Table | None:
        index = place_of(rows, **where)
        return None if index is None else pa.concat_tables([rows.slice(0, index), rows.slice(index + 1)])

    return change


def twice(**where: Any) -> Callable[[pa.Table], pa.Table | None]:
    def change(rows: pa.Table) -> pa.Table | None:
        index = place_of(rows, **where)
        return None if index is None else pa.concat_tables([rows, rows.slice(index, 1)])

    return change


def place_of(rows: pa.Table, **where: Any) -> int | None:
    mask = None
    for name, value in where.items():
        found = pc.equal(rows.column(name), pa.scalar(value, rows.schema.field(name).type))
        mask = found if mask is None else pc.and_(mask, found)
    index = pc.index(pc.fill_null(mask, False), True).as_py()
    return None if index < 0 else int(index)


def snapshotted(root: Path) -> set[str]:
    """The tables that have a snapshot in the log."""
    folder = root / "_snapshots"
    if not DeltaTable.is_deltatable(str(folder)):
        return set()
    return set(DeltaTable(str(folder)).to_pyarrow_table()["table"].to_pylist())


@contextmanager
def unseen_commit(database: Database, statement: str) -> Iterator[None]:
    """A commit that is in the WAL, and so in the log, and that no session sees: it waits for a standby meanwhile."""
    database.execute("set synchronous_commit = local")
    database.execute("alter system set synchronous_standby_names = 'nobody'")
    database.execute("select pg_reload_conf()")
    with database.connect() as session:
        session.execute(b"set synchronous_commit = on")
        wait_until(lambda: session.execute(b"show synchronous_standby_names").fetchone() == ("nobody",))
        committing = threading.Thread(target=session.execute, args=(statement.encode(),))
        committing.start()
        try:
            waits = "select count(*) from pg_stat_activity where wait_event = 'SyncRep' and datname = %s"
            wait_until(lambda: database.execute(waits, database.name) == [(1,)])
            yield
        finally:
            database.execute("alter system reset synchronous_standby_names")
            database.execute("select pg_reload_conf()")
            committing.join()


def place_in(table: Path, **where: Any) -> int | None:
    """Whether a file of a Delta table has a row."""
    found = [place_of(pq.read_table(path), **where) for path in DeltaTable(str(table)).file_uris()]
    return next((index for index in found if index is not None), None)


def by_table(found: Verification) -> dict[str, TableVerification]:
    return {each.table: each for each in found.tables}


class Verified:
    """Verifications of one pipeline's log, as a role that may read some tables."""

    def __init__(self, pipeline: Pipeline, schema: str) -> None:
        self.pipeline, self.database = pipeline, pipeline.database
        self.root = pipeline.delta
        self.database.execute(schema)
        self.database.execute("create publication p for all tables")

    def start(self, *tables: str) -> None:
        """Begin the run, and wait for the snapshots of these tables."""
        config = self.pipeline.config(snapshot="initial")
        self.pipeline.query = ChangeStream(config).toDelta(str(self.root)).start(self.pipeline.spark)
        names = {f"public.{table}" for table in tables}
        self.pipeline.wait_until(lambda: snapshotted(self.root) == names)

    def __call__(
        self, *tables: str, role: str = "postgres", standby: EmbeddedPostgres | None = None, **more: Any
    ) -> dict[str, TableVerification]:
        patterns = [f"*.{table}" for table in tables]
        settings = {"rows_per_range": 700, "timeout_s": 90, **more}
        dsn = self.database.dsn(user=role) if standby is None else standby.conninfo(self.database.name)
        found = ChangeLog(str(self.root)).verify(self.pipeline.spark, dsn, "p", patterns, **settings)
        print(found)
        return by_table(found)

    def differences(self, table: str, **more: Any) -> Differences:
        found = self(table, **more)[f"public.{table}"]
        assert found.verdict is Verdict.DIFFERS and found.differences is not None
        return found.differences


@pytest.mark.slow
@on_18
@pytest.mark.timeout(300)
def test_tables_are_equal_under_load_and_a_damaged_row_is_found_and_a_log_that_stands_still_is_said(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    database, verified = pipeline.database, Verified(pipeline, SCHEMA)
    role = f"reader_{database.name}"
    database.execute(f"create role {role} login")
    database.execute(f"grant select on accounts, whole to {role}")
    load = Load(database.connect)
    try:
        verified.start("accounts", "whole", "hidden")
        n_commits = load.n_commits
        found = verified(role=role)
        assert load.n_commits > n_commits
    finally:
        load.stop()
    assert {name for name, each in found.items() if each.verdict is Verdict.EQUAL} == {
        "public.accounts",
        "public.whole",
    }
    assert found["public.accounts"].ranges > 4
    hidden = found["public.hidden"]
    assert hidden.verdict is Verdict.NOT_VERIFIED and "SELECT" in str(hidden.reason)

    database.execute("insert into accounts values (777777, 1, 'alone', now())")
    (count,) = database.execute("select count(*) from accounts")[0]
    pipeline.wait_until(lambda: place_in(verified.root / "public.accounts", id=777777) is not None)
    with damaged(verified.root / "public.accounts", replaced("note", "other", id=777777)):
        one = verified("accounts")["public.accounts"]
    assert one.verdict is Verdict.DIFFERS and one.differences is not None
    assert (one.source_rows, one.log_rows) == (count, count)
    differences = one.differences
    assert (differences.changed, differences.missing, differences.extra) == (1, 0, 0)
    assert differences.columns == {"note": 1}
    assert differences.rows == (DifferingRow(DifferenceKind.CHANGED, {"id": "777777"}, ("note",)),)
    (range_,) = differences.ranges
    assert range_.columns == ("id",) and range_.first is not None and range_.end is None
    assert 3000 < int(range_.first[0] or 0) < 777777
    assert differences.repairs == (f"id >= {range_.first[0]}",)
    assert "alone" not in str(one) and "other" not in str(one.to_json())

    record = tmp_path / "verify.json"
    assert verified("accounts", result=record)["public.accounts"].verdict is Verdict.EQUAL
    pipeline.query.stop()
    record.write_text(record.read_text().replace('"finished": true', '"finished": false'))
    database.execute("delete from accounts where id = 777777")
    found = verified("accounts", "whole", result=record, timeout_s=1)
    # What was finished is not read again: it would not come to an end.
    assert found["public.accounts"].verdict is Verdict.EQUAL
    still = found["public.whole"]
    assert still.verdict is Verdict.NOT_VERIFIED and "the source's snapshot needs" in str(still.reason)
    assert str(ChangeLog(str(verified.root)).readable_lsn) in str(still.reason)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_types_are_equal_and_all_kinds_of_damage_are_found(pipeline: Pipeline) -> None:
    database, verified = pipeline.database, Verified(pipeline, MORE_TABLES)
    make_corners(database)
    insert_corners(database, 0)
    verified.start("pairs", "twins", "nothing", "corners")
    insert_corners(database, 1)
    found = verified()
    assert {each.verdict for each in found.values()} == {Verdict.EQUAL} and len(found) == 4
    assert found["public.nothing"].source_rows == 0
    assert [(found["public.corners"].source_rows,)] == database.execute("select count(*) from corners")

    pairs, twins = verified.root / "public.pairs", verified.root / "public.twins"
    with damaged(pairs, without(b="b1999")):
        missing = verified.differences("pairs", show_values=True)
    assert (missing.changed, missing.missing, missing.extra) == (0, 1, 0)
    key = {"a": "4", "b": "b1999"}
    assert missing.rows == (DifferingRow(DifferenceKind.MISSING, key, source={**key, "n": "1999.0"}),)
    database.execute("delete from pairs where b = 'b1999'")
    pipeline.wait_until(lambda: place_in(pairs, b="b1999", _change_type="delete") is not None)
    with damaged(pairs, without(b="b1999", _change_type="delete")):
        assert verified.differences("pairs").rows == (DifferingRow(DifferenceKind.EXTRA, key),)
    with damaged(twins, twice(n=49)):
        doubled = verified.differences("twins")
    assert (doubled.extra, doubled.missing, doubled.rows) == (1, 0, ())
    (range_,) = doubled.ranges
    assert range_.log_rows == range_.source_rows + 1
    with damaged(twins, replaced("x", -0.0, n=48, x=0.0)):
        signs = verified.differences("twins", show_values=True)
    assert [(row.kind, row.n) for row in signs.rows] == [
        (DifferenceKind.EXTRA, 1),
        (DifferenceKind.MISSING, 1),
    ]


@pytest.mark.slow
@on_18
@pytest.mark.timeout(300)
def test_all_types_are_equal_in_iceberg_tables(pipeline: Pipeline) -> None:
    pytest.importorskip("pyiceberg")
    database, sink = pipeline.database, f"iceberg:{pipeline.folder}/lake/shop"
    database.execute(MORE_TABLES)
    database.execute("create publication p for all tables")
    with database.connect() as session:
        prepare(session)  # so that TRUNCATE of a table without TOAST is told from a load past the stream
    make_corners(database)
    insert_corners(database, 0)
    pipeline.query = ChangeStream(pipeline.config(snapshot="initial", sink=sink)).start(pipeline.spark)

    def has_snapshots() -> bool:
        with suppress(UsageError):  # there is no log yet
            return len(ChangeLog(sink).generations()) == 4
        return False

    pipeline.wait_until(has_snapshots)
    insert_corners(database, 1)
    database.execute("alter table pairs add column more text")
    database.execute("update pairs set more = b where a = 3")
    database.execute("truncate twins")
    database.execute("insert into twins values (1, '-0'), (1, 0)")
    log = ChangeLog(sink)
    found = by_table(log.verify(pipeline.spark, database.dsn(), "p", rows_per_range=700, timeout_s=90))
    assert {each.verdict for each in found.values()} == {Verdict.EQUAL} and len(found) == 4, found
    assert found["public.twins"].source_rows == 2
    state = log.as_of(pipeline.spark, lsn=log.wait())
    assert state["public.pairs"].count() == 2000


@pytest.mark.slow
@pytest.mark.timeout(400)
@on_18
def test_a_commit_that_no_session_sees_yet_is_left_out_and_the_command_tells_by_its_status(
    pipeline: Pipeline,
) -> None:
    database, verified = pipeline.database, Verified(pipeline, MORE_TABLES)
    pairs = verified.root / "public.pairs"
    verified.start("pairs", "twins", "nothing")
    with unseen_commit(database, "update pairs set n = -1 where b = 'b5'"):
        database.execute("insert into pairs values (9, 'behind it', 0)")
        unseen = verified("pairs")["public.pairs"]
    assert (unseen.verdict, unseen.left_out, unseen.source_rows) == (Verdict.EQUAL, 1, 2001)
    seen = verified("pairs")["public.pairs"]
    assert (seen.verdict, seen.left_out, seen.source_rows) == (Verdict.EQUAL, 0, 2001)

    command = ["verify", "--dsn", database.dsn(), "--publication", "p", "--sink", f"delta:{verified.root}"]
    with damaged(pairs, replaced("n", 0.5, b="b7")):
        record = pipeline.folder / "verify.json"
        ended = run(*command, "--table", "*.pairs", "--table", "*.nothing", "--result", str(record))
    assert ended.returncode == 1, ended.stderr
    assert "public.nothing: equal at " in ended.stdout and "a=0, b=b7: differs in n" in ended.stdout
    kept = json.loads(record.read_text())
    assert (kept["finished"], kept["equal"], kept["differs"], kept["not_verified"]) == (True, 1, 1, 0)
    ended = run(*command, "--table", "missing")
    assert (
        ended.returncode == 2 and "no table of the log or the publication is called missing" in ended.stderr
    )
    elsewhere = ["--dsn", database.server.conninfo("postgres")]
    ended = run(*command, *elsewhere)
    assert ended.returncode == 3 and "the dsn leads to database postgres" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_standby_is_read_in_place_of_the_primary(
    own_postgres: Callable[..., EmbeddedPostgres], make_pipeline: Callable[[Database], Pipeline]
) -> None:
    primary = own_postgres()
    with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
        pipeline = make_pipeline(Database(primary, "postgres", connection))
        verified = Verified(pipeline, SCHEMA)
        with standby_of(primary) as standby:
            load = Load(pipeline.database.connect)
            try:
                verified.start("accounts", "whole", "hidden")
                wait_until(lambda: is_replayed_there(standby, pipeline.database))
                found = verified(standby=standby)
                assert {each.verdict for each in found.values()} == {Verdict.EQUAL} and len(found) == 3
            finally:
                load.stop()
                pipeline.query.stop()


def is_replayed_there(standby: EmbeddedPostgres, database: Database) -> bool:
    (lsn,) = database.execute("select pg_current_wal_insert_lsn()::text")[0]
    with psycopg.connect(standby.conninfo()) as connection:
        query = b"select coalesce(pg_last_wal_replay_lsn() >= %s::pg_lsn, false)"
        wait_until(lambda: connection.execute(query, (lsn,)).fetchone() == (True,))
    return True
