"""The four acts of the demo. Two clients write, and the demo shows how far their rows are.

1. A large transaction begins, and its rows arrive in the buffers before COMMIT.
2. Small transactions commit past it.
3. A savepoint in the large transaction is rolled back, and the transaction goes on.
4. The large transaction commits.
"""

from __future__ import annotations

import textwrap
import time
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from xidstream.actors.demo.live_stream import LiveStream
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.quantities import counted, human_bytes

SCHEMA: Final = """
create table orders (
  id bigint primary key, customer int, note text, amount numeric(12,2), placed timestamptz, paid bool, weight float8
);
create table payments (id bigint primary key, order_id bigint, amount numeric(12,2));
create publication shop for table orders, payments;
"""
_ROWS: Final = """
insert into orders
select i, mod(i, 1000), 'order number ' || i, mod(i, 100000) / 100.0, now(), mod(i, 2) = 0, i / 7.0
from generate_series(%s::bigint, %s::bigint) i
"""
_SMALL_TRANSACTIONS: Final = 20
_ROWS_AFTER_ROLLBACK: Final = 5
_STEPS: Final = 20

Connection = psycopg.Connection[Any]


def perform(console: Console, conninfo: str, stream: LiveStream, n_rows: int) -> float:
    """Returns when all rows are in Delta: the ``time.monotonic`` at which COMMIT had returned.

    Raises EnvironmentFault if no row arrived before the COMMIT.
    """
    with psycopg.connect(conninfo) as large, psycopg.connect(conninfo, autocommit=True) as small:
        _write_large(console, large, stream, n_rows)
        _commit_small(console, small, stream)
        _roll_back_savepoint(console, large, stream, n_rows)
        console.print("\n[bold]4.[/] COMMIT.")
        large.commit()
        committed_s = time.monotonic()
        n_expected = _SMALL_TRANSACTIONS + n_rows + _ROWS_AFTER_ROLLBACK
        stream.wait_until(lambda: stream.n_rows_delivered >= n_expected)
    return committed_s


def _write_large(console: Console, large: Connection, stream: LiveStream, n_rows: int) -> None:
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
        step = max(1, n_rows // _STEPS)
        for first in range(1, n_rows + 1, step):
            last = min(first + step - 1, n_rows)
            large.execute(_ROWS.encode(), (first, last))
            bar.update(written, completed=last)
            bar.update(arrived, completed=stream.n_open_rows())
        # The walsender keeps the last rows until COMMIT if they need less than logical_decoding_work_mem.
        stream.wait_until_steady(lambda n: bar.update(arrived, completed=n))
    n_decoded = stream.n_open_rows()
    n_segments = sum(each.n_segments for each in stream.open_transactions())
    n_bytes = sum(each.n_bytes_in_memory for each in stream.open_transactions())
    _say(
        console,
        f"{n_decoded:,} of {n_rows:,} rows are decoded: {human_bytes(n_bytes)} in memory, and "
        f"{counted(n_segments, 'segment')} in storage. Spark sees none of them: it has had "
        f"{len(stream.arrivals)} batches so far.",
    )
    if n_decoded == 0:
        raise EnvironmentFault("no row of the open transaction arrived before its COMMIT")


def _commit_small(console: Console, small: Connection, stream: LiveStream) -> None:
    console.print(
        f"\n[bold]2.[/] {_SMALL_TRANSACTIONS} small transactions commit while the large one is open:"
    )
    for n in range(1, _SMALL_TRANSACTIONS + 1):
        small.execute(b"insert into payments values (%s, %s, 9.99)", (n, n))
    stream.wait_until(lambda: stream.n_rows_delivered >= _SMALL_TRANSACTIONS)
    _say(console, f"all {_SMALL_TRANSACTIONS} are in Spark and in Delta, and the large one is still open.")


def _roll_back_savepoint(console: Console, large: Connection, stream: LiveStream, n_rows: int) -> None:
    console.print("\n[bold]3.[/] The large transaction rolls back to a savepoint and goes on:")
    n_undone = n_rows // 10
    large.execute(b"savepoint mistake")
    large.execute(_ROWS.encode(), (n_rows + 1, n_rows + n_undone))
    large.execute(b"rollback to savepoint mistake")
    large.execute(_ROWS.encode(), (2 * n_rows + 1, 2 * n_rows + _ROWS_AFTER_ROLLBACK))
    _say(
        console,
        f"it wrote {n_undone:,} rows and rolled them back, then it wrote {_ROWS_AFTER_ROLLBACK} more.",
    )
    stream.wait_until_steady(lambda n: None)


def _say(console: Console, text: str) -> None:
    """Indented, also where the terminal is too narrow for one line."""
    console.print(textwrap.fill(text, console.width, initial_indent="   ", subsequent_indent="   "))
