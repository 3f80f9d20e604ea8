"""What the command ``journal`` does: show what a slot's journal holds, and check that it is whole.

Both read the storage and change nothing, beside a run or where nothing runs. The server is asked for one thing, which
of several servers' slots of the same name is meant; where it does not answer, and the storage has one alone, that one
is shown.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xidstream.actors.cli.checks import stored_slot
from xidstream.pipeline.errors import ExitStatus, PreconditionMissing, SegmentCorrupt, XidstreamError
from xidstream.pipeline.exchange import JournalFile
from xidstream.pipeline.postgres.beginning import left_behind
from xidstream.pipeline.quantities import counted, human_bytes
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.storage.beginning_record import count_left_behind
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_journal import (
    JournalFinding,
    NamedFile,
    StoredJournal,
    findings,
    slots_servers,
    stored_journal,
)

_MOST_SHOWN: Final = 20
_FILE_WIDTH: Final = 160


def show_command(config: Config, *, as_json: bool) -> None:
    """Raises PreconditionMissing where the storage has no such slot, SegmentCorrupt for a damaged record."""
    storage, layout = _slot(config)
    journal = _journal(config, storage, layout, verify=False)
    if as_json:
        click.echo(json.dumps(_json(journal, layout), indent=2))
        return
    click.echo(_summary(journal, layout))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    if journal.files:
        console.print(_table(journal.files[:_MOST_SHOWN]))
    if (more := len(journal.files) - _MOST_SHOWN) > 0:
        click.echo(f"and {counted(more, 'file')} more (--json names all)")
    for named in journal.files:
        if named.damage is not None:
            click.echo(f"damaged: {named.damage}")
    if journal.unnamed:
        click.echo(
            f"{counted(len(journal.unnamed), 'file')} that the record does not name: no part of the journal, and "
            "deleted when the next epoch begins"
        )


def check_command(config: Config) -> None:
    """Exits with status 4 where there is a finding. Raises PreconditionMissing where the storage has no such slot."""
    storage, layout = _slot(config)
    try:
        journal = _journal(config, storage, layout, verify=True)
    except SegmentCorrupt as error:
        _tell(error.message, error.remedy)
        raise SystemExit(ExitStatus.TERMINAL) from None
    click.echo(_summary(journal, layout))
    found = list(findings(journal))
    for finding in found:
        _tell(_statement(finding), finding.remedy)
    if found:
        raise SystemExit(ExitStatus.TERMINAL)
    n_segments = sum(len(file.stored_keys) for file in journal.readable)
    click.echo(
        f"whole: {counted(len(journal.files), 'file')}, and {counted(n_segments, 'segment')} that they name"
        if journal.files
        else "whole"
    )


def _slot(config: Config) -> tuple[Storage, Layout]:
    """Storage and layout of the slot that the settings mean."""
    storage = Storage(config.storage)
    servers = slots_servers(storage, config.slot)
    if not servers:
        raise PreconditionMissing(
            f"storage {redacted(config.storage)} has no record of slot {config.slot}",
            remedy="give the --storage and --slot of the run",
        )
    try:
        config.require("dsn")
        return stored_slot(config)
    except XidstreamError:
        if len(servers) > 1:
            raise
        return storage, Layout(servers[0], config.slot, "command")


def _journal(config: Config, storage: Storage, layout: Layout, *, verify: bool) -> StoredJournal:
    journal = stored_journal(storage, layout, verify=verify)
    if journal is None and (n_objects := count_left_behind(storage, layout)):
        raise left_behind(config.slot, redacted(config.storage), n_objects)
    if journal is None:
        raise PreconditionMissing(
            f"storage {redacted(config.storage)} has no record of slot {config.slot} of the server with system "
            f"identifier {layout.system_identifier}",
            remedy="give the --storage, --slot and server of the run",
        )
    return journal


def _tell(text: str, remedy: str) -> None:
    click.echo(text)
    click.echo(f"  remedy: {remedy}")


def _statement(finding: JournalFinding) -> str:
    where = f"commits after {finding.after_lsn} up to {finding.to_lsn}"
    return f"{finding.key} ({where}): {finding.statement}"


def _summary(journal: StoredJournal, layout: Layout) -> str:
    record, files = journal.record, journal.readable
    head = (
        f"slot {layout.slot} of server {layout.system_identifier}: delivered {record.delivered_lsn}, confirmed "
        f"{record.confirmed_lsn}, by epoch {record.epoch}"
    )
    if not journal.files:
        return f"{head}\nthe journal is empty"
    n_transactions = sum(file.n_transactions for file in files)
    held = f"{counted(n_transactions, 'transaction')}, {counted(sum(f.n_rows for f in files), 'row')}"
    since = next((_committed_at(file) for file in files if file.first_commit_timestamp_us), None)
    oldest = "" if since is None else f", the oldest of {since:%Y-%m-%d %H:%M:%S} UTC"
    n_bytes = human_bytes(sum(file.n_bytes for file in files))
    return f"{head}\n{counted(len(journal.files), 'file')}, {n_bytes}: {held}{oldest}"


def _table(files: tuple[NamedFile, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("file", "epoch", "first commit", "last commit", "transactions", "rows", "segments", "bytes"):
        is_number = name in ("file", "transactions", "rows", "segments", "bytes")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for named in files:
        file = named.file
        facts = ["damaged"] if file is None else _facts(file)
        table.add_row(*(Text(str(cell)) for cell in (named.number, named.epoch, *facts)))
    return table


def _facts(file: JournalFile) -> list[str]:
    """A journal that holds only non-transactional messages has no commit to show."""
    commits = [str(file.first_commit_lsn), str(file.last_commit_lsn)] if file.n_transactions else ["", ""]
    numbers = [f"{n:,}" for n in (file.n_transactions, file.n_rows, len(file.stored_keys))]
    return [*commits, *numbers, human_bytes(file.n_bytes)]


def _committed_at(file: JournalFile) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(file.first_commit_timestamp_us / 1e6, datetime.timezone.utc)


def _json(journal: StoredJournal, layout: Layout) -> dict[str, Any]:
    record, files = journal.record, journal.readable
    return {
        "slot": layout.slot,
        "system_identifier": str(layout.system_identifier),
        "delivered_lsn": str(record.delivered_lsn),
        "confirmed_lsn": str(record.confirmed_lsn),
        "epoch": record.epoch,
        "n_files": len(journal.files),
        "n_transactions": sum(file.n_transactions for file in files),
        "n_rows": sum(file.n_rows for file in files),
        "n_bytes": sum(file.n_bytes for file in files),
        "files": [_file_json(named) for named in journal.files],
        "unnamed": list(journal.unnamed),
    }


def _file_json(named: NamedFile) -> dict[str, Any]:
    known = {"number": named.number, "epoch": named.epoch, "key": named.key, "damage": named.damage}
    file = named.file
    if file is None:
        return known
    return {
        **known,
        "first_commit_lsn": str(file.first_commit_lsn) if file.n_transactions else None,
        "last_commit_lsn": str(file.last_commit_lsn) if file.n_transactions else None,
        "end_lsn": str(file.end_lsn),
        "first_commit_at": _committed_at(file).isoformat() if file.first_commit_timestamp_us else None,
        "n_units": file.n_units,
        "n_transactions": file.n_transactions,
        "n_rows": file.n_rows,
        "n_segments": len(file.stored_keys),
        "n_bytes": file.n_bytes,
    }
