"""One differential run: a workload, a streamed slot read beside it, twins read after it, and the judgement.

The streamed side reads while the workload goes on, is interrupted and restarted from its storage, and its
buffers finish out of order. The twin reads the same WAL from the same point with ``streaming=off``. With
two-phase there is a second twin without it, which sees a prepared transaction only at COMMIT PREPARED.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.differential.compare import Model, check_confirmations, difference, final_difference
from tests.differential.local_pipeline import LocalPipeline, Options, Sink
from tests.differential.source_schema import PUBLICATIONS, set_up_statements, tear_down_statement
from tests.differential.workload import Workload
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, drop_slot, stream_stats

SERVER_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",  # its locks would come at times that the seed does not decide
    "synchronous_commit": "on",
    "max_wal_size": "4GB",
    "wal_writer_delay": "10s",
}

IMMEDIATE = "-c debug_logical_replication_streaming=immediate"


@dataclass
class Outcome:
    """``problem`` is None when all is equal."""

    seed: int
    version: int
    options: Options
    problem: str | None = None
    n_transactions: int = 0
    n_rows: int = 0
    n_messages: int = 0
    n_dropped_messages: int = 0
    stream_txns: int = 0
    n_spills: int = 0
    n_restarts: int = 0
    n_failed_statements: int = 0
    n_streamed: int = 0
    history: list[str] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        verdict = "ok" if self.problem is None else f"FAILED: {self.problem}"
        return (
            f"seed {self.seed} pg{self.version} {self.options}: {self.n_transactions} transactions "
            f"({self.n_streamed} streamed), {self.n_rows} rows, {self.n_messages} messages "
            f"({self.n_dropped_messages} rolled back), {self.n_spills} spills, {self.n_restarts} restarts, "
            f"{self.n_failed_statements} failed statements: {verdict}"
        )


class OriginSpy:
    """Sees which streams begin without O on the wire; shares no code with the cutter."""

    def __init__(self) -> None:
        self.without_origin: set[int] = set()
        self._first: int | None = None

    def __call__(self, data: bytes) -> None:
        kind = data[25:26]
        if self._first is not None and kind != b"O":
            self.without_origin.add(self._first)
        self._first = int.from_bytes(data[26:30], "big") if kind == b"S" and data[30] == 1 else None


class Differential:
    def __init__(
        self,
        server: EmbeddedPostgres,
        folder: Path,
        seed: int,
        options: Options,
        *,
        n_steps: int,
        largest: int,
    ) -> None:
        self._server = server
        self._folder = folder
        self._seed = seed
        self._options = options
        self._n_steps = n_steps
        self._largest = largest
        self._random = random.Random(seed * 7 + 1)
        self._spy = OriginSpy()
        proto = options.proto_version
        self._name = f"d{seed}_{server.version}_{options.streaming}_{proto or 0}_{int(options.two_phase)}"

    def run(self, *, trace: bool = False) -> Outcome:
        """Never raises for what differs; ``Outcome.problem`` has it, and ``history`` the statements."""
        outcome = Outcome(self._seed, self._server.version, self._options)
        with psycopg.connect(self._server.conninfo(), autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._name)))
            try:
                self._run(outcome, trace)
            except Exception as error:
                outcome.problem = f"{type(error).__name__}: {error}"
                if trace:
                    raise
            finally:
                remove_database(self._server, self._name, admin)
        return outcome

    def _run(self, outcome: Outcome, trace: bool) -> None:
        dsn = self._server.conninfo(self._name)
        with psycopg.connect(dsn, autocommit=True) as connection:
            self._connection = connection
            connection.execute(set_up_statements(self._server.version).encode())
            plans = self._slots()
            for slot, options in plans:
                # Half of the two-phase slots are made so, half become so by START_REPLICATION (fact 19).
                create_slot(dsn, slot, two_phase=options.two_phase and self._seed % 2 == 0)
            sinks = {slot: Sink() for slot, _ in plans}
            workload = Workload(
                self._seed,
                dsn,
                n_steps=self._n_steps,
                two_phase=self._options.two_phase,
                largest=self._largest,
                trace=trace,
            )
            outcome.history = workload.history
            for slot, _ in plans:  # a record of another slot of this name
                shutil.rmtree(self._folder / slot, ignore_errors=True)
            (main, options), *twins = plans
            self._beside(workload, dsn, main, options, sinks[main], outcome)
            outcome.n_failed_statements = workload.n_failed
            outcome.n_dropped_messages = len(workload.dropped_messages)
            target = self._tick()
            for slot, twin_options in twins:
                pipeline = self._open(dsn, slot, twin_options, sinks[slot], 1)
                with pipeline:
                    pipeline.read_until(target)
            outcome.problem = self._judge(sinks, plans, workload, target, outcome)

    def _slots(self) -> list[tuple[str, Options]]:
        proto = None if self._options.two_phase else (1 if self._seed % 2 else None)
        twin = replace(self._options, streaming="off", proto_version=proto)
        plans = [(f"{self._name}_s", self._options), (f"{self._name}_t", twin)]
        if self._options.two_phase:
            plans.append((f"{self._name}_p", replace(twin, two_phase=False, proto_version=1)))
        return plans

    def _open(
        self, dsn: str, slot: str, options: Options, sink: Sink, epoch: int, peek: OriginSpy | None = None
    ) -> LocalPipeline:
        order = random.Random(self._random.random())
        self._tick()  # opening waits for WAL that is not flushed
        folder = self._folder / slot
        folder.mkdir(parents=True, exist_ok=True)
        return LocalPipeline(
            dsn, slot, PUBLICATIONS, folder, sink, options, epoch=f"{epoch:04d}", order=order, peek=peek
        )

    def _beside(
        self, workload: Workload, dsn: str, slot: str, options: Options, sink: Sink, outcome: Outcome
    ) -> None:
        """The workload, with the streamed side reading between its steps and restarting now and then."""
        r = self._random
        if self._seed % 3 == 0:
            # Every change is streamed at once: thousands of stream blocks, and an A for each subtransaction.
            dsn = self._server.conninfo(self._name, options=IMMEDIATE)
        pipeline = self._open(dsn, slot, options, sink, 1, self._spy)
        due = {self._n_steps // 2, r.randrange(self._n_steps)}
        try:
            for number, _ in enumerate(workload.steps()):
                what = r.random()
                if what < 0.10:
                    pipeline.read_until(self._tick())
                elif what < 0.16:
                    pipeline.read_some(r.choice((10, 200, 3000)))
                if number in due:
                    if r.random() < 0.5:
                        pipeline.read_some(r.randrange(2000))
                    outcome.n_spills += pipeline.buffers.n_spills
                    pipeline.close()
                    outcome.n_restarts += 1
                    pipeline = self._open(dsn, slot, options, sink, outcome.n_restarts + 1, self._spy)
            pipeline.read_until(self._tick())
            outcome.n_spills += pipeline.buffers.n_spills
            left = pipeline.segment_keys()
            assert not left, f"segments are left behind: {left[:3]}"
            pipeline.stop()
        finally:
            pipeline.close()

    def _judge(
        self,
        sinks: dict[str, Sink],
        plans: list[tuple[str, Options]],
        workload: Workload,
        target: Lsn,
        outcome: Outcome,
    ) -> str | None:
        (main, _), (twin, _), *rest = plans
        streamed = sinks[main]
        outcome.n_transactions = len(streamed.transactions)
        outcome.n_streamed = sum(t.streamed for t in streamed.transactions)
        outcome.n_rows = sum(t.n_rows for t in streamed.transactions)
        outcome.n_messages = len(streamed.messages)
        stats = stream_stats(self._server.conninfo(self._name), main)
        outcome.stream_txns = stats.stream_txns if stats else 0
        if outcome.stream_txns == 0:
            return "nothing was streamed: pg_stat_replication_slots.stream_txns is 0"
        twin_stats = stream_stats(self._server.conninfo(self._name), twin)
        if twin_stats and twin_stats.stream_txns:
            return "the twin was streamed"
        dropped = workload.dropped_messages
        if found := difference(
            streamed, sinks[twin], dropped=dropped, without_origin=self._spy.without_origin
        ):
            return found
        for slot, _ in rest:
            if found := difference(streamed, sinks[slot], dropped=dropped, ignore=("gid", "origin")):
                return f"against the twin without two-phase: {found}"
        for slot, _ in plans:
            last = target if slot != main else 0
            if found := check_confirmations(sinks[slot], up_to=last):
                return f"{slot}: {found}"
        model = Model()
        model.apply(streamed.transactions)
        if found := final_difference(model, self._connection):
            return f"the source tables differ: {found}"
        return None

    def _tick(self) -> Lsn:
        """Flush the WAL with a transaction that nobody publishes; the position after it."""
        self._connection.execute("INSERT INTO hidden.tick VALUES (0)")
        row = self._connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return Lsn.parse(row[0])


def remove_database(server: EmbeddedPostgres, name: str, admin: psycopg.Connection[Any]) -> None:
    """With its slots, its prepared transactions, and what its set-up made for the whole server."""
    dsn = server.conninfo(name)
    admin.execute(
        "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots"
        " WHERE database = %s AND active_pid IS NOT NULL",
        (name,),
    )
    slots = admin.execute("SELECT slot_name FROM pg_replication_slots WHERE database = %s", (name,))
    for (slot,) in slots.fetchall():
        drop_slot(dsn, slot)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for (gid,) in connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ):
            connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        try:
            connection.execute(tear_down_statement(name).encode())
        except psycopg.errors.UndefinedObject:
            pass  # the set-up failed before it was made
    admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
