"""``python -m benchmarks [CASE …]`` runs cases at a scale and writes the results down. See the package."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks import results

CASES = (
    "drain",
    "lag",
    "delta",
    "latency",
    "growth",
    "tables",
    "profile",
    "startup",
    "capture",
    "snapshot",
    "snapshot_peers",
    "snapshot_lag",
    "state",
    "hang",
)


def cases(
    rows: int, repeats: int, *, quick: bool, with_debezium: bool, largest: int = 10_000_000
) -> dict[str, Callable[[], Any]]:
    """The cases by name. Each imports its own modules, because the report needs neither Ray nor a server."""

    def drain() -> Any:
        from benchmarks import drain

        return drain.run(rows, repeats, with_debezium=with_debezium)

    def lag() -> Any:
        from benchmarks import lag

        sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
        sizes = tuple(size for size in sizes if size <= largest)
        return lag.run(sizes, repeats, off_up_to=1_000_000)

    def delta() -> Any:
        from benchmarks import delta_lag

        sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000)
        return delta_lag.run(tuple(size for size in sizes if size <= largest), repeats)

    def latency() -> Any:
        from benchmarks import latency

        return latency.run((10, 100) if quick else (10, 100, 1000), 5 if quick else 20)

    def growth() -> Any:
        from benchmarks import growth

        streams = (1, 4) if quick else (1, 2, 4, 8, 16, 32)
        sizes = (100_000,) if quick else (100_000, 1_000_000, 10_000_000)
        sizes = tuple(size for size in sizes if size <= largest)
        return growth.run(rows, streams, sizes, repeats)

    def tables() -> Any:
        from benchmarks import tables

        return tables.run(*((1_000, 2_000) if quick else (10_000, 100_000)))

    def profile() -> Any:
        from benchmarks import profiles

        return profiles.run(rows, repeats)

    def startup() -> Any:
        from benchmarks import startup

        return startup.run(1 if quick else 3)

    def capture() -> Any:
        from benchmarks import capture

        return capture.run(rows, 1 if quick else 3)

    def snapshot() -> Any:
        from benchmarks import snapshot_read

        return snapshot_read.run(rows, repeats)

    def state() -> Any:
        from benchmarks import current_state

        sizes = (200_000, 2_000) if quick else (largest, 100_000)
        return current_state.run(*sizes, repeats)

    def snapshot_peers() -> Any:
        from benchmarks import snapshot_peers

        return snapshot_peers.run(rows, repeats, with_debezium=with_debezium)

    def snapshot_lag() -> Any:
        from benchmarks import snapshot_lag

        return snapshot_lag.run(*((100_000, 5.0) if quick else (1_000_000, 30.0)))

    def hang() -> Any:
        from benchmarks import hang

        return hang.run(200.0, 60.0 if quick else 300.0)

    return {
        "drain": drain,
        "lag": lag,
        "delta": delta,
        "latency": latency,
        "growth": growth,
        "tables": tables,
        "profile": profile,
        "startup": startup,
        "capture": capture,
        "snapshot": snapshot,
        "snapshot_peers": snapshot_peers,
        "snapshot_lag": snapshot_lag,
        "state": state,
        "hang": hang,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}, report; default: all")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the large transaction")
    parser.add_argument("--largest", type=int, default=10_000_000, help="most rows of the cases that grow")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, once each: shows that it works, not how fast it is"
    )
    parser.add_argument("--no-debezium", action="store_true")
    arguments = parser.parse_args()
    wanted = arguments.cases or [*CASES, "report"]
    if unknown := set(wanted) - {*CASES, "report"}:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    rows, repeats = (200_000, 1) if arguments.quick else (arguments.rows, arguments.repeats)
    runnable = cases(
        rows,
        repeats,
        quick=arguments.quick,
        with_debezium=not arguments.no_debezium,
        largest=arguments.largest,
    )
    for name in wanted:
        if name == "report":
            from benchmarks import report

            report.write()
            continue
        before, started_s = os.getloadavg()[0], time.monotonic()
        print(f"{name}: load {before:.1f} before", flush=True)
        measured = runnable[name]()
        measured["load_before"] = before
        measured["took_s"] = time.monotonic() - started_s
        results.save(name, measured)
        print(f"{name}: {measured['took_s']:.0f} s; {results.OUT}", flush=True)


if __name__ == "__main__":
    main()
