"""The commands ``tables`` and ``consumer``, as ``main`` has the others: options and help, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.options import build_config, setting_options

_JSON = click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")


@click.command("tables", short_help="Show what a sink's change log still has.")
@setting_options("sink", "slot")
@_JSON
def tables(config_file: Path | None, as_json: bool, **options: Any) -> None:
    """The tables of a change log: the first LSN whose state can be read, and from where on there are changes.

    `--log-retention` of a run removes older ones. It needs the sink's tables, and no server. --slot tells which log,
    where several slots write to it. docs/delta.md has the rest.
    """
    config = build_config(config_file, options)
    config.require("sink")
    from xidstream.actors.cli.log import tables_command

    tables_command(config, as_json=as_json)


@click.group(short_help="Show or remove those who read a change log by name.")
def consumer() -> None:
    """Show how far the consumers of a change log are, or forget one.

    A consumer is a reader that tells how far it has come (`ChangeLog.consumer`). What it has not read is not removed,
    so one that never comes back holds back the whole log.
    """


@consumer.command("list")
@setting_options("sink", "slot")
@_JSON
def consumer_list(config_file: Path | None, as_json: bool, **options: Any) -> None:
    """The consumers, where each is, and how long ago it told so."""
    config = build_config(config_file, options)
    config.require("sink")
    from xidstream.actors.cli.log import consumers_command

    consumers_command(config, as_json=as_json)


@consumer.command("remove")
@setting_options("sink", "slot")
@click.option("--name", required=True, help="As `consumer list` shows it.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask, in a terminal.")
def consumer_remove(config_file: Path | None, name: str, is_sure: bool, **options: Any) -> None:
    """Forget a consumer: what it has not read may be removed from then on.

    It says which changes these are, and asks before it goes on where it runs in a terminal. A script is not asked.
    One that comes back is registered again by its next commit; what was removed meanwhile is gone.
    """
    config = build_config(config_file, options)
    config.require("sink")
    from xidstream.actors.cli.log import remove_consumer_command

    remove_consumer_command(config, name, is_sure=is_sure)
