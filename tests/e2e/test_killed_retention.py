"""A run that is killed again and again while it shortens its log: what it says it can answer, it answers rightly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.chaos.kills import Plan
from tests.e2e.conftest import Pipeline
from tests.e2e.test_command_line import XIDSTREAM, environment, marked, options
from tests.waiting import wait_until
from xidstream import ChangeLog
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.faultpoints import TOKENS_VARIABLE, VARIABLE
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.verify.result import Verdict

pytestmark = pytest.mark.e2e

HURRIED = Path(__file__).parent / "hurried"
POINTS = ("log_folded", "log_shortened")
"""A fold without a name, and a table that is cut where others are not. tests/unit/sinks kills at all of them."""
PATIENCE_S = 240
TABLE = "public.t"
_Rows = Counter[tuple[Any, ...]]


class Writer(threading.Thread):
    """Commits to the table until it is stopped. ``history``: by LSN, what the table held there."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(daemon=True)
        self._database = pipeline.database
        self._ends = threading.Event()
        self._dice = random.Random(36)
        self.history: dict[Lsn, _Rows] = {}
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self._database.connect() as session:
                while not self._ends.wait(0.05):
                    session.execute("update t set n = n + 1 where id = %s", (self._dice.randint(1, 50),))
                    (lsn,) = session.execute("select pg_current_wal_insert_lsn()::text").fetchone() or ()
                    rows = session.execute("select id, n from t").fetchall()
                    session.execute("select pg_logical_emit_message(true, 'test', 'behind')")
                    self.history[Lsn.parse(lsn).before] = Counter(rows)
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._ends.set()
        self.join()
        assert self.failure is None, self.failure


class Reader(threading.Thread):
    """Asks for states that the log says it has, one after the other, until it is stopped."""

    def __init__(self, root: str, spark: Any, history: dict[Lsn, _Rows]) -> None:
        super().__init__(daemon=True)
        self._root, self._spark, self._history = root, spark, history
        self._ends = threading.Event()
        self._dice = random.Random(63)
        self.oldest: set[Lsn] = set()
        self.n_states = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ends.wait(0.1):
                self._look()
        except BaseException as error:
            self.failure = error

    @property
    def has_read_enough(self) -> bool:
        return self.n_states > 5 and len(self.oldest) > 1

    def _look(self) -> None:
        log = ChangeLog(self._root)
        oldest, newest = log.oldest_lsn(TABLE), log.readable_lsn
        promised = [lsn for lsn in list(self._history) if oldest is not None and oldest <= lsn <= newest]
        if not promised:
            return
        lsn = self._dice.choice([promised[0], self._dice.choice(promised)])
        try:
            check(log, self._spark, lsn, self._history[lsn])
        except PreconditionMissing:
            now = log.oldest_lsn(TABLE)
            assert now is not None and lsn < now, f"{lsn} is refused, and the log has all from {now} on"
            return
        assert oldest is not None
        self.oldest.add(oldest)
        self.n_states += 1

    def stop(self) -> None:
        self._ends.set()
        self.join()
        assert self.failure is None, self.failure


def check(log: ChangeLog, spark: Any, lsn: Lsn, rows: _Rows) -> None:
    found = log.as_of(spark, lsn=lsn)[TABLE].select("id", "n").collect()
    assert Counter(tuple(row) for row in found) == rows, str(lsn)


@contextmanager
def living(
    arguments: list[str], env: dict[str, str], mark: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A run, which is killed with all of its processes at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*XIDSTREAM, *arguments],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=environment(env),
            start_new_session=True,
        )
    try:
        yield process
        assert process.poll() is None, log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not marked(mark))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_run_that_is_killed_while_it_cuts_its_log_answers_all_that_it_promises_and_equals_the_source(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    database, spark, plan = pipeline.database, pipeline.spark, Plan(tmp_path / "plan")
    database.execute("create table t (id int primary key, n int)")
    database.execute("insert into t select i, i from generate_series(1, 50) i")
    database.execute("create publication p for all tables")
    mark, output = str(tmp_path / "mark"), tmp_path / "output"
    env = {
        "XIDSTREAM_TEST_MARK": mark,
        "PYTHONPATH": str(HURRIED),
        VARIABLE: f"@{plan.file}",
        TOKENS_VARIABLE: str(plan.tokens),
    }
    arguments = options(database, tmp_path, "--log-retention", "1")
    first = [*arguments, "--create-slot", "--snapshot", "initial"]
    root = pipeline.delta
    writer, cuts = Writer(pipeline), [Lsn(0)]
    reader = Reader(str(root), spark, writer.history)

    def cut_further() -> bool:
        log = ChangeLog(str(root))
        return TABLE in log.tables() and log.cut_lsn(TABLE) > cuts[-1]

    try:
        with living(first, env, mark, output) as run:
            wait_until(lambda: run.poll() is not None or (root / "_snapshots" / "_delta_log").exists())
            assert run.poll() is None, output.read_text()
            writer.start()
            wait_until(lambda: (root / "_transactions" / "_delta_log").exists())
            log = ChangeLog(str(root))
            wait_until(cut_further, PATIENCE_S)
            reader.start()
            # Each takes the driver, the second one that which takes the first one's place. The run goes on.
            faults = plan.arm(",".join(f"{point}:kill" for point in POINTS))
            wait_until(lambda: None not in map(plan.struck_at, faults), PATIENCE_S)
            cuts.append(log.cut_lsn(TABLE))
            wait_until(cut_further, PATIENCE_S)
        cuts.append(log.cut_lsn(TABLE))
        with living(arguments, env, mark, output):
            wait_until(cut_further, PATIENCE_S)
            # A busy machine reads a state in many seconds.
            wait_until(lambda: reader.failure is not None or reader.has_read_enough, PATIENCE_S)
            writer.stop()
            reader.stop()
            wait_until(lambda: log.readable_lsn >= max(writer.history), PATIENCE_S)
            found = log.verify(spark, database.dsn(), "p", ["*.t"], timeout_s=PATIENCE_S)
            assert [each.verdict for each in found.tables] == [Verdict.EQUAL]
            oldest = log.oldest_lsn(TABLE)
        assert oldest is not None and min(writer.history) < oldest
        left = sorted(lsn for lsn in writer.history if lsn >= oldest)
        for lsn in {left[0], left[len(left) // 2], left[-1]}:
            check(log, spark, lsn, writer.history[lsn])
        assert reader.has_read_enough, "it has read while the log was cut"
    finally:
        writer._ends.set()
        reader._ends.set()
    for name in (TABLE, "_transactions"):
        paths = DeltaTable(str(pipeline.delta / name)).file_uris()
        assert [path for path in paths if not Path(path).exists()] == []
