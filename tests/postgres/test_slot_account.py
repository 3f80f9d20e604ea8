"""The slot's part of an account, from real servers: positions, what the server keeps, and when the slot may be lost."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.postgres_fixtures import Database
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.account import Window
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, describe_slot
from xidstream.pipeline.postgres.slot_account import slot_part, with_forecast

pytestmark = pytest.mark.postgres


def test_a_slot_that_nobody_reads_says_how_far_it_is_behind_and_what_wal_it_holds(database: Database) -> None:
    name = f"s_{database.name}"
    point = create_slot(database.dsn(), name)
    database.execute("create table t as select i from generate_series(1, 10000) i")
    positions = Window(60.0)
    part = slot_part(database.dsn(), name, positions)
    state = describe_slot(database.dsn(), name)
    assert (part.name, part.plugin, part.database) == (name, "pgoutput", database.name)
    assert part.confirmed_lsn == str(point) and part.restart_lsn == str(state.restart_lsn)
    assert part.behind_bytes == Lsn.parse(part.server_lsn) - point > 100_000
    assert part.wal_held_bytes >= part.behind_bytes
    assert (part.active_pid, part.flush_lag_s, part.wal_status) == (None, None, "reserved")
    assert (part.wal_limit_bytes, part.safe_wal_size_bytes, part.lost_in_s) == (None, None, None), "no limit"
    assert part.wal_bytes_per_s is not None, "the first question looks twice"
    with pytest.raises(PreconditionMissing, match="does not exist"):
        slot_part(database.dsn(), "nope", positions)


def test_under_a_limit_the_forecast_is_what_the_server_may_still_write_over_its_rate(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    server = own_postgres(settings={"max_slot_wal_keep_size": "64MB"})
    create_slot(server.conninfo(), "s")
    times = iter([0.0, 10.0])
    positions = Window(60.0)
    positions.note(next(times), 0)
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("create table t as select repeat('x', 1000) from generate_series(1, 5000)")
        part = slot_part(server.conninfo(), "s", positions, clock=lambda: next(times))
        safe = connection.execute("select safe_wal_size from pg_replication_slots").fetchone()
    assert safe is not None and part.wal_limit_bytes == 64 << 20
    assert part.safe_wal_size_bytes == pytest.approx(safe[0], abs=1 << 20)
    assert part.wal_bytes_per_s == Lsn.parse(part.server_lsn) / 10.0
    assert part.lost_in_s is not None and part.safe_wal_size_bytes is not None
    assert part.lost_in_s == part.safe_wal_size_bytes / part.wal_bytes_per_s
    assert with_forecast(part, 0.0).lost_in_s is None, "an idle server loses no slot"
