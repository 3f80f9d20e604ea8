"""``spark = local`` and ``raydp`` as a user runs them, and several slots on a small machine: processes of their own."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.stranger import asked
from tests.e2e.test_command_line import (
    ROWS,
    SMALL_SEGMENTS,
    ask_for_spark,
    delta,
    environment,
    options,
    run,
    set_up,
)
from tests.e2e.test_locked import LOOPBACK, listening, table, tells
from tests.postgres_fixtures import Database
from tests.processes import Living, living_below
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("postgres_server", [18], indirect=True)]
REPOSITORY = Path(__file__).parents[2]

# Tells of its session, and has rows of the batch pass Spark's Python, wherever its tasks run.
HANDLER = """
import json
from pathlib import Path

HERE = Path(__file__).parent


def handle(batch):
    orders = batch.dataframe("public.t")
    context = orders.sparkSession.sparkContext
    block_manager = context._jvm.org.apache.spark.SparkEnv.get().blockManager().blockManagerId()
    ids = sorted(row.id for row in orders.select("id").mapInArrow(lambda rows: rows, "id long").collect())
    with open(HERE / "seen.json", "a") as file:
        print(json.dumps({
            "ids": ids,
            "master": context.master,
            "authenticate": context.getConf().get("spark.authenticate", "false"),
            "rpc": int(context.getConf().get("spark.driver.port")),
            "blocks": block_manager.port(),
        }), file=file, flush=True)
"""

# The first call needs more than the heap of whoever runs its task.
HUNGRY = """
from pathlib import Path

HERE = Path(__file__).parent


def handle(batch):
    frame = batch.dataframe("public.t")
    if not (HERE / "began").exists():
        (HERE / "began").touch()
        long = "size(collect_list(concat(id, repeat('x', 100000))))"
        frame.sparkSession.range(0, 100_000_000, 1, 1).selectExpr(long).collect()
    with open(HERE / "ids", "a") as file:
        print(*sorted(row.id for row in frame.collect()), file=file, flush=True)
