"""A change that cannot be delivered: all before it is, it ends the run by name, and a person may give it up.

What is rolled back ends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.ray.conftest import RayPipeline
from tests.ray.test_storage_faults import deliver_one, ids
from xidstream.actors.cli.main import main
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ExitStatus, PoisonedChange, SlotLost, XidstreamError
from xidstream.pipeline.pg import Lsn

pytestmark = pytest.mark.ray

POISON = r"insert into small values ({}, E'caf\xe9 hunter2')"  # Latin-1, no UTF-8


@pytest.fixture
def bytes_pipeline(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[RayPipeline]:
    """A database that checks no encoding."""
    name = "anything_goes"
    with psycopg.connect(postgres_server.conninfo(), autocommit=True) as admin:
        admin.execute(
            f"create database {name} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'".encode()
        )
        try:
            dsn = postgres_server.conninfo(name, client_encoding="SQL_ASCII")
            with psycopg.connect(dsn, autocommit=True) as connection:
                made = RayPipeline(Database(postgres_server, name, connection), tmp_path)
                yield made
                made.stop()
                connection.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        finally:
            admin.execute(f"drop database {name} with (force)".encode())


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("plain", marks=pytest.mark.nightly),
        pytest.param("streamed", marks=pytest.mark.nightly),
        "prepared",
    ],
)
def test_poison_stops_the_run_with_its_place_and_nothing_behind_it_confirmed(
    bytes_pipeline: RayPipeline, way: str
) -> None:
    pipeline, database = bytes_pipeline, bytes_pipeline.database
    database.execute("create table small (id int primary key, note text)")
    database.execute("create publication p for table small")
    pipeline.start(two_phase=way == "prepared", logical_decoding_work_mem="64kB")
    deliver_one(pipeline, 1)
    before = int(database.execute("select pg_current_wal_lsn() - '0/0'")[0][0])
    with database.connect() as session:
        session.execute(b"begin")
        row = session.execute(b"select pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        if way != "plain":
            session.execute(b"insert into small select i, 'x' from generate_series(1000, 4000) i")
        session.execute(POISON.format(2).encode())
        session.execute(b"prepare transaction 'p'" if way == "prepared" else b"commit")
        if way == "prepared":
            session.execute(b"commit prepared 'p'")
        poisoned_until = int(database.execute("select pg_current_wal_lsn() - '0/0'")[0][0])
    database.execute("insert into small values (3)")
    with pytest.raises(PoisonedChange) as caught:
        pipeline.join()
    said = caught.value.message
    assert caught.value.policy.exit_status is ExitStatus.TERMINAL
    assert f"xid {row[0]}, LSN " in said, said
    assert "public.small" in said and "note" in said and "hunter2" not in said
    assert any(before <= lsn <= poisoned_until for lsn in lsns_in(said)), said
    assert pipeline.confirmed() < poisoned_until
    assert ids(pipeline, "public.small") == [1]


def lsns_in(text: str) -> list[int]:
    words = [word.strip(",:;.()'") for word in text.split()]
    return [int(Lsn.parse(w)) for w in words if w.count("/") == 1 and w.replace("/", "").isalnum()]


def set_up(pipeline: RayPipeline, **settings: object) -> None:
    """The tables, and a slot that nobody reads yet."""
    database = pipeline.database
    database.execute("create table small (id int primary key, note text)")
    database.execute("create publication p for table small")
    pipeline.create_slot(**settings)


def transaction(pipeline: RayPipeline, *statements: str) -> int:
    """Its xid."""
    with pipeline.database.connect() as session:
        session.execute(b"begin")
        row = session.execute(b"select pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        for statement in statements:
            session.execute(statement.encode())
        return int(row[0])


def failure(pipeline: RayPipeline, kind: type[XidstreamError], **settings: object) -> XidstreamError:
    with pytest.raises(kind) as caught:
        pipeline.run_available(**settings)
    return caught.value


def command_of(remedy: str) -> list[str]:
    """The arguments of the command that a remedy shows."""
    (shown,) = [part for part in remedy.split("`") if part.startswith("xidstream slot skip")]
    return shown.split()[1:]


def xidstream(pipeline: RayPipeline, *arguments: str) -> int:
    config = pipeline.config()
    where = ["--dsn", config.dsn, "--slot", config.slot, "--storage", config.storage]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *where])
    return int(ended.value.code or 0)


FILL = "insert into small select i, 'x' from generate_series({}, {}) i"


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "streamed",
        "prepared",
    ],
)
def test_all_before_poison_is_delivered_and_the_run_goes_on_behind_it_when_it_is_given_up(
    bytes_pipeline: RayPipeline, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = bytes_pipeline
    settings = {"two_phase": way == "prepared", "logical_decoding_work_mem": "64kB"}
    set_up(pipeline, **settings)
    for number in (1, 2):
        pipeline.database.execute(f"insert into small values ({number})")
    last_good = int(pipeline.database.execute("select pg_current_wal_lsn() - '0/0'")[0][0])
    more = [] if way == "plain" else [FILL.format(1000, 4000)]
    end = ["prepare transaction 'p'"] if way == "prepared" else ["commit"]
    xid = transaction(pipeline, *more, POISON.format(3), *end)
    pipeline.database.execute("insert into small values (4)")
    if way == "prepared":
        pipeline.database.execute("commit prepared 'p'")
    pipeline.database.execute("insert into small values (5)")
    before = [1, 2, 4] if way == "prepared" else [1, 2]

    error = failure(pipeline, PoisonedChange, **settings)
    assert ids(pipeline, "public.small") == before
    assert pipeline.confirmed() >= last_good
    arguments = command_of(error.remedy)
    assert arguments[arguments.index("--xid") + 1] == str(xid)

    wrong = [*arguments]
    wrong[arguments.index("--xid") + 1] = str(xid + 1)
    assert xidstream(pipeline, *wrong) == 0
    assert failure(pipeline, PoisonedChange, **settings).message == error.message, (
        "another xid is not touched"
    )
    assert ids(pipeline, "public.small") == before, "and nothing came twice"

    assert xidstream(pipeline, *arguments, "--reason", "Latin-1") == 0
    pipeline.run_available(**settings)
    assert ids(pipeline, "public.small") == sorted([1, 2, 4, 5])
    assert xid not in [t["xid"] for t in pipeline.driver.transactions]
    assert any(f"transaction {xid}," in notice and "given up" in notice for notice in pipeline.notices)
    capsys.readouterr()
    assert xidstream(pipeline, "status") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "given up" in line]
    assert len(said) == 2, said
    for line in said:
        assert ("left out on" in line) == (f"xid {xid}," in line) == ("Latin-1" in line), line
        assert ("without effect" in line) == (f"xid {xid + 1}," in line), line
    assert xidstream(pipeline, *arguments) == ExitStatus.USAGE, "what is confirmed cannot be given up"

    pipeline.database.execute("update small set note = 'mended' where id = 3")
    pipeline.run_available(**settings)
    (row,) = [row for row in pipeline.driver.rows("public.small") if row["id"] == 3]
    assert (row["_change_type"], row["note"]) == ("update_postimage", "mended"), (
        "the way to have the row after all"
    )


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_poison_that_is_rolled_back_ends_nothing(bytes_pipeline: RayPipeline) -> None:
    pipeline = bytes_pipeline
    settings = {"two_phase": True, "logical_decoding_work_mem": "64kB"}
    set_up(pipeline, **settings)
    kept = transaction(
        pipeline, FILL.format(1000, 3999), "savepoint s", FILL.format(5000, 7999), POISON.format(2),
        "rollback to s", "insert into small values (3)", "commit",
    )  # fmt: skip
    transaction(pipeline, FILL.format(10000, 13000), POISON.format(4), "rollback")
    transaction(pipeline, FILL.format(10000, 13000), POISON.format(4), "prepare transaction 'p'")
    pipeline.run_available(**settings)
    pipeline.database.execute("rollback prepared 'p'")
    pipeline.database.execute("insert into small values (5)")
    pipeline.run_available(**settings)
    assert ids(pipeline, "public.small") == [*range(1000, 4000), 3, 5]
    assert pipeline.driver.transactions[0]["xid"] == kept


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_columns_name_that_clashes_parks_the_table_only_where_rows_of_it_are_kept(
    bytes_pipeline: RayPipeline,
) -> None:
    pipeline = bytes_pipeline
    settings = {"logical_decoding_work_mem": "64kB"}
    set_up(pipeline, **settings)
    clash = 'alter table small add column "_SEQ" int'
    transaction(
        pipeline, FILL.format(1000, 3999), "savepoint s", clash, FILL.format(5000, 7999), "rollback to s",
        "insert into small values (1)", "commit",
    )  # fmt: skip
    pipeline.run_available(**settings)
    assert ids(pipeline, "public.small") == [*range(1000, 4000), 1]
    pipeline.database.execute("insert into small values (2)")
    pipeline.database.execute(clash)
    pipeline.database.execute("insert into small values (3)")
    # The remedy for what is to come; it does not mend what was written before.
    pipeline.database.execute('alter table small rename "_SEQ" to mended')
    pipeline.database.execute("insert into small values (4)")
    pipeline.run_available(**settings)
    assert ids(pipeline, "public.small") == [*range(1000, 4000), 1, 2]
    assert any("table public.small is parked" in notice and "_SEQ" in notice for notice in pipeline.notices)
    assert xidstream(pipeline, "table", "resume", "--table", "public.small") == 0
    pipeline.database.execute("insert into small values (5)")
    pipeline.run_available(**settings)
    assert ids(pipeline, "public.small") == [*range(1000, 4000), 1, 2, 5]


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [16], indirect=True)
def test_a_commit_prepared_whose_content_is_nowhere_can_be_given_up(bytes_pipeline: RayPipeline) -> None:
    """Before PostgreSQL 18 a transaction that only locked rows sends its COMMIT PREPARED alone. Where it was prepared
    before the first run, nothing tells it from one whose rows another reader took."""
    pipeline, database = bytes_pipeline, bytes_pipeline.database
    database.execute("create table small (id int primary key, note text)")
    database.execute("insert into small values (1)")
    database.execute("create publication p for table small")
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", pipeline.slot)
    transaction(pipeline, "select * from small for update", "prepare transaction 'p'")
    pipeline.run_available(two_phase=True)
    database.execute("insert into small values (2)")
    database.execute("commit prepared 'p'")
    database.execute("insert into small values (3)")
    error = failure(pipeline, SlotLost, two_phase=True)
    assert ids(pipeline, "public.small") == [2], "what committed before it is delivered"
    assert xidstream(pipeline, *command_of(error.remedy)) == 0
    pipeline.run_available(two_phase=True)
    assert ids(pipeline, "public.small") == [2, 3]


@pytest.fixture
def windows_pipeline(postgres_server: EmbeddedPostgres, tmp_path: Path) -> Iterator[RayPipeline]:
    """A database whose encoding has bytes that no UTF-8 character stands for."""
    name = "windows"
    with psycopg.connect(postgres_server.conninfo(), autocommit=True) as admin:
        admin.execute(
            f"create database {name} encoding 'WIN1252' template template0 lc_collate 'C' lc_ctype 'C'".encode()
        )
        try:
            dsn = postgres_server.conninfo(name)
            with psycopg.connect(dsn, autocommit=True) as connection:
                made = RayPipeline(Database(postgres_server, name, connection), tmp_path)
                yield made
                made.stop()
                connection.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        finally:
            admin.execute(f"drop database {name} with (force)".encode())


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [pytest.param(16, marks=pytest.mark.slow), 18], indirect=True)
@pytest.mark.parametrize(
    "rows", [pytest.param(1, id="small", marks=pytest.mark.slow), pytest.param(3000, id="streamed")]
)
def test_the_run_goes_on_behind_what_the_server_itself_cannot_send(
    windows_pipeline: RayPipeline, rows: int
) -> None:
    pipeline = windows_pipeline
    settings = {"logical_decoding_work_mem": "64kB"}
    set_up(pipeline, **settings)
    for number in (1, 2):
        pipeline.database.execute(f"insert into small values ({number})")
    last_good = int(pipeline.database.execute("select pg_current_wal_lsn() - '0/0'")[0][0])
    bad = "insert into small values (3, convert_from('\\x4181'::bytea, 'WIN1252'))"
    transaction(pipeline, FILL.format(100_000, 100_000 + rows), "savepoint s", bad, "rollback to s", "commit")
    xid = transaction(pipeline, FILL.format(1000, 999 + rows), bad, "commit")
    pipeline.database.execute("insert into small values (4)")

    error = failure(pipeline, PoisonedChange, **settings)
    if rows > 1:
        assert "--streaming off" in error.remedy
        error = failure(pipeline, PoisonedChange, **settings, streaming="off")
    before = [1, 2, *range(100_000, 100_001 + rows)]
    assert f"xid {xid}: " in error.message
    assert ids(pipeline, "public.small") == before
    assert pipeline.confirmed() >= last_good, "though it cannot be told on the connection that has ended"
    assert xidstream(pipeline, *command_of(error.remedy)) == 0
    pipeline.run_available(**settings, streaming="off")
    assert ids(pipeline, "public.small") == [*before, 4]
    assert any("given up" in notice for notice in pipeline.notices)
    pipeline.database.execute("insert into small values (5)")
    pipeline.run_available(**settings)
    assert ids(pipeline, "public.small") == [*before, 4, 5]
