"""Names that people type though they are no commands here: ``version``, ``help [COMMAND]``, ``start`` and ``stop``.

They are hidden: the list of commands is for what there is to do. ``stop`` stops nothing, because a run may be anybody's
on this machine. It names the runs of the slot, or all of them, and how one is stopped.
"""

from __future__ import annotations

import click

from xidstream.actors.cli.runs_here import runs_here
from xidstream.pipeline.errors import UsageError


@click.command("version", hidden=True)
@click.pass_context
def version(context: click.Context) -> None:
    """Show the version, as ``--version`` does."""
    from importlib.metadata import version as installed

    click.echo(f"xidstream, version {installed('xidstream')}")


@click.command("help", hidden=True)
@click.argument("names", nargs=-1)
@click.pass_context
def help_(context: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a command, as ``COMMAND --help`` does."""
    assert context.parent is not None
    context = context.parent
    for name in names:
        command = context.command
        found = command.get_command(context, name) if isinstance(command, click.Group) else None
        if found is None:
            raise UsageError(
                f"there is no command {name!r}", remedy=f"`{context.command_path} --help` lists them"
            )
        context = click.Context(found, info_name=name, parent=context)
    click.echo(context.get_help())


@click.command("start", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def start(rest: tuple[str, ...]) -> None:
    """Say what it is called."""
    raise UsageError("there is no command 'start'", remedy="a run starts with `xidstream run`")


@click.command("stop", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def stop(rest: tuple[str, ...]) -> None:
    """Say how a run is stopped."""
    pids = sorted({account.run.pid for account in runs_here()[0] if account.run is not None})
    kill = (
        f"`kill {pids[0]}`"
        if len(pids) == 1
        else "`kill PID`, with the process that `xidstream status` shows"
    )
    raise UsageError(
        "there is no command 'stop'",
        remedy=f"a run ends cleanly with Ctrl-C where it was started, or with {kill}; in systemd, `systemctl stop`",
    )
