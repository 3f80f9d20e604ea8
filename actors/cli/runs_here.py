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
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.codec import of_json
from xidstream.pipeline.account.model import state_words
from xidstream.pipeline.errors import EnvironmentFault
from xidstream.pipeline.quantities import counted

_FILE_WIDTH: Final = 160


def runs_here() -> tuple[list[Account], list[str]]:
    """The accounts of the runs that answer, and why others do not."""
    answers, silent = _ask_all()
    accounts = [of_json(answer) for answer in answers]
    return [account for account in accounts if account.run is not None], silent


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
    accounts, silent = runs_here()
    if not accounts and not silent:
        click.echo("no run of xidstream is on this machine")
    if accounts:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("slot", "process", "since (UTC)", "state", "status page"):
            table.add_column(title, justify="right" if title == "process" else "left", no_wrap=True)
        for account in accounts:
            run = account.run
            assert run is not None
            state = "stalled" if account.stalls else state_words(account)
            table.add_row(
                run.slot, str(run.pid), f"{run.started_at:%Y-%m-%d %H:%M:%S}", state, run.page or "none"
            )
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)).print(table)
        click.echo(f"{counted(len(accounts), 'slot')} read; `xidstream status --slot NAME` shows one of them")
    for reason in silent:
        click.echo(reason)
