"""A key's rows are erased while the run, its mirror and its clients go on, and no file has them in the end."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import Pipeline
from tests.e2e.test_command_line import options, run
from tests.e2e.test_verify import Verified
from tests.postgres_fixtures import Database
from xidstream import ChangeLog, Mirror
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.verify.result import Verdict

pytestmark = pytest.mark.e2e

NEEDLE = "needle-4711@example.org"
OTHER = "needle-4712@example.org"
"""Is still in the source when it is erased."""
SCHEMA = """
    create table users (email text primary key, n int, body text);
    alter table users alter body set storage external;
    insert into users select 'user ' || i, i, repeat(md5(i::text), 100) from generate_series(1, 300) i;
    insert into users values ('needle-4711@example.org', 0, repeat('needle-4711@example.org', 200)),
        ('needle-4712@example.org', 0, repeat('x', 3000));
    create table others (id int primary key, note text);
    insert into others select i, 'note' from generate_series(1, 300) i;
"""
STATEMENTS = (
    f"update users set n = n + 1 where email in ('{NEEDLE}', 'user 7')",
    f"update users set body = repeat('{NEEDLE}', 150) where email = '{NEEDLE}'",
    # Streamed, with segments.
    f"update users set body = repeat(md5(n::text), 110), n = n + 1 where n % 2 = 0 or email = '{NEEDLE}'",
    f"update users set email = 'moved' where email = '{NEEDLE}'",
    f"update users set email = '{NEEDLE}' where email = 'moved'",
    f"delete from users where email = '{NEEDLE}'",
    f"insert into users values ('{NEEDLE}', 1, 'again ' || '{NEEDLE}')",
)
"""The row changes its key, there and back, is deleted and comes again."""


class Writes:
    """A session that goes on with other rows of both tables, until ``stop``."""

    def __init__(self, database: Database) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.n_commits = 0
        self._thread = threading.Thread(target=self._run, args=(database,), daemon=True)
        self._thread.start()

    def _run(self, database: Database) -> None:
        try:
            with database.connect() as session:
                while not self._stop.wait(0.05):
                    n = self.n_commits
                    session.execute("update users set n = n + 1 where email = %s", (f"user {n % 300 + 1}",))
                    session.execute("insert into users values (%s, %s, 'new')", (f"later {n}", n))
                    session.execute("update others set note = 'note ' || id where id = %s", (n % 300 + 1,))
                    self.n_commits += 3
        except BaseException as error:
            self._failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        assert not self._failures, self._failures


def erase(pipeline: Pipeline, key: str, *more: str) -> dict[str, Any]:
    config = pipeline.config()
    told = ("--dsn", config.dsn, "--slot", config.slot, "--storage", config.storage)
    found = run("erase", *told, "--sink", f"delta:{pipeline.delta}", *more_of(key), "--json", *more)
    assert found.returncode == 0, found.stderr
    assert NEEDLE not in found.stdout + found.stderr and OTHER not in found.stdout + found.stderr
    done: dict[str, Any] = json.loads(found.stdout)
    return done


def more_of(key: str) -> list[str]:
    return ["--table", "public.users", "--key", f"email = '{key}'"]


def files_with(folder: Path, text: str) -> list[str]:
    """Files with these bytes, or with this text in a value, however it is packed."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        is_parquet = path.suffix == ".parquet" and content[:4] == b"PAR1"
        rows = repr(pq.read_table(path, partitioning=None).to_pylist()) if is_parquet else ""
        if text.encode() in content or text in rows:
            found.append(str(path.relative_to(folder)))
    return found


def wait_for_log(pipeline: Pipeline, lsn: int) -> None:
    pipeline.wait_until(lambda: ChangeLog(str(pipeline.delta)).readable_lsn >= lsn)


