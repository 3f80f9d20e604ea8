"""The record in storage against real servers: promoted, replaced, dropped; and who may do what with which privilege."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.open_slot import open_slot
from tests.postgres_fixtures import Database
from tests.proxies import Link
from xidstream.actors.cli.checks import create_slot_command
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.preflight import require
from xidstream.actors.reader import slot_reader
from xidstream.actors.reader.slot_reader import SlotReader
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import ConnectionLost, SlotInUse, SlotLost
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.admin import create_slot, current_flush_lsn, describe_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.gone_tables import gone_tables
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.stream_options import stream_options
from xidstream.pipeline.preflight.record_check import check_server, without_publications
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.server_record import read_server
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.postgres
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)


def timeline_of(storage: Storage, layout: Layout) -> int | None:
    record = read_server(storage, layout)
    return None if record is None else record.timeline


def check_record(config: Config, *, remember: bool = False) -> None:
    with ReplicationConnection(without_publications(config)) as connection:
        check_server(config, connection, remember=remember)


def test_a_promoted_server_goes_on_where_it_has_what_was_delivered_and_only_there(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    server = own_postgres()
    config = Config(dsn=server.conninfo(), slot="s", publication=("p",), storage=str(tmp_path / "storage"))
    create_slot(config.dsn, config.slot)
    check_record(config, remember=True)
    layout = layout_of(server.conninfo(), config)
    storage = Storage(config.storage)
    assert timeline_of(storage, layout) == 1
    write_progress(storage, layout, current_flush_lsn(config.dsn))
    promote(server)
    check_record(config)  # as delivered up to the switch
    assert timeline_of(storage, layout) == 1, "only a reader writes it down"

    with psycopg.connect(config.dsn, autocommit=True) as admin:
        admin.execute("create table t (id int primary key); insert into t values (1)")
    write_progress(storage, layout, current_flush_lsn(config.dsn))  # as delivered before, elsewhere
    with pytest.raises(SlotLost, match="timeline 2 left timeline 1 at"):
        check_record(config, remember=True)
    with pytest.raises(SlotLost, match="timeline 2 left timeline 1 at"):
        require(config, tell=print, wait_s=0)
    assert timeline_of(storage, layout) == 1


def test_a_run_that_is_led_to_a_standby_while_its_primary_restarts_is_not_told_that_its_slot_is_lost(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    """It ended with status 4, and the advice to drop the slot."""
    server = own_postgres()
    config = Config(dsn=server.conninfo(), slot="s", publication=("p",), storage=str(tmp_path / "storage"))
    write_progress(Storage(config.storage), layout_of(config.dsn, config), current_flush_lsn(config.dsn))
    (server.data_dir / "standby.signal").touch()
    server.restart()
    with pytest.raises(ConnectionLost, match="is a standby without slot s"):
        check_record(config)


def test_a_failover_between_two_connections_of_one_start_is_not_passed_over(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was compared over a connection of its own, and the next one led to another server."""
    server = own_postgres()
    config = Config(dsn=server.conninfo(), slot="s", publication=("p",), storage=str(tmp_path / "storage"))
    create_slot(config.dsn, config.slot)
    check_record(config, remember=True)
    delivered = Lsn(current_flush_lsn(config.dsn) + 0x100)
    write_progress(Storage(config.storage), layout_of(config.dsn, config), delivered)
    check_record(config)
    real = slot_reader.connect_slot

    def after_a_failover(*args: Any, **kwargs: Any) -> Any:
        promote(server)
        with psycopg.connect(config.dsn, autocommit=True) as admin:
            admin.execute("create table t (id int primary key); insert into t values (1)")
        return real(*args, **kwargs)

    monkeypatch.setattr(slot_reader, "connect_slot", after_a_failover)
    with pytest.raises(SlotLost, match="timeline 2 left timeline 1 at"):
        SlotReader(config, "e").prepare()


