"""``start`` with a Spark session that is not RayDP's: the rows in memory reach it through the storage.

Each test is a script of its own, because a process has one SparkContext. A script may read two slots, one after the
other: a function gets the rows of one, and a Delta root those of the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.postgres_fixtures import Database

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("postgres_server", [18], indirect=True)]
REPOSITORY = Path(__file__).parents[2]

SCRIPT = """
import json
import sys

from pyspark.sql import SparkSession

from xidstream import ChangeStream

settings, delta = json.loads(sys.argv[1]), json.loads(sys.argv[2])
builder = SparkSession.builder.master(settings.pop("master")).config("spark.ui.enabled", "false")
# Not ours: a user's session has whatever zone it has.
builder = builder.config("spark.sql.session.timeZone", "Asia/Tokyo").config("spark.driver.host", "127.0.0.1")
spark = builder.config("spark.executor.memory", "512m").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
tables = {}


def handle(batch):
    for name in batch.tables:
        frame = batch.dataframe(name).selectExpr("id", "note", "cast(at as double) as at", "_seq", "_commit_lsn")
        tables.setdefault(name, []).extend([list(row) for row in frame.collect()])
    tables.setdefault("messages", []).extend([row.prefix for row in batch.messages.collect()])
    tables.setdefault("transactions", []).extend([row.rows for row in batch.transactions.collect()])


ChangeStream(settings).trigger(availableNow=True).foreachBatch(handle).start(spark).awaitTermination()
if delta:
    stream = ChangeStream({**settings, "slot": delta["slot"]}).trigger(availableNow=True).toDelta(delta["root"])
    stream.start(spark).awaitTermination()
print("RESULT", json.dumps(tables))
"""


def run_script(folder: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env |= {
        "PYTHONPATH": str(REPOSITORY),
        "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    file = folder / "script.py"
    file.write_text(script)
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
        env=env,
        check=False,
    )


def settings(database: Database, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "master": "local[2]",
        "dsn": database.dsn(),
        "slot": f"s_{database.name}",
        "publication": "p",
        "storage": str(folder / "storage"),
        "buffers_max": 2,
        **more,
    }


def set_up(database: Database) -> None:
    for name in ("small", "large", "spilled"):
        database.execute(f"create table {name} (id bigint primary key, note text, at timestamptz)")
    database.execute("create publication p for all tables")
    for slot in (f"s_{database.name}", f"d_{database.name}"):
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", slot)


ROWS = "insert into {} select i, 'note ' || i, '2024-03-10 01:02:03.25+00' from generate_series({}::int, {}::int) i"


def change(database: Database) -> None:
    """A few rows, rows that are more than travel inside a function, and rows that a buffer spills."""
    database.execute(ROWS.format("small", 1, 7))
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format("large", 1, 10_000).encode())
        session.execute(b"select pg_logical_emit_message(true, 'with it', 'x')")
        session.execute(b"savepoint s")
        session.execute(ROWS.format("large", 50_001, 52_000).encode())
        session.execute(b"rollback to savepoint s")
        session.execute(b"commit")
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format("spilled", 1, 60_000).encode())
        session.execute(b"commit")


TABLES = (("small", 7), ("large", 10_000), ("spilled", 60_000))


def expected(n: int) -> list[list[Any]]:
    return [[i, f"note {i}", 1710032523.25] for i in range(1, n + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("master", "to_delta"),
    [("local[2]", True), ("local-cluster[2,1,700]", False)],
    ids=["local", "cluster"],
)
def test_a_plain_session_gets_every_row_through_the_storage_writes_delta_tables_and_leaves_nothing_there(
    database: Database, tmp_path: Path, master: str, to_delta: bool
) -> None:
    """It failed with a TypeError whose text was withheld."""
    set_up(database)
    change(database)
    given = settings(
        database, tmp_path, master=master, buffer_memory_bytes="2MB", logical_decoding_work_mem="64kB"
    )
    root = tmp_path / "delta"
    delta = {"slot": f"d_{database.name}", "root": str(root)} if to_delta else None
    done = run_script(tmp_path, json.dumps(given), json.dumps(delta))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    for name, n in TABLES:
        rows = sorted(result[f"public.{name}"], key=lambda row: (row[4], row[3]))
        assert [row[:3] for row in rows] == expected(n), name
        assert [row[3] for row in rows] == list(range(n))
    assert result["transactions"] == [7, 10_000, 60_000]
    assert result["messages"] == ["with it"]
    assert list((tmp_path / "storage").rglob("*.arrow")) == []
    for name, n in TABLES if to_delta else ():
        rows = DeltaTable(str(root / f"public.{name}")).to_pyarrow_table().sort_by("id").to_pylist()
        assert [[row["id"], row["note"], row["at"].timestamp()] for row in rows] == expected(n), name
        assert [row["_seq"] for row in rows] == list(range(n))


NOT_THERE = """
import sys

from pyspark.sql import SparkSession

from xidstream import ChangeStream

stream = ChangeStream({"dsn": sys.argv[1], "slot": sys.argv[2], "publication": "p", "storage": sys.argv[3]})
builder = SparkSession.builder.master(sys.argv[4]).config("spark.driver.host", "127.0.0.1")
spark = builder.config("spark.executorEnv.PYTHONPATH", "/nowhere").getOrCreate()
for session in (None, spark):
    try:
        stream.foreachBatch(print).start(session)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
spark.stop()
try:
    stream.foreachBatch(print).start(spark)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_what_is_no_session_or_has_ended_is_refused_at_once(database: Database, tmp_path: Path) -> None:
    set_up(database)
    script = NOT_THERE.replace("(None, spark)", "(None,)")
    given = [database.dsn(), f"s_{database.name}", str(tmp_path / "storage"), "local[1]"]
    done = run_script(tmp_path, *given, script=script)
    assert done.returncode == 0, done.stderr
    assert "UsageError: start() needs a SparkSession, not a NoneType" in done.stdout
    assert "UsageError: the Spark session has ended" in done.stdout
