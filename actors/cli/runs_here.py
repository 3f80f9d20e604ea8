"""``xidstream status`` without a slot: the runs of this machine, a line each.

Runs of other users are there, and answer their own user alone: they are counted.
"""

from __future__ import annotations

import json
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from xidstream.actors.runtime.run_socket import ask, running
from xidstream.pipeline.account import RunPart
from xidstream.pipeline.account.codec import of_json
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.quantities import counted

_FILE_WIDTH: Final = 160


def runs_here() -> tuple[list[RunPart], list[str]]:
    """The runs that answer, and why others do not."""
    answers, silent = _ask_all()
    runs = [of_json(answer).run for answer in answers]
    return [run for run in runs if run is not None], silent


def _ask_all() -> tuple[list[str], list[str]]:
    answers, silent = [], []
    for name in running():
        try:
            answer = ask(name)
        except EnvironmentFault as error:
            silent.append(error.message)
            continue
        if answer is not None:
            answers.append(answer)
    return answers, silent


def print_runs(*, as_json: bool) -> None:
    """With ``as_json``: the account of each, a line each."""
    if as_json:
        for answer in _ask_all()[0]:
            click.echo(json.dumps(json.loads(answer)))
        return
    runs, silent = runs_here()
    if not runs and not silent:
        click.echo("no run of xidstream is on this machine")
    if runs:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("slot", "process", "since (UTC)", "state", "status page"):
            table.add_column(title, justify="right" if title == "process" else "left", no_wrap=True)
        for run in sorted(runs, key=lambda run: (run.slot, run.pid)):
            state = "caught up with commits" if run.is_caught_up and run.state == "reading" else run.state
            table.add_row(
                run.slot, str(run.pid), f"{run.started_at:%Y-%m-%d %H:%M:%S}", state, run.page or "none"
            )
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)).print(table)
        click.echo(f"{counted(len(runs), 'slot')} read; `xidstream status --slot NAME` shows one of them")
    for reason in silent:
        click.echo(reason)
