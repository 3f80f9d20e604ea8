"""The end of the demo: how long it took, in which order transactions are in Delta, and whether every row is there.

Spark reads the Delta tables' files, and PostgreSQL is asked for the same sums. A difference makes the demo fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from deltalake import DeltaTable
from rich.console import Console
from rich.table import Table

from xidstream.actors.demo.watched_delta import Arrival
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.quantities import human_bytes, human_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLES: Final = ("orders", "payments")
_SHOWN_AT_EACH_END: Final = 2


def prove(console: Console, spark: SparkSession, conninfo: str, output: Path) -> None:
    """Show the proof. Raises EnvironmentFault if Delta and the source differ, or the large transaction is not last."""
    in_order = _show_commit_order(console, spark, output)
    equal = _compare_with_source(console, spark, conninfo, output)
    _show_files(console, output)
    if not (in_order and equal):
        raise EnvironmentFault("what Spark holds differs from the source: please report this")


def show_lag(console: Console, last: Arrival, committed_s: float) -> None:
    """How long after its COMMIT the large transaction was in each place."""
    for reached, arrived_s in (
        ("COMMIT to the batch in the handler", last.handler_s),
        ("COMMIT to a Spark count of its rows", last.counted_s),
        ("COMMIT to the Delta tables", last.delta_s),
    ):
        console.print(f"   {reached:<36} {human_ms((arrived_s - committed_s) * 1000):>8}")


def _show_commit_order(console: Console, spark: SparkSession, output: Path) -> bool:
    """Whether the last transaction was streamed and is the largest."""
    transactions = _frame(spark, output, "_transactions").orderBy("commit_lsn").collect()
    console.print("\nCommit order, as Spark reads it:")
    table = Table("place", "xid", "commit LSN", "rows", "streamed")
    for index, row in enumerate(transactions):
        if index < _SHOWN_AT_EACH_END or index >= len(transactions) - _SHOWN_AT_EACH_END:
            lsn = str(Lsn(row.commit_lsn))
            table.add_row(str(index), str(row.xid), lsn, f"{row.rows:,}", "yes" if row.streamed else "no")
        elif index == _SHOWN_AT_EACH_END:
            table.add_row("…", "", "", "", "")
    console.print(table)
    last = transactions[-1]
    return bool(last.streamed) and last.rows == max(t.rows for t in transactions)


def _compare_with_source(console: Console, spark: SparkSession, conninfo: str, output: Path) -> bool:
    """Whether each table has as many rows in Delta as in PostgreSQL, all distinct, with the same sum of ids."""
    console.print("\nSource and Delta:")
    proof = Table("table", "rows in PostgreSQL", "rows in Delta", "sum of ids", "equal")
    equal = True
    with psycopg.connect(conninfo) as source:
        for name in _TABLES:
            row = source.execute(f"select count(*), sum(id)::bigint from {name}".encode()).fetchone()
            assert row is not None
            n_rows, id_sum = row
            delta = _frame(spark, output, f"public.{name}")
            n_ids, delta_sum, n_delta = delta.selectExpr(
                "count(distinct id)", "sum(id)", "count(*)"
            ).collect()[0]
            same = (n_rows, id_sum, n_rows) == (n_ids, delta_sum, n_delta)
            equal = equal and same
            verdict = "[green]yes[/]" if same else "[red]NO[/]"
            proof.add_row(name, f"{n_rows:,}", f"{n_delta:,}", f"{delta_sum:,}", verdict)
    console.print(proof)
    return equal


def _show_files(console: Console, output: Path) -> None:
    console.print(f"\nThe Delta tables are in [bold]{output}[/]:")
    for path in sorted(p for p in output.iterdir() if p.is_dir()):
        size = sum(f.stat().st_size for f in path.rglob("*.parquet"))
        console.print(
            f"   {path.name:<18} version {DeltaTable(str(path)).version()}, {human_bytes(size)} of Parquet"
        )


def _frame(spark: SparkSession, output: Path, name: str) -> Any:
    return spark.read.parquet(*DeltaTable(str(output / name)).file_uris())