def is_known(log: ChangeLog, spark: Any, table: str) -> bool:
    try:
        log.as_of(spark)[table]
    except PreconditionMissing:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_key_is_erased_beside_a_run_a_mirror_and_clients_and_no_file_has_it_in_the_end(
    pipeline: Pipeline,
) -> None:
    database, verified = pipeline.database, Verified(pipeline, SCHEMA)
    spark, root = pipeline.spark, str(pipeline.delta)
    verified.start("users", "others")
    mirror = Mirror(root)
    for i, statement in enumerate(STATEMENTS):
        database.execute(statement)
        if i == 3:
            mirror.refresh(spark)
    mirror.start(spark, every="2s")
    writes = Writes(database)
    try:
        database.execute(f"delete from users where email = '{NEEDLE}'")
        log = ChangeLog(root)
        pipeline.wait_until(lambda: is_known(log, spark, "public.users"))
        moments = [log.readable_lsn]
        assert files_with(pipeline.delta, NEEDLE)
        n_before = writes.n_commits
        done = erase(pipeline, NEEDLE, "--id", "ticket-1")
        assert done["n_rows"] >= 8 and done["n_behind"] == 0
        wait_for_log(pipeline, moments[0] + 1)
        moments.append(log.readable_lsn)
        for lsn in moments:
            rows = log.as_of(spark, lsn=lsn)["public.users"].collect()
            assert NEEDLE not in {row["email"] for row in rows} and len(rows) >= 300
        changes = log.changes(spark, "public.users")
        assert changes.filter(changes["email"] == NEEDLE).count() == 0
        assert writes.n_commits > n_before and pipeline.query.isActive
        found = verified("users", "others")
        assert {each.verdict for each in found.values()} == {Verdict.EQUAL}, "the source has no such row"
        # Of a key that is still in the source, verify says so.
        assert erase(pipeline, OTHER)["n_rows"] >= 1
        assert verified.differences("users").missing == 1
    finally:
        writes.stop()
    assert mirror.exception() is None
    mirror.stop()
    again = erase(pipeline, NEEDLE, "--id", "ticket-1")
    assert (again["n_rows"], again["upto_lsn"]) == (done["n_rows"], done["upto_lsn"])
    pipeline.query.stop()
    last = erase(pipeline, NEEDLE, "--id", "ticket-1", "--at-once")
    assert last["copies"] == [] and last["finished_at"] is not None
    assert [files_with(folder, NEEDLE) for folder in (pipeline.delta, pipeline.storage)] == [[], []]
    told = run(
        *("erase", "--status", "--dsn", pipeline.config().dsn, "--slot", pipeline.config().slot),
        *("--storage", str(pipeline.storage), "--sink", f"delta:{root}"),
    )
    assert told.returncode == 0 and "erasure ticket-1: 1 key of table public.users" in told.stdout
    assert "no copy is left since" in told.stdout and NEEDLE not in told.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.parametrize("lake", ["delta", "iceberg"])
def test_rows_in_the_journal_are_waited_for_and_the_command_goes_on_by_its_id_when_a_run_has_delivered_them(
    database: Database, tmp_path: Path, lake: str
) -> None:
    tables = tmp_path / lake
    to = f"delta:{tables}" if lake == "delta" else f"iceberg:{tables}/shop"
    database.execute(SCHEMA)
    database.execute("create publication p for all tables")
    once = [*options(database, tmp_path, sink=to), "--snapshot", "initial", "--available-now"]
    assert run(*once, "--create-slot").returncode == 0
    for statement in STATEMENTS:
        database.execute(statement)
    sink = once.index("--sink")
    captured = run("capture", *once[1:sink], "--logical-decoding-work-mem", "64kB", "--available-now")
    assert captured.returncode == 0, captured.stderr
    storage = tmp_path / "segments"
    assert list(storage.rglob("*.journal"))
    database.execute(f"delete from users where email = '{NEEDLE}'")
    asked = [*once[1 : once.index("--publication")], *once[once.index("--storage") : sink + 2]]
    erases = ["erase", *asked, *more_of(NEEDLE), "--id", "j-1"]
    before = sorted(tables.rglob("*"))
    refused = run(*erases, "--timeout-s", "1")
    assert refused.returncode == 3 and "rows in the journal, or not read yet" in refused.stderr
    assert sorted(tables.rglob("*")) == before
    assert run(*once).returncode == 0
    done = run(*erases, "--timeout-s", "1", "--at-once")
    assert done.returncode == 0 and "no copy is left" in done.stdout, done.stderr + done.stdout
    assert [files_with(folder, NEEDLE) for folder in (tables, storage)] == [[], []]
