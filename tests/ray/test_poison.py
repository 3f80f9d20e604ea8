"""A change that cannot be decoded stops the run, named, with nothing behind it confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.ray.conftest import LONG, RayPipeline
from tests.ray.test_storage_faults import deliver_one, ids
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ExitStatus, PoisonedChange

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
    "way", [pytest.param("plain", marks=LONG), pytest.param("streamed", marks=LONG), "prepared"]
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
        poisoned_until = int(database.execute("select pg_current_wal_lsn() - '0/0'")[0][0])
        if way == "prepared":
            session.execute(b"commit prepared 'p'")
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
    from xidstream.pipeline.pg import Lsn

    words = [word.strip(",:;.()'") for word in text.split()]
    return [int(Lsn.parse(w)) for w in words if w.count("/") == 1 and w.replace("/", "").isalnum()]
