"""``xidstream demo``: the whole path on nothing but what pip installed, with its proof at the end.

An embedded PostgreSQL 18, a local Ray, a RayDP session in this process. A large transaction is written and held
open; its rows are seen in the buffers before COMMIT; small transactions commit past it; a savepoint is rolled
back; then it commits, and the time until Spark counts its rows is measured. What Spark and the Delta tables then
hold is compared with the source tables, and a difference makes the demo fail.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.driver.session import start_spark, stop_spark
from xidstream.actors.runtime.quantities import human_bytes, human_ms
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.supervision.drivers import InProcessDriver
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import EnvironmentFault, UsageError, XidstreamError
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.spark.delta import DeltaSink
from xidstream.pipeline.spark.frames import SparkBatch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MARKER = ".xidstream-demo"
_SMALL_TRANSACTIONS = 20
_TIMEOUT_S = 120

_SCHEMA = """
create table orders (
  id bigint primary key, customer int, note text, amount numeric(12,2), placed timestamptz, paid bool, weight float8
);
create table payments (id bigint primary key, order_id bigint, amount numeric(12,2));
create publication shop for table orders, payments;
"""
_ROWS = """
insert into orders
select i, mod(i, 1000), 'order number ' || i, mod(i, 100000) / 100.0, now(), mod(i, 2) = 0, i / 7.0
from generate_series(%s::bigint, %s::bigint) i
"""


@dataclass
class Arrival:
    """When a batch reached the handler, when a Spark action on its rows was done, when Delta had it."""

    last_commit_lsn: Lsn
    n_rows: int
    handler_s: float
    counted_s: float
    delta_s: float


@dataclass
class WatchedDelta:
    """The Delta sink, with a Spark count before it and a clock beside it."""

    delta: DeltaSink
    arrivals: list[Arrival] = field(default_factory=list)

    def open(self, spark: SparkSession) -> None:
        self.delta.open(spark)

    def watermark(self) -> Lsn:
        return self.delta.watermark()

    def last_owner(self) -> int:
        return self.delta.last_owner()

    def claim(self, tenure: Tenure) -> None:
        self.delta.claim(tenure)

    def write(self, batch: SparkBatch) -> None:
        handler_s = time.monotonic()
        n_rows = sum(batch.dataframe(table).count() for table in batch.tables)
        if n_rows != batch.handoff.n_rows:
            raise EnvironmentFault(
                f"Spark counted {n_rows:,} rows of {batch.handoff.n_rows:,}: please report this"
            )
        counted_s = time.monotonic()
        self.delta.write(batch)
        self.arrivals.append(Arrival(batch.last_commit_lsn, n_rows, handler_s, counted_s, time.monotonic()))

    def close(self) -> None:
        self.delta.close()


def run_demo(*, n_rows: int, output: Path) -> None:
    """Raises UsageError for an output folder that is not a demo's, EnvironmentFault when the proof fails."""
    console = Console(highlight=False)
    _prepare_output(output)
    started_s = time.monotonic()
    console.print(
        Panel(
            f"A transaction of {n_rows:,} rows goes from PostgreSQL to Spark while it is still open.\n"
            "Everything here is embedded: PostgreSQL 18, Ray, a JVM, Spark through RayDP.",
            title="xidstream demo",
            expand=False,
        )
    )
    with tempfile.TemporaryDirectory(prefix="xidstream-demo-") as scratch:
        with console.status("starting PostgreSQL, Ray and a RayDP Spark session (about 20 s)"):
            connect_ray()
            server = EmbeddedPostgres(Path(scratch) / "postgres", version=18)
            server.start()
        try:
            _shown(console, server, Path(scratch), output, n_rows)
        finally:
            server.stop()
            stop_spark()
    console.print(f"\nThe demo took {time.monotonic() - started_s:.0f} s.")
    console.print(
        "Next: [bold]xidstream check --dsn … --slot … --publication …[/] tells what your server still lacks;\n"
        "      [bold]xidstream run --help[/] lists every setting; the README has a PySpark example."
    )


