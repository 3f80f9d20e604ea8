"""The cheap half of the chaos run: one process with all parts but Ray and Spark, killed and forked again.

``LocalPipeline`` (tests/differential) runs in a child; SIGKILL at a fault point takes reader, buffers, sequencer and
sink down together, with all they have in memory. The parent forks the next life at once, so a kill costs half a
second instead of a new set of actors. The slot, the storage, the segments, the prepared records and the progress
record are the real ones; the sink is a folder of batches, each renamed into place, with a watermark of its own. The
same twin and the same comparison as in ``make soak`` judge it: order, rows, values, messages, and each confirmed
position against what the sink held then.

``committing_transactions`` and ``transactions_committed`` are before and after that renaming; points of Delta and
of executors are not passed here.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos.chaos_round import Kill, Round, RoundResult
from tests.chaos.judge import Verdict
from tests.chaos.kills import JOURNAL_POINTS, PREPARED_POINTS, STREAM_POINTS, Plan
from tests.delivered import delivered_lsn
from tests.differential.compare import Model, check_confirmations, difference, final_difference
from tests.differential.local_pipeline import LocalPipeline, Message, Options, Released, Sink
from tests.differential.source_schema import PUBLICATIONS, set_up_statements
from tests.differential.workload import Workload
from tests.journal_contents import Journaled
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline import faultpoints
from xidstream.pipeline.decode import warm_up
from xidstream.pipeline.errors import ConnectionLost, SlotInUse
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot

ELSEWHERE = frozenset(
    {
        "parquet_written",
        "segment_filled_in_part",
        "segment_filled",
        "segment_linked",
        "memory_written",
        "committing_table",
        "table_committed",
    }
)
_RECOVERY_TIMEOUT_S = 60.0
_KILLED = 9


class FolderSink(Sink):
    """Outlives its process: one file for each batch, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(folder.glob("*.batch"))
        self._n = len(files)
        self._held = (0, 0)
        if files:
            *_, self.watermark, self._lsns, self._held = pickle.loads(files[-1].read_bytes())

    def take(self, transactions: list[Released], messages: list[Message]) -> None:
        fresh = [t for t in transactions if t.commit_lsn > self.watermark]
        news = [m for m in messages if m.lsn not in self._lsns]
        if not fresh and not news:
            return
        self._lsns.update(m.lsn for m in news)
        self.watermark = fresh[-1].commit_lsn if fresh else self.watermark
        self._held = (self._held[0] + len(fresh), self._held[1] + len(news))
        content = pickle.dumps((fresh, news, self.watermark, self._lsns, self._held))
        temporary = self._folder / "next"
        temporary.write_bytes(content)
        reach("committing_transactions")
        temporary.rename(self._folder / f"{self._n:08}.batch")
        self._n += 1
        reach("transactions_committed")

    def note_confirmed(self, lsn: Lsn, journaled: Journaled) -> None:
        """With what is durably held."""
        held = [int(lsn), *self._held, journaled.first_lsn, journaled.end_lsn, sorted(journaled.messages)]
        with (self._folder / "confirmations").open("a") as file:
            file.write(json.dumps(held) + "\n")

    def load(self) -> Sink:
        """All that every life put here."""
        sink = Sink()
        for path in sorted(self._folder.glob("*.batch")):
            transactions, messages, *_ = pickle.loads(path.read_bytes())
            sink.transactions += transactions
            sink.messages += messages
        for line in (self._folder / "confirmations").read_text().splitlines():
            lsn, n_transactions, n_messages, first_lsn, end_lsn, messages_in = json.loads(line)
            journaled = Journaled(first_lsn, end_lsn, frozenset(messages_in))
            sink.confirmations.append((Lsn(lsn), n_transactions, n_messages, journaled))
        return sink


