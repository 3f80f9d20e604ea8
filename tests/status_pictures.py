"""``python -m tests.status_pictures FOLDER``: what a person sees of a real run, in four scenes, as pictures and text.

A server and a run with its own Ray and Spark: while a large transaction is open and others commit, while a table's
snapshot is taken, and while the sink does not come back. Of each scene: the page in headless Chromium (light, wide; the
first one dark and on a phone, too), and the terminal's ``xidstream status``. docs/status.md shows some of them.

It needs ``pip install playwright`` and a Chromium on the PATH. It is no test: people look at what it made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Any

import psycopg

from tests.waiting import meanwhile
from xidstream import ChangeStream, SparkBatch, spark_session
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.settings.config import Config

_SLOT, _SLOT_PARKED = "pictures", "pictures_parked"
"""No other run of this machine has them: ``status`` finds runs by their slot."""
_SCHEMA = """
    create table orders (id bigint primary key, customer int, total numeric(12,2), note text);
    create table customers (id int primary key, name text);
    create table history (id bigint primary key, body text);
    insert into customers select i, 'customer ' || i from generate_series(1, 1000) i;
    insert into history select i, repeat(md5(i::text), 8) from generate_series(1, 1200000) i;
    create publication shop for table orders, customers;
"""
_WIDE, _PHONE = {"width": 1200, "height": 600}, {"width": 390, "height": 800}


class Pictures:
    """Of the page at ``url``. The page stays open for as long as this does, so that it has a history to show."""

    def __init__(self, browser: Any, url: str, folder: Path, slot: str = _SLOT) -> None:
        self._folder, self._slot = folder, slot
        self._pages = {
            name: browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1).new_page()
            for name, size, scheme in (
                ("light", _WIDE, "light"),
                ("dark", _WIDE, "dark"),
                ("phone", _PHONE, "light"),
            )
        }
        for page in self._pages.values():
            page.goto(url)

    def take(self, scene: str, *looks: str) -> None:
        for look in looks:
            page = self._pages[look]
            page.bring_to_front()
            page.wait_for_timeout(1500)
            page.screenshot(path=self._folder / f"{scene}-{look}.png", full_page=True)
        command = [sys.executable, "-m", "xidstream", "status", "--slot", self._slot]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        (self._folder / f"{scene}.txt").write_text(told.stdout + told.stderr)
        print(f"--- {scene}\n{told.stdout}{told.stderr}", flush=True)


@contextmanager
def _small_commits(connect: Callable[[], psycopg.Connection[Any]], number: int = 0) -> Iterator[None]:
    numbers = itertools.count(number)
    insert = "insert into orders select %s * 100 + i, i, i * 1.5, 'small' from generate_series(1, 20) i"
    with connect() as session, meanwhile(lambda: session.execute(insert, [next(numbers)]), every_s=0.05):
        yield


def _fill(session: psycopg.Connection[Any], first: int, n_rows: int) -> None:
    session.execute(
        b"insert into orders select i, i %% 1000, i * 1.25, repeat('large', 10)"
        b" from generate_series(%s::bigint, %s::bigint) i",
        [first, first + n_rows - 1],
    )


def _scenes(browser: Any, server: EmbeddedPostgres, folder: Path, work: Path) -> None:
    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(server.conninfo(), autocommit=True)

    spark = spark_session("xidstream-pictures")
    settings: dict[str, Any] = {
        "dsn": server.conninfo(),
        "slot": _SLOT,
        "publication": "shop",
        "create_slot": True,
        "storage": str(work / "storage"),
        "logical_decoding_work_mem": "1MB",
        "buffer_memory_bytes": 64 << 20,
        "status_address": "127.0.0.1:0",
    }
    with connect() as session:
        session.execute(_SCHEMA.encode())  # several statements in one
    query = (
        ChangeStream(Config(**settings, snapshot="initial", snapshot_bytes_per_s=24 << 20))
        .toDelta(str(work / "delta"))
        .start(spark)
    )
    try:
        pictures = Pictures(browser, _page_of(query), folder)
        with _small_commits(connect), connect() as large, connect() as other:
            time.sleep(10)
            large.execute(b"begin")
            other.execute(b"begin")
            _fill(other, 50_000_001, 150_000)
            for part in range(5):
                _fill(large, 10_000_001 + part * 200_000, 200_000)
                large.execute(b"savepoint s")
                _fill(large, 20_000_001, 10_000)
                large.execute(b"rollback to savepoint s")
            time.sleep(8)
            pictures.take("large", "light", "dark", "phone")
            large.execute(b"commit")
            other.execute(b"rollback")
            with connect() as session:
                session.execute(b"alter publication shop add table history")
            _wait(
                lambda: any(
                    t["rangesRead"] for t in (query.lastProgress["snapshots"] or {}).get("tables", ())
                )
            )
            pictures.take("snapshot", "light")
    finally:
        query.stop()
    held = threading.Event()

    def handle(batch: SparkBatch) -> None:
        held.wait(120)

    query = ChangeStream(Config(**settings, snapshot="never")).foreachBatch(handle).start(spark)
    try:
        pictures = Pictures(browser, _page_of(query), folder)
        with _small_commits(connect, 50_000):
            time.sleep(35)
            pictures.take("stalled", "light")
        held.set()
    finally:
        query.stop()


def _parked(browser: Any, server: EmbeddedPostgres, folder: Path, work: Path) -> None:
    """In a database of its own: a value that is no UTF-8 comes only from one without an encoding."""
    with psycopg.connect(server.conninfo(), autocommit=True) as session:
        session.execute("create database latin encoding 'SQL_ASCII' locale 'C' template template0")

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(server.conninfo("latin"), autocommit=True)

    with connect() as session:
        session.execute(_SCHEMA.replace("1200000", "10").encode())
    config = Config(
        dsn=server.conninfo("latin"),
        slot=_SLOT_PARKED,
        publication=("shop",),
        create_slot=True,
        storage=str(work / "parked"),
        on_poison="park",
        status_address="127.0.0.1:0",
    )
    spark = spark_session("xidstream-pictures")
    query = ChangeStream(config).toDelta(str(work / "delta-parked")).start(spark)
    try:
        pictures = Pictures(browser, _page_of(query, _SLOT_PARKED), folder, _SLOT_PARKED)
        with _small_commits(connect), connect() as session:
            time.sleep(10)
            session.execute(rb"update customers set name = E'Andr\xe9' where id = 17")
            session.execute(b"update customers set name = upper(name) where id > 900")
            time.sleep(20)
            pictures.take("parked", "light", "dark")
    finally:
        query.stop()


def _page_of(query: Any, slot: str = _SLOT) -> str:
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s:
        command = [sys.executable, "-m", "xidstream", "status", "--slot", slot, "--json"]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        with suppress(ValueError, KeyError, TypeError):
            account = json.loads(told.splitlines()[0]) if told else {}
            if account["run"]["state"] == "reading" and account["run"]["page"]:
                return str(account["run"]["page"])
        if not query.isActive:
            raise RuntimeError(f"the run has ended: {query.exception()}")
        time.sleep(2)
    raise TimeoutError("the run has no page")


def _wait(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 180
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.status_pictures", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parked", action="store_true", help="only the scene with a parked table")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xs-pictures-") as work, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        with EmbeddedPostgres(Path(work) / "data", settings={"max_slot_wal_keep_size": "2GB"}) as server:
            if not arguments.parked:
                _scenes(browser, server, folder, Path(work))
            _parked(browser, server, folder, Path(work))
        browser.close()


if __name__ == "__main__":
    main()
