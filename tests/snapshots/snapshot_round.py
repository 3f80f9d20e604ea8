"""One round: tables with rows, writers, a run that takes their snapshots, kills, and the judgement by the twin.

The run is the command line in a process of its own (``observed_run``), with its own Ray and Spark. The twin is a slot
that was made before any table had a row. When all snapshots are taken and the writers have ended, each table's log and
the twin's must fold to the same at ``N_LSNS`` random LSNs from the last ``valid_from`` on, and at every commit from the
table's own; and at the end to what the source holds.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
from deltalake import DeltaTable
from psycopg import sql

from tests.delivered import delivered_lsn
from tests.differential.runner import remove_database
from tests.fold import bounds_of, standing_generations
from tests.postgres_fixtures import Database
from tests.processes import living_below
from tests.snapshots.range_log import RangeCosts, RangeLog
from tests.snapshots.states import State, States, source_state, states, transactions_of
from tests.snapshots.tables import SCHEMA, TABLES, Table, set_up_statements
from tests.snapshots.twin import Twin
from tests.snapshots.writers import Writers
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.log_tables.locations import encode_table
from xidstream.pipeline.pg import Lsn, Xid

N_LSNS = 20
KINDS = {
    "sequencer": "CommitSequencer",
    "slot-reader": "SlotReader",
    "buffer": "XidBuffer",
    "reader": "SnapshotReader",
    "driver": "SparkDriver",
    "holder": "SnapshotHolder",
    "run": "",
}
"""What can be killed → the Ray actor; the run is killed with all its processes. What costs most is last."""
_START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Kill:
    """SIGKILL to one process of a kind when so many percent of the rows from before are read."""

    kind: str
    percent: int

    @classmethod
    def parse(cls, text: str) -> Kill:
        kind, _, percent = text.partition("@")
        if kind not in KINDS or not percent.isdigit():
            raise ValueError(f"{text!r}: give KIND@PERCENT, KIND one of {', '.join(KINDS)}")
        return cls(kind, int(percent))

    def __str__(self) -> str:
        return f"{self.kind}@{self.percent}"


@dataclass
class Result:
    seed: int
    version: int
    kills: list[str] = field(default_factory=list)
    struck_at_percent: list[int] = field(default_factory=list)
    n_rows: int = 0
    costs: RangeCosts = field(default_factory=RangeCosts)
    n_changes: int = 0
    n_states: int = 0
    n_transactions_contained: int = 0
    snapshot_s: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(self.kills) or "no kill"
        struck = ", ".join(f"{percent}" for percent in self.struck_at_percent)
        text = (
            f"seed {self.seed} pg{self.version} {kills}{f' (at {struck} %)' if struck else ''}: "
            f"{self.n_rows:,} rows in {self.costs}; "
            f"{self.n_changes:,} changes, {self.n_transactions_contained} "
            f"transactions contained; {self.n_states:,} states compared; snapshots {self.snapshot_s:.0f} s, "
            f"all {self.seconds:.0f} s: {'FAILED' if self.problems else 'ok'}"
        )
        text += "".join(f"\n    {line}" for line in self.costs.by_kill_told)
        return text + "".join(f"\n    {problem}" for problem in self.problems[:12])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Round:
    def __init__(
        self,
        server: EmbeddedPostgres,
        folder: Path,
        seed: int,
        n: int,
        kills: Sequence[Kill],
        *,
        two_phase: bool = False,
        range_bytes: int = 64 << 20,
        options: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._server = server
        self._folder = folder
        self._seed = seed
        self._n = n
        self._kills = sorted(kills, key=lambda kill: kill.percent)
        self._range_bytes = range_bytes
        self._options = [*(["--two-phase"] if two_phase else []), *options]
        self._say = say
        self._name = f"snap_{seed}"
        self._delta = folder / "delta"
        self._observed = RangeLog(folder / "ranges.jsonl")
        self._output = folder / "run.log"
        self._run: subprocess.Popen[bytes] | None = None
        self._n_commits = self._n_taken = 0
        self._n_rows = sum(table.n_rows(n) for table in TABLES)
        self._struck: list[tuple[int, str]] = []
        """How many lines the log of ranges had at each kill."""
        self.result = Result(seed, server.version, [str(kill) for kill in self._kills], n_rows=self._n_rows)

    def run(self) -> Result:
        started_s = time.monotonic()
        self._folder.mkdir(parents=True)
        with psycopg.connect(self._server.conninfo(), autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._name)))
            try:
                with psycopg.connect(self._server.conninfo(self._name), autocommit=True) as connection:
                    self._database = Database(self._server, self._name, connection)
                    self._round()
            except Exception as error:
                self.result.problems.append(f"{type(error).__name__}: {error}")
            finally:
                self._end_run()
                remove_database(self._server, self._name, admin)
        self.result.seconds = time.monotonic() - started_s
        return self.result

    def _round(self) -> None:
        self._database.execute("SET timezone = 'UTC'")
        for statement in set_up_statements():
            self._database.execute(statement)
        twin = Twin(self._database, self._folder / "twin")
        for table in TABLES:
            for statement in table.fills(self._n):
                self._database.execute(statement)
        self._database.execute("ANALYZE")
        self._say("the tables are filled")
        twin.read_until(self._tick())
        self._say(f"the twin has {len(twin.sink.commit_lsns)} transactions")
        writers = Writers(self._database, self._n, self._seed, self._folder)
        try:
            writers.start()
            begun_s = time.monotonic()
            self._start_run()
            self._wait(self._is_reading, _START_TIMEOUT_S, "the run does not read")
            with writers.giant():
                for kill in self._kills:
                    self._strike(kill)
                self._wait(self._all_taken, 3600, "the snapshots were not taken")
                self.result.snapshot_s = time.monotonic() - begun_s
                self._say(f"all snapshots are taken, {writers.n_transactions} transactions were written")
                time.sleep(2)
            time.sleep(3)
        finally:
            writers.stop()
        target = self._tick()
        self._wait(lambda: self._delivered() >= target, 600, "the run did not catch up")
        self._stop_run()
        self._say("the run has ended")
        twin.read_until(target)
        self._say("the twin is read")
        self._judge(twin, target)

    # -- the run ---------------------------------------------------------------------------------------

    def _start_run(self) -> None:
        command = [sys.executable, "-m", "tests.snapshots.observed_run", str(self._observed.path)]
        command += [str(self._range_bytes), "run", "--dsn", self._database.dsn(), "--slot", f"s_{self._name}"]
        command += ["--publication", "p", "--storage", str(self._folder / "segments"), "--sink"]
        command += [f"delta:{self._delta}", "--create-slot", "--snapshot", "initial", *self._options]
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._output.open("ab") as output:
            self._run = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )

    def _stop_run(self) -> None:
        assert self._run is not None
        self._run.send_signal(signal.SIGTERM)
        status = self._run.wait(120)
        if status != 0:
            self.result.problems.append(f"the run ended with status {status}: {self._tail()}")

    def _end_run(self) -> None:
        """Whatever state it is in: the run and all that it started."""
        if self._run is None or self._run.poll() is not None:
            return
        below = [each.process for each in living_below(self._run.pid)]
        os.killpg(self._run.pid, signal.SIGKILL)
        self._run.wait()
        # Ray's processes end when their driver is gone. The next run must not meet them.
        _, alive = psutil.wait_procs(below, timeout=60)
        for process in alive:
            process.kill()

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-1500:]

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self._run is not None and self._run.poll() is not None:
                raise RuntimeError(f"the run ended with status {self._run.returncode}: {self._tail()}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what}: {self._tail()}")
            time.sleep(0.1)

    def _is_reading(self) -> bool:
        query = (
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s AND confirmed_flush_lsn IS NOT NULL"
        )
        return self._database.execute(query, f"s_{self._name}") == [(True,)]

    def _delivered(self) -> Lsn:
        return delivered_lsn(str(self._folder / "segments"), f"s_{self._name}")

    def _tick(self) -> Lsn:
        """Flush the WAL with a transaction that nobody publishes; the position after it."""
        self._database.execute("SET synchronous_commit = on")
        self._database.execute("INSERT INTO tick VALUES (0)")
        return Lsn.parse(self._database.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])

    def _all_taken(self) -> bool:
        """Reading a Delta table ten times a second would cost more than what is tested: only new commits are read."""
        log = self._delta / "_snapshots" / "_delta_log"
        n_commits = len(list(log.glob("*.json"))) if log.exists() else 0
        if n_commits != self._n_commits:
            self._n_commits = n_commits
            self._n_taken = len(standing_generations(self._delta))
        return self._n_taken >= len(TABLES)

    # -- kills -----------------------------------------------------------------------------------------

    def _strike(self, kill: Kill) -> None:
        self._wait(
            lambda: self._observed.percent(self._n_rows) >= kill.percent or self._all_taken(),
            3600,
            f"{kill} was not reached",
        )
        if self._all_taken():
            self.result.problems.append(
                f"{kill}: all was taken before; use smaller ranges or a limit of the rate"
            )
            return
        percent, killed = self._observed.percent(self._n_rows), set[int]()
        if kill.kind != "run":
            self._wait(lambda: bool(self._actors(kill.kind)), 120, f"there is no {kill.kind}")
            victim = self._actors(kill.kind)[0]
            killed.add(victim.pid)
            victim.kill()
        self._struck.append((len(self._observed.lines()), str(kill)))
        if kill.kind == "run":
            self._end_run()
            self._start_run()
        self.result.struck_at_percent.append(percent)
        self._say(f"{kill} struck at {percent} %")
        self._wait(lambda: self._is_back(kill, killed), _START_TIMEOUT_S, f"nothing is read after {kill}")

    def _is_back(self, kill: Kill, killed: set[int]) -> bool:
        """Whether another process stands in the place of the one that was killed, and ranges are read again."""
        is_there = kill.kind == "run" or any(each.pid not in killed for each in self._actors(kill.kind))
        later = self._observed.lines()[self._struck[-1][0] :]
        return self._all_taken() or (is_there and any(line["what"] == "done" for line in later))

    def _actors(self, kind: str) -> list[psutil.Process]:
        assert self._run is not None
        name = f"ray::{KINDS[kind]}"
        return [each.process for each in living_below(self._run.pid) if each.name.startswith(name)]

    # -- the judgement ---------------------------------------------------------------------------------

    def _judge(self, twin: Twin, target: Lsn) -> None:
        result, generations = self.result, standing_generations(self._delta)
        places = {g["table"].partition(".")[2]: int(g["place"]) for g in generations.values()}
        result.costs = self._observed.costs(places, self._struck)
        least = max(int(g["valid_from"]) for g in generations.values())
        chance = random.Random(f"{self._seed} LSNs")
        lsns = [*(chance.randint(least, int(target)) for _ in range(N_LSNS - 1)), int(target)]
        for table in TABLES:
            generation = generations[f"{SCHEMA}.{table.name}"]
            mine, theirs, hashed = self._folded(table, generation, twin)
            result.n_changes += mine.n_events
            result.problems += [f"{table.name}: {text}" for text in mine.oddities]
            result.problems += [f"{table.name}, the twin: {text}" for text in theirs.oddities]
            commits = [lsn for lsn in {*mine.lsns, *theirs.lsns} if lsn >= generation["valid_from"]]
            wrong = [lsn for lsn in sorted({*lsns, *commits}) if mine.at(lsn) != theirs.at(lsn)]
            result.n_states += len({*lsns, *commits})
            if wrong:
                self._accuse(table, generation, wrong, mine, theirs)
            if (found := hashed.at(target)) != (
                there := source_state(self._database, table, self._compared(table))
            ):
                result.problems.append(f"{table.name}: {found} at the end, {there} in the source")

    def _accuse(
        self, table: Table, generation: dict[str, Any], wrong: list[int], mine: States, theirs: States
    ) -> None:
        def told(state: State) -> str:
            return f"{state[0]} rows, {state[1] % 10**6:06}"

        first = wrong[0]
        self.result.problems.append(
            f"{table.name}: {len(wrong)} states differ, first at {Lsn(first)}, "
            f"valid from {Lsn(generation['valid_from'])}: "
            f"{told(mine.at(first))}; the twin {told(theirs.at(first))}"
        )

    def _columns(self, table: Table) -> list[str]:
        query = (
            "SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
            " AND NOT attisdropped ORDER BY attnum"
        )
        quoted = '"' + table.name.replace('"', '""') + '"'
        return [name for (name,) in self._database.execute(query, quoted)]

    def _compared(self, table: Table) -> list[str]:
        return [column for column in self._columns(table) if column not in table.uncompared]

    def _folded(self, table: Table, generation: dict[str, Any], twin: Twin) -> tuple[States, States, States]:
        """The run's log, the twin's, and the run's again in the columns that are compared with the source."""
        files = DeltaTable(str(self._delta / encode_table(SCHEMA, table.name))).file_uris()
        columns, key, bounds = self._columns(table), generation["key"], bounds_of(generation)
        contained = [(xid, lsn) for xid, lsn in transactions_of(files) if bounds.contains(Xid(xid), Lsn(lsn))]
        self.result.n_transactions_contained += len(contained)
        about: dict[str, Any] = {"place": generation["place"], "contained": contained}
        mine = states(files, columns, key, **about)
        compared = self._compared(table)
        hashed = mine
        if compared != columns:
            hashed = states(files, columns, key, hashed=compared, **about)
        theirs = states(twin.sink.files(table.name), columns, key)
        return mine, theirs, hashed
