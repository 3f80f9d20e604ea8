"""``xidstream journal``: what a person reads of the storage alone, and the exit status that a script reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.storage.journals import Made, made_journal
from xidstream.actors.cli.main import main
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

COLUMNS = (Column("id", 23, -1, True), Column("ordinal", 25, -1, False), Column("Größe", 1700, -1, False))
RELATION = RelationVersion(16_400, "public", "orders", ReplicaIdentity.DEFAULT, COLUMNS)
SERVER = 7_423_000_000_000_000_001


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """No variable names a server."""
    for variable in ("PGHOST", "PGSERVICE", "PGDATABASE", "PGUSER", "PGPORT", "PGHOSTADDR"):
        monkeypatch.delenv(variable, raising=False)
    layout = Layout(SERVER, "shop", "20260101T000000-00c0ffee")
    return made_journal(Storage(str(tmp_path)), layout, RELATION)


def journal(made: Made, command: str, *arguments: str, slot: str = "shop") -> int:
    with pytest.raises(SystemExit) as ended:
        main(["journal", command, "--slot", slot, "--storage", made.storage.uri, *arguments])
    return int(ended.value.code or 0)


def test_show_has_both_positions_and_a_line_for_each_file(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal(made, "show") == 0
    first, second, names, *lines = capsys.readouterr().out.splitlines()
    assert (
        first
        == f"slot shop of server {SERVER}: delivered 0/1000, confirmed 0/4100, by epoch {made.layout.epoch}"
    )
    assert (
        second.startswith("4 files, ")
        and "4 transactions, 4 rows, the oldest of 2023-11-14 22:13:20" in second
    )
    assert " ".join(names.split()) == "file epoch first commit last commit transactions rows segments bytes"
    assert lines[0].split()[:4] == ["3", made.layout.epoch, "0/1000", "0/1100"]
    assert [line.split()[0] for line in lines] == ["3", "4", "5", "7"]


def test_show_as_json_names_all(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.write(8, 0x5000)
    made.storage.delete([made.layout.journal_key(7)])
    assert journal(made, "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["delivered_lsn"], shown["confirmed_lsn"]) == ("0/1000", "0/4100")
    assert shown["system_identifier"] == str(SERVER) and shown["unnamed"] == [made.layout.journal_key(8)]
    large, missing = shown["files"][1], shown["files"][3]
    assert (large["first_commit_lsn"], large["n_segments"], large["damage"]) == ("0/2000", 1, None)
    assert large["n_bytes"] == made.files[1].n_bytes and "missing" in missing["damage"]


def test_check_of_a_whole_journal_has_status_0(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert journal(made, "check") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "whole: 4 files, and 1 segment that they name"
    made.record(0x4100, 0x4100)
    assert journal(made, "check") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["the journal is empty", "whole"]


def test_check_names_what_is_lost_and_what_to_do_with_status_4(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    made.storage.delete([made.layout.journal_key(4)])
    assert journal(made, "check") == 4
    *_, finding, remedy = capsys.readouterr().out.splitlines()
    assert finding.startswith(f"{made.layout.journal_key(4)} (commits after 0/1100 up to 0/3FFF): ")
    assert "missing" in finding and remedy.startswith("  remedy: restore the object")


def test_a_damaged_record_is_a_finding(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.storage.write_bytes(made.layout.record_key(1), b"{}")
    assert journal(made, "check") == 4
    assert made.layout.record_key(1) in capsys.readouterr().out


def test_a_storage_that_cannot_be_read_is_no_finding(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / made.layout.journal_key(4)
    folder.unlink()
    folder.mkdir()
    assert journal(made, "check") == 1


def test_a_slot_that_the_storage_does_not_know_or_that_several_servers_have_is_said(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal(made, "show", slot="other") == 3
    assert "has no record of slot other" in capsys.readouterr().err
    another = made_journal(made.storage, Layout(8, "shop", "e"), RELATION)
    assert journal(another, "show") == 2
    assert "dsn is missing" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_not_needed_for_the_one_slot_of_the_storage(made: Made) -> None:
    assert journal(made, "check", "--dsn", "host=127.0.0.1 port=1 dbname=shop connect_timeout=2") == 0
