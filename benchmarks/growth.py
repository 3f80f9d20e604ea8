"""Growth: the cost of a row stays what it is with more open streams, and with more rows.

``streams``: the same number of rows, written by 1 to 32 transactions that are open together and take turns.
``rows``: one transaction of 10⁵ rows and more. Both read from a slot that was made before, with the cost of each row
in CPU seconds of reader and buffers.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psycopg

from benchmarks import ours
from benchmarks.results import median
from benchmarks.source import Source, server

_TURN_ROWS = 2_000
_BUFFERS = 4


def run(rows: int, streams: tuple[int, ...], sizes: tuple[int, ...], repeats: int) -> dict[str, Any]:
    measured: dict[str, Any] = {"rows": rows, "streams": {}, "sizes": {}}
    with server() as publisher, ours.spark_session() as spark:
        for n in (2, *streams):  # the first only warms up
            source = Source(publisher, f"streams{n}")
            slots = source.slots(repeats)
            per_stream = rows // n // _TURN_ROWS * _TURN_ROWS
            _write_in_turns(source, n, per_stream)
            measured["streams"][str(n)] = _drain(spark, source, slots, n * per_stream)
            source.close()
        for size in sizes:
            source = Source(publisher, f"rows{size}")
            slots = source.slots(1 if size >= 5_000_000 else repeats)
            source.insert(size)
            measured["sizes"][str(size)] = _drain(spark, source, slots, size)
            source.close()
    measured["streams"] = {str(n): measured["streams"][str(n)] for n in streams}
    return measured


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


def _drain(spark: Any, source: Source, slots: list[str], n_rows: int) -> dict[str, Any]:
    # All buffers are there from the start: what starting one costs is no cost of a row.
    runs = [
        ours.drain(spark, source, slot, n_rows, ours.nothing, buffers_min=_BUFFERS, buffers_max=_BUFFERS)
        for slot in slots
    ]

    def cpu(role: str) -> float:
        return median([r.usage.cpu_s.get(role, 0.0) for r in runs]) / n_rows * 1e6

    return {
        "rows": n_rows,
        "rows_per_s": n_rows / median([r.handler_s for r in runs]),
        "reader_cpu_s_per_million": cpu("reader"),
        "buffers_cpu_s_per_million": cpu("buffers"),
        "reader_growth_mb": max(r.usage.growth_bytes.get("reader", 0) for r in runs) / 2**20,
        "buffer_growth_mb": max(r.usage.growth_bytes.get("buffers", 0) for r in runs) / 2**20,
    }
