"""``xidstream resync``: a slot that was lost is put right, whatever became of it; one that is well is left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.postgres.test_first_run import identity_of, read_slot_to_its_end, write_lake
from tests.postgres_fixtures import Database
from xidstream.actors.cli.main import main
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.preflight import findings_of, require
from xidstream.pipeline.errors import SlotLost
from xidstream.pipeline.exchange import JournalSpan, PrepareCover
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, describe_slot
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.beginning_record import read_beginning
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import claim_slot, read_progress, take_over_progress, write_progress
from xidstream.pipeline.storage.snapshot_record import read_decision
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.postgres
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Config:
    """Of a slot that a run has read: storage and sink know it."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    database.execute("INSERT INTO t VALUES (1)")
    slot = f"s_{database.name}"
    lsn = create_slot(database.dsn(), slot)
    database.execute("INSERT INTO t VALUES (5)")
    config = Config(
        dsn=database.dsn(),
        slot=slot,
        publication=("pub",),
        storage=str(tmp_path / "segments"),
        sink=f"delta:{tmp_path / 'lake'}",
    )
    storage, layout = stored(config)
    take_over_progress(storage, layout, None, lsn, owner=claim_slot(storage, layout), cover=PrepareCover())
    write_lake(config, int(lsn))
    return config


def stored(config: Config) -> tuple[Storage, Layout]:
    return Storage(config.storage), Layout(identity_of(config).system_identifier, config.slot, "e")


def resync(config: Config, *more: str) -> int:
    given = ["--dsn", config.dsn, "--slot", config.slot, "--publication", "pub"]
    with pytest.raises(SystemExit) as ended:
        main(["resync", *given, "--storage", config.storage, "--sink", config.sink, *more])
    return int(ended.value.code or 0)


def failed(config: Config) -> list[Finding]:
    return [finding for finding in findings_of(config) if finding.status is Status.FAILED]


def drop(database: Database, config: Config) -> None:
    database.execute(f"SELECT pg_drop_replication_slot('{config.slot}')")


def read_by_another(database: Database, config: Config) -> None:
    database.execute("INSERT INTO t VALUES (2)")
    read_slot_to_its_end(database, config)


def drop_and_make_again(database: Database, config: Config) -> None:
    drop(database, config)
    database.execute("INSERT INTO t VALUES (2)")
    create_slot(config.dsn, config.slot)


@NEWEST
@pytest.mark.parametrize("lose", [drop, read_by_another, drop_and_make_again], ids=lambda each: each.__name__)
def test_a_lost_slot_is_made_anew_with_snapshots_and_the_gap_is_told(
    config: Config,
    database: Database,
    capsys: pytest.CaptureFixture[str],
    lose: Callable[[Database, Config], None],
) -> None:
    held = describe_slot(config.dsn, config.slot).confirmed_flush
    lose(database, config)
    assert SlotLost in {finding.raises for finding in failed(dataclasses.replace(config, create_slot=True))}
    assert resync(config) == 0
    said = capsys.readouterr().out
    assert said.startswith("lost: ") and "takes new snapshots of all published tables" in said
    position = describe_slot(config.dsn, config.slot).confirmed_flush
    assert f"the sink's tables end at {held}, and slot {config.slot} begins at {position}" in said
    begun, decision = read_beginning(*stored(config)), read_decision(*stored(config))
    assert begun is not None and begun.lsn == position
    assert decision is not None and decision.takes_snapshots and len(decision.published) == 1
    # A run goes on, and only the gap is told.
    assert failed(config) == []
    told: list[str] = []
    require(config, tell=told.append, wait_s=0)
    assert len(told) == 1 and "what committed between is in no table" in told[0]


def test_a_slot_that_the_server_has_invalidated_is_made_anew(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = own_postgres(
        settings={"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    )
    dsn = server.conninfo()
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("CREATE TABLE t (id int PRIMARY KEY)")
        admin.execute("CREATE PUBLICATION pub FOR TABLE t")
        lsn = create_slot(dsn, "s")
        config = Config(
            dsn=dsn,
            slot="s",
            publication=("pub",),
            storage=str(tmp_path / "segments"),
            sink=f"delta:{tmp_path / 'lake'}",
        )
        storage, layout = stored(config)
        take_over_progress(
            storage, layout, None, lsn, owner=claim_slot(storage, layout), cover=PrepareCover()
        )
        for n in range(4):
            admin.execute("INSERT INTO t VALUES (%s)", (n,))
            admin.execute("SELECT pg_switch_wal()")
        admin.execute("CHECKPOINT")
    assert describe_slot(dsn, "s").is_lost
    assert resync(config) == 0
    assert "slot s is lost" in capsys.readouterr().out
    assert not describe_slot(dsn, "s").is_lost and failed(config) == []


@NEWEST
def test_a_slot_that_is_well_is_refused_and_nothing_is_changed(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    before = describe_slot(config.dsn, config.slot)
    assert resync(config) == 2
    assert "is not lost" in capsys.readouterr().err
    assert describe_slot(config.dsn, config.slot) == before and read_progress(*stored(config)) is not None


@NEWEST
def test_what_a_run_would_refuse_is_told_before_anything_is_changed(
    config: Config, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    drop(database, config)
    role = f"role_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    try:
        assert resync(dataclasses.replace(config, dsn=database.dsn(user=role))) == 3
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert "may not read public.t" in capsys.readouterr().err
    assert not describe_slot(config.dsn, config.slot).exists and read_progress(*stored(config)) is not None


@NEWEST
def test_a_journal_with_what_no_sink_holds_is_given_up_only_by_name(
    config: Config, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, layout = stored(config)
    record = read_progress(storage, layout)
    assert record is not None
    write_progress(
        storage,
        layout,
        Lsn(record.confirmed_lsn + 8),
        delivered_lsn=record.delivered_lsn,
        journal=(JournalSpan("e", 0, 2),),
    )
    drop(database, config)
    assert resync(config) == 3
    assert "has 3 files of transactions" in capsys.readouterr().err
    assert read_progress(storage, layout) is not None
    assert resync(config, "--discard-journal") == 0


@NEWEST
def test_a_resync_that_died_between_dropping_and_making_the_slot_is_gone_on_with(
    config: Config, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["slot", "drop", "--dsn", config.dsn, "--slot", config.slot, "--storage", config.storage])
    assert resync(config) == 0
    decision = read_decision(*stored(config))
    assert decision is not None and decision.takes_snapshots and failed(config) == []


@NEWEST
def test_a_slot_that_is_there_stays_where_the_storage_may_be_the_wrong_one(
    config: Config, database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A volume that is not mounted looks like a first run, but for the sink."""
    before = describe_slot(config.dsn, config.slot)
    elsewhere = dataclasses.replace(config, storage=str(tmp_path / "not mounted"))
    assert resync(elsewhere) == 4
    assert "not mounted" in capsys.readouterr().err
    assert describe_slot(config.dsn, config.slot) == before and not (tmp_path / "not mounted").exists()
