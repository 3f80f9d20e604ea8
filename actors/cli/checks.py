"""What the commands ``check`` and ``slot`` do and print; the findings are ``actors.preflight``'s."""

from __future__ import annotations

import datetime
import getpass
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xidstream.actors.preflight import findings_of, port_findings, room_finding
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.pipeline.errors import PreconditionMissing, UsageError
from xidstream.pipeline.exchange import Beginning, PrepareCover
from xidstream.pipeline.findings import MARKS, Finding, Status
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.postgres.admin import Blocker, create_slot, describe_slot, drop_slot
from xidstream.pipeline.postgres.beginning import NO_RECORD, SNAPSHOTS, SinkHolds, gap, gap_text
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.preflight.record_check import identity_of, without_publications
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.storage.beginning_record import count_left_behind, write_beginning
from xidstream.pipeline.storage.cleanup import holds_slot, remove_slot
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import claim_slot, read_progress, take_over_progress
from xidstream.pipeline.storage.skips import Skip, write_skip
from xidstream.pipeline.storage.storage import Storage

_STYLES = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.NOT_CHECKED: "cyan",
}


def print_checks(configs: Sequence[Config], *, has_sink: bool) -> bool:
    """What each slot of a run needs, and what all of them need together; whether nothing failed."""
    with waiting("checking server, storage and sink"):
        found = [findings_of(config, has_sink=has_sink) for config in configs]
    of_run = [room_finding(configs, has_sink=has_sink), *port_findings(configs[0])]
    if len(configs) == 1:
        return _print_findings([*found[0], *of_run])
    complete = True
    for config, findings in zip(configs, found, strict=True):
        click.echo(f"\nslot {config.slot}")
        complete = _print_findings(findings) and complete
    click.echo("\nall slots together")
    return _print_findings(of_run) and complete


def _print_findings(findings: Sequence[Finding]) -> bool:
    """One line each, with its remedy; whether nothing failed."""
    console = Console(highlight=False)
    for finding in findings:
        mark = Text(f"{MARKS[finding.status]:<4}", style=_STYLES[finding.status])
        _print_beside(console, mark, Text(finding.text))
        if finding.remedy and finding.status is not Status.OK:
            _print_beside(console, Text("    "), Text(finding.remedy, style="dim"))
    n = Counter(finding.status for finding in findings)
    console.print(
        f"\n{n[Status.OK]} ok, {counted(n[Status.WARNING], 'warning')}, {n[Status.FAILED]} failed, "
        f"{n[Status.NOT_CHECKED]} not checked"
    )
    return not n[Status.FAILED]


