"""One round: a hostile workload, a supervised run of the real parts into a lake, kills, and the judgement.

Reader, buffers and sequencer are Ray actors; the driver is the actor that ``xidstream run`` has, with a RayDP
session of its own; the supervisor is in this process, as in ``run``. All replication traffic goes through the
feedback spy. After each kill the round waits until the sink has taken something new: that is the recovery time.

A *pause* is a process that stops itself at a fault point, as a rule together with all other processes of the run. It
lasts ``PAUSE_S`` at least, and until the server has given up the connection. Then all go on at the same moment.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.chaos.judge import Verdict, judge
from tests.chaos.kills import JVMS, OUTSIDE, WHOLE, Plan, kill_from_outside, let_go_on, stop_processes
from tests.delivered import delivered_lsn
from tests.differential.compare import Model, final_difference
from tests.differential.local_pipeline import LocalPipeline, Options, Sink
from tests.differential.runner import remove_database
from tests.differential.source_schema import PUBLICATIONS, set_up_statements
from tests.differential.workload import Workload
from tests.feedback_spy import FeedbackSpy, observe
from tests.lakes import DeltaLake, Lake
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.faultpoints import POINTS, Fault
from xidstream.pipeline.log_tables.locations import TRANSACTIONS
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, describe_slot
from xidstream.pipeline.settings.config import Config

STRIKE_TIMEOUT_S = 40.0
"""How long a fault that was drawn waits to be passed, before the next one has its turn."""
CHOSEN_STRIKE_TIMEOUT_S = 150.0
"""The same for a fault that was asked for by name. At a load of 15 on two cores a batch that needs a Spark job took
50 s, and nothing of the journal is loaded meanwhile."""
START_TIMEOUT_S = 240.0
"""Until the run reads, and again until the sink has taken something. At a load of 30 the first batch took 120 s."""
RECOVERY_TIMEOUT_S = 180.0
END_TIMEOUT_S = 240.0
_WAL_SENDER_TIMEOUT = "2s"
"""Of the server, during a pause. Otherwise a busy machine would cut connections at moments of its own."""
PAUSE_S = 3.5
_FREED_TIMEOUT_S = 30.0
_STEP_S = 0.06
"""Slow enough that a batch does not always hold every table: each is a Spark job."""
_GIANT_EVERY = 25
_GIANT = "INSERT INTO s.plain SELECT i, 1, repeat(md5(i::text), 20), 1 FROM generate_series({}::bigint, {}::bigint) i"
_GIANT_ROWS = 1_800
_NARROWED = "CREATE TABLE s.narrowed (id bigint PRIMARY KEY, k bigint, note text)"
_NARROW = "INSERT INTO s.narrowed VALUES (0, 0, ''); ALTER TABLE s.narrowed ALTER k TYPE int"
_NARROW_GIANT = (
    "INSERT INTO s.narrowed SELECT i, 1, repeat(md5(i::text), 20) FROM generate_series({}, {}::bigint) i"
)
"""The Delta table keeps the type of the first row, so segments do not fit it: Spark's executors write the files."""


@dataclass(frozen=True)
class Kill:
    point: str
    recovery_s: float | None
    """From the kill, or the end of the pause, until the sink took something new; None where another fault came in
    between."""
    is_pause: bool = False


@dataclass
class RoundResult:
    seed: int
    settings: str
    kills: list[Kill] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    accusations: list[str] = field(default_factory=list)
    """What the spy found on the wire."""
    verdict: Verdict | None = None
    n_statuses: int = 0
    n_connections: int = 0
    n_prepared: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems and not self.accusations and self.verdict is not None and self.verdict.ok

    def __str__(self) -> str:
        recoveries = [k.recovery_s for k in self.kills if k.recovery_s is not None]
        times = (
            f"recovery median {statistics.median(recoveries):.1f} s, max {max(recoveries):.1f} s"
            if recoveries
            else "no recovery"
        )
        n_pauses = sum(k.is_pause for k in self.kills)
        kills = f"{len(self.kills) - n_pauses} kills" + (f" and {n_pauses} pauses" if n_pauses else "")
        text = (
            f"seed {self.seed} {self.settings}: {kills}, {times}; {self.verdict}; {self.n_statuses} "
            f"status updates on {self.n_connections} connections, {self.n_prepared} prepared; {self.seconds:.0f} s"
        )
        if self.not_reached:
            text += f"; not reached: {', '.join(self.not_reached)}"
        return text + "".join(f"\n    {p}" for p in [*self.problems[:8], *self.accusations[:8]])