"""


@contextmanager
def running(
    folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A run that has the modules of ``folder``. Ended in order."""
    path = f"{folder}{os.pathsep}{REPOSITORY}"
    process = subprocess.Popen(
        [sys.executable, "-m", "actors", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment({"XIDSTREAM_TEST_MARK": str(folder), "PYTHONPATH": path, **(env or {})}),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        (folder / "output").write_text(output)


def seen(folder: Path) -> list[dict[str, Any]]:
    file = folder / "seen.json"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def java(processes: list[Living]) -> list[Living]:
    return [process for process in processes if process.name == "java"]


def make_slot(database: Database, name: str | None = None) -> None:
    slot = name or f"s_{database.name}"[:63]
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", slot)


@pytest.mark.slow
def test_raydps_executors_on_one_machine_read_rows_from_rays_object_store_and_answer_nobody_else(
    database: Database, tmp_path: Path, short_folder: Path
) -> None:
    """Every login could run code through the gateway of RayDP's master."""
    set_up(database)
    make_slot(database)
    database.execute(ROWS.format(1, 1000))
    (tmp_path / "handler.py").write_text(HANDLER)
    (tmp_path / "settings.toml").write_text('spark = "raydp"\n')
    arguments = options(database, tmp_path, sink="foreach:handler:handle")
    libraries = set(Path("/tmp/ray").glob("[0-9]*"))
    environment = {"RAY_TMPDIR": str(short_folder)}
    with running(
        tmp_path, *arguments, "--config", str(tmp_path / "settings.toml"), env=environment
    ) as process:
        wait_until(lambda: bool(seen(tmp_path)) or process.poll() is not None, 240)
        assert process.poll() is None
        run = psutil.Process(process.pid)
        processes = [Living(run, run.name(), tuple(run.cmdline())), *living_below(process.pid)]
        ports = listening(processes, process.pid)
        (file,) = short_folder.glob("xids-*/t/spark-*.credentials")
        answers, rights = asked(list(ports), [file])
        secret = file.read_bytes()[-64:].decode()
        logs = [path for path in short_folder.glob("xids-*/r/session_2*/logs/**/*") if path.is_file()]
        telling = [each.name for each in processes if tells(each, secret)]
        telling += [str(path) for path in logs if secret.encode() in path.read_bytes()]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    output = (tmp_path / "output").read_text()
    assert process.returncode == 0, output
    (session,) = seen(tmp_path)
    assert session["ids"] == list(range(1, 1001)) and session["master"].startswith("ray")
    assert session["authenticate"] == "true"
    found = [" ".join(each.command) for each in processes]
    # The application master's gateway, and an executor.
    assert any("PythonGatewayServer" in command for command in found)
    assert any("-Dspark.driver.port=" in command for command in found)
    assert {address for _, address in ports.values()} <= set(LOOPBACK)
    on_page = {(row[0], row[2], row[3]) for name in ("process", "RayDP's process") for row in table(name)}
    assert {(name, *answers[port]) for port, (name, _) in ports.items()} <= on_page
    assert telling == [] and logs
    # Another login could have put a library there, and could foretell where.
    assert set(Path("/tmp/ray").glob("[0-9]*")) <= libraries
    if os.geteuid() == 0:
        assert rights == {str(file): []}
    assert not list((tmp_path / "segments").rglob("*.arrow")), "rows went through the object store"


@pytest.mark.slow
def test_a_run_into_delta_has_no_jvm_until_a_batch_needs_one(database: Database, tmp_path: Path) -> None:
    set_up(database)
    make_slot(database)
    with running(tmp_path, *options(database, tmp_path, *SMALL_SEGMENTS)) as process:

        def n_committed() -> int:
            return len(delta(tmp_path, "_transactions"))

        database.execute(ROWS.format(1, 1000))
        wait_until(lambda: n_committed() == 1 or process.poll() is not None, 180)
        assert process.poll() is None
        assert not java(living_below(process.pid))
        others = ask_for_spark(database.execute, 1001)
        wait_until(lambda: n_committed() == 3 or process.poll() is not None, 180)
        assert process.poll() is None
        assert len(java(living_below(process.pid))) == 1
    output = (tmp_path / "output").read_text()
    assert process.returncode == 0, output
    assert [row["id"] for row in delta(tmp_path, "public.t")] == [*range(1, 1001), *others]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_that_needs_more_than_the_heap_costs_the_jvm_and_no_row(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    make_slot(database)
    database.execute(ROWS.format(1, 1000))
    (tmp_path / "hungry.py").write_text(HUNGRY)
    with running(
        tmp_path, *options(database, tmp_path, "--available-now", sink="foreach:hungry:handle")
    ) as process:
        wait_until(lambda: process.poll() is not None, 480)
    output = (tmp_path / "output").read_text()
    assert process.returncode == 0, output
    assert "starting again" in output
    ids = [int(each) for each in (tmp_path / "ids").read_text().split()]
    assert ids == list(range(1, 1001))


def slots_toml(database: Database, folder: Path, n: int, *more: str) -> tuple[str, list[str]]:
    names = [f"s_{database.name}_{i}" for i in range(n)]
    lines = [
        f'dsn = "{database.dsn()}"',
        'publication = "p"',
        f'storage = "{folder}/segments"',
        f"buffers_max = {n}",
        "available_now = true",
        *more,
        *(f'[[slots]]\nslot = "{name}"\nsink = "delta:{folder}/{name}/delta"' for name in names),
    ]
    path = folder / "slots.toml"
    path.write_text("\n".join(lines))
    return str(path), names


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spark", ["local", pytest.param("raydp", marks=pytest.mark.nightly)])
def test_six_slots_of_one_run_deliver_everything_on_two_cpus(
    database: Database, tmp_path: Path, spark: str
) -> None:
    """With RayDP they started, and each ended after two minutes: no CPUs were left for an executor."""
    set_up(database)
    path, names = slots_toml(database, tmp_path, 6, f'spark = "{spark}"')
    for name in names:
        make_slot(database, name)
    database.execute(ROWS.format(1, 20_000))
    done = run("run", "--config", path, env={"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert "CPUs" not in done.stderr, done.stderr
    for name in names:
        assert [row["id"] for row in delta(tmp_path / name, "public.t")] == list(range(1, 20_001))


@pytest.mark.slow
def test_more_slots_than_a_machine_has_cpus_for_are_refused_by_check_and_by_run_before_ray_starts(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    path, names = slots_toml(database, tmp_path, 3, "create_slot = true")
    small = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 0.1}', "XIDSTREAM_TEST_MARK": str(tmp_path)}
    for name in names:
        make_slot(database, name)
    checked = run("check", "--config", path, env=small)
    assert checked.returncode == 3, checked.stdout + checked.stderr
    refused = run("run", "--config", path, env=small)
    assert refused.returncode == 3, refused.stderr
    for said in (checked.stdout, refused.stderr):
        assert "this machine is too small for the run: 3 slots would ask Ray for 0.85 CPUs" in said, said
        assert "it has 0.1" in said and "fewer slots" in said
    assert "waiting for Ray" not in refused.stderr
    enough = run("check", "--config", path, env={"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'})
    assert enough.returncode == 0, enough.stdout + enough.stderr
    assert "3 slots of this run: Ray is asked for 0.85 of this machine's 2 CPUs at the start" in enough.stdout


def test_the_setting_is_one_of_three(database: Database, tmp_path: Path) -> None:
    wrong = run(*options(database, tmp_path, "--spark", "yarn"))
    assert wrong.returncode == 2 and "spark must be auto, local or raydp, got 'yarn'" in wrong.stderr
