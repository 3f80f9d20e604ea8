"""The command ``xidstream verify`` and its options; what it does is in ``verify``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.options import build_config, setting_options
from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.settings.config import Config


@click.command(short_help="Compare the source's rows with the change log, exactly.")
@setting_options(
    "dsn",
    "slot",
    "publication",
    "column_names",
    "sink",
    *(f.name for f in dataclasses.fields(Config) if f.name == "spark" or f.name.startswith("spark_")),
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="PATTERN",
    help="A table, schema.table, or a pattern such as 'sales.*'; repeat it. Without it: all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, at the end.")
@click.option(
    "--result",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep the result in this file, too; an interrupted verification goes on from it.",
)
@click.option(
    "--show-values", is_flag=True, help="Show the values of rows that differ, not their keys alone."
)
@click.option(
    "--keys",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="How many rows that differ are shown of a table.",
)
@click.option(
    "--rows-per-range",
    type=click.IntRange(1),
    default=100_000,
    show_default=True,
    help="About how many rows a range of keys has that is compared as one.",
)
@click.option(
    "--pause-ms",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Pause between two ranges of pages, of 64 MiB, that are read from the source.",
)
@click.option(
    "--bytes-per-s",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Read this much of the source's rows in a second at most; 0: no limit.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="How long to wait for the log to reach a snapshot, and for a table that is locked.",
)
@click.option(
    "--staging", default="", metavar="FOLDER", help="For the source's rows, where Spark has executors."
)
def verify(
    config_file: Path | None,
    tables: tuple[str, ...],
    as_json: bool,
    result: Path | None,
    show_values: bool,
    keys: int,
    rows_per_range: int,
    pause_ms: int,
    bytes_per_s: int,
    timeout_s: float,
    staging: str,
    **options: Any,
) -> None:
    """Compare each table's rows in the source with the change log of a Delta or Iceberg sink, at the same moment.

    A snapshot of the source is taken, and its rows are compared with the log's state at that moment, by ranges of the
    key; where these differ, row by row. So source and log may change meanwhile, and no difference is due to that. The
    run of the slot must be up. It needs SELECT on the tables, and the sink's folder.

    Status 0: all tables are equal. 1: a table differs. 3: none differs, and some could not be compared; the output says
    why.

    \b
    Examples:
      xidstream verify --config shop.toml
      xidstream verify --config shop.toml --table 'public.*' --pause-ms 200 --result verify.json
    """
    config = build_config(config_file, options)
    config.require("publication", "sink")
    stop = StopRequest()
    stop.listen()
    from xidstream.actors.cli.verify import verify_command
    from xidstream.pipeline.verify.settings import VerifySettings

    settings = VerifySettings(rows_per_range, pause_ms, bytes_per_s, timeout_s, keys, show_values, staging)
    try:
        verify_command(config, stop, tables, settings, result=result, as_json=as_json)
    finally:
        stop.deafen()