class LocalRound(Round):
    """``make_driver`` is not used: there is none."""

    def _run(self, result: RoundResult) -> None:
        dsn = self._server.conninfo(self._name)
        slot, twin_slot = f"{self._name}_s", f"{self._name}_t"
        warm_up()
        with psycopg.connect(dsn, autocommit=True) as connection:
            self._connection = connection
            connection.execute(set_up_statements(self._server.version).encode())
            for name in (slot, twin_slot):
                create_slot(dsn, name, two_phase=self._options.two_phase)
            workload = Workload(
                self._seed, dsn, n_steps=1 << 60, two_phase=self._options.two_phase, largest=2000
            )
            self._lives = 0
            self._child = self._fork(dsn, slot)
            try:
                self._drive(workload, dsn, slot, result)
            finally:
                os.kill(self._child, _KILLED)
                os.waitpid(self._child, 0)
            sink = FolderSink(self._folder / "sink").load()
            twin = self._read_twin(dsn, twin_slot)
            self._judge(sink, twin, workload, result)
            model = Model()
            model.apply(twin.transactions)
            if found := final_difference(model, connection):
                result.problems.append(f"the twin differs from the source tables: {found}")

    def _fork(self, dsn: str, slot: str) -> int:
        self._lives += 1
        pid = os.fork()
        if pid:
            return pid
        try:
            faultpoints._plan = faultpoints.FaultPlan(f"@{self._plan.file}", str(self._plan.tokens))
            self._live(dsn, slot)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _live(self, dsn: str, slot: str) -> None:
        storage = self._folder / "segments"
        storage.mkdir(exist_ok=True)
        sink = FolderSink(self._folder / "sink")
        order = random.Random(f"{self._seed} {self._lives}")
        while True:
            try:
                pipeline = LocalPipeline(
                    dsn,
                    slot,
                    PUBLICATIONS,
                    storage,
                    sink,
                    self._options,
                    epoch=f"{self._lives:06}",
                    order=order,
                )
                break
            except (SlotInUse, ConnectionLost):
                time.sleep(0.02)
        while True:
            try:
                pipeline.read_until(Lsn((1 << 63) - 1), timeout_s=3600)
            except TimeoutError:
                continue

    def _drive(self, workload: Workload, dsn: str, slot: str, result: RoundResult) -> None:
        """Workload, forks and kills, all in this thread: a step, then a look."""
        faults = iter(self._faults)
        armed: Any = None
        struck = since_s = 0.0
        batches = 0
        for number, _ in enumerate(workload.steps()):
            if number % 4 == 0:
                self._tick()
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                if os.WTERMSIG(status) != _KILLED:
                    raise RuntimeError(f"the pipeline ended with {status} by itself")
                self._child = self._fork(dsn, slot)
            now_s = time.time()
            if armed is None:
                text = next(faults, None)
                if text is None or time.monotonic() > self._kills_until_s:
                    workload.ending = True
                    continue
                (armed,) = self._plan.arm(text)
                struck, since_s = 0.0, now_s
            elif not struck:
                struck = self._plan.struck_at(armed) or 0.0
                batches = self._n_batches()
                if not struck and now_s - since_s > 20:
                    result.not_reached.append(armed.point)
                    # Or it strikes when nobody looks for it any more.
                    self._plan.arm("")
                    armed = None
            elif self._n_batches() > batches:
                result.kills.append(Kill(armed.point, now_s - struck))
                armed = None
            elif now_s - struck > _RECOVERY_TIMEOUT_S:
                raise TimeoutError(f"no recovery after {armed.token}")
            time.sleep(0.002)
        self._plan.arm("")
        target = self._tick()
        deadline = time.monotonic() + _RECOVERY_TIMEOUT_S
        while delivered_lsn(str(self._storage), slot) < target:
            if time.monotonic() > deadline:
                raise TimeoutError("the run did not catch up in the end")
            time.sleep(0.02)

    def _n_batches(self) -> int:
        # The first life makes the folder.
        return sum(1 for _ in (self._folder / "sink").glob("*.batch"))

    def _judge(self, sink: Sink, twin: Sink, workload: Workload, result: RoundResult) -> None:
        verdict = result.verdict = Verdict()
        verdict.n_transactions = len(sink.transactions)
        verdict.n_rows = sum(t.n_rows for t in sink.transactions)
        verdict.n_messages = len(sink.messages)
        mine, theirs = [t.commit_lsn for t in sink.transactions], {t.commit_lsn for t in twin.transactions}
        verdict.twice = len(mine) - len(set(mine))
        verdict.lost = len(theirs - set(mine))
        verdict.disordered = sum(b <= a for a, b in itertools.pairwise(mine))
        if found := difference(sink, twin, dropped=workload.dropped_messages, ignore=("origin",)):
            verdict.differences.append(found)
        if found := check_confirmations(sink, up_to=0):
            result.problems.append(found)
        result.n_statuses = len(sink.confirmations)
        result.n_connections = self._lives


def local_schedule(seed: int, n_kills: int, *, two_phase: bool, journal: bool) -> list[str]:
    """As ``kills.schedule``, over the points that one process passes."""
    r = random.Random(f"local kills {seed}")
    left_out = ELSEWHERE if two_phase else ELSEWHERE | PREPARED_POINTS
    passed = STREAM_POINTS.keys() | (JOURNAL_POINTS if journal else frozenset())
    points = sorted(passed - left_out)
    chosen = [points[(seed * 7 + i) % len(points)] for i in range(n_kills)]
    r.shuffle(chosen)
    return [f"{p}:kill@{r.choice((1, 1, 2, 4, 9))}#l{seed}-{i}" for i, p in enumerate(chosen)]


def local_options(seed: int) -> tuple[bool, str]:
    """two_phase, streaming."""
    return seed % 2 == 0, ("on", "parallel")[seed // 2 % 2]


def run_local(
    server: EmbeddedPostgres,
    folder: Path,
    plan: Plan,
    seed: int,
    n_kills: int,
    kills_until_s: float,
    *,
    journal: bool = False,
) -> RoundResult:
    two_phase, streaming = local_options(seed)
    faults = local_schedule(seed, n_kills, two_phase=two_phase, journal=journal)
    made = LocalRound(
        server,
        folder,
        plan,
        seed,
        faults,
        None,
        two_phase=two_phase,
        streaming=streaming,
        kills_until_s=kills_until_s,
    )
    made._options = replace(made._options, batch_rows=1_000, journal=journal)
    return made.run()


__all__ = ["FolderSink", "LocalRound", "Options", "local_schedule", "run_local"]
