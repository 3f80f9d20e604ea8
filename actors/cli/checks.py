"""What the commands ``check``, ``status`` and ``slot`` do and print; the findings are ``pipeline.slot``'s.

``run`` uses the same preflight, silently where all is well, so that a missing precondition is told before Ray
and a JVM are started for nothing.
"""

from __future__ import annotations

import datetime
import getpass
import sys
import time
from collections.abc import Callable

import click
from rich.console import Console
from rich.text import Text

from xidstream.actors.runtime.java import ensure_java
from xidstream.pipeline.config import Config, redacted
from xidstream.pipeline.errors import (
    ConfigError,
    ConnectionLost,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    StorageFault,
    UsageError,
    XidstreamError,
)
from xidstream.pipeline.exchange import PrepareCover
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.segments import (
    Layout,
    Skip,
    Storage,
    holds_slot,
    read_progress,
    read_skips,
    remove_slot,
    take_over_progress,
    write_skip,
)
from xidstream.pipeline.slot.admin import (
    Blocker,
    create_slot,
    current_flush_lsn,
    describe_slot,
    drop_slot,
    existing_slot,
    stream_stats,
)
from xidstream.pipeline.slot.connection import ReplicationConnection
from xidstream.pipeline.slot.findings import Finding, Status
from xidstream.pipeline.slot.opening import slot_settings
from xidstream.pipeline.slot.preflight import preflight
from xidstream.pipeline.stages.slot_record import check_record, without_publications

_MARKS = {
    Status.OK: ("ok  ", "green"),
    Status.WARNING: ("warn", "yellow"),
    Status.FAILED: ("FAIL", "bold red"),
}

SLOT_IN_USE_WAIT_S = 30.0
"""A server notices within seconds that a killed reader is gone; what holds a slot for longer is a living one."""
_SLOT_POLL_S = 0.5


def findings_of(config: Config) -> list[Finding]:
    """The server's side, then ours."""
    findings = preflight(slot_settings(config), will_create_slot=config.create_slot)
    try:
        findings.append(Finding.ok("java", f"Java: {ensure_java()}"))
    except PreconditionMissing as error:
        findings.append(Finding.of_error("java", error))
    try:
        config.refuse_credentials()
    except ConfigError as error:
        findings.append(Finding.failed("secrets", error.message, error.remedy, ConfigError))
    if config.storage:
        findings.append(_check_storage(config.storage))
    return findings + _check_record(config, findings)


def print_findings(config: Config) -> bool:
    """One line each, with its remedy; whether nothing failed."""
    console = Console(highlight=False)
    findings = findings_of(config)
    for finding in findings:
        mark, style = _MARKS[finding.status]
        console.print(Text.assemble((mark, style), "  ", finding.statement), soft_wrap=True)
        if finding.remedy and finding.status is not Status.OK:
            console.print(Text(f"      {finding.remedy}", style="dim"), soft_wrap=True)
    failed = sum(f.status is Status.FAILED for f in findings)
    warned = sum(f.status is Status.WARNING for f in findings)
    console.print(f"\n{len(findings) - failed - warned} ok, {warned} to mind, {failed} missing")
    return not failed


