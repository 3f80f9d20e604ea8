"""Drain: rows a second from a slot, of one large committed transaction and of many small ones.

They are compared with ``pg_recvlogical`` with the same options (the walsender's limit), PostgreSQL's own subscription,
and Debezium. The same runs give the cost: CPU seconds for a million rows by process, growth of memory, bytes spilled.
"""

from __future__ import annotations

from typing import Any

from benchmarks import ours, references
from benchmarks.results import median, ratio
from benchmarks.source import Source, server

TRANSACTION_ROWS = (1, 10, 1000)


def run(rows: int, repeats: int, *, with_debezium: bool = True) -> dict[str, Any]:
    """``rows`` is the number of rows of the large transaction. The small transactions have as many together."""
    measured: dict[str, Any] = {"rows": rows, "repeats": repeats}
    with server() as publisher, server() as subscriber, ours.spark_session() as spark:
        ours.warm_up(spark, publisher)

        source = Source(publisher, "large")
        slots = iter(source.slots(11 * repeats + 2))
        source.insert(rows)
        end_lsn = source.end_lsn()
        source.insert(1)  # after the end, because pg_recvlogical stops at the first message past it
        large: dict[str, list[Any]] = {name: [] for name in (*_COMPARED, "binary", "off")}
        for _ in range(repeats):
            large["recvlogical"].append(references.recvlogical(source, next(slots), end_lsn))
            drained = ours.drain(spark, source, next(slots), rows + 1, ours.nothing)
            large["segments"].append(drained.handler_s)
            large["recvlogical_unix"].append(
                references.recvlogical(source, next(slots), end_lsn, dsn=source.socket_dsn)
            )
            unix = ours.drain(spark, source, next(slots), rows + 1, ours.nothing, dsn=source.socket_dsn)
            large["segments_unix"].append(unix.handler_s)
            large["recvlogical_again"].append(references.recvlogical(source, next(slots), end_lsn))
            drained = ours.drain(spark, source, next(slots), rows + 1, ours.touch_every_row)
            large["spark"].append(drained.done_s)
            large["cost"].append(_cost(drained, rows))
            drained = ours.drain(spark, source, next(slots), rows + 1, ours.nothing, lake="delta")
            large["delta"].append(drained.done_s)
            large["cost_delta"].append(_cost(drained, rows))
            large["binary"].append(references.recvlogical(source, next(slots), end_lsn, binary=True))
            large["off"].append(references.recvlogical(source, next(slots), end_lsn, streaming="off"))
            large["subscription"].append(references.subscription(source, next(slots), subscriber, rows + 1))
        if with_debezium:
            seconds = references.debezium(source, next(slots), rows)
            large["debezium"] = [] if seconds is None else [seconds]
        source.close()
        measured["large"] = _summary(rows, large)

        for size in TRANSACTION_ROWS:
            total = rows
            source = Source(publisher, f"small{size}")
            slots = iter(source.slots(2 * repeats))
            source.insert_in_transactions(total, size)
            end_lsn = source.end_lsn()
            source.insert(1)
            small: dict[str, list[Any]] = {"recvlogical": [], "spark": [], "handler": [], "cost": []}
            for _ in range(repeats):
                small["recvlogical"].append(references.recvlogical(source, next(slots), end_lsn))
                drained = ours.drain(spark, source, next(slots), total + 1, ours.touch_every_row)
                small["spark"].append(drained.done_s)
                small["handler"].append(drained.handler_s)
                small["cost"].append(_cost(drained, total))
            source.close()
            measured[f"small_{size}"] = {
                "rows": total,
                "rows_per_s": {
                    name: total / median(small[name]) for name in ("recvlogical", "handler", "spark")
                },
                "ratio_to_recvlogical": {
                    name: ratio(small["recvlogical"], small[name]) for name in ("handler", "spark")
                },
                "seconds": {name: small[name] for name in ("recvlogical", "handler", "spark")},
                "cost": small["cost"],
            }
    return measured


_COMPARED = (
    *("recvlogical", "segments", "recvlogical_again", "spark", "delta", "subscription", "debezium"),
    *("cost", "cost_delta"),
    *("recvlogical_unix", "segments_unix"),
)


def _cost(drained: ours.Drained, rows: int) -> dict[str, Any]:
    usage = drained.usage
    return {
        "cpu_s_per_million_rows": {role: s / rows * 1e6 for role, s in usage.cpu_s.items()},
        "growth_mb": {role: n / 2**20 for role, n in usage.growth_bytes.items()},
        "peak_mb": {role: n / 2**20 for role, n in usage.peak_bytes.items()},
        "spilled_mb": drained.spilled_bytes / 2**20,
    }


def _summary(rows: int, large: dict[str, list[Any]]) -> dict[str, Any]:
    timed = [name for name in large if not name.startswith("cost") and large[name]]
    reference = large["recvlogical"]
    return {
        "rows": rows,
        "rows_per_s": {name: rows / median(large[name]) for name in timed},
        "ratio_to_recvlogical": {
            "segments": ratio(reference, large["segments"]),
            "segments_unix": ratio(large["recvlogical_unix"], large["segments_unix"]),
            "spark": ratio(large["recvlogical_again"], large["spark"]),
            "delta": ratio(large["recvlogical_again"], large["delta"]),
            "binary": ratio(reference, large["binary"]),
            "subscription": ratio(reference, large["subscription"]),
        },
        "seconds": {name: large[name] for name in timed},
        "cost": large["cost"],
        "cost_delta": large["cost_delta"],
    }
