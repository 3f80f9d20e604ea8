"""``xidstream demo``: shows the whole path with nothing but installed wheels, and proves the result at the end.

It uses an embedded PostgreSQL 18, a local Ray, and a Spark session in this process. The acts (``demo.acts``) show that
rows of an open transaction are decoded before its COMMIT. The proof (``demo.proof``) compares what Spark and the
Delta tables hold with the source tables, and a difference makes the demo fail.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psycopg
from rich.console import Console
from rich.panel import Panel

from xidstream.actors.demo.acts import SCHEMA, perform
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.demo.live_stream import LiveStream
from xidstream.actors.demo.proof import prove, show_lag
from xidstream.actors.driver.session import start_spark, stop_spark
from xidstream.actors.runtime.elapsed import Elapsed
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.settings.config import Config

_MARKER: Final = ".xidstream-demo"


def run_demo(*, n_rows: int, output: Path) -> None:
    """Raises PreconditionMissing without the extra ``demo``, UsageError for an output folder that is not a demo's,
    EnvironmentFault when the proof fails."""
    console = Console(highlight=False)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xidstream-demo-") as scratch:
        # First of all, because it is here that a missing PostgreSQL is told.
        server = EmbeddedPostgres(Path(scratch) / "postgres", version=18)
        _prepare_output(output)
        _introduce(console, n_rows)
        with console.status(Elapsed("waiting for PostgreSQL and Ray", started_s)):
            connect_ray()
            server.start()
        try:
            _show(console, server.conninfo(), Path(scratch) / "segments", output, n_rows, started_s)
        finally:
            server.stop()
            stop_spark()
    console.print(f"\nThe demo took {time.monotonic() - started_s:.0f} s.")
    command = _command()
    console.print(
        f"Next: [bold]{command} check --dsn … --slot … --publication …[/]\n"
        "      tells what your server still lacks.\n"
        f"      [bold]{command} run --help[/] lists the settings; the README has a PySpark example."
    )


def _command() -> str:
    """How this xidstream is called here: `make demo` leaves it in an environment that is not on the PATH."""
    if shutil.which("xidstream"):
        return "xidstream"
    beside = Path(sys.executable).with_name("xidstream")
    if not beside.exists():
        return f"{sys.executable} -m xidstream"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def _introduce(console: Console, n_rows: int) -> None:
    console.print(
        Panel(
            f"A transaction of {n_rows:,} rows goes from PostgreSQL to Spark\n"
            "while it is still open. Everything here is embedded: PostgreSQL 18,\n"
            "Ray, and Spark in one JVM. It takes less than a minute.",
            title="xidstream demo",
            expand=False,
        )
    )


def _show(
    console: Console, conninfo: str, storage: Path, output: Path, n_rows: int, started_s: float
) -> None:
    with psycopg.connect(conninfo, autocommit=True) as admin:
        admin.execute(SCHEMA.encode())
    config = Config(
        dsn=conninfo,
        slot="demo",
        publication=("shop",),
        storage=str(storage),
        sink=f"delta:{output}",
        create_slot=True,
        snapshot="never",  # the tables are empty when the slot is made, and a snapshot later would have rows twice
        buffers_max=2,
        buffer_memory_bytes=16 << 20,
        batch_rows=10_000_000,
    )
    with console.status(Elapsed("waiting for the Spark session", started_s)):
        spark = start_spark(config, "xidstream-demo")
    with ExitStack() as stack:
        with console.status(Elapsed("waiting for the slot", started_s)):
            live = LiveStream(config, spark, str(output), lambda text: console.print(text, style="yellow"))
            stream = stack.enter_context(live)
        committed_s = perform(console, conninfo, stream, n_rows)
        show_lag(console, stream.arrivals[-1], committed_s)
        prove(console, spark, conninfo, output)


def _prepare_output(output: Path) -> None:
    """Make an empty output folder. An earlier demo's folder is replaced; any other folder with files is refused."""
    if output.exists():
        if any(output.iterdir()) and not (output / _MARKER).exists():
            raise UsageError(
                f"{output} is not empty, and not an earlier demo's", remedy="give another --output"
            )
        shutil.rmtree(output)
    output.mkdir(parents=True)
    (output / _MARKER).touch()
