"""The commands ``journal show`` and ``journal check``, as ``main`` has the others: options and help, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from xidstream.actors.cli.options import build_config, setting_options


@click.group(short_help="Show what waits for the sink in the storage.")
def journal() -> None:
    """Show what a slot's journal holds, or check that it is whole.

    The journal is what is committed, and the sink does not have yet. It is in the storage alone: the server does not
    send it again. Both commands change nothing, and may be used beside a run. docs/journal.md has the rest.
    """


@journal.command("show")
@setting_options("dsn", "slot", "storage")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def journal_show(config_file: Path | None, as_json: bool, **options: Any) -> None:
    """What the journal of a slot holds: both positions, and its files.

    --dsn tells which server's slot is meant, where the storage has several of this name.
    """
    config = build_config(config_file, options)
    config.require("slot", "storage")
    from xidstream.actors.cli.journal import show_command

    show_command(config, as_json=as_json)


@journal.command("check")
@setting_options("dsn", "slot", "storage")
def journal_check(config_file: Path | None, **options: Any) -> None:
    """Read all of it, with the segments that it names: lengths, checksums, and the order of commits.

    Status 4 if something is missing or altered: a line for each finding, with its commits and what to do. What a run
    delivers and deletes meanwhile is no finding.
    """
    config = build_config(config_file, options)
    config.require("slot", "storage")
    from xidstream.actors.cli.journal import check_command

    check_command(config)