def fail_on_findings(
    config: Config, *, wait_s: float = SLOT_IN_USE_WAIT_S, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Raise for the first thing that is missing, after printing the others; warnings go to stderr.

    A slot that is in use, and nothing else amiss, may be that of a run that was killed a moment ago: it is waited
    for, ``wait_s`` at most, and no longer than until ``stopped``. A lost slot is told before all else: what needs a
    person's decision is no less lost when the rest is mended.
    """
    deadline_s = time.monotonic() + wait_s
    told = False
    while True:
        findings = preflight(slot_settings(config), will_create_slot=config.create_slot)
        failed = [f for f in findings if f.status is Status.FAILED]
        if [f.raises for f in failed] != [SlotInUse] or time.monotonic() >= deadline_s:
            break
        if stopped():
            return
        if not told:
            click.echo(f"{failed[0].statement}: waiting up to {wait_s:.0f} s for it to end", err=True)
            told = True
        time.sleep(_SLOT_POLL_S)
    failed += [f for f in _check_record(config, findings) if f.status is Status.FAILED]
    failed.sort(key=lambda f: f.raises is not SlotLost)
    for finding in findings:
        if finding.status is Status.WARNING:
            click.echo(f"note: {finding.statement}", err=True)
    for finding in failed[1:]:
        click.echo(f"also missing: {finding.statement}\n  remedy: {finding.remedy}", err=True)
    if failed:
        raise failed[0].raises(failed[0].statement, remedy=failed[0].remedy)


def print_status(config: Config) -> None:
    """Raises PreconditionMissing where there is no such slot."""
    state = existing_slot(config.dsn, config.slot)
    flush = current_flush_lsn(config.dsn)
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
    stats = stream_stats(config.dsn, config.slot)
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
        lines.append(("recorded", _recorded(config)))
        lines += [("given up", text) for text in _skips(config)]
    for name, value in lines:
        click.echo(f"{name:<16}{value}")


def _recorded(config: Config) -> str:
    record = read_progress(*_stored(config))
    return "nothing yet" if record is None else f"{record.confirmed_lsn} by epoch {record.epoch}"


def _skips(config: Config) -> list[str]:
    """What was given up, and what became of it."""
    storage, layout = _stored(config)
    record = read_progress(storage, layout)
    lines = []
    for skip in read_skips(storage, layout):
        if skip.left_out_at is not None:
            state = f"left out on {skip.left_out_at:%Y-%m-%d %H:%M:%S} UTC"
        elif record is not None and record.confirmed_lsn > skip.commit_lsn:
            state = "without effect: no transaction had this xid and this commit LSN"
        else:
            state = "not met yet"
        by = f", by {skip.recorded_by}" if skip.recorded_by else ""
        why = f" ({skip.reason})" if skip.reason else ""
        lines.append(f"xid {skip.xid}, commit LSN {skip.commit_lsn}{by}{why}: {state}")
    return lines


def skip_command(config: Config, xid: Xid, commit_lsn: Lsn, reason: str) -> None:
    """Record that a transaction is given up. Raises PreconditionMissing, UsageError, with nothing recorded."""
    stored = _stored(config)
    record = read_progress(*stored)
    if record is None:
        raise PreconditionMissing(
            f"storage {redacted(config.storage)} has no record of slot {config.slot}",
            remedy="give the --storage, --slot and server of the run that met the transaction",
        )
    if commit_lsn < record.confirmed_lsn:
        raise UsageError(
            f"commit LSN {commit_lsn} is not ahead: all up to {record.confirmed_lsn} is delivered and confirmed",
            remedy="give xid and commit LSN as the run's error names them",
        )
    now = datetime.datetime.now(datetime.timezone.utc)
    write_skip(*stored, Skip(xid, commit_lsn, now, getpass.getuser(), reason))
    click.echo(
        f"transaction {xid}, committed at LSN {commit_lsn}, is given up: from the next start on a run delivers none "
        "of its changes"
    )


def _stored(config: Config) -> tuple[Storage, Layout]:
    """Where the pipeline keeps what it records of this slot; the server tells its system identifier."""
    with ReplicationConnection(without_publications(config)) as connection:
        system = connection.identify_system()
    return Storage(config.storage), Layout(int(system.system_identifier), config.slot, "command")


def create_slot_command(config: Config, *, failover: bool) -> None:
    """Where a storage is given the slot is recorded in it: so a run knows this server's from one that took the place
    of another server's of the same name.

    Raises PreconditionMissing where the storage has the record of an earlier slot.
    """
    stored = _stored(config) if config.storage else None
    if stored is not None and not describe_slot(config.dsn, config.slot).exists and holds_slot(*stored):
        raise PreconditionMissing(
            f"storage {redacted(config.storage)} holds the record of an earlier slot {config.slot}: a run would take "
            "the new slot for one that lost changes",
            remedy="remove it with `xidstream slot drop --storage URI`, or use another name or storage",
        )
    lsn = create_slot(
        config.dsn, config.slot, two_phase=config.two_phase, failover=failover, on_wait=tell_blockers
    )
    if stored is not None:
        take_over_progress(*stored, None, lsn, cover=PrepareCover())
    click.echo(f"slot {config.slot} is there: what commits after {lsn} will be delivered")


def drop_slot_command(config: Config) -> None:
    """The slot, and then, if a storage is given, its record; also of a slot that was dropped without it.

    Raises SlotInUse, with nothing removed; PreconditionMissing where there is neither slot nor record.
    """
    stored = _stored(config) if config.storage else None
    # The storage is asked first: one that cannot be reached is told while the slot is still there.
    is_recorded = stored is not None and holds_slot(*stored)
    if is_recorded and not describe_slot(config.dsn, config.slot).exists:
        click.echo(f"there is no slot {config.slot}; what the storage holds of it is removed")
    else:
        drop_slot(config.dsn, config.slot)
        click.echo(f"slot {config.slot} is dropped")
    if stored is None:
        return
    removed = remove_slot(*stored)
    where = redacted(config.storage)
    for what, n_objects in removed.items():
        click.echo(f"removed {what} from {where} ({counted(n_objects, 'object')})")
    if not removed:
        click.echo(f"{where} held nothing of it")


def tell_blockers(blockers: tuple[Blocker, ...]) -> None:
    """The server waits until everything open has ended; say for whom instead of hanging silently."""
    names = "; ".join(map(str, blockers)) or "transactions that cannot be seen"
    print(f"waiting for {names} to end before the slot can be created", file=sys.stderr, flush=True)


def _check_record(config: Config, findings: list[Finding]) -> list[Finding]:
    """Whether what the storage records of the slot fits this server; nothing where either cannot be asked.

    That is told by other findings, or met again by the run, which knows how long to try.
    """
    unreachable = any(
        f.check in ("connection", "replication") and f.status is Status.FAILED for f in findings
    )
    if not config.storage or unreachable:
        return []
    try:
        check_record(config)
    except (ConnectionLost, StorageFault):
        return []
    except XidstreamError as error:
        return [Finding.failed("record", error.message, error.remedy, type(error))]
    return [Finding.ok("record", "what the storage records of the slot fits this server")]


def _check_storage(uri: str) -> Finding:
    key = ".xidstream-check"
    try:
        storage = Storage(uri)
        storage.write_bytes(key, b"check")
        storage.delete([key])
    except XidstreamError as error:
        return Finding.of_error("storage", error)
    return Finding.ok("storage", f"storage {redacted(uri)} can be written")
