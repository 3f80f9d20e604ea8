"""What ``xidstream status`` does: it finds the run of a slot and shows its account, or else what slot and storage say.

A run is found by its slot (``runtime.run_search``). Where the dsn is given as well, a run of another server's slot of
the same name is passed over. ``--json`` prints one account a line, of a run in the very bytes that the run gave, so
that it works across versions. ``--watch`` asks again each second, until it is interrupted.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from xidstream.actors.cli.checks import stored_slot
from xidstream.actors.cli.status_view import view
from xidstream.actors.runtime.run_search import answers
from xidstream.pipeline.account import Account, StoredPart, Window
from xidstream.pipeline.account.codec import of_json, to_json
from xidstream.pipeline.account.model import with_undelivered
from xidstream.pipeline.errors import ConfigError, UsageError, XidstreamError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import current_flush_lsn, existing_slot, stream_stats
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.postgres.slot_account import slot_part
from xidstream.pipeline.preflight.record_check import without_publications
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.skips import read_skips

_WATCH_INTERVAL_S: Final = 1.0
_FILE_WIDTH: Final = 160


class Asking:
    """What is remembered from one question to the next. ``search``: finds the accounts of a slot's runs, as JSON."""

    def __init__(self, search: Callable[[str], list[str]] = answers) -> None:
        self._search = search
        self._servers: dict[str, str | None] = {}
        self._positions: dict[str, Window] = {}

    def runs(self, config: Config) -> list[str]:
        """The accounts of the runs of this slot, as JSON."""
        found = self._search(config.slot)
        server = self._server(config) if found else None
        return [answer for answer in found if server is None or _server_of(answer) in (None, server)]

    def stopped(self, config: Config) -> Account:
        """The account of a slot that nothing runs for. Raises PreconditionMissing where there is no such slot, and
        ConfigError where the settings name no server."""
        require_server(config)
        positions = self._positions.setdefault(config.slot, Window(60.0))
        now = datetime.datetime.now(datetime.timezone.utc)
        slot = slot_part(login_of(config), config.slot, positions)
        stored = _stored(config) if config.storage else None
        return with_undelivered(Account(at=now, run=None, slot=slot, stored=stored))

    def _server(self, config: Config) -> str | None:
        """The system identifier of the server that the settings name; None where they name none, or it is silent."""
        try:
            config.require("dsn")
            if config.dsn not in self._servers:
                with ReplicationConnection(without_publications(config)) as connection:
                    self._servers[config.dsn] = connection.identify_system().system_identifier
        except XidstreamError:
            return None  # the run may be asked all the same: a person wants to see it most when the server is silent
        return self._servers[config.dsn]


def _server_of(answer: str) -> str | None:
    run = json.loads(answer).get("run") or {}
    server = run.get("system_identifier")
    return None if server is None else str(server)


def require_server(config: Config) -> None:
    """Raise ConfigError where the settings do not say which server to ask in place of a run."""
    try:
        config.require("dsn")
    except ConfigError as error:
        raise ConfigError(
            f"no run of slot {config.slot} was found; {error.message}", remedy=error.remedy
        ) from None


def print_json(config: Config) -> None:
    """Raises PreconditionMissing where there is neither run nor slot."""
    asking = Asking()
    for answer in asking.runs(config) or [to_json(asking.stopped(config))]:
        click.echo(answer)


def print_status(config: Config) -> None:
    """Raises PreconditionMissing where there is neither run nor slot."""
    found = Asking().runs(config)
    if not found:
        _print_stopped(config)
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    for answer in found:
        console.print(view(of_json(answer)))


def watch(configs: Sequence[Config], times: int | None = None) -> None:
    """Show the accounts until interrupted, or so many ``times``. Raises UsageError where there is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        raise UsageError("--watch needs a terminal", remedy="leave it out, or use --json")
    asking = Asking()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        n = 0
        while times is None or n < times:
            n += 1
            live.update(Group(*(_shown(asking, config) for config in configs)), refresh=True)
            time.sleep(_WATCH_INTERVAL_S)


def _shown(asking: Asking, config: Config) -> RenderableType:
    try:
        found = asking.runs(config)
        accounts = [of_json(answer) for answer in found] or [asking.stopped(config)]
    except XidstreamError as error:
        return Text(f"slot {config.slot}: {error.message}\n  remedy: {error.remedy}", style="bold red")
    return Group(*map(view, accounts))


def _stored(config: Config) -> StoredPart:
    record = read_progress(*stored_slot(config))
    if record is None:
        return StoredPart(None, None, tuple(_skips(config)))
    return StoredPart(
        str(record.confirmed_lsn),
        record.epoch,
        tuple(_skips(config)),
        str(record.delivered_lsn),
        sum(span.last - span.first + 1 for span in record.journal),
        tuple(str(each) for each in record.parked if each.is_parked),
    )


def _print_stopped(config: Config) -> None:
    """The account of slot and storage."""
    require_server(config)
    state = existing_slot(login_of(config), config.slot)
    flush = current_flush_lsn(login_of(config))
    lines = [
        ("slot", f"{state.name} ({state.plugin}, database {state.database})"),
        ("read by", f"process {state.active_pid}" if state.active else "nobody"),
        (
            "confirmed",
            f"{state.confirmed_flush}, {counted(flush - (state.confirmed_flush or 0), 'byte')} behind the server",
        ),
        (
            "keeps WAL from",
            f"{state.restart_lsn}, {counted(flush - (state.restart_lsn or 0), 'byte')} ({state.wal_status})",
        ),
        ("two-phase", "yes" if state.two_phase else "no"),
    ]
    stats = stream_stats(login_of(config), config.slot)
    if stats is not None:
        blocks = counted(stats.stream_count, "block")
        streamed = (
            f"{counted(stats.stream_txns, 'transaction')} in {blocks}, {counted(stats.stream_bytes, 'byte')}"
        )
        lines.append(("streamed", streamed))
        lines.append(
            ("all", f"{counted(stats.total_txns, 'transaction')}, {counted(stats.total_bytes, 'byte')}")
        )
    if config.storage:
        stored = _stored(config)
        recorded = (
            "nothing yet" if stored.epoch is None else f"{stored.confirmed_lsn} by epoch {stored.epoch}"
        )
        lines.append(("recorded", recorded))
        if stored.n_journal_files:
            behind = counted(max(0, flush - Lsn.parse(stored.delivered_lsn or "0/0")), "byte")
            files = counted(stored.n_journal_files, "file")
            lines.append(("delivered", f"{stored.delivered_lsn}, {behind} behind the server"))
            lines.append(("journal", f"{files} with what lies between (xidstream journal show)"))
        lines += [("parked", text) for text in stored.parked]
        lines += [("given up", text) for text in stored.given_up]
    for name, value in lines:
        click.echo(f"{name:<16}{value}")


def _skips(config: Config) -> list[str]:
    """The skipped transactions, and their outcome."""
    storage, layout = stored_slot(config)
    record = read_progress(storage, layout)
    lines = []
    for skip in read_skips(storage, layout):
        if skip.left_out_at is not None:
            state = f"left out on {skip.left_out_at:%Y-%m-%d %H:%M:%S} UTC"
        elif record is not None and record.delivered_lsn > skip.commit_lsn:
            state = "without effect: no transaction had this xid and this commit LSN"
        else:
            state = "not met yet"
        by = f", by {skip.recorded_by}" if skip.recorded_by else ""
        why = f" ({skip.reason})" if skip.reason else ""
        lines.append(f"xid {skip.xid}, commit LSN {skip.commit_lsn}{by}{why}: {state}")
    return lines
