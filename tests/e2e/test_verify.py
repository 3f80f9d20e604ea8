"""``verify`` beside a run: the source's rows under a snapshot against the log's state, at that very moment."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.e2e.conftest import Pipeline
from tests.postgres.test_decode_types import CORNERS, MADE
from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream import ChangeLog, ChangeStream
from xidstream.pipeline.verify.result import Kind, TableVerification, Verdict, Verification

pytestmark = pytest.mark.e2e
on_18 = pytest.mark.parametrize("postgres_server", [18], indirect=True)

SCHEMA = """
    create table accounts (id bigint primary key, balance numeric(12,2), note text, seen timestamptz);
    insert into accounts select i, i, 'note ' || i, now() from generate_series(1, 5000) i;
    create table pairs (a int, b text, n float8, primary key (a, b));
    insert into pairs select i % 7, 'b' || i, i from generate_series(1, 2000) i;
    create table whole (n int, x float8, note text);
    alter table whole replica identity full;
    insert into whole select i % 50, case when i % 2 = 0 then 0.0 else '-0' end, null
    from generate_series(1, 1000) i;
    create table nothing (id int primary key);
    create table hidden (id int primary key);
    insert into hidden values (1);
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


def insert_corners(database: Database, part: int) -> int:
    types = [each for each in CORNERS if each != "xml" or "c" in each]
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
    return n