class Round:
    """``make_driver`` gives what the supervisor needs of a driver for a configuration."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        folder: Path,
        plan: Plan,
        seed: int,
        faults: list[str],
        make_driver: Any,
        *,
        two_phase: bool,
        streaming: str = "on",
        journal: bool = False,
        lake: Lake | None = None,
        kills_until_s: float = float("inf"),
        strike_timeout_s: float = STRIKE_TIMEOUT_S,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._server = server
        self._folder = folder
        self._plan = plan
        self._seed = seed
        self._faults = faults
        self._make_driver = make_driver
        self._name = f"chaos_{seed}"
        self._options = Options(streaming=streaming, two_phase=two_phase, journal=journal)
        self._lake = DeltaLake(folder / "lake") if lake is None else lake
        self._storage = folder / "segments"
        self.notices: list[str] = []
        self._say = say
        self._kills_until_s = kills_until_s
        self._strike_timeout_s = strike_timeout_s
        self._unnoticed: set[Fault] = set()

    def run(self) -> RoundResult:
        result = RoundResult(self._seed, str(self._options))
        started = time.monotonic()
        self._folder.mkdir(parents=True)
        with psycopg.connect(self._server.conninfo(), autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._name)))
            try:
                self._run(result)
            except Exception as error:
                result.problems.append(f"{type(error).__name__}: {error}")
            finally:
                self._plan.arm("")
                remove_database(self._server, self._name, admin)
        result.seconds = time.monotonic() - started
        return result

    def _run(self, result: RoundResult) -> None:
        dsn = self._server.conninfo(self._name)
        slot, twin_slot = f"{self._name}_s", f"{self._name}_t"
        with psycopg.connect(dsn, autocommit=True) as connection:
            self._connection = connection
            connection.execute(set_up_statements(self._server.version).encode())
            connection.execute(_NARROWED.encode())
            for name in (slot, twin_slot):
                create_slot(dsn, name, two_phase=self._options.two_phase)
            before = describe_slot(dsn, slot).confirmed_flush or Lsn(0)
            workload = Workload(
                self._seed, dsn, n_steps=1 << 60, two_phase=self._options.two_phase, largest=3000
            )
            socket_path = f"{self._server.socket_dir}/.s.PGSQL.{self._server.port}"
            spy = FeedbackSpy(socket_path, observe(self._lake, self._storage))
            with spy:
                self._supervise(spy, slot, workload, result)
            result.n_statuses = len(spy.statuses)
            result.n_connections = len({s.connection for s in spy.statuses})
            result.n_prepared = len(spy.prepared)
            twin = self._read_twin(dsn, twin_slot)
            result.verdict = judge(self._lake, twin, workload.dropped_messages)
            result.problems += self._lake.torn()
            result.accusations += spy.problems(self._lake, int(before))
            model = Model()
            model.apply(twin.transactions)
            if found := final_difference(model, connection):
                result.problems.append(f"the twin differs from the source tables: {found}")
            left = [str(p) for pattern in ("epochs/*/*/*", "*.journal") for p in self._storage.rglob(pattern)]
            if left:
                result.problems.append(f"segments are left behind: {left[:3]}")

    # -- the run and its kills -------------------------------------------------------------------------

    def _supervise(self, spy: FeedbackSpy, slot: str, workload: Workload, result: RoundResult) -> None:
        from xidstream.actors.supervision.supervisor import Supervisor

        journal = {"journal_after_bytes": 0, "batch_bytes": 1 << 20} if self._options.journal else {}
        config = Config.of(
            {
                **journal,
                "dsn": spy.dsn(self._name),
                "slot": slot,
                "publication": ",".join(PUBLICATIONS),
                "storage": str(self._storage),
                "sink": self._lake.sink,
                # On one machine a run into Delta has no JVM at first, and may never have one.
                "spark": "raydp" if JVMS.intersection(self._faults) else "auto",
                "streaming": self._options.streaming,
                "two_phase": self._options.two_phase,
                "logical_decoding_work_mem": "64kB",
                "block_bytes": 64 << 10,
                "buffer_memory_bytes": "1MB",
                "reader_memory_bytes": "4MB",
                "buffers_max": 2,
                "status_interval_ms": 500,
            }
        )
        supervisor = Supervisor(config, lambda: self._make_driver(config), notify=self._notice)
        ended: list[BaseException | None] = []

        def work() -> None:
            try:
                supervisor.run()
                ended.append(None)
            except BaseException as error:
                ended.append(error)

        run = threading.Thread(target=work, daemon=True)
        run.start()
        traffic = threading.Thread(target=self._work, args=(workload, ended), daemon=True)
        try:
            self._wait(
                lambda: supervisor.status().account.sequencer is not None,
                START_TIMEOUT_S,
                ended,
                "the run did not start",
            )
            traffic.start()
            # A run that never took a batch gives up soon, and rightly so.
            self._wait(
                lambda: supervisor._retries.restarts.took_batch,
                START_TIMEOUT_S,
                ended,
                "nothing came into the sink",
            )
            again: list[str] = []
            for text in self._faults:
                if time.monotonic() > self._kills_until_s:
                    break
                if text in OUTSIDE:
                    self._kill_from_outside(text, spy, ended, result)
                else:
                    again += self._strike(text, ended, result)
            # Not reached in time, or not before another fault's epoch ended: each has a second chance alone.
            for text in again:
                if time.monotonic() < self._kills_until_s:
                    result.not_reached += self._strike(text, ended, result)
            workload.ending = True
            traffic.join(60)
            target = self._tick()
            self._wait(
                lambda: delivered_lsn(str(self._storage), slot) >= target,
                END_TIMEOUT_S,
                ended,
                "the run did not catch up in the end",
            )
        finally:
            workload.ending = True
            if traffic.ident is not None:
                traffic.join(60)
            supervisor.stop()
            run.join(90)
        if run.is_alive():
            raise TimeoutError("the run did not stop")
        if ended and ended[0] is not None:
            raise ended[0]

    def _strike(self, text: str, ended: list[Any], result: RoundResult) -> list[str]:
        """One fault, or several at once: those that are not reached before a part dies strike in a later epoch.

        Returns those that never struck.
        """
        faults = self._plan.arm(text)
        deadline = time.monotonic() + self._strike_timeout_s
        went_on: dict[Fault, float] = {}
        while None in [self._plan.struck_at(f) for f in faults]:
            deadline += self._pause(faults, went_on)
            if ended:
                raise RuntimeError(f"the run ended before {text}: {ended[0]!r}; {self.notices[-3:]}")
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self._plan.arm("")
        self._pause(faults, went_on)
        struck = [self._plan.struck_at(f) for f in faults]
        missed = [t for t, at in zip(text.split(","), struck, strict=True) if at is None]
        done = sorted(
            (went_on.get(f, at), f.point, f.action == "stop")
            for f, at in zip(faults, struck, strict=True)
            if at is not None and f not in self._unnoticed
        )
        if done:
            self._recover(text, ended)
            # The recovery is the last one's: before it nothing came far.
            last_s = time.time() - done[-1][0]
            result.kills += [Kill(point, None, is_pause) for _, point, is_pause in done[:-1]]
            result.kills.append(Kill(done[-1][1], last_s, done[-1][2]))
            self._say(f"{text}: {len(done)} struck, recovered {last_s:.1f} s after the last")
        return missed

    def _pause(self, faults: Iterable[Fault], went_on: dict[Fault, float]) -> float:
        """Keep still what has stopped itself, then let it go on. Returns for how many seconds in all."""
        began_s = time.monotonic()
        for fault in faults:
            if fault.action != "stop" or fault in went_on or self._plan.struck_at(fault) is None:
                continue
            while not (pid := self._plan.pid_of(fault)):
                time.sleep(0.001)
            stopped = stop_processes(pid, whole=fault.tag.startswith(WHOLE))
            try:
                self._set_timeout(_WAL_SENDER_TIMEOUT)
                time.sleep(PAUSE_S)
                if fault.tag.startswith(WHOLE) or POINTS[fault.point].startswith("reader"):
                    self._until_freed(fault)
            finally:
                self._set_timeout("60s")
                let_go_on(stopped)
            went_on[fault] = time.time()
        return time.monotonic() - began_s

    def _set_timeout(self, value: str) -> None:
        self._connection.execute(f"ALTER SYSTEM SET wal_sender_timeout = '{value}'".encode())
        self._connection.execute("SELECT pg_reload_conf()")

    def _until_freed(self, fault: Fault) -> None:
        """The server has given up a connection that does not answer. One that it does not notice is not counted."""
        deadline = time.monotonic() + _FREED_TIMEOUT_S
        query = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
        while self._connection.execute(query, (f"{self._name}_s",)).fetchone() is not None:
            if time.monotonic() > deadline:
                self._unnoticed.add(fault)
                self._say(
                    f"{fault.point}: the server did not give up the connection of a run that stands still"
                )
                return
            time.sleep(0.1)

    def _kill_from_outside(self, what: str, spy: FeedbackSpy, ended: list[Any], result: RoundResult) -> None:
        struck = time.time()
        if not kill_from_outside(what, spy):
            result.problems.append(f"there was no {what} to kill")
            return
        self._recover(what, ended)
        recovery_s = time.time() - struck
        result.kills.append(Kill(what, recovery_s))
        self._say(f"{what}: recovered after {recovery_s:.1f} s")

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        self._say(text)

    def _recover(self, what: str, ended: list[Any]) -> None:
        # A commit under way in another process when this one died is not recovery.
        time.sleep(0.2)
        version = self._version()
        self._wait(
            lambda: self._version() > version,
            RECOVERY_TIMEOUT_S,
            ended,
            f"no recovery after {what}; {self.notices[-3:]}",
        )

    def _wait(self, condition: Any, timeout_s: float, ended: list[Any], what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if ended:
                raise RuntimeError(f"the run ended: {ended[0]!r}; {self.notices[-3:]}") from ended[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}; {self.notices[-3:]}")
            time.sleep(0.05)

    def _version(self) -> int:
        return self._lake.holds(TRANSACTIONS)

    # -- traffic ---------------------------------------------------------------------------------------

    def _work(self, workload: Workload, ended: list[Any]) -> None:
        next_id = 90_000_000_000
        with psycopg.connect(self._server.conninfo(self._name), autocommit=True) as giant:
            giant.execute("SET synchronous_commit = on")
            for statement in _NARROW.split(";"):
                giant.execute(statement.encode())
            for number, _ in enumerate(workload.steps()):
                if number % _GIANT_EVERY == 0:
                    # Larger than a buffer's memory, so that it spills; every commit flushes what others left.
                    insert = (_GIANT, _NARROW_GIANT)[number // _GIANT_EVERY % 2]
                    giant.execute(insert.format(next_id, next_id + _GIANT_ROWS - 1).encode())
                    next_id += _GIANT_ROWS
                elif number % 5 == 0:
                    giant.execute("INSERT INTO hidden.tick VALUES (0)")
                if ended:
                    workload.ending = True
                time.sleep(_STEP_S)

    def _tick(self) -> Lsn:
        self._connection.execute("INSERT INTO hidden.tick VALUES (0)")
        row = self._connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return Lsn.parse(row[0])

    def _read_twin(self, dsn: str, slot: str) -> Sink:
        sink = Sink()
        options = replace(
            self._options, streaming="off", journal=False, batch_rows=50_000, batch_bytes=16 << 20
        )
        folder = self._folder / "twin"
        folder.mkdir()
        target = self._tick()
        with LocalPipeline(dsn, slot, PUBLICATIONS, folder, sink, options) as pipeline:
            pipeline.read_until(target, timeout_s=300)
        return sink
