"""A storage, a sink or a slot that is empty, older or made again where it should not be, on a real server.

What `check` says, what a run refuses, and that nothing is made and nothing is deleted by then. docs/recovery.md has the
table of all such cases. The lines that are not tested here are in tests/unit/commits/test_first_take_over.py and
tests/postgres/test_slot_continuity.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.postgres_fixtures import Database
from xidstream.actors.cli.checks import create_slot_command, drop_slot_command
from xidstream.actors.preflight import findings_of, require
from xidstream.actors.reader import slot_reader
from xidstream.actors.reader.slot_reader import SlotReader
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import ExitStatus, PreconditionMissing, SinkDiverged, SlotLost
from xidstream.pipeline.exchange import Beginning, SlotIdentity
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres import opening
from xidstream.pipeline.postgres.admin import (
    advance_slot,
    create_slot,
    current_flush_lsn,
    describe_slot,
    drop_slot,
)
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.verified_server import mark
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.beginning_record import read_beginning, write_beginning
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.postgres
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Config:
    """Of a first run: the slot was made by hand, the storage's volume is not there yet, nor is the Delta root."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    slot = f"s_{database.name}"
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    database.execute("INSERT INTO t VALUES (1)")
    return Config(
        dsn=database.dsn(),
        slot=slot,
        publication=("pub",),
        storage=str(tmp_path / "mnt" / "xs"),
        sink=f"delta:{tmp_path / 'lake'}",
    )


def identity_of(config: Config) -> SlotIdentity:
    with ReplicationConnection(slot_settings(config)) as connection:
        system = connection.identify_system()
    return SlotIdentity(int(system.system_identifier), system.dbname, config.slot)


def stored(config: Config) -> tuple[Storage, Layout]:
    return Storage(config.storage), Layout(identity_of(config).system_identifier, config.slot, "e")


def position(config: Config) -> Lsn:
    lsn = describe_slot(config.dsn, config.slot).confirmed_flush
    assert lsn is not None
    return lsn


def read_slot_to_its_end(database: Database, config: Config) -> None:
    """As a run whose storage is gone, or another consumer, has done."""
    options = "'proto_version', '1', 'publication_names', 'pub'"
    taken = f"pg_logical_slot_get_binary_changes('{config.slot}', NULL, NULL, {options})"
    assert database.execute(f"SELECT count(*) FROM {taken}")[0][0]


def write_lake(config: Config, commit_lsn: int, owner: int = 3, of: SlotIdentity | None = None) -> None:
    """A Delta root as run ``owner`` of this slot has left it, or of the slot ``of``."""
    root = Location.parse(config.sink.partition(":")[2])
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    writer = DeltaTableWriter.open_or_create(
        root.child(locations.TRANSACTIONS), locations.TRANSACTIONS, columns
    )
    application_id = (of or identity_of(config)).application_id
    marks = {f"{application_id}/owner": owner, f"{application_id}/timeline": 1}
    writer.commit([], {application_id: commit_lsn} if commit_lsn else {}, "commit_lsn", marks=marks)


def finding(config: Config, check: str = "record") -> Finding:
    (found,) = [f for f in findings_of(config) if f.check == check]
    return found


def only_rows_from_before(text: str) -> None:
    """A run of a first life tells of the row that the table has, and of nothing else."""
    assert "from before the slot are not read" in text, text


def refused(config: Config) -> SlotLost:
    with pytest.raises(SlotLost) as caught:
        require(config, tell=print, wait_s=0)
    assert caught.value.policy.exit_status is ExitStatus.TERMINAL
    assert not Path(config.storage).parent.exists(), "no folder is made"
    return caught.value


