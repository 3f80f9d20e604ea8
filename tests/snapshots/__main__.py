"""``python -m tests.snapshots --rows N --seed S --kills KIND@PERCENT …``: a round of snapshots with kills, judged.

``--kills`` may be given several times: each gives a round of its own. ``--matrix``: every kind of process is killed at
25, 50 and 75 % of the rows, in one round, and the whole run in another. Exit status 1 when any state differs from the
twin's.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.snapshots.snapshot_round import KINDS, Kill, Result, Round
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

_PERCENTS = (25, 50, 75)
_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_wal_size": "8GB",
    "shared_buffers": "256MB",
    "max_locks_per_transaction": "128",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.snapshots", description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=200_000, help="of the largest table; the others in proportion"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many, counted from --seed, of each round")
    parser.add_argument("--version", type=int, default=18)
    parser.add_argument("--kills", nargs="*", action="append", default=[], metavar="KIND@PERCENT")
    parser.add_argument(
        "--matrix", action="store_true", help=f"each of {', '.join(KINDS)} at 25, 50 and 75 %%"
    )
    parser.add_argument("--two-phase", action="store_true")
    parser.add_argument(
        "--range-bytes", type=int, default=0, help="default: so that there are some 60 ranges"
    )
    parser.add_argument("--bytes-per-s", type=int, default=0, help="snapshot_bytes_per_s; default: no limit")
    parser.add_argument("--out", type=Path, help="write the results into this file, as JSON")
    arguments = parser.parse_args()
    faulthandler.enable()
    rounds = [[Kill.parse(text) for text in texts] for texts in arguments.kills]
    if arguments.matrix:
        parts = [kind for kind in KINDS if kind != "run"]
        rounds += [
            [Kill(kind, percent) for percent in _PERCENTS for kind in kinds] for kinds in (parts, ["run"])
        ]
    # About 350 bytes of all tables for a row of the largest.
    range_bytes = arguments.range_bytes or min(64 << 20, max(64 << 10, arguments.rows * 350 // 60))
    options = ["--snapshot-bytes-per-s", str(arguments.bytes_per_s)] if arguments.bytes_per_s else []
    results: list[Result] = []
    # `timeout` ends this by SIGTERM: the server and the run must go, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started_s = time.monotonic()
    with folder() as at:
        for number, kills in enumerate(rounds or [[]]):
            for seed in range(arguments.seed, arguments.seed + arguments.seeds):
                place = at / f"{number}-{seed}"
                place.mkdir(parents=True)
                with EmbeddedPostgres(
                    place / "data", version=arguments.version, settings=_SETTINGS
                ) as server:
                    result = Round(
                        server,
                        place / "round",
                        seed,
                        arguments.rows,
                        kills,
                        two_phase=arguments.two_phase,
                        range_bytes=range_bytes,
                        options=options,
                        say=lambda text: print(f"  {time.monotonic() - started_s:6.1f} {text}", flush=True),
                    ).run()
                print(result, flush=True)
                results.append(result)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"load": os.getloadavg()[0], "rounds": [r.to_json() for r in results]}, indent=1)
        )
    failed = sum(bool(result.problems) for result in results)
    print(f"{len(results)} rounds, {failed} failed")
    return 1 if failed else 0


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xs-snapshots-", ignore_cleanup_errors=True) as made:
        yield Path(made)


if __name__ == "__main__":
    sys.exit(main())
