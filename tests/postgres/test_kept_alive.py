"""A connection that nobody reads from for longer than the server waits for an answer."""

from __future__ import annotations

import time

import pytest

from tests.open_slot import open_slot
from tests.postgres_fixtures import Database
from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.postgres.kept_alive import KeptAlive
from xidstream.pipeline.postgres.settings import SlotSettings

pytestmark = pytest.mark.postgres


def prepare(database: Database) -> SlotSettings:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION pub FOR TABLE t")
    options = "options='-c wal_sender_timeout=1s'"
    return SlotSettings(
        dsn=f"{database.dsn()} {options}", slot=f"slot_{database.name}", publications=("pub",)
    )


def test_a_take_over_that_takes_longer_than_wal_sender_timeout_finds_the_stream_whole(
    database: Database,
) -> None:
    """The server hung up: with 12,000 files of a journal no run ever got through its take-over. It sends more than the
    socket holds meanwhile, so the walsender waits inside of a message."""
    slot = open_slot(prepare(database), create=True)
    try:
        assert slot.wal_sender_timeout_s == 1
        before = slot.confirmed_flush_lsn
        kept = KeptAlive(slot.connection, slot.confirmed_flush_lsn, 0.3)
        database.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 30000) i")
        time.sleep(4)
        kept.end()
        assert describe_slot(database.dsn(), slot.identity.slot).confirmed_flush == before
        n_inserts = 0
        deadline_s = time.monotonic() + 60
        while n_inserts < 30_000 and time.monotonic() < deadline_s:
            data = slot.connection.get_copy_data()
            if data is None:
                slot.connection.wait_readable(1)
            elif data[0] == ord("w"):
                n_inserts += bytes(data[25:26]) == b"I"
                if n_inserts % 1000 == 0:
                    slot.connection.send_status(before, before, before)
        assert n_inserts == 30_000
    finally:
        slot.connection.close()


def test_what_ended_the_connection_meanwhile_is_told_to_whoever_wants_to_read(database: Database) -> None:
    slot = open_slot(prepare(database), create=True)
    kept = KeptAlive(slot.connection, slot.confirmed_flush_lsn, 0.01)
    pid = describe_slot(database.dsn(), slot.identity.slot).active_pid
    database.execute(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(ConnectionLost):
        while True:
            kept._thread.join(0.1)
            if not kept._thread.is_alive():
                kept.end()
    slot.connection.close()
