"""Heartbeats on a real server, and what a slot whose tables idle holds while everything else is written to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.reading_alone import reading_alone
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.reader.heartbeat_thread import heartbeats
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.postgres.heartbeat import heartbeat_connection, write_heartbeat
from xidstream.pipeline.settings.config import Config

pytestmark = pytest.mark.postgres

MIB = 1 << 20


def config_of(dsn: str, status_interval_ms: int = 600_000) -> Config:
    return Config(
        dsn=dsn,
        slot="beaten",
        publication=("p",),
        status_interval_ms=status_interval_ms,
        receive_timeout_ms=0,
    )


def set_up(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("create table t (id int primary key)")
        admin.execute("create publication p for table t")


def test_a_session_that_idles_from_beat_to_beat_is_not_ended_by_the_roles_time_limit(
    database: Database,
) -> None:
    with heartbeat_connection(database.dsn(options="-c idle_session_timeout=300")) as connection:
        time.sleep(1.0)
        write_heartbeat(connection)


def test_heartbeats_move_the_slot_of_a_role_that_may_only_connect_and_come_back_as_transactions(
    database: Database,
) -> None:
    set_up(database.dsn())
    role = f"reader_{database.name}"
    database.execute(f"create role {role} login replication")
    config = config_of(database.dsn(user=role))
    confirmed = "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s"
    try:
        with reading_alone(config) as (slot, sink, _), heartbeats(slot.connection.same_server, 0.2):
            wait_until(lambda: sink.n_blocks >= 3)
            (before,) = database.execute(confirmed, config.slot)
            sink.go_on()
            wait_until(lambda: database.execute(confirmed, config.slot) != [before])
            assert not sink.failed
    finally:
        database.execute(f"drop role {role}")


def test_a_standby_takes_no_heartbeat_and_says_so(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres()
    (server.data_dir / "standby.signal").touch()
    server.restart()
    with (
        pytest.raises(EnvironmentFault, match="during recovery"),
        heartbeat_connection(server.conninfo()) as connection,
    ):
        write_heartbeat(connection)


class Load:
    """Writes ``bytes_per_s`` to one database, in rows that do not compress; ``n_bytes`` so far."""

    def __init__(self, dsn: str, bytes_per_s: float) -> None:
        self._dsn, self._bytes_per_s = dsn, bytes_per_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.n_bytes = 0

    def __enter__(self) -> Load:
        with psycopg.connect(self._dsn, autocommit=True) as admin:
            admin.execute("create table noise (v bytea)")
            admin.execute("alter table noise alter v set storage external")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _write(self) -> None:
        began_s, row = time.monotonic(), bytes(MIB)
        with psycopg.connect(self._dsn, autocommit=True) as writer:
            while not self._over.is_set():
                writer.execute("insert into noise values (%b)", (row,))
                self.n_bytes += len(row)
                if not self.n_bytes % (256 * MIB):
                    writer.execute("truncate noise")
                time.sleep(max(0.0, self.n_bytes / self._bytes_per_s - (time.monotonic() - began_s)))


class Watch:
    """The farthest that a slot was behind the server, as the server's views had it twice a second."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.wal: list[tuple[float, int]] = []
        self.unconfirmed: list[int] = []
        self.not_decoded: list[int] = []
        self.held: list[int] = []

    def look_for(self, seconds: float) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as admin:
            deadline_s = time.monotonic() + seconds
            while time.monotonic() < deadline_s:
                row = admin.execute(
                    "select end_lsn - '0/0', end_lsn - confirmed_flush_lsn, end_lsn - restart_lsn, end_lsn - sent_lsn"
                    " from pg_replication_slots join pg_stat_replication on pid = active_pid,"
                    " pg_current_wal_flush_lsn() as end_lsn where slot_name = 'beaten'"
                ).fetchone()
                assert row is not None
                self.wal.append((time.monotonic(), int(row[0])))
                self.unconfirmed.append(int(row[1]))
                self.held.append(int(row[2]))
                self.not_decoded.append(int(row[3]))
                time.sleep(0.5)

    def __str__(self) -> str:
        most, undecoded = max(zip(self.unconfirmed, self.not_decoded, strict=True))
        return (
            f"{self.bytes_per_s / 1e6:.0f} MB/s of WAL; unconfirmed {self.median_unconfirmed / 1e6:.1f} MB (median), "
            f"{most / 1e6:.0f} at most ({undecoded / 1e6:.0f} of them not decoded by the server); held at most "
            f"{max(self.held) / 1e6:.0f} MB, which is {max(self.held) / self.bytes_per_s:.1f} s of it"
        )

    @property
    def median_unconfirmed(self) -> int:
        return sorted(self.unconfirmed)[len(self.unconfirmed) // 2]

    @property
    def bytes_per_s(self) -> float:
        (first_s, first), (last_s, last) = self.wal[0], self.wal[-1]
        return (last - first) / (last_s - first_s)


@contextmanager
def busy_server(own_postgres: Callable[..., EmbeddedPostgres], bytes_per_s: float) -> Iterator[str]:
    """Its published table idles; another table and another database share the load."""
    server = own_postgres(settings={"max_wal_size": "2GB", "shared_buffers": "256MB"})
    set_up(server.conninfo())
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("create database other")
    with ExitStack() as stack:
        for name in ("postgres", "other"):
            stack.enter_context(Load(server.conninfo(name), bytes_per_s / 2))
        yield server.conninfo()


@pytest.mark.nightly
@pytest.mark.parametrize(("heartbeat_s", "status_interval_ms"), [(0.0, 600_000), (1.0, 600_000)])
def test_the_slot_of_an_idle_table_stays_close_behind_a_server_that_writes_a_hundred_megabytes_per_second(
    own_postgres: Callable[..., EmbeddedPostgres],
    heartbeat_s: float,
    status_interval_ms: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with busy_server(own_postgres, 100e6) as dsn:
        config = config_of(dsn, status_interval_ms)
        with reading_alone(config) as (slot, sink, _), heartbeats(slot.connection.same_server, heartbeat_s):
            sink.go_on()
            watch = Watch(dsn)
            watch.look_for(90)
            assert not sink.failed
    with capsys.disabled():
        print(f"\nheartbeat {heartbeat_s:g} s, status {status_interval_ms / 1000:g} s: {watch}")
    # The farthest that it was behind depends on what else the machine does.
    assert watch.median_unconfirmed < 64 * MIB
    assert max(watch.held) < 60 * watch.bytes_per_s, "four of the server's snapshots of running transactions"
