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
from xidstream.pipeline.account.snapshots import TableProgress, TableState
from xidstream.pipeline.errors import ConfigError, Unsupported, UsageError
from xidstream.pipeline.findings import enumerate_names
from xidstream.pipeline.postgres.admin import held_wal_bytes, read_slot, sql_connection
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.preflight.record_check import without_publications
from xidstream.pipeline.quantities import counted, human_bytes, visible
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.key_filter import BY_BYTES, RANGES, KeyFilter, bound, parse_key_filter
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import (
    cancel,
    read_decision,
    read_delivered,
    read_taken,
    read_wishes,
    request,
)
from xidstream.pipeline.storage.storage import Storage

_FILE_WIDTH: Final = 160
_IN_HAND: Final = tuple(state.value for state in TableState)
_ENDED: Final = "no longer valid"
_BYTES_OF_UTF8: Final = ("UTF8", "SQL_ASCII")
"""Encodings of databases whose texts have the bytes of the log's."""


def request_command(config: Config, tables: Sequence[str], where: str | None = None) -> None:
    """``where``: of one table, the rows to read from the source; the others are carried over from its last snapshot.

    Raises UsageError for a table that is not published, and for a ``where`` that cannot be; Unsupported for one with a
    sink that has no log. Nothing is recorded then."""
    if where is not None:
        _request_repair(config, tables, parse_key_filter(where))
        return
    stored, surveyed = _asked(config)
    for source in _named(surveyed.sources, tables):
        request(*stored, source.relation.relid, source.name)
        click.echo(
            f"table {source.name} ({human_bytes(source.n_bytes)}): snapshot requested; the run of slot "
            f"{config.slot} takes it, now or when it starts"
        )


def _request_repair(config: Config, tables: Sequence[str], where: KeyFilter) -> None:
    if config.sink and not config.sink_kind.carries_rows:
        raise Unsupported(
            f"--where needs a Delta sink, whose log has the rows outside of it: this is the {config.sink_kind.name}",
            remedy="leave --where out: the whole table is taken",
        )
    if len(tables) > 1:
        raise UsageError("--where is for one table", remedy="give the command once for each table")
    stored, surveyed = _asked(config)
    (source,) = _named(surveyed.sources, tables)
    whole = f"take the whole table: `xidstream snapshot request --table {source.name}`"
    taken = {each.generation.relid: each.generation for each in read_taken(*stored)}
    generation = taken.get(source.relation.relid)
    state = _states(config, ())(source.name, generation)
    if generation is None or state.startswith(_ENDED):
        raise UsageError(
            f"no snapshot of table {source.name} stands, from which the rows outside of --where could be carried over"
            + ("" if generation is None else f": its last one is {state}"),
            remedy=whole,
        )
    compared = bound(where, generation.relation, generation.key)
    if surveyed.encoding not in _BYTES_OF_UTF8 and any(
        each.operator in RANGES and each.type in BY_BYTES for each in compared
    ):
        raise UsageError(
            f"texts of a database in {surveyed.encoding} have another order there than in the log",
            remedy=f"give --where with = or IN; or {whole}",
        )
    if not request(*stored, source.relation.relid, source.name, where):
        click.echo(
            f"table {source.name}: a snapshot of the whole table is requested already, and will have these rows, too"
        )
        return
    click.echo(
        f"table {source.name}: repair of the rows with {where} requested; the run of slot {config.slot} reads these "
        "from the source, now or when it starts, and carries all others over from its log"
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
    records = {each.generation.relid: each for each in read_taken(*stored)}
    taken = {relid: each.generation for relid, each in records.items()}
    state_of = _states(config, {(each.name, each.number) for each in read_delivered(*stored)})
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
        if state == "finished" and relid in records and records[relid].where is not None:
            state = f"finished: repair of {records[relid].where}"
        if relid in wishes.ranges:
            now = f" ({state})" if state.startswith(_IN_HAND) else ""
            state = f"repair asked for: {wishes.ranges[relid]}{now}"
        elif relid in wishes.requests:
            state = "asked for"
        elif relid in wishes.cancelled:
            state = "cancelled"
        number, valid_from = (
            ("", "") if generation is None else (str(generation.number), str(generation.bounds.valid_from))
        )
        # As Text: a table's name may look like markup, and so may a value of its key.
        shown = Text(visible(source.name))
        table.add_row(shown, human_bytes(source.n_bytes), number, valid_from, Text(visible(state)))
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)).print(table)
    click.echo(
        f"{counted(len(surveyed.sources), 'table')} published"
        + ("" if config.sink or not taken else "; give --sink, which knows what is finished")
    )
    if surveyed.held_wal_bytes is not None:
        click.echo(f"slot {config.slot} keeps {human_bytes(surveyed.held_wal_bytes)} of WAL")


def _states(
    config: Config, delivered: Collection[tuple[str, int]]
) -> Callable[[str, Generation | None], str]:
    """What is said of a table's last generation: by the run on this machine, by a Delta sink, or by the record of what
    a function has got (``delivered``)."""
    reading: dict[str, TableProgress] = {}
    for answer in local_answers(config.slot):
        progress = of_json(answer).snapshots
        reading |= {} if progress is None else {table.table: table for table in progress.tables}
    in_sink = sink_type(config.sink).recorded_generations() if config.sink else None

    def state(table: str, generation: Generation | None) -> str:
        if (now := reading.get(table)) is not None:
            share = f", {now.n_bytes_read / now.n_bytes:.0%}" if now.n_bytes and now.n_bytes_read else ""
            return f"{now.state}{share}"
        if generation is None:
            return "none"
        if (table, generation.number) in delivered:
            return "finished"
        if in_sink is None:
            return "begun or finished"
        said = in_sink.get((table, generation.number, generation.bounds.snapshot_lsn))
        if said is None:
            return "begun, and not in the sink"
        return "finished" if said[0] is GenerationState.FINISHED else f"{_ENDED}: {said[1]}"

    return state


@dataclass(frozen=True)
class _Server:
    """What is published now, how much WAL is kept for the slot (None: it is not known), and the database's encoding."""

    sources: tuple[PublishedSource, ...]
    held_wal_bytes: int | None
    encoding: str | None


def _asked(config: Config) -> tuple[tuple[Storage, Layout], _Server]:
    """Storage and layout of the slot, and what the server says."""
    with ReplicationConnection(without_publications(config)) as connection:
        system = connection.identify_system()
        with sql_connection(connection.same_server, "the published tables") as sql:
            surveyed = _Server(
                survey(sql, config.publication),
                held_wal_bytes(sql, read_slot(sql, config.slot)),
                sql.info.parameter_status("server_encoding"),
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