def prepare_reader(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run's reader does before it reads, without the buffers, which need Ray."""
    monkeypatch.setattr(SlotReader, "_start_buffers", lambda self: None)
    reader = SlotReader(config, "e")
    reader.prepare()
    reader._slot.connection.close()


def test_a_slot_that_was_made_by_hand_and_never_read_is_a_beginning_and_check_says_where(
    config: Config,
) -> None:
    """`check` said that "what the storage records of the slot fits this server"."""
    found = finding(config)
    assert found.status is Status.OK
    assert found.statement == (
        f"the storage has no record of slot {config.slot}: a run would be its first, and begin at {position(config)}, "
        "where the slot is"
    )
    require(config, tell=only_rows_from_before, wait_s=0)
    assert not Path(config.storage).parent.exists()


@pytest.mark.parametrize("has_sink", [True, False], ids=["run", "capture"])
def test_a_slot_that_was_read_and_a_storage_that_is_not_mounted_are_no_first_run(
    config: Config, database: Database, monkeypatch: pytest.MonkeyPatch, has_sink: bool
) -> None:
    """The function, or the capture, went on where the slot is: what the journal held was in nobody's hands."""
    config = dataclasses.replace(config, sink="foreach:builtins:print")
    read_slot_to_its_end(database, config)
    error = refused(config)
    assert "there is no such folder" in error.message and "no record of slot" in error.message
    assert "has decoded 1 transaction of the slot for a reader" in error.message
    assert str(position(config)) in error.remedy
    with pytest.raises(SlotLost):
        require(config, tell=print, wait_s=0, has_sink=has_sink)
    with pytest.raises(SlotLost):
        prepare_reader(config, monkeypatch)
    assert not Path(config.storage).parent.exists()

    anew = dataclasses.replace(config, begin_anew=str(position(config)))
    assert finding(anew).status is Status.WARNING and "begins anew at" in finding(anew).statement
    prepare_reader(anew, monkeypatch)
    begun = read_beginning(*stored(config))
    assert begun is not None and begun.is_anew and begun.lsn == position(config)
    assert "has decoded 1 transaction" in begun.against[0], "it is on record, and why it was asked"
    assert finding(config).status is Status.WARNING, "it need not be said twice"
    database.execute("INSERT INTO t VALUES (2)")
    read_slot_to_its_end(database, config)
    assert finding(anew).raises is SlotLost, "the setting fits one position"


@NEWEST
def test_a_first_run_that_died_before_its_record_is_still_the_first(
    config: Config, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has decoded for it by then, and its Delta root is empty."""
    prepare_reader(config, monkeypatch)
    options = "'proto_version', '1', 'publication_names', 'pub'"
    database.execute(f"SELECT pg_logical_slot_peek_binary_changes('{config.slot}', NULL, NULL, {options})")
    assert finding(config).status is Status.OK
    prepare_reader(config, monkeypatch)
    read_slot_to_its_end(database, config)
    found = finding(config)
    assert found.raises is SlotLost and "this storage began at" in found.statement


@NEWEST
def test_where_the_statistics_are_gone_two_phase_tells_and_else_check_says_where_a_run_would_begin(
    config: Config, database: Database
) -> None:
    """Statistics do not outlive a crash of the server, and are not on a promoted standby."""
    config = dataclasses.replace(config, sink="foreach:builtins:print")
    two_phase = dataclasses.replace(config, slot=f"{config.slot}_2")
    create_slot(two_phase.dsn, two_phase.slot, two_phase=True)
    database.execute("INSERT INTO t VALUES (2)")
    for each in (config, two_phase):
        assert finding(each).status is Status.OK
        read_slot_to_its_end(database, each)
        database.execute(f"SELECT pg_stat_reset_replication_slot('{each.slot}')")
    assert "decodes two-phase from" in refused(two_phase).message
    assert f"begin at {position(config)}, where the slot is" in finding(config).statement


@NEWEST
@pytest.mark.parametrize("commit_lsn", [0x100, 0], ids=["with transactions", "claimed"])
def test_a_delta_root_that_knows_the_slot_is_no_first_runs(config: Config, commit_lsn: int) -> None:
    """A run skipped what the journal held, made a record in the empty folder, and ended with status 0."""
    write_lake(config, commit_lsn)
    error = refused(config)
    assert "was written by run 3 of the slot" in error.message and "there is no such folder" in error.message
    assert "mount or restore it" in error.remedy
    anew = dataclasses.replace(config, begin_anew=str(position(config)))
    told: list[str] = []
    require(anew, tell=told.append, wait_s=0)
    gap = f"the sink's tables end at 0/100, and slot {config.slot} begins at {position(config)}"
    assert any(gap in line for line in told) is bool(commit_lsn)


@NEWEST
def test_a_run_makes_no_slot_beside_a_delta_root_that_knows_one_and_an_empty_storage(
    config: Config, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lake(config, 0x100)
    database.execute(f"SELECT pg_drop_replication_slot('{config.slot}')")
    config = dataclasses.replace(config, create_slot=True)
    assert "`--begin-anew 0/100`" in refused(config).remedy
    assert not describe_slot(config.dsn, config.slot).exists
    require(dataclasses.replace(config, begin_anew="0/100"), tell=print, wait_s=0)
    # Another root: a run that makes its slot has nothing to lose.
    require(dataclasses.replace(config, sink=f"{config.sink}2"), tell=only_rows_from_before, wait_s=0)


@NEWEST
def test_a_slot_that_was_dropped_and_made_again_behind_the_tables_end_leaves_a_gap_that_all_commands_tell(
    config: Config, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    """`slot create`, `check` and `run` said nothing, and a row that was committed between was nowhere."""
    write_lake(config, 0x100)
    write_progress(*stored(config), position(config))
    drop_slot_command(config, discard_journal=False)
    database.execute("INSERT INTO t VALUES (2)")
    capsys.readouterr()
    create_slot_command(config)
    gap = f"the sink's tables end at 0/100, and slot {config.slot} begins at {position(config)}"
    said = capsys.readouterr().out
    assert gap in said and "`--snapshot initial`" in said
    found = finding(config, "gap")
    assert found.status is Status.WARNING and gap in found.statement
    assert "`--snapshot initial`" in str(found.remedy)
    told: list[str] = []
    require(config, tell=told.append, wait_s=0)
    assert any(gap in line for line in told)
    write_lake(config, int(position(config)) + 8, owner=4)
    assert not [f for f in findings_of(config) if f.check == "gap"], "the sink is past it"


@NEWEST
def test_delta_tables_that_come_after_a_function_lack_what_it_got_and_check_tells_it(config: Config) -> None:
    write_beginning(*stored(config), Beginning(Lsn(0x100)))
    write_progress(*stored(config), position(config))
    found = finding(config, "gap")
    assert found.status is Status.WARNING and f"from 0/100 up to {position(config)}" in found.statement
    require(dataclasses.replace(config, sink="foreach:builtins:print"), tell=only_rows_from_before, wait_s=0)


@NEWEST
def test_a_delta_root_with_the_tables_of_another_servers_slot_is_no_sign_of_an_earlier_run(
    config: Config,
) -> None:
    write_lake(config, 0x100, of=SlotIdentity(7_000_000_000_000_000_001, "db", config.slot))
    require(config, tell=only_rows_from_before, wait_s=0)
    assert "a run would be its first" in finding(config).statement


@NEWEST
@pytest.mark.parametrize("of_another", [True, False], ids=["another_server", "ahead_of_the_server"])
def test_a_sink_that_is_refused_is_found_before_the_slot_is_made(config: Config, of_another: bool) -> None:
    slot, mine = config.slot, identity_of(config)
    drop_slot_command(config, discard_journal=False)
    config = dataclasses.replace(config, create_slot=True, snapshot="initial")
    write_lake(config, 1 << 60, of=dataclasses.replace(mine, system_identifier=7) if of_another else None)
    with pytest.raises((SinkDiverged, SlotLost)) as refused:
        require(config, tell=print, wait_s=0)
    assert refused.value.policy.exit_status is ExitStatus.TERMINAL
    assert not describe_slot(config.dsn, slot).exists


@NEWEST
def test_a_start_that_fails_behind_the_slot_it_made_drops_it_again_and_no_other(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> Lsn:
        raise PreconditionMissing("the server was left")

    creating = dataclasses.replace(config, create_slot=True, snapshot="never")
    for module, name in ((opening, "settled_flush_lsn"), (slot_reader, "with_slot_xmax")):
        with monkeypatch.context() as failing:
            failing.setattr(module, name, fail)
            with pytest.raises(PreconditionMissing, match="was left"):
                prepare_reader(creating, failing)
            assert describe_slot(config.dsn, config.slot).exists, "it was there before"
            drop_slot(config.dsn, config.slot)
            with pytest.raises(PreconditionMissing, match="was left"):
                prepare_reader(creating, failing)
            assert not describe_slot(config.dsn, config.slot).exists
            failing.setattr(opening, "drop_unread_slot", fail)
            with pytest.raises(PreconditionMissing, match="was left"):
                prepare_reader(creating, failing)
            assert "could not be dropped again" in caplog.text and "slot drop" in caplog.text
    prepare_reader(creating, monkeypatch)
    assert describe_slot(config.dsn, config.slot).exists


@NEWEST
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "made_anew"])
def test_a_start_that_fails_drops_no_slot_that_another_run_has_read_meanwhile_or_made_anew(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_read: bool
) -> None:
    """What the other run has not delivered is in the slot alone."""
    drop_slot(config.dsn, config.slot)

    def fail(*args: object) -> Lsn:
        mark(config.dsn)
        if is_read:
            advance_slot(config.dsn, config.slot, current_flush_lsn(config.dsn))
        else:
            drop_slot(config.dsn, config.slot)
            create_slot(config.dsn, config.slot)
        raise PreconditionMissing("the server was left")

    monkeypatch.setattr(slot_reader, "with_slot_xmax", fail)
    with pytest.raises(PreconditionMissing, match="was left"):
        prepare_reader(dataclasses.replace(config, create_slot=True, snapshot="never"), monkeypatch)
    assert describe_slot(config.dsn, config.slot).exists
    assert "has been read by somebody else" in caplog.text


@NEWEST
def test_a_slot_that_somebody_has_dropped_already_is_not_told_to_keep_wal(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drop_slot(config.dsn, config.slot)

    def fail(*args: object) -> Lsn:
        drop_slot(config.dsn, config.slot)
        raise PreconditionMissing("the server was left")

    monkeypatch.setattr(slot_reader, "with_slot_xmax", fail)
    with pytest.raises(PreconditionMissing, match="was left"):
        prepare_reader(dataclasses.replace(config, create_slot=True, snapshot="never"), monkeypatch)
    assert "could not be dropped" not in caplog.text


@NEWEST
@pytest.mark.parametrize("holds", [None, 0x100], ids=["empty", "older"])
def test_a_delta_root_that_has_less_than_was_delivered_to_it_is_not_written_to(
    config: Config, holds: int | None
) -> None:
    """Its volume was not mounted: the run made the tables anew, and what came before was in none of them."""
    write_progress(*stored(config), position(config), held_lsn=Lsn(0x200))
    if holds is not None:
        write_lake(config, holds)
    found = finding(config)
    assert found.raises is SlotLost and "up to the commit at 0/200 to its Delta tables" in found.statement
    assert not (Path(config.sink.partition(":")[2]) / locations.MESSAGES).exists()
    require(dataclasses.replace(config, begin_anew="0/200"), tell=print, wait_s=0)
    require(dataclasses.replace(config, sink="foreach:builtins:print"), tell=only_rows_from_before, wait_s=0)
    write_lake(config, 0x200)
    assert finding(config).status is Status.OK


@NEWEST
def test_files_of_a_journal_without_a_record_are_refused_by_every_command_and_deleted_by_none(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, layout = stored(config)
    storage.write_bytes(layout.journal_key(7), b"the only copy")
    anew = dataclasses.replace(config, begin_anew=str(position(config)))
    for each in (config, anew):
        assert "1 object of its journal" in finding(each).statement
        with pytest.raises(SlotLost, match="only the record says which of them count"):
            prepare_reader(each, monkeypatch)
    with pytest.raises(PreconditionMissing, match="1 object of its journal"):
        drop_slot_command(config, discard_journal=False)
    assert describe_slot(config.dsn, config.slot).exists
    assert storage.list_keys(layout.root) == [layout.journal_key(7)]
