"""The command line as a user runs it: a process of its own, with its own Ray and Spark session."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.postgres_fixtures import Database
from tests.processes import living_below, spark_driver_jvms
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e
NEWEST = pytest.mark.parametrize("postgres_server", [18], indirect=True)
OURS = re.compile(
    r"(\d+ s: (waiting for|reading slot) |waiting for the Spark session |done: |the status page of this run: |"
    r"(caught|keeping|catching) up|(no longer )?stalled: ).*"
)
"""The lines of a run that goes well, on a slow machine, too: Ray, Spark and RayDP say nothing beside them."""
XIDSTREAM = [sys.executable, "-m", "actors"]
ROWS = "insert into t select i, 'note ' || i from generate_series({}::bigint, {}::bigint) i"


def run(
    *arguments: str, timeout_s: float = 180, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*XIDSTREAM, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=environment(env),
        check=False,
    )


# In front of a command: on a host whose name (reserved for that) no name service ever has.
NAMELESS = ["unshare", "--uts", "sh", "-c", 'hostname xidstream-test.invalid && exec "$@"', "sh"]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Not the Ray of the test process: a user's shell has none."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**env, **(extra or {})}


def set_up(database: Database) -> None:
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")


def drivers_of(pid: int) -> set[int]:
    """The processes of the run's Spark driver actor."""
    return {each.process.pid for each in living_below(pid) if "ray::SparkDriver" in each.command[:1]}


SMALL_SEGMENTS = ("--logical-decoding-work-mem", "64kB", "--buffer-memory-bytes", "1MB")


def ask_for_spark(execute: Callable[[str], object], first: int, note: str = "extra") -> range:
    """Commit two transactions into ``t``, the second of which a run with ``SMALL_SEGMENTS`` into Delta needs Spark for,
    and no earlier one. The ids of their rows."""
    # Another type under the name is another column of the Delta table: segments do not have it where it is.
    for statement in (
        "alter table t add column extra int",
        f"insert into t values ({first}, '{note}', 1)",
        "alter table t alter extra type text using extra::text",
        f"insert into t select i, '{note}', i from generate_series({first + 1}, {first + 200_000}) i",
    ):
        execute(statement)
    return range(first, first + 200_001)


def options(database: Database, folder: Path, *more: str, sink: str | None = None) -> list[str]:
    return [
        "run",
        "--dsn",
        database.dsn(),
        "--slot",
        f"s_{database.name}"[:63],
        "--publication",
        "p",
        "--storage",
        str(folder / "segments"),
        "--sink",
        sink or f"delta:{folder / 'delta'}",
        *more,
    ]


