"""The storage is not mounted when the machine boots: nothing is skipped, and all comes when it is back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_capture import capture_options, folded, source
from tests.e2e.test_command_line import NEWEST, ROWS, options, run, set_up
from tests.postgres_fixtures import Database
from xidstream.pipeline.storage.beginning_record import read_beginning
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


@NEWEST
def test_what_was_captured_waits_for_its_storage(database: Database, tmp_path: Path) -> None:
    """`check` said "18 ok, 0 missing". The run ended with status 0 and made a record in the empty folder, and the rows
    of the capture were in no table. When the storage came back the next run ended with status 4: they were lost."""
    make_slot_by_hand(database)
    storage, away = tmp_path / "segments", tmp_path / "volume"
    to_the_end = options(database, tmp_path, "--available-now")
    captured = capture_options(database, tmp_path, "--available-now")
    database.execute(ROWS.format(1, 10))
    first = run(*to_the_end)
    assert first.returncode == 0, first.stderr
    database.execute(ROWS.format(11, 110))
    capture = run(*captured)
    assert capture.returncode == 0, capture.stderr

    storage.rename(away)
    database.execute(ROWS.format(111, 120))
    checked = run("check", *options(database, tmp_path)[1:])
    assert checked.returncode == 3, checked.stdout
    assert "no record of slot" in checked.stdout and "records of the slot fits" not in checked.stdout
    for command in (to_the_end, captured):
        refused = run(*command)
        assert refused.returncode == 4, refused.stderr
        assert "this is no first run" in refused.stderr and "(there is no such folder)" in refused.stderr
    assert not storage.exists()

    away.rename(storage)
    back = run(*to_the_end)
    assert back.returncode == 0, back.stderr
    assert folded(tmp_path) == source(database)


@NEWEST
def test_a_person_may_begin_anew_without_the_storage_and_that_is_on_record(
    database: Database, tmp_path: Path
) -> None:
    slot = make_slot_by_hand(database)
    to_the_end = options(database, tmp_path, "--available-now")
    database.execute(ROWS.format(1, 10))
    first = run(*to_the_end)
    assert first.returncode == 0, first.stderr
    shutil.rmtree(tmp_path / "segments")
    refused = run(*to_the_end)
    assert refused.returncode == 4, refused.stderr
    named = re.search(r"`--begin-anew ([0-9A-F/]+)`", refused.stderr)
    assert named is not None, refused.stderr
    database.execute(ROWS.format(11, 20))
    anew = run(*to_the_end, "--begin-anew", named[1])
    assert anew.returncode == 0, anew.stderr
    assert folded(tmp_path) == source(database)
    identifier = database.execute("select system_identifier from pg_control_system()")[0][0]
    stored = Storage(str(tmp_path / "segments")), Layout(int(identifier), slot, "test")
    begun, record = read_beginning(*stored), read_progress(*stored)
    assert begun is not None and begun.is_anew and str(begun.lsn) == named[1]
    assert record is not None and record.held_lsn > begun.lsn


def make_slot_by_hand(database: Database) -> str:
    set_up(database)
    slot = f"s_{database.name}"[:63]
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    return slot