def _shown(console: Console, server: EmbeddedPostgres, scratch: Path, output: Path, n_rows: int) -> None:
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(_SCHEMA.encode())
    config = Config(
        dsn=server.conninfo(),
        slot="demo",
        publication=("shop",),
        storage=str(scratch / "segments"),
        sink=f"delta:{output}",
        create_slot=True,
        buffers_max=2,
        buffer_memory_bytes=16 << 20,
        batch_rows=10_000_000,
    )
    with console.status("starting a RayDP Spark session"):
        spark = start_spark(config, "xidstream-demo")
    sinks: list[WatchedDelta] = []

    def make(identity: SlotIdentity) -> Any:
        sinks.append(WatchedDelta(DeltaSink(str(output), identity)))
        return sinks[-1]

    driver = InProcessDriver(spark, config.storage, make)
    supervisor = Supervisor(config, lambda: driver, notify=lambda text: console.print(text, style="yellow"))
    failed: list[BaseException] = []

    def work() -> None:
        try:
            supervisor.run()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        _await(lambda: supervisor.status().opened is not None and bool(sinks), failed)
        committed_s, commit_lsns = _workload(console, server, supervisor, sinks[0], n_rows, failed)
        _prove(console, spark, server, output, sinks[0], committed_s, commit_lsns)
    finally:
        supervisor.stop()
        thread.join(_TIMEOUT_S)