def delta(folder: Path, table: str) -> list[dict[str, Any]]:
    """The rows in their order; none while nothing of the table is committed, though its folder may be there."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        rows = DeltaTable(str(folder / "delta" / table)).to_pyarrow_table().to_pylist()
    except TableNotFoundError:
        return []
    key = "commit_lsn" if table.startswith("_") else "_commit_lsn"
    return sorted(rows, key=lambda r: (r[key], r.get("_seq", 0)))


@pytest.mark.slow
@NEWEST
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*NAMELESS, "true"], check=False, capture_output=True).returncode != 0,
    reason="this user may not give a process a host name of its own",
)
def test_a_host_whose_own_name_cannot_be_resolved_is_no_obstacle_but_for_aws_keys(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    slot = f"s_{database.name}"[:63]
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    database.execute(ROWS.format(1, 1000))
    without = {k: v for k, v in environment().items() if not k.startswith("AWS_")}

    def run_there(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*NAMELESS, *XIDSTREAM, *options(database, tmp_path, "--available-now")],
            capture_output=True,
            text=True,
            timeout=240,
            stdin=subprocess.DEVNULL,
            env=env,
            check=False,
        )

    refused = run_there({**without, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"})
    assert refused.returncode == 3, refused.stderr
    assert "host name cannot be resolved (xidstream-test.invalid)" in refused.stderr
    assert "/etc/hosts" in refused.stderr and "Traceback" not in refused.stderr
    done = run_there(without)
    assert done.returncode == 0, done.stderr
    assert [r["id"] for r in delta(tmp_path, "public.t")] == list(range(1, 1001))


@pytest.mark.slow
@NEWEST
def test_kill_9_of_the_runs_process_group_leaves_no_process_and_available_now_then_leaves_exactly_the_committed_rows(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    slot = f"s_{database.name}"[:63]
    created = run("slot", "create", "--dsn", database.dsn(), "--slot", slot, "--two-phase")
    assert created.returncode == 0, created.stderr
    killed = subprocess.Popen(
        [*XIDSTREAM, *options(database, tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=environment({"XIDSTREAM_TEST_MARK": str(tmp_path)}),
        start_new_session=True,
    )
    try:
        wait_for_reader(database)
        database.execute(ROWS.format(1, 5000))
        wait_until(lambda: bool(delta(tmp_path, "_transactions")))
        database.execute(ROWS.format(5001, 50_000))
    finally:
        # Nothing that the run started may depend on its handlers, or on a parent that lives.
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    wait_until(lambda: not marked(str(tmp_path)))
    change_in_every_way(database)
    # Else the next run would tell that it waits for the slot.
    wait_until(lambda: not is_read(database))
    done = run(*options(database, tmp_path, "--available-now", "--logical-decoding-work-mem", "1MB"))
    assert done.returncode == 0, done.stderr
    assert "done:" in done.stderr
    assert [line for line in done.stderr.splitlines() if not OURS.fullmatch(line)] == []
    rows = delta(tmp_path, "public.t")
    inserted = [r["id"] for r in rows if r["_change_type"] == "insert"]
    assert inserted == [*range(1, 50_001), *range(100_001, 160_001), *range(400_001, 440_001)]
    assert [(r["id"], r["note"]) for r in rows if r["_change_type"] == "update_postimage"] == [(7, "changed")]
    transactions = delta(tmp_path, "_transactions")
    assert [t["rows"] for t in transactions] == [5000, 45_000, 60_000, 40_000, 1]
    assert [(t["gid"], t["streamed"]) for t in transactions[2:]] == [
        (None, True),
        ("committed", True),
        (None, False),
    ]
    streamed = database.execute(
        "select stream_txns from pg_stat_replication_slots where slot_name = %s", slot
    )
    assert streamed[0][0] > 0
    assert [p for p in tmp_path.rglob("*") if p.stat().st_mode & 0o077] == [], "others may read rows"
    database.execute("rollback prepared 'pending'")


def change_in_every_way(database: Database) -> None:
    """Commit 60,000 rows, 40,000 that were prepared, and an update; the other rows are rolled back, or pending."""
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format(100_001, 160_000).encode())
        session.execute(b"savepoint s")
        session.execute(ROWS.format(200_001, 230_000).encode())
        session.execute(b"rollback to savepoint s")
        session.execute(b"commit")
        session.execute(b"begin")
        session.execute(ROWS.format(300_001, 360_000).encode())
        session.execute(b"rollback")
        session.execute(b"begin")
        session.execute(ROWS.format(400_001, 440_000).encode())
        session.execute(b"prepare transaction 'committed'")
        session.execute(b"begin")
        session.execute(ROWS.format(500_001, 540_000).encode())
        session.execute(b"prepare transaction 'pending'")
        session.execute(b"commit prepared 'committed'")
        session.execute(b"update t set note = 'changed' where id = 7")


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize("spark", ["local", "raydp"])
def test_a_lost_jvm_is_replaced_and_sigterm_then_ends_the_run_with_everything_confirmed(
    database: Database, tmp_path: Path, spark: str
) -> None:
    set_up(database)
    settings = ("--create-slot", "--snapshot", "never", "--spark", spark)
    process = subprocess.Popen(
        [*XIDSTREAM, *options(database, tmp_path, *settings, *SMALL_SEGMENTS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        wait_for_reader(database)
        database.execute(ROWS.format(1, 1000))
        wait_until(lambda: bool(delta(tmp_path, "_transactions")))
        others = ask_for_spark(database.execute, 1_000_000)
        wait_until(lambda: len(delta(tmp_path, "_transactions")) == 3, 180)
        jvms = spark_driver_jvms(process.pid)
        assert len(jvms) == 1
        senders = walsenders(database)
        drivers = drivers_of(process.pid)
        jvms[0].kill()
        # Noticed although nothing is being written: the next batch that needs the JVM must not be the first to find it.
        wait_until(lambda: bool(drivers_of(process.pid) - drivers), 120)
        database.execute(ROWS.format(1001, 2000))
        wait_until(lambda: len(delta(tmp_path, "_transactions")) == 4, 180)
        assert walsenders(database) == senders, "nothing was read anew"
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "starting again" in output
    assert [r["id"] for r in delta(tmp_path, "public.t")] == [*range(1, 1001), *others, *range(1001, 2001)]
    confirmed = database.execute(
        "select (confirmed_flush_lsn - '0/0')::bigint, active from pg_replication_slots where slot_name = %s",
        f"s_{database.name}"[:63],
    )
    assert confirmed[0][0] >= delta(tmp_path, "_transactions")[-1]["end_lsn"] and not confirmed[0][1]


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_stopped_while_ray_starts_ends_it_whole_with_status_0(
    database: Database, tmp_path: Path, number: signal.Signals
) -> None:
    set_up(database)
    with started(tmp_path, *options(database, tmp_path, "--create-slot")) as process:
        wait_until(lambda: any("gcs_server" in command for command in commands(str(tmp_path))))
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "stopped before anything was read" in output and "Traceback" not in output
    assert not marked(str(tmp_path))
    assert database.execute("select count(*) from pg_replication_slots") == [(0,)]


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    ("spark", "first", "last"),
    [
        pytest.param("local", "SparkSubmit", "-m xidstream.pipeline.spark.daemon", id="local"),
        # An executor comes after the master and the session, and nobody needs it any more.
        pytest.param("raydp", "PythonGatewayServer", "-Dspark.driver.port=", id="raydp"),
    ],
)
def test_a_run_stopped_while_spark_starts_and_the_slot_is_waited_for_waits_for_neither(
    database: Database, tmp_path: Path, spark: str, first: str, last: str
) -> None:
    set_up(database)
    seen: set[str] = set()

    def starts(jvm: str) -> bool:
        seen.update(commands(str(tmp_path)))
        return any(jvm in command for command in seen)

    with database.connect() as other:
        other.execute(b"begin")
        other.execute(ROWS.format(1, 1).encode())
        # A console has a session started at once.
        settings = options(database, tmp_path, "--create-slot", "--spark", spark, sink="console")
        with started(tmp_path, *settings) as process:
            waits = "select count(*) from pg_locks where locktype = 'transactionid' and not granted"
            wait_until(lambda: starts(first) and database.execute(waits) == [(1,)])
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: process.poll() is not None or starts(last))
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert not starts(last) and "Traceback" not in output and "***" not in output
        assert not marked(str(tmp_path))
        wait_until(lambda: database.execute("select count(*) from pg_replication_slots") == [(0,)])


@pytest.mark.slow
@NEWEST
@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (["--publication", "missing"], 3, "publication 'missing'"),
        (["--dsn", "host=127.0.0.1 port=1 dbname=x password=hunter2"], 3, "no server listens there"),
        (["--slot", "Bad-Name"], 2, "a-z, 0-9 and _"),
    ],
)
def test_what_is_missing_is_one_clear_line_with_its_status(
    database: Database, tmp_path: Path, change: list[str], status: int, says: str
) -> None:
    set_up(database)
    failed = run(*options(database, tmp_path, "--create-slot", "--available-now"), *change)
    assert failed.returncode == status, failed.stderr
    assert says in failed.stderr
    assert "Traceback" not in failed.stderr and "hunter2" not in failed.stderr


@NEWEST
def test_a_ray_that_is_not_there_is_one_clear_line_with_status_1(database: Database, tmp_path: Path) -> None:
    set_up(database)
    # An address that is none: Ray waits for minutes for one that does not answer, and "auto" finds other tests'.
    nowhere = {"RAY_ADDRESS": "nowhere"}
    failed = run(*options(database, tmp_path, "--create-slot", "--available-now"), env=nowhere)
    assert failed.returncode == 1, failed.stderr
    assert "the Ray cluster was not joined" in failed.stderr and "RAY_ADDRESS" in failed.stderr
    assert "Traceback" not in failed.stderr


@NEWEST
def test_settings_come_from_a_toml_file_and_the_environment(database: Database, tmp_path: Path) -> None:
    set_up(database)
    settings = tmp_path / "shop.toml"
    settings.write_text(
        f'slot = "s_{database.name}"\npublication = ["p"]\nstorage = "{tmp_path}/segments"\n'
        f'sink = "delta:{tmp_path}/delta"\ncreate-slot = true\nblock_bytes = "1MB"\n'
    )
    server = database.server
    environ = {
        "PGHOST": str(server.socket_dir),
        "PGPORT": str(server.port),
        "PGUSER": "postgres",
        "PGDATABASE": database.name,
    }
    checked = run("check", "--config", str(settings), env=environ)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "wrong.toml").write_text("slott = 's'\n")
    wrong = run("check", "--config", str(tmp_path / "wrong.toml"), env=environ)
    assert wrong.returncode == 2 and "did you mean slot?" in wrong.stderr


@pytest.mark.slow
def test_demo_ends_by_itself_with_its_proof_and_replaces_only_an_earlier_demos_folder(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    output.mkdir()
    (output / ".xidstream-demo").touch()
    (output / "stray").write_text("left by an earlier demo")
    shown = run("demo", "--rows", "60000", "--output", str(output))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "60,005" in shown.stdout and "NO" not in shown.stdout
    assert not (output / "stray").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("")
    refused = run("demo", "--output", str(tmp_path / "mine"))
    assert refused.returncode == 2 and (tmp_path / "mine" / "precious").exists()


@pytest.mark.slow
@NEWEST
def test_a_run_of_several_slots_does_what_can_be_done_and_ends_with_the_worst_status(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    database.execute("create table u (id int primary key, of_u text)")
    database.execute("create publication q for table u")
    names = [f"s_{database.name}_{n}" for n in ("t", "u", "x")]
    (tmp_path / "slots.toml").write_text(
        f'storage = "{tmp_path}/segments"\ncreate_slot = true\navailable_now = true\nbuffers_max = 4\n'
        f'dsn = "{database.dsn()}"\n'
        + "".join(
            f'[[slots]]\nslot = "{name}"\npublication = "{publication}"\nsink = "{sink}"\n'
            for name, publication, sink in zip(
                names,
                ["p", "q", "missing"],
                [f"delta:{tmp_path}/delta", "foreach:mine:handle", f"delta:{tmp_path}/never"],
                strict=True,
            )
        )
    )
    (tmp_path / "mine.py").write_text(
        "def handle(batch):\n    print('seen', batch.tables, batch.dataframe('public.u').count(), flush=True)\n"
    )
    for name in names[:2]:
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", name)
    database.execute(ROWS.format(1, 20_000))
    database.execute("insert into u select i, 'u' from generate_series(1, 500) i")
    with database.connect() as session:
        session.execute(b"begin")
        session.execute(ROWS.format(20_001, 80_000).encode())
        session.execute(b"insert into u values (1000, 'last')")
        session.execute(b"commit")
    done = run(
        "run",
        "--config",
        str(tmp_path / "slots.toml"),
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
    )
    assert done.returncode == 3, done.stderr
    assert f"{names[2]}: " in done.stderr and "missing" in done.stderr
    assert all(f"{name}: done: " in done.stderr for name in names[:2]), done.stderr
    assert [r["id"] for r in delta(tmp_path, "public.t")] == list(range(1, 80_001))
    assert done.stdout.count("seen ['public.u']") >= 1
    assert sum(int(line.split()[-1]) for line in done.stdout.splitlines() if "seen" in line) == 501
    assert not (tmp_path / "never").exists() and "Traceback" not in done.stderr
    assert "the status page of this run: http://127.0.0.1:" in done.stderr
    every = run("status", "--config", str(tmp_path / "slots.toml"))
    assert every.returncode == 3, "one of them is not there, which hides no other"
    assert names[1] in every.stdout and "does not exist" in every.stderr
    shown = run("status", "--config", str(tmp_path / "slots.toml"), "--slot", names[1])
    assert shown.returncode == 0 and names[1] in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_run_puts_a_slot_that_was_dropped_right_where_it_is_told_to_and_refuses_it_else(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    arguments = options(
        database, tmp_path, "--create-slot", "--available-now", sink=f"delta:{tmp_path / 'delta'}"
    )
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    slot = arguments[arguments.index("--slot") + 1]
    database.execute("select pg_drop_replication_slot(%s)", slot)
    database.execute("insert into t (id, note) values (1000, 'nobody can read this from the slot')")
    refused = run(*arguments)
    assert refused.returncode == 4, (refused.stdout, refused.stderr)
    healed = run(*arguments, "--on-slot-lost", "resync")
    assert healed.returncode == 0, (healed.stdout, healed.stderr)
    assert "the slot is made anew" in healed.stderr and "takes new snapshots" in healed.stderr
    last = [row for row in delta(tmp_path, "public.t") if row["id"] == 1000]
    assert [row["_change_type"] for row in last] == ["snapshot"]


def is_read(database: Database) -> bool:
    asked = "select active from pg_replication_slots where slot_name = %s"
    return database.execute(asked, f"s_{database.name}"[:63]) == [(True,)]


def walsenders(database: Database) -> list[tuple[int]]:
    asked = "select active_pid from pg_replication_slots where slot_name = %s"
    return database.execute(asked, f"s_{database.name}"[:63])


def wait_for_reader(database: Database) -> None:
    wait_until(lambda: is_read(database), 180)


@contextmanager
def started(mark: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose processes are ``marked``; killed if it lives at the end."""
    process = subprocess.Popen(
        [*XIDSTREAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment({"XIDSTREAM_TEST_MARK": str(mark)}),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def commands(mark: str) -> set[str]:
    """The command lines of ``marked`` processes."""
    found = set()
    for pid in marked(mark):
        with suppress(OSError):
            found.add((Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def marked(mark: str) -> list[int]:
    """Processes that were started, however indirectly, by a process with this mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"XIDSTREAM_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
