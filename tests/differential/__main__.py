"""``python -m tests.differential``: many seeds, on each version, with each set of options; for ``make soak``.

Exit status 1 when anything differs. A failing seed is repeated exactly by ``--seed N`` with the same options; its
statements are written to ``--history FOLDER``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.differential.local_pipeline import Options
from tests.differential.runner import SERVER_SETTINGS, Differential, Outcome
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline import decode

MODES = ((2, "on"), (3, "on"), (4, "on"), (4, "parallel"))


def options_of(seed: int, *, two_phase: bool, proto: str, streaming: str) -> Options | None:
    """What a seed is run with: the modes in turn where none is asked for; None where it is impossible."""
    modes = [
        (p, s)
        for p, s in MODES
        if (proto == "any" or p == int(proto)) and streaming in ("any", s) and not (two_phase and p < 3)
    ]
    if not modes:
        return None
    proto_version, mode = modes[seed % len(modes)]
    return Options(streaming=mode, proto_version=proto_version, two_phase=two_phase)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many, counted from --first-seed")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seed", type=int, help="this one alone, with its statements shown")
    parser.add_argument("--versions", default="16,18")
    parser.add_argument("--two-phase", choices=("on", "off", "both"), default="both")
    parser.add_argument("--proto", choices=("any", "2", "3", "4"), default="any")
    parser.add_argument("--streaming", choices=("any", "on", "parallel"), default="any")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--largest", type=int, default=20_000, help="rows of the largest statement")
    parser.add_argument("--history", type=Path, help="a folder for the statements of seeds that fail")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.seed is not None:
        seeds = range(arguments.seed, arguments.seed + 1)
    two_phases = {"on": (True,), "off": (False,), "both": (False, True)}[arguments.two_phase]
    outcomes: list[Outcome] = []
    # In a fresh checkout this compiles the kernels. That must not happen while a slot is read: on a busy machine it
    # takes longer than the server waits for an answer (wal_sender_timeout).
    decode.warm_up()
    started = time.monotonic()
    for version in map(int, arguments.versions.split(",")):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"xs-diff-{version}-")))
            server = stack.enter_context(
                EmbeddedPostgres(folder / "data", version=version, settings=SERVER_SETTINGS)
            )
            for seed in seeds:
                for two_phase in two_phases:
                    options = options_of(
                        seed, two_phase=two_phase, proto=arguments.proto, streaming=arguments.streaming
                    )
                    if options is None:
                        continue
                    run = Differential(
                        server,
                        folder / "storage",
                        seed,
                        options,
                        n_steps=arguments.steps,
                        largest=arguments.largest,
                    )
                    outcome = run.run(trace=arguments.seed is not None)
                    outcomes.append(outcome)
                    print(outcome, flush=True)
                    if outcome.problem is not None and arguments.history is not None:
                        arguments.history.mkdir(parents=True, exist_ok=True)
                        name = f"pg{version}-seed{seed}-2pc{int(two_phase)}.sql"
                        (arguments.history / name).write_text("\n".join(outcome.history) + "\n")
    failed = [o for o in outcomes if o.problem is not None]
    rows, streams = sum(o.n_rows for o in outcomes), sum(o.stream_txns for o in outcomes)
    print(
        f"{len(outcomes)} runs, {sum(o.n_transactions for o in outcomes)} transactions, {rows} rows, "
        f"{streams} streamed, "
        f"{time.monotonic() - started:.0f} s: {len(failed)} failed",
        flush=True,
    )
    for outcome in failed:
        print(f"  {outcome}", flush=True)
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
