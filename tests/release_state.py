"""What a release leaves behind, kept for those after it: ``python -m tests.release_state`` makes the archive.

A server's data, a storage and a Delta root, as a run of this version left them on one day: delivered transactions,
small ones and one whose files are linked; a snapshot; a column that came later; base tables; and what the next run has
to deliver, a transaction in the journal and a prepared one in segments. ``tests/e2e/test_releases.py`` unpacks each of
them, and goes on with the xidstream of the checkout.

One archive for each release, made by the release itself, and never changed afterwards. Until 0.1.0 is released its
archive is made anew where a stored document has another version. A server's files are read by the same major version
on machines of the same kind (x86-64, arm64: little-endian, eight bytes), so PostgreSQL 18 is kept.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import psycopg

from tests.postgres_fixtures import FAST
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

RELEASES = Path(__file__).parent / "e2e" / "releases"
GID = "left prepared"
_ANSWER_S = 300
_SCHEMA = """
    create table orders (id bigint primary key, customer int, note text, amount numeric(12,2), at timestamptz);
    create table customers (id int primary key, name text);
    create publication p for table orders, customers;
    insert into customers select i, 'customer ' || i from generate_series(1, 50) i;
"""
_DELIVERED = (
    """insert into orders select i, i % 50 + 1, 'note ' || i, i / 100.0, timestamptz '2026-01-01' + i * interval '1 min'
       from generate_series(1, 20000) i""",
    "update orders set amount = amount + 1 where id % 100 = 0; delete from orders where id % 500 = 1",
    "alter table customers add column mail text; update customers set mail = name || '@example.org' where id <= 10",
    "update customers set id = id + 1000 where id = 7",
)
_CAPTURED = "insert into orders select i, 1, 'captured', 1, now() from generate_series(30001, 30100) i"
_PREPARED = "insert into orders select i, 2, 'prepared', 2, now() from generate_series(40001, 45000) i"


class Left:
    """The state below ``folder``; its server is up."""

    def __init__(self, folder: Path, server: EmbeddedPostgres) -> None:
        self.folder, self.server = folder, server
        self.root = folder / "tables"

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as session:
            cursor = session.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def xidstream(self, command: str, *more: str) -> str:
        """What it prints. Raises AssertionError with that where the status is not 0."""
        options = []
        if command != "mirror":
            options += ["--dsn", self.server.conninfo(), "--publication", "p", "--slot", "s"]
            options += ["--storage", str(self.folder / "segments"), "--logical-decoding-work-mem", "64kB"]
            options += ["--two-phase"]
        if command != "capture":
            options += ["--sink", f"delta:{self.root}"]
        done = subprocess.run(
            [sys.executable, "-m", "actors", command, *options, *more],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def deliver(self) -> None:
        self.xidstream("run", "--available-now", "--create-slot")


@contextmanager
def left(folder: Path) -> Iterator[Left]:
    """The server of the state below ``folder``, or of a new one."""
    server = EmbeddedPostgres(folder / "data", settings=FAST)
    with server:
        yield Left(folder, server)


def make(state: Left) -> None:
    state.execute(_SCHEMA)
    state.deliver()
    for statement in _DELIVERED:
        state.execute(statement)
    state.deliver()
    state.xidstream("mirror")
    state.execute(_CAPTURED)
    with psycopg.connect(state.server.conninfo()) as session:
        session.execute(_PREPARED.encode())
        session.execute(f"prepare transaction '{GID}'".encode())
    state.xidstream("capture", "--available-now")
    state.execute("checkpoint")


def main() -> None:
    RELEASES.mkdir(exist_ok=True)
    archive = RELEASES / f"{metadata.version('xidstream')}.tar.xz"
    with tempfile.TemporaryDirectory(prefix="xs-release-") as name:
        folder = Path(name)
        with left(folder) as state:
            make(state)
        (folder / "data" / "xidstream.conf").unlink()
        with tarfile.open(archive, "w:xz", preset=9) as file:
            for part in ("data", "segments", "tables"):
                file.add(folder / part, part, filter=_nobodys)
    print(archive, archive.stat().st_size >> 10, "KiB")


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if member.name.endswith((".log", "postmaster.opts")) else member


if __name__ == "__main__":
    main()
