"""The replication connection against real servers: settings, streaming, status, and every way it can fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.postgres_fixtures import Database
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import (
    ConnectionLost,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    XidstreamError,
)
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.admin import create_slot, describe_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.sessions import pinned
from xidstream.pipeline.postgres.settings import SlotSettings, Streaming
from xidstream.pipeline.postgres.stream_options import stream_options
from xidstream.pipeline.postgres.verified_server import is_read

pytestmark = pytest.mark.postgres

DEADLINE_S = 60
"""Only ends a test that hangs; no assertion depends on it."""


def settings(database: Database, *, slot: str | None = None, **options: object) -> SlotSettings:
    return SlotSettings(
        dsn=str(options.pop("dsn", database.dsn())),
        slot=slot or f"slot_{database.name}",
        publications=("pub",),
        **options,  # type: ignore[arg-type]
    )


def prepare(database: Database) -> SlotSettings:
    """A table, a publication and a slot."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION pub FOR TABLE t")
    made = settings(database, logical_decoding_work_mem="64kB")
    create_slot(made.dsn, made.slot)
    return made


@contextmanager
def streaming(made: SlotSettings) -> Iterator[ReplicationConnection]:
    with ReplicationConnection(made) as connection:
        connection.start_replication(made.slot, INVALID_LSN, stream_options(made, connection.server_version))
        yield connection


@contextmanager
def stopped_walsender(made: SlotSettings) -> Iterator[None]:
    """The server neither reads nor sends on the slot's connection."""
    pid = describe_slot(made.dsn, made.slot).active_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def messages(connection: ReplicationConnection) -> Iterator[bytes]:
    """pgoutput messages (without the header of 25 bytes); keepalives are passed over."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        data = connection.get_copy_data()
        if data is None:
            connection.wait_readable(1)
        elif data[0] == ord("w"):
            yield bytes(data[25:])
    pytest.fail("nothing came")


def read_until(connection: ReplicationConnection, kind: bytes) -> list[bytes]:
    seen = []
    for message in messages(connection):
        seen.append(message)
        if message[:1] == kind:
            break
    return seen


def drain(connection: ReplicationConnection) -> None:
    """Read until the stream ends, with an error."""
    for _ in messages(connection):
        pass


def test_identify_system_names_server_and_database(database: Database) -> None:
    expected = database.execute("SELECT system_identifier::text FROM pg_control_system()")[0][0]
    with ReplicationConnection(settings(database)) as connection:
        identity = connection.identify_system()
    assert identity.system_identifier == expected
    assert identity.dbname == database.name
    assert identity.timeline == 1
    assert (
        INVALID_LSN
        < identity.xlogpos
        <= Lsn.parse(database.execute("SELECT pg_current_wal_lsn()::text")[0][0])
    )


def test_a_verification_hears_whether_somebody_reads_the_slot(database: Database) -> None:
    made = prepare(database)
    assert not is_read(made.dsn, made.slot)
    with streaming(made):
        assert is_read(made.dsn, made.slot)
    assert is_read(made.dsn, "elsewhere"), "where the slot is not known, nobody can tell"


def test_session_settings_win_over_dsn_and_environment(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    dsn = database.dsn(options="-c bytea_output=escape -c work_mem=7MB", client_encoding="LATIN1")
    with ReplicationConnection(settings(database, dsn=dsn)) as connection:
        for name, value in pinned(connection.server_version).items():
            assert connection.show(name).split(",")[0] == value, name
        assert connection.show("work_mem") == "7MB"  # what is not ours is left as it was asked for
        assert connection.show("application_name") == "xidstream"


def test_logical_decoding_work_mem_is_set_for_the_session_only(database: Database) -> None:
    with ReplicationConnection(settings(database, logical_decoding_work_mem="128kB")) as connection:
        assert connection.show("logical_decoding_work_mem") == "128kB"
    with ReplicationConnection(settings(database, logical_decoding_work_mem="server")) as connection:
        assert connection.show("logical_decoding_work_mem") == "64MB"


def test_users_application_name_is_kept(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGAPPNAME", "theirs")
    with ReplicationConnection(settings(database)) as connection:
        assert connection.show("application_name") == "theirs"


def test_open_transaction_is_read_before_its_commit(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection, database.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t SELECT n, repeat('x', 50) FROM generate_series(1, 5000) n")
        before = read_until(connection, b"E")
        assert before[0][:1] == b"S"
        assert {m[:1] for m in before} == {b"S", b"R", b"I", b"E"}
        assert writer.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        writer.execute("COMMIT")
        after = read_until(connection, b"c")
    rows = sum(m[:1] == b"I" for m in before + after)
    assert rows == 5000


def test_streaming_off_sends_nothing_before_the_commit(database: Database) -> None:
    prepare(database)
    made = settings(database, logical_decoding_work_mem="64kB", streaming=Streaming.OFF)
    with streaming(made) as connection:
        database.execute("INSERT INTO t SELECT n, repeat('x', 50) FROM generate_series(1, 5000) n")
        kinds = [m[:1] for m in read_until(connection, b"C")]
    assert kinds[0] == b"B"
    assert b"S" not in kinds
    assert kinds.count(b"I") == 5000


def test_logical_messages_and_publication_with_quotes_arrive(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("""CREATE PUBLICATION "it's ""one"", no \\" FOR TABLE t""")
    made = SlotSettings(database.dsn(), f"1_{database.name}", ('it\'s "one", no \\',))
    create_slot(made.dsn, made.slot)
    with streaming(made) as connection:
        database.execute("SELECT pg_logical_emit_message(false, 'p', 'hello')")
        database.execute("INSERT INTO t VALUES (1)")
        kinds = [m[:1] for m in read_until(connection, b"C")]
    assert kinds == [b"M", b"B", b"R", b"I", b"C"]


def test_flushed_status_moves_the_slot_and_stop_delivers_the_last_one(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection:
        database.execute("INSERT INTO t VALUES (1)")
        commit = read_until(connection, b"C")[-1]
        end_lsn = Lsn(int.from_bytes(commit[10:18], "big"))
        assert connection.send_status(end_lsn, end_lsn, end_lsn)
        assert connection.stop(DEADLINE_S)
        assert connection.closed
    assert describe_slot(made.dsn, made.slot).confirmed_flush == end_lsn


def test_stop_in_the_middle_of_a_large_transaction_still_delivers_the_status(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection:
        database.execute("INSERT INTO t VALUES (0)")
        end_lsn = Lsn(int.from_bytes(read_until(connection, b"C")[-1][10:18], "big"))
        database.execute("INSERT INTO t SELECT n, repeat('x', 500) FROM generate_series(1, 20000) n")
        read_until(connection, b"I")
        connection.send_status(end_lsn, end_lsn, end_lsn)
        assert connection.stop(DEADLINE_S)
    assert describe_slot(made.dsn, made.slot).confirmed_flush == end_lsn


def test_wait_readable_says_when_time_ran_out(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection, stopped_walsender(made):
        # A running one may send a keepalive at any moment: other databases of the server write WAL.
        while connection.get_copy_data() is not None or connection.wait_readable(0):
            pass
        assert connection.get_copy_data() is None
        assert connection.wait_readable(0) is False


def test_status_is_never_queued_without_bound_while_the_server_does_not_read(database: Database) -> None:
    """A server that reads nothing: put_copy_data is refused by our own rule, before libpq's buffer can grow."""
    made = prepare(database)
    with streaming(made) as connection:
        with stopped_walsender(made):
            results = [connection.send_status(Lsn(1), INVALID_LSN, INVALID_LSN) for _ in range(100_000)]
        assert results[0] is True
        assert results[-1] is False


