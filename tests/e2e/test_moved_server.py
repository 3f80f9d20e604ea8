"""A database that gets another name, and a server that ``pg_upgrade`` makes anew: what a run and its log make of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from tests.postgres_fixtures import FAST
from xidstream import ChangeLog
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.faultpoints import VARIABLE

pytestmark = pytest.mark.e2e
_ANSWER_S = 120


class Shop:
    """A table, its publication, and ``xidstream run`` with a Delta log."""

    def __init__(self, server: EmbeddedPostgres, folder: Path) -> None:
        self.server, self.folder, self.database = server, folder, "shop"
        self.root = folder / "tables"

    def execute(self, statement: str, database: str | None = None) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.server.conninfo(database or self.database), autocommit=True) as session:
            cursor = session.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def create(self) -> None:
        self.execute("create database shop", "postgres")
        self.execute("create table t (id int primary key); create publication p for table t")

    def command(self, *more: str) -> list[str]:
        options = ["--dsn", self.server.conninfo(self.database), "--slot", "s", "--publication", "p"]
        options += ["--storage", str(self.folder / "segments"), "--sink", f"delta:{self.root}"]
        return [sys.executable, "-m", "actors", "run", *options, *more]

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Deliver what there is, and end."""
        command = self.command("--available-now", *more)
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)

    def delivered(self) -> None:
        done = self.run("--create-slot")
        assert done.returncode == 0, done.stdout + done.stderr

    @contextmanager
    def running(self, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[subprocess.Popen[bytes]]:
        """A run that is killed in the end, with its processes."""
        run = subprocess.Popen(
            self.command(),
            env={**os.environ, **more},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        try:
            yield run
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()

    def ids(self) -> list[int]:
        if not (self.root / "public.t").exists():
            return []
        return sorted(DeltaTable(str(self.root / "public.t")).to_pyarrow_table()["id"].to_pylist())


@pytest.fixture
def shop(own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path) -> Shop:
    made = Shop(own_postgres(), tmp_path)
    made.create()
    return made


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_renamed_database_keeps_its_log_and_what_a_killed_run_had_written_comes_once(shop: Shop) -> None:
    """Under the new name the sink seemed to be another one, and the run refused it."""
    shop.delivered()
    shop.execute("insert into t values (1)")
    shop.delivered()
    shop.execute("insert into t values (2)")
    # The sink holds the batch, and nobody hears of it.
    with shop.running({VARIABLE: "batch_written:delay=600000"}) as run:
        deadline_s = time.monotonic() + _ANSWER_S
        while shop.ids() != [1, 2]:
            assert run.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.2)
    while shop.execute("select 1 from pg_replication_slots where active"):
        time.sleep(0.1)
    shop.execute("alter database shop rename to store", "postgres")
    shop.database = "store"
    shop.execute("insert into t values (3)")
    shop.delivered()
    assert shop.ids() == [1, 2, 3]

    log = ChangeLog(str(shop.root))  # of one slot: it asks for none
    assert log.application_id.split("/")[1:] == ["shop", "s"]
    with shop.running() as run:
        options = [
            "--dsn",
            shop.server.conninfo("store"),
            "--publication",
            "p",
            "--sink",
            f"delta:{shop.root}",
        ]
        command = [sys.executable, "-m", "actors", "verify", *options]
        verified = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert "public.t" in verified.stdout and run.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_behind_pg_upgrade_a_run_refuses_the_old_records_and_new_ones_go_on_without_a_gap(
    shop: Shop, tmp_path: Path
) -> None:
    """The slot comes along (PostgreSQL 17 and later), but the server has another system identifier."""
    shop.delivered()
    shop.execute("insert into t values (1)")
    shop.delivered()
    shop.server.stop()
    upgraded = upgrade(shop.server)
    try:
        old, shop.server = shop.server, upgraded.start()
        assert old.version == shop.server.version
        assert shop.execute("select slot_name from pg_replication_slots") == [("s",)]
        shop.execute("insert into t values (2)")
        refused = shop.run()
        assert refused.returncode == 4, refused.stdout + refused.stderr
        assert "remedy" in refused.stdout + refused.stderr
        assert shop.ids() == [1]

        shop.folder = tmp_path / "new"
        shop.root = shop.folder / "tables"
        shop.delivered()
        assert shop.ids() == [2], "from where the slot is; snapshots are taken where they are asked for"
    finally:
        upgraded.stop("immediate")


def upgrade(old: EmbeddedPostgres) -> EmbeddedPostgres:
    """``old`` must be stopped."""
    new = EmbeddedPostgres(old.data_dir.with_name("new"), settings=FAST)
    new.start()
    new.stop()
    folder = new.data_dir.with_name("upgrade")
    folder.mkdir()
    new._account.give(folder)
    binaries = str(new.bin("pg_upgrade").parent)
    script = 'cd "$1" && exec "$2/pg_upgrade" -b "$2" -B "$2" -d "$3" -D "$4" -U postgres'
    arguments = [str(folder), binaries, str(old.data_dir), str(new.data_dir)]
    done = subprocess.run(
        ["/bin/sh", "-c", script, "upgrade", *arguments],
        capture_output=True,
        text=True,
        timeout=_ANSWER_S,
        **new._account.popen_options(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return new
