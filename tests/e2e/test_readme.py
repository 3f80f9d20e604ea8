"""The README's script as a new user runs it: copied out, and nothing changed, on a machine of two CPUs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.processes import living_below

pytestmark = pytest.mark.e2e
REPOSITORY = Path(__file__).parents[2]
TWO_CPUS = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}

REFUSES = "raise SystemExit('the user\\'s own module was imported')\n"
"""A module of the user's that nobody asked for."""

USERS_ACTORS = """
import pyarrow


def doubled(batches):
    for batch in batches:
        ids = pyarrow.array([value * 2 for value in batch.column(0).to_pylist()], pyarrow.int32())
        yield pyarrow.RecordBatch.from_arrays([ids], ["id"])


def where():
    return __file__
"""

USERS_PIPELINE = """
import ray

import actors


def handle(batch):
    orders = batch.dataframe("public.orders")
    notes = {row.note for row in orders.collect()}
    if "refuse me" in notes:
        raise ValueError(*notes)
    ids = sorted(row.id for row in orders.select("id").mapInArrow(actors.doubled, "id int").collect())
    print("in executors", ids, flush=True)
    print("in a worker", ray.get(ray.remote(num_cpus=0)(actors.where).remote()), flush=True)
"""

CROWDED = """
import sys
import time

import raydp

from xidstream import ChangeStream
from xidstream.actors.runtime.ray_cluster import connect_ray

connect_ray()
spark = raydp.init_spark("crowded", num_executors=1, executor_cores=2, executor_memory="512m")
settings = {"dsn": "dbname=shop", "slot": "crowded", "publication": "shop", "create_slot": True}
stream = ChangeStream({**settings, "storage": sys.argv[1]})
began_s = time.monotonic()
try:
    stream.foreachBatch(print).trigger(availableNow=True).start(spark)
except Exception as error:
    print(f"{type(error).__name__}: {error} | {error.remedy}")
    print(f"waited {time.monotonic() - began_s:.0f} s")
"""


def script_of_readme() -> str:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 1, "there is one script in the README"
    return blocks[0]


def run_beside(server: Any, script: Path, *arguments: str, timeout_s: float) -> tuple[str, str]:
    """The script in a folder of its own: what it prints, and what it says on stderr."""
    return run_in(server, script.parent, str(script), *arguments, timeout_s=timeout_s)


def run_in(server: Any, folder: Path, *arguments: str, timeout_s: float, status: int = 0) -> tuple[str, str]:
    """Python in this folder, and libpq told by its variables where the server is. It must end with ``status``."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PG"))}
    env |= {"PGHOST": str(server.socket_dir), "PGPORT": str(server.port), "PGUSER": "postgres"}
    # Where xidstream is installed no path is needed.
    # The README's storage is below the user's home.
    env |= {**TWO_CPUS, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    try:
        output, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        below = living_below(process.pid)
        process.send_signal(signal.SIGKILL)
        output, said = process.communicate()
        for living in below:
            with suppress(psutil.NoSuchProcess):
                living.process.kill()
        pytest.fail(f"the script did not end within {timeout_s:.0f} s:\n{output}\n{said}")
    assert process.returncode == status, f"{output}\n{said}"
    return output, said


@pytest.fixture
def shop(own_postgres: Any) -> Any:
    """A server whose database, publication and slot are named as in the README."""
    server = own_postgres()
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("create database shop")
    with psycopg.connect(server.conninfo("shop"), autocommit=True) as source:
        source.execute("create table orders (id int primary key, note text)")
        source.execute("create publication shop for table orders")
        source.execute("select pg_create_logical_replication_slot('shop', 'pgoutput')")
        source.execute("insert into orders select i, 'note' from generate_series(1, 7) i")
    return server


@pytest.mark.slow
def test_the_readmes_script_runs_as_it_stands_on_two_cpus_beside_a_users_own_modules_and_ends(
    shop: Any, tmp_path: Path
) -> None:
    for name in ("pipeline.py", "actors.py"):
        (tmp_path / name).write_text(REFUSES)
    script = tmp_path / "script.py"
    script.write_text(script_of_readme())
    output, said = run_beside(shop, script, timeout_s=300)
    assert re.search(r"\|\s*insert\|\s*7\|", output), f"{output}\n{said}"
    assert "free CPUs" not in output and "Traceback" not in output
    # The slot was there before, so nobody knows that these rows came after it.
    note = "note: 1 table, about 7 rows from before the slot are not read (snapshot = never)"
    told = [line for line in said.splitlines() if not line.startswith(note)]
    assert told == [], "Ray, Spark and RayDP have nothing to tell where all goes well"
    assert (tmp_path / "shop" / "segments").is_dir()


@pytest.mark.slow
def test_a_sink_in_a_users_own_pipeline_py_runs_there_in_executors_and_in_ray_workers_and_its_error_has_status_1(
    shop: Any, tmp_path: Path
) -> None:
    (tmp_path / "pipeline.py").write_text(USERS_PIPELINE)
    (tmp_path / "actors.py").write_text(USERS_ACTORS)
    with psycopg.connect(shop.conninfo("shop"), autocommit=True) as source:
        source.execute("insert into orders select i, 'refuse me' from generate_series(1001, 4000) i")
    # The second transaction is streamed, so that it is a batch by itself.
    arguments = (
        "run", "--available-now", "--dsn", "dbname=shop", "--slot", "shop", "--publication", "shop",
        "--storage", str(tmp_path / "segments"), "--sink", "foreach:pipeline:handle",
        "--batch-rows", "1", "--logical-decoding-work-mem", "64kB",
    )  # fmt: skip
    output, said = run_in(shop, tmp_path, "-m", "xidstream", *arguments, timeout_s=300, status=1)
    assert "in executors [2, 4, 6, 8, 10, 12, 14]" in output, output
    assert f"in a worker {tmp_path / 'actors.py'}" in output, output
    assert "ValueError" in said and "raise ValueError(*notes)" in said and "--debug" in said, said
    assert "refuse me" not in output + said and "Traceback" not in said, "a message may quote a row"

    _, said = run_in(shop, tmp_path, "-m", "xidstream", "--debug", *arguments, timeout_s=300, status=1)
    assert "ValueError: refuse me" in said, said


@pytest.mark.slow
def test_a_session_that_takes_all_cpus_makes_start_fail_with_what_is_free_and_what_is_needed(
    shop: Any, tmp_path: Path
) -> None:
    script = tmp_path / "crowded.py"
    script.write_text(CROWDED)
    output, _ = run_beside(shop, script, str(tmp_path / "segments"), timeout_s=300)
    assert "PreconditionMissing" in output, output
    assert "need 0.25 CPUs, and 0 of 2 CPUs are free" in output, output
    assert "spark_session" in output
    waited = re.search(r"waited (\d+) s", output)
    # The limit that is promised, not how fast this machine is.
    assert waited is not None and int(waited[1]) < 60
