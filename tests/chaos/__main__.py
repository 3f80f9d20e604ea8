"""``python -m tests.chaos --seeds N --kills M``: N rounds of M kills on one Ray, each judged; for ``make chaos``.
``--pauses P``: and of P pauses, for which processes stand still until the server has given them up.

Exit status 1 when anything is lost, twice, disordered or confirmed too early, a kill is not recovered from, or a fault
point was struck less often than ``--least`` says.
``--first-seed S --seeds 1`` repeats one round with the same workload and the same faults in the same order
(processes do not interleave the same way twice).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.chaos_round import (
    CHOSEN_STRIKE_TIMEOUT_S,
    STRIKE_TIMEOUT_S,
    Round,
    RoundResult,
)
from tests.chaos.kills import OUTSIDE, Plan, schedule, with_pauses
from tests.chaos.local_round import run_local
from tests.chaos.report import Report
from tests.differential.runner import SERVER_SETTINGS
from tests.iceberg_rest import IcebergRestServer
from tests.lakes import DeltaLake, IcebergLake, Lake, TogetherLake
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.faultpoints import TOKENS_VARIABLE, VARIABLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=50, help="of each seed")
    parser.add_argument(
        "--pauses", type=int, default=0, help="of each seed, beside the kills; not with --local"
    )
    parser.add_argument("--driver-share", type=float, default=0.14, help="of the kills, the driver's")
    parser.add_argument(
        "--outside", type=int, default=1, help=f"further kills of each seed: {', '.join(OUTSIDE)}"
    )
    parser.add_argument("--together", type=int, default=3, help="kills armed at once")
    parser.add_argument("--least", type=int, default=0, help="fail with fewer kills at any fault point")
    parser.add_argument("--out", type=Path, help="write what was found into this file, as JSON")
    parser.add_argument("--version", type=int, default=18)
    parser.add_argument(
        "--local", action="store_true", help="without Ray and Spark: one process, forked and killed"
    )
    parser.add_argument(
        "--journal", action="store_true", help="write everything to the journal before the sink has it"
    )
    parser.add_argument(
        "--iceberg",
        nargs="?",
        const="folder",
        choices=("folder", "rest"),
        help="into Iceberg tables: of a folder's catalog, or of a REST catalog that commits several at once; not with "
        "--local",
    )
    parser.add_argument("--limit-s", type=float, default=0, help="no further kill or round after this time")
    parser.add_argument(
        "--faults", help="these instead, in this order; as in XIDSTREAM_FAULTS, or kills from outside"
    )
    arguments = parser.parse_args()
    if arguments.local and arguments.pauses:
        parser.error("--local has no pauses")
    if arguments.local and arguments.iceberg:
        parser.error("--local has a sink of its own")
    faulthandler.enable()
    started = time.monotonic()
    results: list[RoundResult] = []
    loads: list[float] = []
    threading.Thread(target=_watch_load, args=(loads,), daemon=True).start()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xs-chaos-")))
        plan = Plan(folder / "plan")
        make_driver: Any = None
        rest: IcebergRestServer | None = None
        if arguments.iceberg == "rest":
            rest = IcebergRestServer(folder, together=True)
            stack.callback(rest.stop)
            os.environ |= {
                "PYICEBERG_CATALOG__PROD__TYPE": "rest",
                "PYICEBERG_CATALOG__PROD__URI": rest.uri,
            }
        if not arguments.local:
            # Before Ray starts: its workers, RayDP's JVMs and their Python inherit them.
            os.environ[VARIABLE], os.environ[TOKENS_VARIABLE] = f"@{plan.file}", str(plan.tokens)
            from xidstream.actors.runtime.ray_cluster import connect_ray
            from xidstream.actors.supervision.shared_session import SharedSession

            make_driver = lambda config: SharedSession({config.slot: config}).driver(config.slot)
            connect_ray()
            # `timeout` ends this by SIGTERM: the server and Ray must go, too. (Ray has set a handler of its own.)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        server = stack.enter_context(
            EmbeddedPostgres(folder / "data", version=arguments.version, settings=SERVER_SETTINGS)
        )
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            if arguments.limit_s and time.monotonic() - started > arguments.limit_s:
                break
            if arguments.local:
                until_s = started + arguments.limit_s if arguments.limit_s else float("inf")
                results.append(
                    run_local(
                        server,
                        folder / f"seed-{seed}",
                        plan,
                        seed,
                        arguments.kills,
                        until_s,
                        journal=arguments.journal,
                    )
                )
                print(results[-1], flush=True)
                continue
            two_phase, streaming = seed % 2 == 0, ("on", "parallel")[seed // 2 % 2]
            faults = schedule(
                seed,
                arguments.kills,
                two_phase=two_phase,
                driver_share=arguments.driver_share,
                together=arguments.together,
                journal=arguments.journal,
                iceberg=arguments.iceberg,
            )
            pauses = schedule(
                seed,
                arguments.pauses,
                two_phase=two_phase,
                driver_share=arguments.driver_share,
                journal=arguments.journal,
            )
            faults = with_pauses(faults, seed, pauses)
            if arguments.faults:
                faults = arguments.faults.split(",")
            for n in range(0 if arguments.faults else arguments.outside):
                place = random.Random(f"{seed}-{n}").randrange(len(faults) + 1)
                faults.insert(place, OUTSIDE[(seed * arguments.outside + n) % len(OUTSIDE)])
            result = Round(
                server,
                folder / f"seed-{seed}",
                plan,
                seed,
                faults,
                make_driver,
                two_phase=two_phase,
                streaming=streaming,
                journal=arguments.journal,
                lake=_lake(arguments.iceberg, folder / f"seed-{seed}" / "lake", rest, f"chaos_{seed}"),
                kills_until_s=started + arguments.limit_s if arguments.limit_s else float("inf"),
                strike_timeout_s=CHOSEN_STRIKE_TIMEOUT_S if arguments.faults else STRIKE_TIMEOUT_S,
                say=lambda text: print(f"  {time.monotonic() - started:6.1f} {text}", flush=True),
            ).run()
            results.append(result)
            print(result, flush=True)
    report = Report.of(results, loads, time.monotonic() - started)
    print(report)
    if arguments.out:
        report.write(arguments.out)
    failures = report.failures(arguments.least)
    print("\n".join(failures) or "nothing failed")
    return 1 if failures else 0


def _lake(iceberg: str | None, root: Path, rest: IcebergRestServer | None, namespace: str) -> Lake:
    if rest is not None:
        return TogetherLake(rest, namespace)
    return IcebergLake(root) if iceberg else DeltaLake(root)


def _watch_load(loads: list[float]) -> None:
    while True:
        loads.append(round(os.getloadavg()[0], 1))
        time.sleep(10)


if __name__ == "__main__":
    sys.exit(main())
