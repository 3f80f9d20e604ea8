"""``xidstream slot create`` and ``drop`` on a real server, and the slot that a killed run left in use."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from tests.postgres_fixtures import Database
from xidstream.actors.cli.main import main
from xidstream.actors.preflight import require
from xidstream.pipeline.account import StoredPart
from xidstream.pipeline.account.codec import of_json
from xidstream.pipeline.exchange import JournalSpan
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.stream_options import stream_options
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress, write_progress
from xidstream.pipeline.storage.skips import read_skips
from xidstream.pipeline.storage.storage import Storage

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("postgres_server", [18], indirect=True),
]

Printed = pytest.CaptureFixture[str]


def slot(database: Database) -> str:
    return f"s_{database.name}"


def xidstream(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def command(database: Database, name: str, *more: str) -> int:
    return xidstream("slot", name, "--dsn", database.dsn(), "--slot", slot(database), *more)


def record(database: Database, storage: Storage) -> Layout:
    """What a run of the slot leaves."""
    system = int(database.execute("SELECT system_identifier FROM pg_control_system()")[0][0])
    layout = Layout(system, slot(database), "e")
    write_progress(storage, layout, Lsn(0x10))
    storage.write_bytes(f"{layout.epochs_prefix}/e/1-0000000000000001/0.arrow", b"rows")
    return layout


def test_dropping_with_storage_removes_the_record_and_says_so(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    storage = Storage(str(tmp_path))
    assert command(database, "create") == 0
    layout = record(database, storage)
    storage.write_bytes("unrelated", b"x")
    assert command(database, "drop", "--storage", storage.uri) == 0
    said = capsys.readouterr().out
    assert "is dropped" in said
    assert f"removed {layout.progress_prefix} " in said
    assert f"removed {layout.epochs_prefix} " in said
    assert storage.list_keys(layout.root) == []
    assert storage.exists("unrelated")
    assert not describe_slot(database.dsn(), slot(database)).exists
    assert command(database, "create", "--storage", storage.uri) == 0


def test_a_journal_that_no_sink_holds_is_not_dropped_unless_that_is_said(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    storage = Storage(str(tmp_path))
    assert command(database, "create") == 0
    layout = record(database, storage)
    journal = (JournalSpan("e", 3, 5),)
    write_progress(storage, layout, Lsn(0x30), delivered_lsn=Lsn(0x20), journal=journal)
    storage.write_bytes(layout.journal_key(3), b"a file")
    assert command(database, "drop", "--storage", storage.uri) == 3
    said = capsys.readouterr().err
    assert "3 files" in said and "0/20" in said and "--discard-journal" in said
    assert describe_slot(database.dsn(), slot(database)).exists
    assert storage.exists(layout.journal_key(3)) and read_progress(storage, layout) is not None
    assert command(database, "drop", "--storage", storage.uri, "--discard-journal") == 0
    assert storage.list_keys(layout.root) == []


def test_dropping_without_storage_leaves_the_record(database: Database, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    assert command(database, "create") == 0
    layout = record(database, storage)
    assert command(database, "drop") == 0
    assert read_progress(storage, layout) is not None


def test_creating_beside_an_earlier_record_is_refused_and_its_remedy_works(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    storage = Storage(str(tmp_path))
    record(database, storage)
    assert command(database, "create", "--storage", storage.uri) == 3
    assert "slot drop --storage" in capsys.readouterr().err
    assert not describe_slot(database.dsn(), slot(database)).exists
    assert command(database, "drop", "--storage", storage.uri) == 0
    assert "does not exist; its objects" in capsys.readouterr().out
    assert command(database, "create", "--storage", storage.uri) == 0


def test_creating_a_slot_that_is_there_does_not_advise_to_drop_it(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    storage = Storage(str(tmp_path))
    assert command(database, "create") == 0
    record(database, storage)
    assert command(database, "create", "--storage", storage.uri) == 3
    assert "slot drop" not in capsys.readouterr().err


def test_dropping_what_is_nowhere_is_a_missing_precondition(database: Database, tmp_path: Path) -> None:
    assert command(database, "drop", "--storage", str(tmp_path)) == 3
    assert command(database, "drop") == 3


def test_a_storage_out_of_reach_is_told_before_the_slot_is_dropped(
    database: Database, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    assert command(database, "create") == 0
    assert command(database, "drop", "--storage", str(tmp_path / "file")) == 1
    assert describe_slot(database.dsn(), slot(database)).exists


def test_a_slot_in_use_keeps_its_record(database: Database, tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    assert command(database, "create") == 0
    layout = record(database, storage)
    settings = slot_settings(Config(dsn=database.dsn(), slot=slot(database), publication=("p",)))
    with ReplicationConnection(settings) as connection:
        options = stream_options(settings, connection.server_version)
        connection.start_replication(settings.slot, INVALID_LSN, options)
        assert command(database, "drop", "--storage", storage.uri) == 1
    assert read_progress(storage, layout) is not None


def test_a_run_waits_for_the_slot_of_one_that_is_just_ending(database: Database, capsys: Printed) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    assert command(database, "create") == 0
    config = Config(dsn=database.dsn(), slot=slot(database), publication=("p",))
    settings = slot_settings(config)
    with ReplicationConnection(settings) as connection:
        options = stream_options(settings, connection.server_version)
        connection.start_replication(settings.slot, INVALID_LSN, options)
        ending = threading.Timer(1.0, connection.close)
        ending.start()
        require(config, tell=print)
        ending.join()
    assert capsys.readouterr().out.count("waiting") == 1


def skip(database: Database, storage: Storage, xid: str, lsn: str) -> int:
    return command(database, "skip", "--storage", storage.uri, "--xid", xid, "--commit-lsn", lsn)


def test_a_transaction_is_given_up_only_where_a_run_may_still_meet_it(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    storage = Storage(str(tmp_path))
    assert command(database, "create") == 0
    assert skip(database, storage, "700", "0/FFFFFFFF") == 3, "no run has used this storage"
    layout = record(database, storage)
    assert skip(database, storage, "700", "0/F") == 2
    assert "the sink has all up to 0/10" in capsys.readouterr().err
    assert skip(database, storage, "700", "nonsense") == 2
    assert skip(database, storage, "-1", "0/10") == 2
    assert read_skips(storage, layout) == ()
    assert skip(database, storage, "700", "0/10") == 0
    (recorded,) = read_skips(storage, layout)
    assert (recorded.xid, recorded.commit_lsn, recorded.left_out_at) == (700, 0x10, None)
    capsys.readouterr()
    arguments = ["--dsn", database.dsn(), "--slot", slot(database), "--storage", storage.uri]
    assert xidstream("status", *arguments) == 0
    assert "xid 700, commit LSN 0/10" in (said := capsys.readouterr().out) and "not met yet" in said
    journal = [JournalSpan("e", 3, 3)]
    write_progress(storage, layout, Lsn(0x20), delivered_lsn=Lsn(0x10), journal=journal)
    assert xidstream("status", *arguments) == 0
    assert "not met yet" in capsys.readouterr().out, "it may be in the journal"
    assert skip(database, storage, "701", "0/18") == 0
    write_progress(storage, layout, Lsn(0x20))
    assert xidstream("status", *arguments) == 0
    assert "without effect" in capsys.readouterr().out


def test_status_of_a_slot_that_nobody_reads_says_what_the_journal_has_of_it(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    assert command(database, "create") == 0
    arguments = ("--dsn", database.dsn(), "--slot", slot(database), "--storage", str(tmp_path))
    layout = record(database, Storage(str(tmp_path)))
    capsys.readouterr()
    assert xidstream("status", *arguments) == 0
    assert "journal" not in capsys.readouterr().out
    spans = [JournalSpan("e", 3, 5), JournalSpan("e", 7, 7)]
    write_progress(Storage(str(tmp_path)), layout, Lsn(0x20), delivered_lsn=Lsn(0x10), journal=spans)
    assert xidstream("status", *arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^delivered +0/10, [\d,]+ bytes behind the server$", shown, re.M)
    assert re.search(r"^journal +4 files with what lies between", shown, re.M)
    assert xidstream("status", *arguments, "--json") == 0
    account = of_json(capsys.readouterr().out)
    assert account.stored == StoredPart("0/20", "e", (), "0/10", 4)
    assert account.slot is not None and account.slot.undelivered_bytes is not None
    assert account.slot.wal_held_without_journal_bytes == account.slot.undelivered_bytes
    assert account.slot.undelivered_bytes == Lsn.parse(account.slot.server_lsn) - 0x10
    assert xidstream("journal", "check", *arguments) == 4, "there are no such files"
    assert capsys.readouterr().out.count("(commits after 0/10 up to 0/20)") == 4


def test_status_shows_each_slot_of_a_file_and_one_that_is_missing_hides_no_other(
    database: Database, tmp_path: Path, capsys: Printed
) -> None:
    assert command(database, "create") == 0
    capsys.readouterr()
    file = tmp_path / "two.toml"
    file.write_text(
        f'dsn = "{database.dsn()}"\n[[slots]]\nslot = "nope"\n[[slots]]\nslot = "{slot(database)}"\n'
    )
    assert xidstream("status", "--config", str(file)) == 3
    said = capsys.readouterr()
    assert f"slot {slot(database)}" in said.out and "read by         nobody" in said.out
    assert "slot nope does not exist" in said.err and slot(database) in said.err
    assert xidstream("status", "--config", str(file), "--slot", slot(database)) == 0


def test_a_slot_that_is_not_there_is_not_told_to_be_created_before_it_is_dropped(
    database: Database, capsys: Printed
) -> None:
    assert command(database, "drop") == 3
    said = capsys.readouterr().err
    assert "check its name" in said and "create" not in said


@pytest.mark.parametrize(
    "name", ["[/x]", "[bold]y[/bold]", "a\nok  all is well", "\x1b]0;title\x07", "\u202etxt"]
)
def test_a_tables_name_is_one_line_of_what_people_are_told_whatever_it_is(
    database: Database, tmp_path: Path, capsys: Printed, name: str
) -> None:
    database.execute(f'create table "{name}" (id int)')
    database.execute(f'create publication p for table "{name}"')
    connection = ("--dsn", database.dsn(), "--slot", slot(database), "--publication", "p")
    assert xidstream("slot", "create", *connection[:4]) == 0
    place = ("--storage", str(tmp_path / "segments"))
    xidstream("check", *connection, *place, "--sink", f"delta:{tmp_path / 'delta'}")
    assert xidstream("snapshot", "status", *connection, *place) == 0
    refused = xidstream("table", "resume", *connection[:4], *place, "--table", name)
    assert refused == 2
    told = capsys.readouterr()
    shown = name.encode("unicode_escape").decode() if not name.isprintable() else name
    for text in (told.out, told.err):
        assert shown in text
        assert all(line.isprintable() for line in text.splitlines()), text
        assert "ok  all is well" not in [line.strip() for line in text.splitlines()]
