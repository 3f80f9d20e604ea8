"""What ``xidstream source prepare``, ``status`` and ``unprepare`` do: ask the server, or print the SQL."""

from __future__ import annotations

import click

from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.ddl_trigger import (
    PREPARE,
    UNPREPARE,
    installed,
    prepare,
    script,
    unprepare,
)
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.settings.config import Config

_DOING = "the event triggers for DDL"


def prepare_command(config: Config, *, prints: bool) -> None:
    if prints:
        click.echo(script(PREPARE), nl=False)
        return
    with sql_connection(login_of(config), _DOING) as connection:
        is_new = prepare(connection)
        found = installed(connection)
    click.echo(f"event triggers for DDL: {found.text}" + ("" if is_new else "; nothing to do"))


def status_command(config: Config) -> None:
    with sql_connection(login_of(config), _DOING) as connection:
        click.echo(f"event triggers for DDL: {installed(connection).text}")


def unprepare_command(config: Config, *, prints: bool) -> None:
    if prints:
        click.echo(script(UNPREPARE), nl=False)
        return
    with sql_connection(login_of(config), _DOING) as connection:
        unprepare(connection)
    click.echo("event triggers for DDL: removed")
