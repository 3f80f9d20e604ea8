"""What ``xidstream table parked`` and ``table resume`` do. Both read the slot's record in the storage.

A run that is up may write that record. So ``resume`` leaves a wish beside it, and the next epoch takes it up
(``pipeline.storage.resumes``).
"""

from __future__ import annotations

import difflib
import json

import click

from xidstream.actors.cli.checks import stored_slot
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.resumes import read_resumes, request_resume
from xidstream.pipeline.storage.storage import Storage


def parked_command(config: Config, *, as_json: bool) -> None:
    (storage, layout), parked = _recorded(config)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in parked], ensure_ascii=False))
        return
    asked = read_resumes(storage, layout)
    for each in parked:
        state = "was parked"
        if each.is_parked:
            state = "parked, and resumed at the next start" if each.relid in asked else "parked"
        click.echo(f"{state}: {each}")
    if not parked:
        click.echo("no table is or was parked")


def resume_command(config: Config, name: str) -> None:
    """Raises UsageError for a table that is not parked."""
    (storage, layout), tables = _recorded(config)
    parked = {each.table: each for each in tables if each.is_parked}
    if name not in parked:
        near = difflib.get_close_matches(name, parked, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "`xidstream table parked` shows those that are"
        raise UsageError(f"table {name} is not parked", remedy=hint)
    request_resume(storage, layout, parked[name].relid, name)
    click.echo(
        f"table {name} is delivered again from the next start of the run on; what was left out since commit LSN "
        f"{parked[name].since_lsn} stays missing in the sink"
    )


def _recorded(config: Config) -> tuple[tuple[Storage, Layout], tuple[ParkedTable, ...]]:
    storage, layout = stored_slot(config)
    record = read_progress(storage, layout)
    return (storage, layout), () if record is None else record.parked
