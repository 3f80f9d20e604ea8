"""The console sink: prints each batch for people, its transactions and the first rows of each table.

The one place that prints values, because that is what it is for. Rows are rendered by the JVM
(``DataFrame.show``): Python's datetimes cannot hold every date that PostgreSQL's can.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

import pyarrow.compute as pc

from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.settings.sink_kinds import CONSOLE
from xidstream.pipeline.sinks.stateless import StatelessSink
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark_errors import fault_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

N_ROWS = 20
N_TRANSACTIONS = 10


class ConsoleSink(StatelessSink):
    """``n_rows`` of each table, ``n_transactions`` of each batch; ``out`` is standard output when None."""

    kind = CONSOLE

    def __init__(
        self, n_rows: int = N_ROWS, n_transactions: int = N_TRANSACTIONS, out: TextIO | None = None
    ) -> None:
        self._n_rows = n_rows
        self._n_transactions = n_transactions
        self._out = out

    def write(self, batch: SinkBatch) -> None:
        try:
            text = self.render(batch)
        except Exception as error:
            raise batch.segment_fault(error) or fault_of(error, "printing a batch") from error
        print(text, file=self._out or sys.stdout, flush=True)

    def render(self, batch: SinkBatch) -> str:
        handed = batch.content
        amount = f"{counted(handed.n_transactions, 'transaction')}, {counted(handed.n_rows, 'row')}"
        lines = [f"-- batch {batch.number}: {amount} --"]
        transactions = batch.transaction_rows
        for row in transactions.slice(0, self._n_transactions).to_pylist():
            marks = "".join(
                [" streamed" if row["streamed"] else "", f" gid {row['gid']}" if row["gid"] else ""]
            )
            tables = ", ".join(row["tables"] or []) or "no table"
            lines.append(
                f"  xid {row['xid']} commit {Lsn(row['commit_lsn'])} at {row['commit_timestamp'].isoformat()}"
                f"{marks}: {counted(row['rows'], 'row')} in {tables}"
            )
        if transactions.num_rows > self._n_transactions:
            n_more = transactions.num_rows - self._n_transactions
            lines.append(f"  and {counted(n_more, 'more transaction')}")
        lines += self._shown_messages(batch)
        for name, parts in sorted(batch.parts.items()):
            lines.append(f"  {parts.label}: {counted(parts.n_rows, 'row')}")
            lines.append(_shown(batch.dataframe(name), self._n_rows))
        return "\n".join(lines)

    def _shown_messages(self, batch: SinkBatch) -> Iterator[str]:
        """The first ones; what comes after them is not read."""
        n_left = self._n_rows
        for messages in batch.message_batches():
            shown = messages.slice(0, n_left)
            sizes = pc.binary_length(shown.column("content")).to_pylist()
            named = shown.select(["lsn", "transactional", "prefix"]).to_pylist()
            for row, n_bytes in zip(named, sizes, strict=True):
                kind = "transactional" if row["transactional"] else "non-transactional"
                yield f"  message {Lsn(row['lsn'])} {kind} {row['prefix']!r}: {counted(n_bytes or 0, 'byte')}"
            n_left -= shown.num_rows
            if not n_left:
                return


def _shown(frame: DataFrame, n_rows: int) -> str:
    return frame._show_string(n_rows, 40, False).rstrip()
