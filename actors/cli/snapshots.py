"""What the command ``snapshot`` does: ask for a table's snapshot, do without it, and show what there is.

A request is a record in the storage. The run of the slot, now or later, finds it and takes the snapshot. So the
commands need server and storage, and no Ray.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xidstream.actors.runtime.run_search import local_answers
from xidstream.pipeline.account.codec import of_json
from xidstream.pipeline.account.snapshots import TableProgress
from xidstream.pipeline.errors import ConfigError, UsageError
from xidstream.pipeline.findings import enumerate_names
from xidstream.pipeline.postgres.admin import held_wal_bytes, read_slot, sql_connection
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.preflight.record_check import without_publications
from xidstream.pipeline.quantities import counted, human_bytes, visible
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import (
    cancel,
    read_decision,
    read_taken,
    read_told,
    read_wishes,
    request,
)
from xidstream.pipeline.storage.storage import Storage

_FILE_WIDTH: Final = 160


def request_command(config: Config, tables: Sequence[str]) -> None:
    """Raises UsageError for a table that is not published, with nothing recorded."""
    stored, surveyed = _asked(config)
    for source in _named(surveyed.sources, tables):
        request(*stored, source.relation.relid, source.name)
        click.echo(
            f"table {source.name} ({human_bytes(source.n_bytes)}): snapshot requested; the run of slot "
            f"{config.slot} takes it, now or when it starts"
        )


def cancel_command(config: Config, tables: Sequence[str]) -> None:
    """Raises UsageError for a table that is not published, with nothing recorded."""
    stored, surveyed = _asked(config)
    for source in _named(surveyed.sources, tables):
        cancel(*stored, source.relation.relid, source.name)
        click.echo(
            f"table {source.name}: no snapshot is taken until one is requested; a finished one stays as it is"
        )


def status_command(config: Config) -> None:
    stored, surveyed = _asked(config)
    decision, wishes = read_decision(*stored), read_wishes(*stored)
    taken = {each.generation.relid: each.generation for each in read_taken(*stored)}
    state_of = _states(config, {(each.name, each.number) for each in read_told(*stored)})
    if decision is None:
        click.echo("no snapshots yet: the first run decides by the setting snapshot which tables get one")
    else:
        what = (
            "all published tables"
            if decision.takes_snapshots
            else "the tables that `xidstream snapshot request` named"
        )
        click.echo(f"snapshots are taken of {what}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("table", "size", "generation", "valid from", "state"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=True)
    for source in surveyed.sources:
        relid = source.relation.relid
        generation = taken.get(relid)
        state = state_of(source.name, generation)
        if relid in wishes.requests:
            state = "asked for"
        elif relid in wishes.cancelled:
            state = "cancelled"
        number, valid_from = (
            ("", "") if generation is None else (str(generation.number), str(generation.bounds.valid_from))
        )
        # As Text: a table's name may look like markup.
        shown = Text(visible(source.name))
        table.add_row(shown, human_bytes(source.n_bytes), number, valid_from, state)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)).print(table)
    click.echo(
        f"{counted(len(surveyed.sources), 'table')} published"
        + ("" if config.sink or not taken else "; give --sink, which knows what is finished")
    )
    if surveyed.held_wal_bytes is not None:
        click.echo(f"slot {config.slot} keeps {human_bytes(surveyed.held_wal_bytes)} of WAL")


def _states(config: Config, told: Collection[tuple[str, int]]) -> Callable[[str, Generation | None], str]:
    """What is said of a table's last generation: by the run on this machine, by a Delta sink, or by the record of what
    a function has got (``told``)."""
    reading: dict[str, TableProgress] = {}
    for answer in local_answers(config.slot):
        progress = of_json(answer).snapshots
        reading |= {} if progress is None else {table.table: table for table in progress.tables}
    in_sink = sink_type(config.sink).told() if config.sink else None

    def state(table: str, generation: Generation | None) -> str:
        if (now := reading.get(table)) is not None:
            share = f", {now.n_bytes_read / now.n_bytes:.0%}" if now.n_bytes and now.n_bytes_read else ""
            return f"{now.state}{share}"
        if generation is None:
            return "none"
        if (table, generation.number) in told:
            return "finished"
        if in_sink is None:
            return "begun or finished"
        said = in_sink.get((table, generation.number, generation.bounds.place))
        if said is None:
            return "begun, and not in the sink"
        return "finished" if said[0] is GenerationState.FINISHED else f"no longer valid: {said[1]}"

    return state


@dataclass(frozen=True)
class _Server:
    """What is published now, and how much WAL is kept for the slot (None: it is not known)."""

    sources: tuple[PublishedSource, ...]
    held_wal_bytes: int | None


def _asked(config: Config) -> tuple[tuple[Storage, Layout], _Server]:
    """Storage and layout of the slot, and what the server says."""
    with ReplicationConnection(without_publications(config)) as connection:
        system = connection.identify_system()
        with sql_connection(connection.same_server, "the published tables") as sql:
            surveyed = _Server(
                survey(sql, config.publication), held_wal_bytes(sql, read_slot(sql, config.slot))
            )
    layout = Layout(int(system.system_identifier), config.slot, "command")
    return (Storage(config.storage), layout), surveyed


def _named(sources: Iterable[PublishedSource], tables: Sequence[str]) -> list[PublishedSource]:
    by_name = {source.name: source for source in sources}
    missing = [table for table in tables if table not in by_name]
    if not tables:
        raise ConfigError("no table is named", remedy="give --table schema.table")
    if missing:
        near = [name for table in missing for name in difflib.get_close_matches(table, by_name, n=3)]
        hint = f"did you mean {enumerate_names(near)}?" if near else "give it as schema.table, not quoted"
        raise UsageError(f"not published: {enumerate_names(missing)}", remedy=hint)
    return [by_name[table] for table in tables]
