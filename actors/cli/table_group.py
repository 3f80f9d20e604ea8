"""The commands ``table parked`` and ``table resume``, as ``main`` has the others: options and help, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.options import build_config, setting_options


@click.group(short_help="Show parked tables, or have one delivered again.")
def table() -> None:
    """Show the tables that are left out, because a change of them cannot be delivered, or take one up again.

    With `on_poison = park` a run leaves out such a table and goes on with the others. docs/parked.md has the rest.
    """


@table.command("parked")
@setting_options("dsn", "slot", "storage")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def table_parked(config_file: Path | None, as_json: bool, **options: Any) -> None:
    """The tables that are parked, since when and why, and those that were.

    The counts are of what is confirmed.
    """
    config = build_config(config_file, options)
    config.require("slot", "storage")
    from xidstream.actors.cli.tables import parked_command

    parked_command(config, as_json=as_json)


@table.command("resume")
@setting_options("dsn", "slot", "storage")
@click.option("--table", "name", required=True, metavar="SCHEMA.TABLE", help="As `table parked` shows it.")
def table_resume(config_file: Path | None, name: str, **options: Any) -> None:
    """Have a parked table delivered again, from the next start of the run on.

    Remove the cause first. What was left out stays missing in the sink, so a table with a snapshot needs a new one: a
    run with `snapshot = initial` takes it by itself, else ask for it with `xidstream snapshot request`.
    """
    config = build_config(config_file, options)
    config.require("slot", "storage")
    from xidstream.actors.cli.tables import resume_command

    resume_command(config, name)