class Load:
    """Threads that write to the tables until ``stop``, some of which do not wait for the disk."""

    STATEMENTS = (
        "update accounts set balance = balance + 1, seen = now() where id = {a}",
        "delete from accounts where id = {a}",
        "insert into accounts values ({a}, {b}, 'new', now()) on conflict do nothing",
        "update accounts set id = -id where id = {a}",
        "update pairs set n = n / 3 where a = {a} % 7",
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
    if not (folder / "_delta_log").exists():
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


def by_table(found: Verification) -> dict[str, TableVerification]:
    return {each.table: each for each in found.tables}


@on_18
@pytest.mark.timeout(300)
def test_tables_are_equal_under_load_and_one_damaged_row_of_the_log_is_found_with_its_key(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    database = pipeline.database
    database.execute(SCHEMA)
    make_corners(database)
    insert_corners(database, 0)
    database.execute("create publication p for all tables")
    role = f"reader_{database.name}"
    database.execute(f"create role {role} login")
    database.execute(f"grant select on all tables in schema public to {role}")
    database.execute(f"revoke select on hidden from {role}")
    config = pipeline.config(snapshot="initial")
    root = str(pipeline.delta)
    pipeline.query = ChangeStream(config).toDelta(root).start(pipeline.spark)
    names = {f"public.{each}" for each in ("accounts", "pairs", "whole", "nothing", "hidden", "corners")}

    load = Load(database.connect)
    try:
        pipeline.wait_until(lambda: snapshotted(pipeline.delta) == names)
        insert_corners(database, 1)

        def verified(tables: str = "*", **more: Any) -> dict[str, TableVerification]:
            log = ChangeLog(root)
            found = log.verify(
                pipeline.spark,
                database.dsn(user=role),
                "p",
                [tables],
                rows_per_range=700,
                timeout_s=90,
                **more,
            )
            print(found)
            return by_table(found)

        for _ in range(2):
            n_commits = load.n_commits
            found = verified()
            assert set(found) == names
            assert load.n_commits > n_commits
            assert {name for name, each in found.items() if each.verdict is not Verdict.EQUAL} == {
                "public.hidden"
            }
            hidden = found["public.hidden"]
            assert hidden.verdict is Verdict.NOT_VERIFIED and "SELECT" in str(hidden.reason)
            assert found["public.accounts"].ranges > 4
            assert found["public.corners"].source_rows == len(database.execute("select from corners"))
            assert found["public.nothing"].source_rows == 0
    finally:
        load.stop()
    # The load ended, so what the source holds now is what is compared.
    database.execute("insert into accounts values (777777, 1, 'alone', now())")
    (count,) = database.execute("select count(*) from accounts")[0]

    pipeline.wait_until(lambda: verified("*.accounts")["public.accounts"].verdict is Verdict.EQUAL)
    with damaged(pipeline.delta / "public.accounts", replaced("note", "other", id=777777)):
        one = verified("*.accounts")["public.accounts"]
        assert one.verdict is Verdict.DIFFERS and one.differences is not None
        assert (one.source_rows, one.log_rows) == (count, count)
        differences = one.differences
        assert (differences.changed, differences.missing, differences.extra) == (1, 0, 0)
        assert differences.columns == {"note": 1}
        (row,) = differences.rows
        assert (row.kind, row.key, row.columns, row.source, row.log) == (
            Kind.CHANGED, {"id": "777777"}, ("note",), None, None,
        )  # fmt: skip
        (range_,) = differences.ranges
        assert range_.columns == ("id",) and range_.first is not None and range_.end is None
        assert 4000 < int(range_.first[0] or 0) < 777777
        assert "alone" not in str(one) and "other" not in str(one.to_json())
        shown = verified("*.accounts", show_values=True)["public.accounts"].differences
        assert shown is not None and shown.rows[0].source is not None and shown.rows[0].log is not None
        assert (shown.rows[0].source["note"], shown.rows[0].log["note"]) == ("alone", "other")
    with damaged(pipeline.delta / "public.accounts", without(id=777777)):
        missing = verified("*.accounts")["public.accounts"].differences
        assert missing is not None
        assert [(each.kind, each.key) for each in missing.rows] == [(Kind.MISSING, {"id": "777777"})]
        assert (missing.changed, missing.missing, missing.extra) == (0, 1, 0)
    with damaged(pipeline.delta / "public.pairs", without(b="b1999", _change_type="snapshot")):
        lost = verified("*.pairs")["public.pairs"].differences
        assert lost is None or [each.key for each in lost.rows] == [{"a": "4", "b": "b1999"}]
    database.execute("delete from pairs where b = 'b1999'")
    pipeline.wait_until(lambda: verified("*.pairs")["public.pairs"].verdict is Verdict.EQUAL)
    with damaged(pipeline.delta / "public.pairs", without(b="b1999", _change_type="delete")):
        extra = verified("*.pairs")["public.pairs"].differences
        assert extra is not None and [(each.kind, each.key) for each in extra.rows] == [
            (Kind.EXTRA, {"a": "4", "b": "b1999"})
        ]
    with damaged(pipeline.delta / "public.whole", twice(_change_type="snapshot", n=49)):
        doubled = verified("*.whole")["public.whole"].differences
        assert doubled is not None and (doubled.extra, doubled.missing, doubled.rows) == (1, 0, ())
        (range_,) = doubled.ranges
        assert range_.log_rows == range_.source_rows + 1
    with unseen_commit(database, "update accounts set note = 'unseen' where id = 777777"):
        database.execute("insert into accounts values (888888, 1, 'behind it', now())")
        found = verified("*.accounts")["public.accounts"]
        assert (found.verdict, found.left_out, found.source_rows) == (Verdict.EQUAL, 1, count + 1)
    found = verified("*.accounts")["public.accounts"]
    assert (found.verdict, found.left_out) == (Verdict.EQUAL, 0)
    pipeline.query.stop()


@on_18
@pytest.mark.timeout(200)
def test_a_log_that_stands_still_is_said_with_the_lsn_it_has_to_reach_and_a_result_is_gone_on_from(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    database = pipeline.database
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    database.execute("insert into a values (1), (2); insert into b values (1)")
    database.execute("create publication p for table a, b")
    root = str(pipeline.delta)
    pipeline.query = ChangeStream(pipeline.config(snapshot="initial")).toDelta(root).start(pipeline.spark)
    pipeline.wait_until(
        lambda: (
            (pipeline.delta / "_transactions" / "_delta_log").exists()
            and len(ChangeLog(root).generations()) == 2
        )
    )
    record = tmp_path / "verify.json"
    asked: dict[str, Any] = {"result": record, "timeout_s": 90}
    found = ChangeLog(root).verify(pipeline.spark, database.dsn(), "p", ["*.a"], **asked)
    assert found.is_equal
    pipeline.query.stop()
    record.write_text(record.read_text().replace('"finished": true', '"finished": false'))
    database.execute("insert into a values (3)")
    found = ChangeLog(root).verify(pipeline.spark, database.dsn(), "p", result=record, timeout_s=1)
    print(found)
    # The finished table is not read again: it would differ from what the log has now.
    assert by_table(found)["public.a"].verdict is Verdict.EQUAL
    still = by_table(found)["public.b"]
    assert still.verdict is Verdict.NOT_VERIFIED
    assert "the source's snapshot needs" in str(still.reason) and str(ChangeLog(root).last_commit_lsn) in str(
        still.reason
    )
    assert not found.is_equal and not found.differs