def _print_beside(console: Console, mark: Text, text: Text) -> None:
    """On a terminal the text is wrapped beside its mark. In a file it stays one line, which can be searched."""
    if not console.is_terminal:
        console.print(Text.assemble(mark, "  ", text), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_row(mark, text)
    console.print(grid)


def skip_command(config: Config, xid: Xid, commit_lsn: Lsn, reason: str) -> None:
    """Record that a transaction is skipped. Raises PreconditionMissing, UsageError, with nothing recorded."""
    stored = stored_slot(config)
    record = read_progress(*stored)
    if record is None:
        raise PreconditionMissing(
            f"storage {redacted(config.storage)} has no record of slot {config.slot}",
            remedy="give the --storage, --slot and server of the run that met the transaction",
        )
    if commit_lsn < record.delivered_lsn:
        raise UsageError(
            f"commit LSN {commit_lsn} is not ahead: the sink has all up to {record.delivered_lsn}",
            remedy="give xid and commit LSN as the run's error names them",
        )
    now = datetime.datetime.now(datetime.timezone.utc)
    write_skip(*stored, Skip(xid, commit_lsn, now, getpass.getuser(), reason))
    click.echo(
        f"transaction {xid}, committed at LSN {commit_lsn}, is given up: from the next start on a run delivers none "
        "of its changes"
    )


def stored_slot(config: Config) -> tuple[Storage, Layout]:
    """Where the pipeline keeps what it records of this slot; the server tells its system identifier."""
    with ReplicationConnection(without_publications(config)) as connection:
        system = connection.identify_system()
    return Storage(config.storage), Layout(int(system.system_identifier), config.slot, "command")


def create_slot_command(config: Config, *, tell: Callable[[str], None] = click.echo) -> None:
    """Where a storage is given the slot is recorded in it: so a run knows it for a beginning, also where another
    server's slot of the same name is recorded there, or the sink has an earlier slot's transactions. Where a Delta sink
    is given, too, it says what will be missing between these and the slot.

    Raises PreconditionMissing where the storage has the record of an earlier slot.
    """
    stored = stored_slot(config) if config.storage else None
    # What cannot be asked is told while there is no slot yet.
    sink = _held_by_sink(config)
    if stored is not None and not describe_slot(login_of(config), config.slot).exists and holds_slot(*stored):
        raise PreconditionMissing(
            f"storage {redacted(config.storage)} holds the record of an earlier slot {config.slot}: a run would take "
            "the new slot for one that lost changes",
            remedy="use another storage or name: nothing of the earlier slot need be removed; if it has nothing any "
            "more that is not delivered, `xidstream slot drop --storage URI` removes it",
        )
    lsn = create_slot(
        login_of(config),
        config.slot,
        two_phase=config.two_phase,
        failover=config.failover,
        on_wait=tell_blockers,
    )
    beginning = Beginning(lsn)
    if stored is not None:
        write_beginning(*stored, beginning)
        take_over_progress(*stored, None, lsn, owner=claim_slot(*stored), cover=PrepareCover())
    tell(f"slot {config.slot} is there: what commits after {lsn} will be delivered")
    if sink is not None and (lsns := gap(beginning, sink)) is not None:
        tell(f"{gap_text(config.slot, lsns)}\n  remedy: {SNAPSHOTS}")


def _held_by_sink(config: Config) -> SinkHolds | None:
    if not config.sink_kind.is_log:
        return None
    with ReplicationConnection(without_publications(config)) as connection:
        system = connection.identify_system()
    return SinkHolds(*sink_type(config.sink).holds(identity_of(config, system).application_id))


def drop_slot_command(
    config: Config, *, discard_journal: bool, tell: Callable[[str], None] = click.echo
) -> None:
    """The slot, and then, if a storage is given, its record; also of a slot that was dropped without it.

    Raises SlotInUse, with nothing removed; PreconditionMissing where there is neither slot nor record, and where the
    journal has what no sink holds, unless ``discard_journal``.
    """
    stored = stored_slot(config) if config.storage else None
    # The storage is asked first: one that cannot be reached is told while the slot is still there.
    is_recorded = stored is not None and holds_slot(*stored)
    if stored is not None and not discard_journal:
        check_nothing_lost(config, *stored)
    if is_recorded and not describe_slot(login_of(config), config.slot).exists:
        tell(f"slot {config.slot} does not exist; its objects in the storage are removed")
    else:
        drop_slot(login_of(config), config.slot)
        tell(f"slot {config.slot} is dropped")
    if stored is None:
        return
    removed = remove_slot(*stored)
    where = redacted(config.storage)
    for what, n_objects in removed.items():
        tell(f"removed {what} from {where} ({counted(n_objects, 'object')})")
    if not removed:
        tell(f"{where} held nothing of slot {config.slot}")


def check_nothing_lost(config: Config, storage: Storage, layout: Layout) -> None:
    """Raise PreconditionMissing where the storage has the only copy of transactions, by its record or without one."""
    record = read_progress(storage, layout)
    if record is None:
        if n_objects := count_left_behind(storage, layout):
            raise PreconditionMissing(
                f"storage {redacted(config.storage)} has {NO_RECORD} {config.slot}, but "
                f"{counted(n_objects, 'object')} of its journal and of prepared transactions, which the server cannot "
                "send again",
                remedy="restore the record (`progress/` in the slot's folder) and have them delivered; a new slot does "
                "not need this folder removed: give it another --storage. --discard-journal deletes them",
            )
        return
    if not record.journal:
        return
    n_files = sum(span.last - span.first + 1 for span in record.journal)
    raise PreconditionMissing(
        f"the journal of slot {config.slot} has {counted(n_files, 'file')} of transactions up to "
        f"{record.confirmed_lsn} that the sink does not have (it has everything up to {record.delivered_lsn}), and the "
        "server cannot send them again",
        remedy="deliver them first: `xidstream run --available-now`; where that is refused, leave this storage as it "
        "is, and give a new slot another --storage. --discard-journal deletes them",
    )


def tell_blockers(blockers: tuple[Blocker, ...]) -> None:
    """The server waits until everything open has ended; say for whom instead of hanging silently."""
    names = "; ".join(map(str, blockers)) or "transactions that cannot be seen"
    print(f"waiting for {names} to end before the slot can be created", file=sys.stderr, flush=True)
