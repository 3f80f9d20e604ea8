"""The commands ``source prepare``, ``status`` and ``unprepare``, as ``main`` has the others: options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.options import build_config, setting_options


@click.group(short_help="Have the source tell of DDL in its stream.")
def source() -> None:
    """Have the source tell of DDL at its very place in the stream, by event triggers. docs/ddl.md has the rest.

    Recommended where tables have snapshots, and not required. It is of the DSN's database, and for all slots in it.
    """


_PRINT = click.option("--print", "prints", is_flag=True, help="Print the SQL and run nothing.")


@source.command("prepare", short_help="Install the event triggers.")
@setting_options("dsn")
@_PRINT
def source_prepare(config_file: Path | None, prints: bool, **options: Any) -> None:
    """Install the event triggers, or bring them up to this version.

    It needs a superuser, on a managed service its main user. With --print a DBA can read and run the SQL. Where they
    are current, nothing is done.
    """
    config = build_config(config_file, options)
    from xidstream.actors.cli.source import prepare_command

    prepare_command(config, prints=prints)


@source.command("status", short_help="Tell whether they are there, and as they should be.")
@setting_options("dsn")
def source_status(config_file: Path | None, **options: Any) -> None:
    """Whether the event triggers are absent, current, older, newer, disabled or changed. Any role may ask."""
    config = build_config(config_file, options)
    from xidstream.actors.cli.source import status_command

    status_command(config)


@source.command("unprepare", short_help="Remove them, whatever version they have.")
@setting_options("dsn")
@_PRINT
def source_unprepare(config_file: Path | None, prints: bool, **options: Any) -> None:
    """Remove the event triggers and their function, whatever version they have."""
    config = build_config(config_file, options)
    from xidstream.actors.cli.source import unprepare_command

    unprepare_command(config, prints=prints)
