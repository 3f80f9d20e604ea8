"""Small tables whose snapshots are taken together, by a run that is killed whole, or loses its slot to another one.

The run is a process of its own, with its own Ray. At a fault point a process of it stands still (SIGSTOP). Then the
group is where the test wants it, for as long as the test needs. One reader has one group in hand at a time.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from deltalake import DeltaTable

from tests.chaos.kills import Plan
from tests.delivered import delivered_lsn
from tests.e2e.test_command_line import XIDSTREAM, environment, marked, options
from tests.e2e.test_snapshots import until
from tests.fold import Log
from tests.postgres_fixtures import Database
from tests.s3_server import S3Server
from tests.waiting import wait_until
from tests.waiting_rows import waiting_rows
from xidstream.pipeline.faultpoints import TOKENS_VARIABLE, VARIABLE
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import read_taken
from xidstream.pipeline.storage.storage import Storage

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("postgres_server", [18], indirect=True)]
N_TABLES = 40
NAMES = [f"s{i:02d}" for i in range(N_TABLES)]
ONCE = Counter((f"public.{name}", 1) for name in NAMES)
PATIENCE_S = 150
WRITER = "writer"


def make_tables(database: Database) -> None:
    for i, name in enumerate(NAMES):
        database.execute(f"create table {name} (id int primary key, n int)")
        database.execute(f"insert into {name} select i, i from generate_series(1, {i}) i")
    database.execute("create publication p for all tables")


class Writer(threading.Thread):
    """Changes the tables until it is stopped."""

    def __init__(self, database: Database) -> None:
        super().__init__(daemon=True)
        self._database = database
        self._ends = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> None:
        dice = random.Random(37)
        try:
            with self._database.connect(application_name=WRITER) as session:
                while not self._ends.wait(0.02):
                    session.execute(f"update {dice.choice(NAMES)} set n = n + 1 where id % 3 = 1".encode())
        except psycopg.Error as error:
            self._failure = error

    def stop(self) -> None:
        self._ends.set()
        self.join()
        assert self._failure is None, self._failure


class Scene:
    """``root``: of the log. ``settings``: deltalake's, and the environment's of a run."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        root: str,
        storage: str,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.database, self.root, self.storage = database, root, storage
        self.settings = settings or {}
        self.plan = Plan(folder / "plan")
        self._folder = folder
        arguments = options(database, folder, "--snapshot-connections", "1", sink=f"delta:{root}")
        arguments[arguments.index("--storage") + 1] = storage
        self.arguments = arguments
        self.slot = arguments[arguments.index("--slot") + 1]

    @contextmanager
    def run(self, name: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """A run, which is killed with all of its processes at the end, unless it has ended by then."""
        mark, output = self.mark(name), self._folder / f"{name}.log"
        env = {
            **self.settings,
            "XIDSTREAM_TEST_MARK": mark,
            VARIABLE: f"@{self.plan.file}",
            TOKENS_VARIABLE: str(self.plan.tokens),
        }
        with output.open("ab") as log:
            process = subprocess.Popen(
                [*XIDSTREAM, *self.arguments, *more],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(env),
                start_new_session=True,
            )
        try:
            yield process
        except BaseException:
            print(output.read_text())
            raise
        finally:
            process.poll()
            while left := marked(mark):
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.poll()

    def mark(self, name: str) -> str:
        """What all processes of a run have in their environment."""
        return str(self._folder / name)

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def await_(self, run: subprocess.Popen[bytes], condition: Callable[[], Any]) -> None:
        wait_until(lambda: run.poll() is not None or condition(), PATIENCE_S)
        assert run.poll() is None, "the run has ended"

    def stands_still(self, run: subprocess.Popen[bytes], fault: str) -> None:
        """Have a process of the run stand still at that point, and wait for it."""
        (armed,) = self.plan.arm(fault)
        self.await_(run, lambda: self.plan.struck_at(armed))

    def finished(self) -> Counter[tuple[str, int]]:
        lines = self._table("_snapshots")
        rows = [] if lines is None else lines.to_pyarrow_table().to_pylist()
        return Counter((row["table"], row["generation"]) for row in rows if row["state"] == "finished")

    def n_named(self) -> int:
        """Tables of the log that have a snapshot's rows. The first table has none."""
        found = [self._table(f"public.{name}") for name in NAMES]
        kinds = [
            each.to_pyarrow_table(columns=["_change_type"])["_change_type"].to_pylist()
            for each in found
            if each
        ]
        return sum("snapshot" in each for each in kinds)

    def _table(self, name: str) -> DeltaTable | None:
        with suppress(Exception):
            return DeltaTable(f"{self.root}/{name}", storage_options=self.settings)
        return None

    def assert_holds_nothing(self) -> None:
        """No session of the run is left, no lock, and no snapshot that it exported."""
        others = (
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            " and backend_type in ('client backend', 'walsender') and application_name <> %s"
        )
        wait_until(lambda: self.database.execute(others, WRITER) == [(0,)])
        assert self.database.execute("select pg_ls_dir('pg_snapshots')") == []

    def assert_each_is_the_source(self, run: subprocess.Popen[bytes]) -> None:
        lsn = until(self.database)
        self.await_(run, lambda: delivered_lsn(self.storage, self.slot) >= lsn)
        for name in NAMES:
            rows = Counter(self.database.execute(f"select id, n from {name}"))
            assert Log(self.root, "public", name, self.settings).at(lsn) == rows, name

    def assert_record_is_of_what_is_there(self, once: Counter[tuple[str, int]] = ONCE) -> None:
        """The storage has a record of each table's generation, and of no other one."""
        ((system,),) = self.database.execute("select system_identifier from pg_control_system()")
        taken = read_taken(Storage(self.storage), Layout(system, self.slot, "asked"))
        assert Counter((each.generation.name, each.generation.number) for each in taken) == once
        assert waiting_rows(self.storage) == []


AMID = (
    ("held", "snapshot_range_reading:stop@1", False),
    ("read", "snapshot_range_written:stop@5", False),
    ("staged", "committing_snapshot:stop@1", False),
    ("told", "snapshot_told:stop@1", True),
    ("named", "snapshot_committed:stop@9", False),
)
"""Where the group is, the fault that has it stay there, and whether tables have got a line by then. They are those of
the group, or the few that another thread named while the run before was stopped: their lines come first."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_whole_wherever_a_group_is_leaves_one_that_has_each_table_once(
    database: Database, tmp_path: Path
) -> None:
    make_tables(database)
    scene = Scene(database, tmp_path, str(tmp_path / "delta"), str(tmp_path / "segments"))
    writer = Writer(database)
    writer.start()
    first = ["--create-slot", "--snapshot", "initial"]
    for where, fault, has_told in AMID:
        n_before = len(scene.finished())
        with scene.run(where, *first) as run:
            scene.stands_still(run, fault)
            assert (len(scene.finished()) > n_before) is has_told, where
        scene.assert_holds_nothing()
        first = []
    assert scene.n_named() > len(scene.finished()), "rows of which no line tells"
    with scene.run("last") as run:
        scene.await_(run, lambda: len(scene.finished()) == N_TABLES)
        writer.stop()
        scene.assert_each_is_the_source(run)
        run.send_signal(signal.SIGTERM)
        assert run.wait(90) == 0
    assert scene.finished() == ONCE
    scene.assert_holds_nothing()
    scene.assert_record_is_of_what_is_there()


READ, STAGED, NAMED = (
    "snapshot_range_written:stop@5",
    "committing_snapshot:stop@3",
    "snapshot_committed:stop@5",
)
"""Some of a group's tables are read; all are in files; some tables of the log have the rows, and there is no line."""
IDS = {READ: "read", STAGED: "staged", NAMED: "named"}


def cases(slow: str, *nightly: str) -> list[Any]:
    """Each takes a minute or two."""
    return [
        pytest.param(slow, marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in nightly),
    ]


def lose_the_slot(scene: Scene, run: subprocess.Popen[bytes], fault: str) -> None:
    """Have the whole run stand still amid a group, all but Ray's own processes, and the server take its slot."""
    scene.stands_still(run, fault)
    for pid in marked(scene.mark("first")):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if (
                pid == run.pid
                or process.name() == "java"
                or "".join(process.cmdline()[:1]).startswith("ray::")
            ):
                process.suspend()
    scene.database.execute(
        "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = %s",
        scene.slot,
    )


def go_on(scene: Scene, name: str) -> None:
    for pid in marked(scene.mark(name)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", cases(STAGED, READ, NAMED), ids=IDS.get)
def test_a_run_that_stands_still_amid_a_group_while_another_one_takes_its_slot_adds_nothing_more(
    database: Database, tmp_path: Path, fault: str
) -> None:
    make_tables(database)
    scene = Scene(database, tmp_path, str(tmp_path / "delta"), str(tmp_path / "segments"))
    writer = Writer(database)
    writer.start()
    with scene.run("first", "--create-slot", "--snapshot", "initial") as first:
        lose_the_slot(scene, first, fault)
        with scene.run("second") as second:
            scene.await_(second, lambda: len(scene.finished()) == N_TABLES)
            go_on(scene, "first")
            scene.await_(first, lambda: "another run has taken over" in scene.said("first"))
            # It would go on asking for the slot, for five minutes.
            scene.await_(first, lambda: f'"{scene.slot}" is active for PID' in scene.said("first"))
            first.send_signal(signal.SIGTERM)
            first.wait(90)
            writer.stop()
            scene.assert_each_is_the_source(second)
            second.send_signal(signal.SIGTERM)
            assert second.wait(90) == 0, scene.said("second")
    assert scene.finished() == ONCE
    scene.assert_holds_nothing()
    scene.assert_record_is_of_what_is_there()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", cases(READ, STAGED, NAMED), ids=IDS.get)
def test_a_run_that_stands_still_amid_a_group_while_another_one_takes_all_tables_goes_on_behind_it(
    database: Database, tmp_path: Path, fault: str
) -> None:
    make_tables(database)
    scene = Scene(database, tmp_path, str(tmp_path / "delta"), str(tmp_path / "segments"))
    writer = Writer(database)
    writer.start()
    with scene.run("first", "--create-slot", "--snapshot", "initial") as first:
        lose_the_slot(scene, first, fault)
        with scene.run("second") as second:
            scene.await_(second, lambda: len(scene.finished()) == N_TABLES)
            second.send_signal(signal.SIGTERM)
            assert second.wait(90) == 0, scene.said("second")
        go_on(scene, "first")
        writer.stop()
        # Of what it had in hand nothing is left: one reader takes the next table.
        database.execute("create table more (id int)")
        scene.await_(first, lambda: ("public.more", 1) in scene.finished())
        scene.assert_each_is_the_source(first)
        first.send_signal(signal.SIGTERM)
        assert first.wait(90) == 0, scene.said("first")
    assert scene.finished() == ONCE | Counter([("public.more", 1)])
    scene.assert_holds_nothing()
    scene.assert_record_is_of_what_is_there(ONCE | Counter([("public.more", 1)]))


class Flaky(S3Server):
    """Answers 500 to one in ``one_in`` writes to a log, and does what it was asked; and to one in ``one_in`` of all
    other requests that have a key, and does nothing. Which ones these are depends on how many came before."""

    one_in = 0

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._n_asked = {True: 0, False: 0}
        self.n_failed = {True: 0, False: 0}
        """By whether it was a write to a log."""
        super().__init__()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        is_commit = environ["REQUEST_METHOD"] == "PUT" and "/_delta_log/" in path
        with self._guard:
            self._n_asked[is_commit] += 1
            fails = self.one_in and path.count("/") > 1 and self._n_asked[is_commit] % self.one_in == 0
            self.n_failed[is_commit] += bool(fails)
        if not fails:
            return super()._answer(environ, start_response)
        if is_commit:
            list(super()._answer(environ, lambda *_, **__: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
        return [b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"]


def fail_behind_the_checks(s3: Flaky, scene: Scene, name: str, run: subprocess.Popen[bytes]) -> None:
    """The checks before a start try a request twice, and the run many times."""
    scene.await_(run, lambda: "waiting for Ray" in scene.said(name))
    s3.one_in = 9


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_groups_in_a_store_that_fails_and_a_kill_amid_one_leave_each_table_once(
    database: Database, tmp_path: Path
) -> None:
    make_tables(database)
    s3 = Flaky()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    scene = Scene(database, tmp_path, f"s3://{s3.bucket}/delta", s3.uri("segments"), settings)
    writer = Writer(database)
    writer.start()
    try:
        with scene.run("first", "--create-slot", "--snapshot", "initial") as run:
            fail_behind_the_checks(s3, scene, "first", run)
            scene.stands_still(run, "snapshot_committed:stop@9")
        scene.assert_holds_nothing()
        s3.one_in = 0
        with scene.run("second") as run:
            fail_behind_the_checks(s3, scene, "second", run)
            scene.await_(run, lambda: len(scene.finished()) == N_TABLES)
            assert min(s3.n_failed.values()) > 9, "it has failed often"
            s3.one_in = 0
            writer.stop()
            scene.assert_each_is_the_source(run)
            run.send_signal(signal.SIGTERM)
            assert run.wait(90) == 0
        assert scene.finished() == ONCE
        scene.assert_holds_nothing()
        scene.assert_record_is_of_what_is_there()
    finally:
        s3.stop()
