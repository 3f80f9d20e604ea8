"""Growth: does the cost of a row stay the same with more open streams, and with more rows?

``streams``: the same 32 transactions, of which 1 to 32 are open together and take turns. Their number and size are the
same in every case, so that the price of a transaction is not taken for the price of its being open.
``rows``: one transaction of 10⁵ rows and more. Both parts read from a slot that was made before the data, and give the
cost of a row in CPU seconds of reader and buffers.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psycopg

from benchmarks import ours
from benchmarks.ours import Drained
from benchmarks.results import median
from benchmarks.source import Source, server
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

_TURN_ROWS = 2_000
_BUFFERS = 4
_LARGE_ROWS = 5_000_000


def run(rows: int, streams: tuple[int, ...], sizes: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Run each case ``repeats`` times, and the largest once.

    All data is written first. Then it is drained in rounds, one of each case after the other, because the machine's
    speed drifts within minutes by more than the differences that are looked for here.
    """
    with server() as publisher, ours.spark_session() as spark:
        ours.warm_up(spark, publisher)
        by_streams = _measure_streams(spark, publisher, rows, streams, repeats)
        by_size = _measure_sizes(spark, publisher, sizes, repeats)
    return {"rows": rows, "rounds": repeats, "streams": by_streams, "sizes": by_size}


def _measure_streams(
    spark: Any, publisher: EmbeddedPostgres, rows: int, streams: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    cases = {}
    with ExitStack() as stack:
        n_transactions = max(streams)
        per_transaction = rows // n_transactions // _TURN_ROWS * _TURN_ROWS
        for n in streams:
            source = Source(publisher, f"streams{n}")
            stack.callback(source.close)
            cases[n] = _Case(source, source.slots(repeats), n_transactions * per_transaction)
            for _ in range(n_transactions // n):
                _write_in_turns(source, n, per_transaction)
        _drain_in_rounds(spark, list(cases.values()))
    return {str(n): case.measured() for n, case in cases.items()}


def _measure_sizes(
    spark: Any, publisher: EmbeddedPostgres, sizes: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    cases = {}
    with ExitStack() as stack:
        # The largest is written first: a walsender that has sent its rows goes on through the log that was written
        # later.
        for size in sorted(sizes, reverse=True):
            source = Source(publisher, f"rows{size}")
            stack.callback(source.close)
            cases[size] = _Case(source, source.slots(1 if size >= _LARGE_ROWS else repeats), size)
            source.insert(size)
        _drain_in_rounds(spark, list(cases.values()))
    return {str(size): cases[size].measured() for size in sizes}


@dataclass
class _Case:
    """One case: a source, and the slots that drain it one after the other."""

    source: Source
    slots: list[str]
    n_rows: int
    runs: list[Drained] = field(default_factory=list)

    def measured(self) -> dict[str, Any]:
        growth = [run.usage.growth_bytes for run in self.runs]
        return {
            "rows": self.n_rows,
            "rows_per_s": self.n_rows / median([run.handler_s for run in self.runs]),
            "reader_cpu_s_per_million": median(self._cpu_s_per_million("reader")),
            "buffers_cpu_s_per_million": median(self._cpu_s_per_million("buffers")),
            "all_reader_cpu_s_per_million": self._cpu_s_per_million("reader"),
            "all_buffers_cpu_s_per_million": self._cpu_s_per_million("buffers"),
            "reader_growth_mb": max(g.get("reader", 0) for g in growth) / 2**20,
            "buffer_growth_mb": max(g.get("buffers", 0) for g in growth) / 2**20,
        }

    def _cpu_s_per_million(self, role: str) -> list[float]:
        return [run.usage.cpu_s.get(role, 0.0) / self.n_rows * 1e6 for run in self.runs]


def _drain_in_rounds(spark: Any, cases: list[_Case]) -> None:
    """Drain each case in each round. All buffers run from the start, because starting one is not a cost of a row."""
    for i in range(max((len(case.slots) for case in cases), default=0)):
        for case in cases:
            if i < len(case.slots):
                buffers = {"buffers_min": _BUFFERS, "buffers_max": _BUFFERS}
                run = ours.drain(spark, case.source, case.slots[i], case.n_rows, ours.nothing, **buffers)
                case.runs.append(run)


def _write_in_turns(source: Source, n_streams: int, per_stream: int) -> None:
    with ExitStack() as stack:
        writers = [
            stack.enter_context(psycopg.connect(source.dsn, autocommit=True)) for _ in range(n_streams)
        ]
        for writer in writers:
            writer.execute(b"begin")
        for _ in range(per_stream // _TURN_ROWS):
            for writer in writers:
                source.insert(_TURN_ROWS, writer)
        for writer in reversed(writers):
            writer.execute(b"commit")