def _workload(
    console: Console,
    server: EmbeddedPostgres,
    supervisor: Supervisor,
    sink: WatchedDelta,
    n_rows: int,
    failed: list[BaseException],
) -> tuple[float, dict[str, Lsn]]:
    """The acts of the demo. Returns when COMMIT returned, and the LSNs of what committed when."""
    lsns: dict[str, Lsn] = {}
    with (
        psycopg.connect(server.conninfo()) as large,
        psycopg.connect(server.conninfo(), autocommit=True) as small,
    ):
        console.print(
            "\n[bold]1.[/] A large transaction begins. Its rows arrive in the buffers [bold]before COMMIT[/]:"
        )
        bar = Progress(
            TextColumn("   {task.description:<22}"),
            BarColumn(40),
            TextColumn("{task.completed:>9,.0f} rows"),
            console=console,
        )
        with bar:
            written = bar.add_task("written by the client", total=n_rows)
            arrived = bar.add_task("decoded in buffers", total=n_rows)
            step = max(1, n_rows // 20)
            for first in range(1, n_rows + 1, step):
                last = min(first + step - 1, n_rows)
                large.execute(_ROWS.encode(), (first, last))
                bar.update(written, completed=last)
                bar.update(arrived, completed=_open_rows(supervisor))
            # Less than logical_decoding_work_mem stays in the walsender until COMMIT: that is the setting's sense.
            _await_steady(lambda: _open_rows(supervisor), lambda n: bar.update(arrived, completed=n), failed)
        rows_before_commit = _open_rows(supervisor)
        segments = sum(n for *_, n in _open(supervisor))
        held = sum(n for _, _, n, _ in _open(supervisor))
        console.print(
            f"   {rows_before_commit:,} of {n_rows:,} rows are decoded, {segments} segments spilled to storage, "
            f"{human_bytes(held)} in memory. Nothing of it is visible in Spark: {len(sink.arrivals)} batches so far."
        )
        if rows_before_commit == 0:
            raise EnvironmentFault("no row of the open transaction arrived before its COMMIT")

        console.print(f"\n[bold]2.[/] {_SMALL_TRANSACTIONS} small transactions commit past it:")
        for n in range(1, _SMALL_TRANSACTIONS + 1):
            small.execute(b"insert into payments values (%s, %s, 9.99)", (n, n))
        lsns["small"] = _lsn(small)
        _await(lambda: sum(a.n_rows for a in sink.arrivals) >= _SMALL_TRANSACTIONS, failed)
        console.print(
            f"   all {_SMALL_TRANSACTIONS} are in Spark and in Delta, while the large one is still open."
        )

        console.print("\n[bold]3.[/] A savepoint in the large transaction is rolled back, then it goes on:")
        large.execute(b"savepoint mistake")
        large.execute(_ROWS.encode(), (n_rows + 1, n_rows + n_rows // 10))
        large.execute(b"rollback to savepoint mistake")
        large.execute(_ROWS.encode(), (2 * n_rows + 1, 2 * n_rows + 5))
        console.print(f"   {n_rows // 10:,} rows written and rolled back, 5 more written after.")
        _await_steady(lambda: _open_rows(supervisor), lambda n: None, failed)

        console.print("\n[bold]4.[/] COMMIT.")
        large.commit()
        committed_s = time.monotonic()
        lsns["large"] = _lsn(small)
        _await(lambda: sum(a.n_rows for a in sink.arrivals) >= _SMALL_TRANSACTIONS + n_rows + 5, failed)
    return committed_s, lsns


def _prove(
    console: Console,
    spark: SparkSession,
    server: EmbeddedPostgres,
    output: Path,
    sink: WatchedDelta,
    committed_s: float,
    lsns: dict[str, Lsn],
) -> None:
    last = sink.arrivals[-1]
    console.print(
        f"   COMMIT to the batch in the handler   {human_ms((last.handler_s - committed_s) * 1000):>8}"
    )
    console.print(
        f"   COMMIT to a Spark count of its rows  {human_ms((last.counted_s - committed_s) * 1000):>8}"
    )
    console.print(
        f"   COMMIT to the Delta tables           {human_ms((last.delta_s - committed_s) * 1000):>8}"
    )
    from deltalake import DeltaTable

    def frame(name: str) -> Any:
        return spark.read.parquet(*DeltaTable(str(output / name)).file_uris())

    transactions = frame("_transactions").orderBy("commit_lsn").collect()
    table = Table(
        "place",
        "xid",
        "commit LSN",
        "rows",
        "streamed",
        title="\nCommit order, as Spark reads it",
        title_justify="left",
    )
    for place, row in enumerate(transactions):
        if place in (0, 1, len(transactions) - 2, len(transactions) - 1):
            lsn = str(Lsn(row.commit_lsn))
            table.add_row(str(place), str(row.xid), lsn, f"{row.rows:,}", "yes" if row.streamed else "no")
        elif place == 2:
            table.add_row("…", "", "", "", "")
    console.print(table)
    proof = Table(
        "table",
        "rows in PostgreSQL",
        "rows in Delta",
        "sum of ids",
        "equal",
        title="\nSource and Delta",
        title_justify="left",
    )
    equal = bool(transactions[-1].streamed) and transactions[-1].rows == max(t.rows for t in transactions)
    with psycopg.connect(server.conninfo()) as source:
        for name in ("orders", "payments"):
            row = source.execute(f"select count(*), sum(id)::bigint from {name}".encode()).fetchone()
            assert row is not None
            got = frame(f"public.{name}").selectExpr("count(distinct id)", "sum(id)", "count(*)").collect()[0]
            same = (row[0], row[1], row[0]) == (got[0], got[1], got[2])
            equal = equal and same
            proof.add_row(
                name, f"{row[0]:,}", f"{got[2]:,}", f"{got[1]:,}", "[green]yes[/]" if same else "[red]NO[/]"
            )
    console.print(proof)
    console.print(f"\nThe Delta tables are in [bold]{output}[/]:")
    for path in sorted(p for p in output.iterdir() if p.is_dir()):
        size = sum(f.stat().st_size for f in path.rglob("*.parquet"))
        console.print(
            f"   {path.name:<18} version {DeltaTable(str(path)).version()}, {human_bytes(size)} of Parquet"
        )
    if not equal:
        raise EnvironmentFault("what Spark holds differs from the source: please report this")


def _prepare_output(output: Path) -> None:
    """Replace what an earlier demo left; touch nothing else."""
    if output.exists():
        if any(output.iterdir()) and not (output / _MARKER).exists():
            raise UsageError(
                f"{output} is not empty, and not an earlier demo's", remedy="give another --output"
            )
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / _MARKER).touch()


def _open(supervisor: Supervisor) -> tuple[tuple[Any, int, int, int], ...]:
    reader = supervisor.status().reader
    return reader.open if reader is not None else ()


def _open_rows(supervisor: Supervisor) -> int:
    return sum(rows for _, rows, _, _ in _open(supervisor))


def _lsn(connection: psycopg.Connection[Any]) -> Lsn:
    row = connection.execute(b"select pg_current_wal_lsn()::text").fetchone()
    assert row is not None
    return Lsn.parse(row[0])


def _await_steady(measure: Any, show: Any, failed: list[BaseException]) -> None:
    """Until the measure has stopped growing for a second."""
    last, since_s = -1, time.monotonic()
    deadline_s = since_s + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        if failed:
            raise failed[0]
        now = measure()
        show(now)
        if now != last:
            last, since_s = now, time.monotonic()
        elif now and time.monotonic() - since_s > 1.0:
            return
        time.sleep(0.1)
    raise XidstreamError("the demo's rows did not arrive in time")


def _await(condition: Any, failed: list[BaseException]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not condition():
        if failed:
            raise failed[0]
        if time.monotonic() > deadline_s:
            raise XidstreamError("the demo made no progress: see --debug")
        time.sleep(0.02)
