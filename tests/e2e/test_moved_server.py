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
_ANSWER_S = 240


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
        assert "If this server has replaced that one (pg_upgrade" in refused.stderr
        assert shop.ids() == [1]

        shop.folder = tmp_path / "new"
        shop.root = shop.folder / "tables"
        shop.delivered()
        assert shop.ids() == [2], "from where the slot is; snapshots are taken where they are asked for"
    finally:
        upgraded.stop("immediate")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_behind_pg_upgrade_from_16_there_is_no_slot_and_a_run_says_what_is_lost_and_a_new_log_has_all_rows(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    """Before 17 no logical slot comes along."""
    shop = Shop(own_postgres(version=16), tmp_path)
    shop.create()
    shop.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    shop.execute("insert into t values (1)")
    shop.delivered()
    shop.execute("insert into t values (2)")  # nobody had this delivered before
    shop.server.stop()
    upgraded = upgrade(shop.server)
    try:
        shop.server = upgraded.start()
        assert shop.execute("select slot_name from pg_replication_slots") == []
        shop.execute("insert into t values (3)")
        shop.folder = tmp_path / "new"  # another storage, and the old root
        refused = shop.run("--create-slot")
        assert refused.returncode == 4, refused.stdout + refused.stderr
        for part in (
            "another server",
            "pg_upgrade",
            "another, empty --sink",
            "--snapshot initial",
            "in no log",
        ):
            assert part in refused.stderr
        assert shop.ids() == [1]

        shop.root = shop.folder / "tables"
        done = shop.run("--create-slot", "--snapshot", "initial")
        assert done.returncode == 0, done.stdout + done.stderr
        assert shop.ids() == [1, 2, 3]
    finally:
        upgraded.stop("immediate")


def upgrade(old: EmbeddedPostgres) -> EmbeddedPostgres:
    """To 18. ``old`` must be stopped."""
    new = EmbeddedPostgres(old.data_dir.with_name("new"), settings=FAST)
    new.start()
    new.stop()
    folder = new.data_dir.with_name("upgrade")
    folder.mkdir()
    new._account.give(folder)
    binaries = [str(each.bin("pg_upgrade").parent) for each in (old, new)]
    script = (
        # Only from 18 on has a new cluster checksums, and both must have them or neither.
        'cd "$1" && { [ "$2" = "$3" ] || "$3/pg_checksums" --disable -D "$5"; } && '
        'exec "$3/pg_upgrade" -b "$2" -B "$3" -d "$4" -D "$5" -U postgres'
    )
    arguments = [str(folder), *binaries, str(old.data_dir), str(new.data_dir)]
    done = subprocess.run(
        ["/bin/sh", "-c", script, "upgrade", *arguments],
        capture_output=True,
        text=True,
        timeout=_ANSWER_S,
        **new._account.popen_options(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return new
