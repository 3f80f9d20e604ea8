"""``python -m tests.truth --steps N --seed S``: random DDL and DML beside a real run, each step read at once.

Prints the seed, what was equal, refused (and for how long), and each difference with the statements that led to it.
Exit status 1 where something is different, or a table cannot be read in the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psycopg

from tests.truth.run import Settings, run_steps
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.truth", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--version", type=int, default=18)
    parser.add_argument("--trigger", action="store_true", help="with the event trigger for DDL")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no further step after this time")
    parser.add_argument("--looks-every", type=int, default=1, help="steps between two looks")
    parser.add_argument(
        "--refresh-every", type=int, default=20, help="steps between two refreshes of base tables"
    )
    arguments = parser.parse_args()
    faulthandler.enable()
    trigger = "with" if arguments.trigger else "without"
    print(f"seed {arguments.seed}, PostgreSQL {arguments.version}, {trigger} the event trigger", flush=True)
    from xidstream.actors.driver.session import start_spark, stop_spark
    from xidstream.actors.runtime.ray_cluster import connect_ray
    from xidstream.pipeline.settings.config import Config

    connect_ray()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="xs-truth-") as folder,
        EmbeddedPostgres(
            Path(folder) / "data",
            version=arguments.version,
            settings={"fsync": "off", "full_page_writes": "off", "wal_level": "logical"},
        ) as server,
    ):
        spark = start_spark(Config(), "xidstream-truth")
        try:
            settings = Settings(
                arguments.steps,
                arguments.seed,
                has_trigger=arguments.trigger,
                looks_every=arguments.looks_every,
                refresh_every=arguments.refresh_every,
                until_s=began_s + arguments.limit_s,
            )
            result = run_steps(
                lambda: psycopg.connect(server.conninfo(), autocommit=True),
                server.conninfo(),
                spark,
                Path(folder),
                settings,
                say=lambda text: print(f"  {time.monotonic() - began_s:7.1f} {text}", flush=True),
            )
        finally:
            stop_spark()
    print(result)
    return 0 if result.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
