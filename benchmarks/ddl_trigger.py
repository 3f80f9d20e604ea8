"""What the event triggers of ``source prepare`` cost a DDL: ``python -m benchmarks.ddl_trigger``. It prints a table.

Two databases of one server, one of them prepared, take the same commands in turn (paired, and the order changes from
round to round). A round is one transaction that is rolled back, so no command waits for the disk. What counts is the
time that the session's server process was on a CPU (``/proc/PID/schedstat``): other work of the machine does not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.postgres.ddl_trigger import prepare

COMMANDS = {
    "ALTER TABLE … SET STATISTICS": ("ALTER TABLE t ALTER n SET STATISTICS {i}",),
    "ALTER TABLE … ADD COLUMN": ("ALTER TABLE t ADD c{i} int",),
    "ALTER TABLE … TYPE, 1,000 rows": ("ALTER TABLE t ALTER n TYPE {type}",),
    "DROP TABLE (and its CREATE)": ("CREATE TABLE u{i} (id int PRIMARY KEY)", "DROP TABLE u{i}"),
    "CREATE TABLE": ("CREATE TABLE v{i} (id int PRIMARY KEY)",),
    "CREATE TEMP TABLE, ALTER, DROP": (
        "CREATE TEMP TABLE x{i} (id int)",
        "ALTER TABLE x{i} ADD c int",
        "DROP TABLE x{i}",
    ),
    "COMMENT": ("COMMENT ON TABLE t IS 'number {i}'",),
}


def cpu_s(connection: psycopg.Connection[Any], statements: tuple[str, ...], n: int) -> float:
    """Of one of ``n`` repetitions."""
    texts = [s.format(i=1 + i, type=("bigint", "int")[i % 2]).encode() for i in range(n) for s in statements]
    account = Path(f"/proc/{connection.info.backend_pid}/schedstat")
    connection.execute("BEGIN")
    before_ns = int(account.read_text().split()[0])
    for text in texts:
        connection.execute(text)
    spent_ns = int(account.read_text().split()[0]) - before_ns
    connection.execute("ROLLBACK")
    return spent_ns / 1e9 / n


def first(conninfo: Callable[[str], str], name: str) -> float:
    """Of the first command of a session."""
    with psycopg.connect(conninfo(name), autocommit=True) as connection:
        return cpu_s(connection, COMMANDS["ALTER TABLE … ADD COLUMN"], 1)


def paired(run: Callable[[Any], float], plain: Any, prepared: Any, rounds: int) -> str:
    pairs = []
    for i in range(rounds):
        first, second = (plain, prepared) if i % 2 else (prepared, plain)
        times = {id(each): run(each) for each in (first, second)}
        pairs.append((times[id(plain)], times[id(prepared)]))
    without, with_ = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    more = statistics.median(b - a for a, b in pairs) * 1e6
    ratio = statistics.median(b / a for a, b in pairs)
    return f"{without:8.0f} µs  {with_:8.0f} µs  {more:+6.0f} µs  {ratio:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repetitions", type=int, default=100)
    options = parser.parse_args()
    for version in (16, 18):
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbeddedPostgres(Path(folder) / "data", version=version) as server,
        ):
            with psycopg.connect(server.conninfo(), autocommit=True) as admin:
                for name in ("plain", "prepared"):
                    admin.execute(f"CREATE DATABASE {name}".encode())
            databases = [psycopg.connect(server.conninfo(n), autocommit=True) for n in ("plain", "prepared")]
            for database in databases:
                database.execute("CREATE TABLE t (id int PRIMARY KEY, n int)")
                database.execute("INSERT INTO t SELECT i, i FROM generate_series(1, 1000) i")
            prepare(databases[1])
            print(
                f"PostgreSQL {version}:  without, with, difference, ratio (medians of {options.rounds} pairs)"
            )
            for what, statements in COMMANDS.items():
                result = paired(
                    lambda each, s=statements: cpu_s(each, s, options.repetitions),  # type: ignore[misc]
                    *databases,
                    options.rounds,
                )
                print(f"  {what:34} {result}", flush=True)
            result = paired(partial(first, server.conninfo), "plain", "prepared", options.rounds)
            print(f"  {'the first ALTER TABLE of a session':34} {result}", flush=True)
            for database in databases:
                database.close()


if __name__ == "__main__":
    main()