def test_second_reader_of_a_slot_gets_slot_in_use(database: Database) -> None:
    made = prepare(database)
    with (
        streaming(made),
        pytest.raises(SlotInUse, match=r"active for PID \d+ \(SQLSTATE 55006\)"),
        streaming(made),
    ):
        pass


def test_missing_slot_is_a_missing_precondition(database: Database) -> None:
    database.execute("CREATE PUBLICATION pub")
    with pytest.raises(PreconditionMissing, match="does not exist") as caught, streaming(settings(database)):
        pass
    assert "--create-slot" in caught.value.remedy


def test_slot_of_another_database_is_a_missing_precondition(database: Database) -> None:
    made = prepare(database)
    other = settings(database, slot=made.slot, dsn=database.server.conninfo("postgres"))
    with pytest.raises(PreconditionMissing, match="not created in this database"), streaming(other):
        pass


def test_physical_slot_is_a_missing_precondition(database: Database) -> None:
    made = settings(database)
    database.execute("SELECT pg_create_physical_replication_slot(%s)", made.slot)
    try:
        with pytest.raises(PreconditionMissing, match="physical"), streaming(made):
            pass
    finally:
        database.execute("SELECT pg_drop_replication_slot(%s)", made.slot)


def test_dropped_publication_is_an_error_before_18_and_a_notice_since(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection:
        database.execute("DROP PUBLICATION pub")
        database.execute("INSERT INTO t VALUES (1)")
        if database.version < 18:
            with pytest.raises(SlotLost, match='publication "pub" does not exist') as caught:
                drain(connection)
            assert "is not enough" in caught.value.remedy
            return
        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(SlotLost, match='"pub"') as caught:
            while time.monotonic() < deadline:
                connection.check_notices()
                connection.wait_readable(1)
                connection.get_copy_data()
        assert "new snapshot" in caught.value.remedy
        connection.check_notices()  # it is told once


def test_dropping_the_slot_under_a_reader_is_refused_and_the_reader_goes_on(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection:
        with pytest.raises(psycopg.errors.ObjectInUse):
            database.execute("SELECT pg_drop_replication_slot(%s)", made.slot)
        database.execute("INSERT INTO t VALUES (1)")
        assert read_until(connection, b"C")[-1][:1] == b"C"


def test_terminated_walsender_is_connection_lost(database: Database) -> None:
    made = prepare(database)
    with streaming(made) as connection:
        pid = describe_slot(made.dsn, made.slot).active_pid
        database.execute("SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(ConnectionLost):
            drain(connection)


def test_role_without_replication_is_a_missing_precondition(database: Database) -> None:
    database.execute("CREATE ROLE plain LOGIN PASSWORD 'plainsecret'")
    try:
        dsn = database.dsn(over_tcp=True, user="plain", password="plainsecret")
        with pytest.raises(PreconditionMissing, match="lacks a privilege") as caught:
            ReplicationConnection(settings(database, dsn=dsn))
        assert "REPLICATION" in caught.value.remedy
        assert_no_secret(caught.value, "plainsecret")
    finally:
        database.execute("DROP ROLE plain")


def test_wrong_password_is_told_without_the_password(database: Database) -> None:
    database.execute("CREATE ROLE repl LOGIN REPLICATION PASSWORD 'rightsecret'")
    try:
        for wrong in (database.dsn(over_tcp=True, user="repl", password="wrongsecret"),):
            with pytest.raises(PreconditionMissing, match="wrong or missing password") as caught:
                ReplicationConnection(settings(database, dsn=wrong))
            assert_no_secret(caught.value, "wrongsecret")
        with pytest.raises(PreconditionMissing, match="wrong or missing password"):
            ReplicationConnection(settings(database, dsn=database.dsn(over_tcp=True, user="repl")))
        made = settings(database, dsn=database.dsn(over_tcp=True, user="repl", password="rightsecret"))
        with ReplicationConnection(made) as connection:
            assert_no_secret(connection, "rightsecret")
            assert connection.identify_system().dbname == database.name
    finally:
        database.execute("DROP ROLE repl")


def test_password_that_the_servers_message_repeats_is_scrubbed(database: Database) -> None:
    dsn = database.dsn(over_tcp=True, user="typed_it_twice", password="typed_it_twice")
    with pytest.raises(PreconditionMissing) as caught:
        ReplicationConnection(settings(database, dsn=dsn))
    assert_no_secret(caught.value, "typed_it_twice")


@pytest.mark.parametrize(
    ("change", "error", "statement"),
    [
        ({"dbname": "no_such_db"}, PreconditionMissing, "unknown database"),
        ({"user": "nobody_here"}, PreconditionMissing, "unknown role"),
        ({"host": "127.0.0.1", "port": "1"}, ConnectionLost, "no server listens there"),
        ({"host": "/nonexistent"}, ConnectionLost, "no server listens there"),
        ({"host": "no-such-host.invalid"}, ConnectionLost, "unknown host"),
        ({"sslmode": "require", "host": "127.0.0.1"}, PreconditionMissing, "TLS cannot be agreed on"),
        ({"options": "-c no_such_setting=1"}, PreconditionMissing, "refuses a session setting"),
        ({"options": "-c work_mem=lots"}, PreconditionMissing, "refuses a session setting"),
        ({"service": "no_such_service"}, PreconditionMissing, "unknown service"),
        ({"host": "127.0.0.1,127.0.0.1", "port": "1,2"}, ConnectionLost, "no server listens there"),
    ],
)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_what_cannot_be_connected_to_is_told_apart(
    database: Database, change: dict[str, str], error: type[XidstreamError], statement: str
) -> None:
    dsn = psycopg.conninfo.make_conninfo(database.dsn(), **change)
    with pytest.raises(error, match=statement):
        ReplicationConnection(settings(database, dsn=dsn))


def test_no_hba_entry_is_a_missing_precondition(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres(hba=["local postgres postgres trust"])
    made = SlotSettings(server.conninfo("template1"), "s", ("p",))
    with pytest.raises(PreconditionMissing, match="pg_hba") as caught:
        ReplicationConnection(made)
    assert "add a line" in caught.value.remedy


@pytest.mark.parametrize("version", [16, 18])
def test_low_wal_level_is_a_missing_precondition(
    own_postgres: Callable[..., EmbeddedPostgres], version: int
) -> None:
    server = own_postgres(version=version, settings={"wal_level": "replica"})
    made = SlotSettings(server.conninfo(), "s", ("p",))
    with pytest.raises(PreconditionMissing, match="wal_level") as caught:
        create_slot(made.dsn, made.slot)
    assert "wal_level = logical" in caught.value.remedy
    with pytest.raises(PreconditionMissing, match="wal_level") as caught, streaming(made):
        pass
    assert "wal_level = logical" in caught.value.remedy


def test_no_free_walsender_says_so(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres(settings={"max_wal_senders": "1"})
    made = SlotSettings(server.conninfo(), "s", ("p",))
    with ReplicationConnection(made), pytest.raises(ConnectionLost, match="max_wal_senders"):
        ReplicationConnection(made)


@pytest.mark.parametrize("version", [16, 18])
def test_invalidated_slot_is_lost(own_postgres: Callable[..., EmbeddedPostgres], version: int) -> None:
    server = own_postgres(version=version, settings={"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"})
    made = SlotSettings(server.conninfo(), "s", ("p",))
    create_slot(made.dsn, made.slot)
    invalidate(server)
    state = describe_slot(made.dsn, made.slot)
    assert (state.is_lost, state.wal_status) == (True, "lost")
    if version >= 17:
        assert state.invalidation_reason == "wal_removed"
    with pytest.raises(SlotLost, match="can no longer") as caught, streaming(made):
        pass
    assert "snapshot" in caught.value.remedy


@pytest.mark.parametrize("mode", ["immediate", "fast", "kill"])
@pytest.mark.parametrize("version", [16, 18])
def test_server_that_stops_while_it_is_read_is_connection_lost(
    own_postgres: Callable[..., EmbeddedPostgres], version: int, mode: str
) -> None:
    server = own_postgres(version=version)
    made = SlotSettings(server.conninfo(), "s", ("pub",), logical_decoding_work_mem="64kB")
    with psycopg.connect(made.dsn, autocommit=True) as admin:
        admin.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
        create_slot(made.dsn, made.slot)
        with streaming(made) as connection:
            admin.execute("INSERT INTO t SELECT n, repeat('x', 500) FROM generate_series(1, 20000) n")
            read_until(connection, b"I")
            stopping = threading.Thread(target=server.kill if mode == "kill" else lambda: server.stop(mode))  # type: ignore[arg-type]
            stopping.start()
            with pytest.raises(ConnectionLost):
                confirm_all(connection)
            stopping.join()


@pytest.mark.parametrize("version", [18])
def test_fast_stop_of_an_idle_stream_says_that_the_server_ended_it(
    own_postgres: Callable[..., EmbeddedPostgres], version: int
) -> None:
    server = own_postgres(version=version)
    made = SlotSettings(server.conninfo(), "s", ("pub",))
    create_slot(made.dsn, made.slot)
    with streaming(made) as connection:
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(ConnectionLost):
            confirm_all(connection)
        stopping.join()


def test_unanswering_server_is_connection_lost_in_bounded_time(database: Database) -> None:
    made = settings(database, query_timeout_s=0.2)
    with ReplicationConnection(made) as connection:
        os.kill(connection.pgconn.backend_pid, 19)  # SIGSTOP
        try:
            with pytest.raises(ConnectionLost, match="did not answer in time"):
                connection.identify_system()
        finally:
            os.kill(connection.pgconn.backend_pid, 18)  # SIGCONT


def confirm_all(connection: ReplicationConnection) -> None:
    """Read to the end, acknowledging each keepalive's position, as a fast stop of the server demands."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        data = connection.get_copy_data()
        if data is None:
            connection.wait_readable(1)
        elif data[0] == ord("k"):
            end = Lsn(int.from_bytes(data[1:9], "big"))
            connection.send_status(end, end, end)
    pytest.fail("the stream did not end")


def invalidate(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        for _ in range(3):
            admin.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000)), pg_switch_wal()")
            admin.execute("CHECKPOINT")


def assert_no_secret(thing: object, secret: str) -> None:
    texts = [str(thing), repr(thing)]
    if isinstance(thing, XidstreamError):
        texts += [thing.message, thing.remedy, repr(thing.__reduce__())]
    assert all(secret not in text for text in texts), texts


def test_a_connection_that_was_closed_still_says_which_server_it_was(database: Database) -> None:
    """Snapshots asked for it while the reader of the slot ended, and psycopg's own error ended the run."""
    made = prepare(database)
    with ReplicationConnection(made) as connection:
        open_dsn = connection.same_server
    assert connection.same_server == open_dsn
    assert not describe_slot(open_dsn, made.slot).active