def test_further_connections_go_to_the_server_that_the_streaming_one_has_reached(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    first, second = own_postgres(), own_postgres()
    links = [Link(server.socket_dir / f".s.PGSQL.{server.port}") for server in (first, second)]
    dsn = second.conninfo(host="127.0.0.1,127.0.0.1", port=",".join(str(link.port) for link in links))
    links[0].cut()
    opened = open_slot(slot_settings(Config(dsn=dsn, slot="s", publication=("p",))), create=True)
    try:
        links[0].mend()
        assert not describe_slot(dsn, "s").exists, "the DSN leads to the first server again"
        assert opened.opened().confirmed_flush_lsn == opened.confirmed_flush_lsn
        assert describe_slot(opened.connection.same_server, "s").active
    finally:
        opened.connection.close()
        for link in links:
            link.close()


@NEWEST
def test_no_slot_is_created_beside_the_record_of_one_that_is_gone(database: Database, tmp_path: Path) -> None:
    """It was created first, and the loss told after that."""
    database.execute("create publication p for all tables")
    config = Config(
        dsn=database.dsn(),
        slot="s",
        publication=("p",),
        storage=str(tmp_path),
        create_slot=True,
        sink="console",
    )
    write_progress(Storage(config.storage), layout_of(database.dsn(), config), Lsn(0x100))
    for attempt in (lambda: require(config, tell=print, wait_s=0), SlotReader(config, "e").prepare):
        with pytest.raises(SlotLost, match="does not exist any more"):
            attempt()
        assert not describe_slot(config.dsn, "s").exists


@NEWEST
def test_the_record_of_another_server_is_not_passed_over(database: Database, tmp_path: Path) -> None:
    config = Config(dsn=database.dsn(), slot="s", publication=("p",), storage=str(tmp_path))
    storage, other = Storage(config.storage), Layout(7_000_000_000_000_000_001, "s", "e")
    write_progress(storage, Layout(7_000_000_000_000_000_001, "another_slot", "e"), Lsn(0x100))
    storage.write_bytes("unrelated/object", b"x")
    check_record(config)
    write_progress(storage, other, Lsn(0x100))
    with pytest.raises(SlotLost, match="7000000000000000001"):
        check_record(config)
    write_progress(storage, layout_of(database.dsn(), config), Lsn(0x100))
    create_slot(config.dsn, "s")
    check_record(config)


@NEWEST
def test_servers_whose_slots_share_a_name_share_a_storage_when_each_slot_was_created_for_it(
    database: Database, tmp_path: Path
) -> None:
    """A run could not tell that from a server that took the other's place, and asked for two storages."""
    database.execute("create publication p for all tables")
    config = Config(dsn=database.dsn(), slot=f"s_{database.name}", publication=("p",), storage=str(tmp_path))
    storage = Storage(config.storage)
    write_progress(storage, Layout(7_000_000_000_000_000_001, config.slot, "e"), Lsn(0x100))
    with pytest.raises(SlotLost, match="another server"):
        check_record(config)
    create_slot_command(config)
    check_record(config)
    slot = open_slot(slot_settings(config), create=False)
    try:
        recorded = SlotStorage(config.storage, slot.opened(), "e").take_over().confirmed_lsn
        assert recorded == describe_slot(config.dsn, config.slot).confirmed_flush
    finally:
        slot.connection.close()


@NEWEST
def test_a_reader_that_was_superseded_can_confirm_nothing(database: Database) -> None:
    database.execute("create publication p for all tables")
    settings = slot_settings(Config(dsn=database.dsn(), slot=f"s_{database.name}", publication=("p",)))
    zombie = open_slot(settings, create=True).connection
    try:
        with pytest.raises(SlotInUse), ReplicationConnection(settings) as second:
            second.start_replication(
                settings.slot, INVALID_LSN, stream_options(settings, second.server_version)
            )
        # Its link is taken to be dead: the server ends the walsender, and a new reader takes the slot.
        database.execute(
            "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = %s",
            settings.slot,
        )
        successor = open_slot(settings, create=False).connection
        try:
            confirmed = describe_slot(settings.dsn, settings.slot).confirmed_flush
            database.execute("create table t (id int primary key)")
            beyond = current_flush_lsn(settings.dsn)
            with pytest.raises(ConnectionLost):
                while True:
                    zombie.send_status(beyond, beyond, beyond)
                    zombie.wait_readable(0.05)
                    zombie.get_copy_data()
            assert describe_slot(settings.dsn, settings.slot).confirmed_flush == confirmed
            assert describe_slot(settings.dsn, settings.slot).active
        finally:
            successor.close()
    finally:
        zombie.close()


@NEWEST
def test_names_that_would_break_out_of_their_quotes_do_not(database: Database) -> None:
    """Publication, database and columns; a slot's name cannot hold a quote (PostgreSQL refuses it)."""
    names = ['p" ; drop table t; --', "it's", "back\\slash", "Ünï, çödé"]
    database.execute("create table t (id int primary key)")
    for name in names:
        database.connection.execute(sql.SQL("create publication {} for table t").format(sql.Identifier(name)))
    config = Config(dsn=database.dsn(), slot=f"s_{database.name}", publication=tuple(names))  # type: ignore[arg-type]
    settings = slot_settings(config)
    opened = open_slot(settings, create=True)
    try:
        database.execute("insert into t values (1)")
        kinds = []
        while b"C" not in kinds:
            data = opened.connection.get_copy_data()
            if data is None:
                opened.connection.wait_readable(1)
            elif data[0] == ord("w"):
                kinds.append(bytes(data[25:26]))
        assert kinds == [b"B", b"R", b"I", b"C"]
    finally:
        opened.connection.close()
    assert database.execute("select count(*) from t")[0][0] == 1


def layout_of(dsn: str, config: Config) -> Layout:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select system_identifier from pg_control_system()").fetchone()
    assert row is not None
    return Layout(int(row[0]), config.slot, "e")


def promote(server: EmbeddedPostgres) -> None:
    """A new timeline, as after a failover: the server comes up as a standby of nobody and is promoted."""
    (server.data_dir / "standby.signal").touch()
    server.restart()
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("select pg_promote()")
        row = admin.execute("select timeline_id from pg_control_checkpoint()").fetchone()
        while row is None or row[0] < 2:
            admin.execute("checkpoint")
            row = admin.execute("select timeline_id from pg_control_checkpoint()").fetchone()


@NEWEST
def test_a_reader_says_which_parked_tables_were_dropped(database: Database, tmp_path: Path) -> None:
    relids = {}
    for name in ("kept", "dropped"):
        database.execute(f"create table {name} (id int primary key)")
        relids[name] = int(database.execute(f"select '{name}'::regclass::oid::bigint")[0][0])
    gone, before = gone_tables(database.dsn(), relids.values())
    assert gone == frozenset()
    database.execute("drop table dropped")
    gone, behind = gone_tables(database.dsn(), relids.values())
    assert gone == {relids["dropped"]} and behind > before
    assert gone_tables(database.dsn(), ()) == (frozenset(), Lsn(0))
