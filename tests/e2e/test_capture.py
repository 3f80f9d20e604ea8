"""``xidstream capture``: a slot is read into its journal without Spark, and a later run delivers it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.test_command_line import (
    NEWEST,
    ROWS,
    XIDSTREAM,
    delta,
    environment,
    is_read,
    options,
    run,
    set_up,
    wait_for_reader,
)
from tests.postgres_fixtures import Database
from tests.processes import living_below
from tests.waiting import wait_until
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def capture_options(database: Database, folder: Path, *more: str) -> list[str]:
    """Those of the run, without its sink."""
    found = options(database, folder)
    sink = found.index("--sink")
    return ["capture", *found[1:sink], *found[sink + 2 :], "--logical-decoding-work-mem", "64kB", *more]


@contextmanager
def capturing(database: Database, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*XIDSTREAM, *capture_options(database, folder, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def create_slot(database: Database) -> None:
    slot = f"s_{database.name}"[:63]
    created = run("slot", "create", "--dsn", database.dsn(), "--slot", slot, "--two-phase")
    assert created.returncode == 0, created.stderr


def confirmed(database: Database) -> int:
    asked = "select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots where slot_name = %s"
    return int(database.execute(asked, f"s_{database.name}"[:63])[0][0])


def wal_lsn(database: Database) -> int:
    return int(database.execute("select (pg_current_wal_lsn() - '0/0')::bigint")[0][0])


def delivered(database: Database, folder: Path) -> Lsn:
    """As the record says."""
    identifier = database.execute("select system_identifier from pg_control_system()")[0][0]
    layout = Layout(int(identifier), f"s_{database.name}"[:63], "test")
    record = read_progress(Storage(str(folder / "segments")), layout)
    assert record is not None
    return record.delivered_lsn


def write_some(database: Database, first: int) -> None:
    """Small transactions, a large one that is streamed, a prepared one and one that is rolled back."""
    for i in range(20):
        database.execute(ROWS.format(first + 10 * i, first + 10 * i + 9))
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format(first + 1_000, first + 20_999).encode())
        session.execute(b"savepoint s")
        session.execute(ROWS.format(first + 30_000, first + 30_999).encode())
        session.execute(b"rollback to s")
        session.execute(b"commit")
        session.execute(b"begin")
        session.execute(ROWS.format(first + 40_000, first + 42_999).encode())
        session.execute(f"prepare transaction 'p{first}'".encode())
    database.execute(f"update t set note = 'changed' where id = {first}")
    database.execute(f"commit prepared 'p{first}'")


def source(database: Database) -> list[tuple[int, str]]:
    return [(int(i), str(note)) for i, note in database.execute("select id, note from t order by id")]


def folded(folder: Path) -> list[tuple[int, str]]:
    """The table as its change log leaves it. Each change once."""
    rows: dict[int, str] = {}
    seen = set()
    for row in delta(folder, "public.t"):
        change = (row["_commit_lsn"], row["_seq"])
        assert change not in seen, row
        seen.add(change)
        if row["_change_type"] != "update_preimage":
            rows[row["id"]] = row["note"]
    return sorted(rows.items())


@NEWEST
def test_what_was_captured_and_what_a_killed_capture_left_is_delivered_by_the_next_run(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    create_slot(database)
    with capturing(database, tmp_path) as process:
        wait_for_reader(database)
        write_some(database, 1)
        end = wal_lsn(database)
        wait_until(lambda: confirmed(database) >= end or process.poll() is not None)
        assert not [p for p in living_below(process.pid) if "java" in p.name]
        write_some(database, 100_001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: not is_read(database))
    assert not (tmp_path / "delta").exists()
    begun = delivered(database, tmp_path)
    with capturing(database, tmp_path) as process:
        wait_for_reader(database)
        before = confirmed(database)
        write_some(database, 200_001)
        wait_until(lambda: confirmed(database) > before or process.poll() is not None)
        write_some(database, 500_001)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "done: into the journal · " in output and "Traceback" not in output
    assert delivered(database, tmp_path) == begun, "there was nobody to deliver to"
    write_some(database, 300_001)
    # Meanwhile the server writes by itself, autovacuum for one.
    end = wal_lsn(database)
    available = run(*capture_options(database, tmp_path, "--available-now"))
    assert available.returncode == 0, available.stderr
    assert confirmed(database) >= end
    write_some(database, 400_001)
    done = run(*options(database, tmp_path, "--available-now"))
    assert done.returncode == 0, done.stderr
    assert folded(tmp_path) == source(database)
    lsns = [t["commit_lsn"] for t in delta(tmp_path, "_transactions")]
    assert lsns == sorted(set(lsns)) and len(lsns) == 6 * 23


@NEWEST
def test_capture_and_run_do_not_share_a_slot_and_a_capture_needs_its_journal(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    create_slot(database)
    refused = run(*capture_options(database, tmp_path, "--journal-max-bytes", "0"))
    assert refused.returncode == 2 and "journal_max_bytes is 0" in refused.stderr
    refused = run(*capture_options(database, tmp_path, "--create-slot"))
    assert refused.returncode == 2 and "--snapshot initial" in refused.stderr
    checked = run("check", "--capture", *capture_options(database, tmp_path)[1:-2])
    assert checked.returncode == 0 and "Java" not in checked.stdout, checked.stdout
    with capturing(database, tmp_path):
        wait_for_reader(database)
        # Side by side: each waits for the slot before it says who has it.
        others = (options(database, tmp_path), capture_options(database, tmp_path))
        with ThreadPoolExecutor() as pool:
            refused_runs = list(pool.map(lambda arguments: run(*arguments), others))
        for second in refused_runs:
            assert second.returncode == 1, second.stderr
            told = second.stderr.replace("\n", " ")
            assert "is read by the run with process" in told and "Traceback" not in told
        assert is_read(database)
