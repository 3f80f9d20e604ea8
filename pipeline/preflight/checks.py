"""Everything that can be known of a run before Ray and Spark are started: server, storage, record and sink.

``xidstream check`` prints the findings, ``run`` and ``ChangeStream.start`` raise the first that failed. All three ask
here, so that none passes what another refuses. Nothing is changed but a file that is written to the storage and to the
sink, and removed again.

Order is that of dependence. What cannot be asked, because something before it failed or was not given, is a finding of
its own. What only the running parts can tell (CPUs, other nodes, the session) is for the caller to add.

Retries are not made here. At the start a person waits, and what does not answer is told at once; a run that has begun
has its own patience (``pipeline.restarts``).
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress

from xidstream.pipeline.errors import ConfigError, PreconditionMissing, XidstreamError
from xidstream.pipeline.exchange import Beginning, Tenure
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.initial_copy.readers import most_readers
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import renamed_columns
from xidstream.pipeline.postgres.admin import describe_slot, settled_flush_lsn, sql_connection
from xidstream.pipeline.postgres.beginning import (
    NO_RECORD,
    SNAPSHOTS,
    BeginningVerdict,
    SinkHolds,
    check_sink,
    gap,
    gap_text,
    unseen,
    unseen_text,
)
from xidstream.pipeline.postgres.connection import ReplicationConnection, SystemIdentity
from xidstream.pipeline.postgres.continuity import check_positions
from xidstream.pipeline.postgres.login import Login
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.preflight import server_findings
from xidstream.pipeline.postgres.published import published_names
from xidstream.pipeline.postgres.snapshot_findings import snapshot_findings, unread_findings
from xidstream.pipeline.preflight.record_check import Unrecorded, check_server, identity_of
from xidstream.pipeline.preflight.slot_beginning import anew_lsn, judge, witnesses_of
from xidstream.pipeline.preflight.snapshot_decision import would_take_snapshots
from xidstream.pipeline.quantities import human_bytes
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.file_modes import is_anybodys, planted_link, who_else, who_may_move
from xidstream.pipeline.settings.sink_kinds import Snapshots
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.sinks.sink_findings import ServerSide, SinkCheck, check_of_spec
from xidstream.pipeline.storage.beginning_record import read_beginning
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.snapshot_record import read_taken, read_wishes
from xidstream.pipeline.storage.storage import Storage

_LITTLE_BYTES = 1 << 30
"""Free on the storage's disk: a bulk load of a few million rows takes so much before its COMMIT."""
_STORAGE_LEVELS = 3
"""System identifier, slot, and the folders of a slot. Below are those that a run makes with names of its own."""
_USABLE = (Status.OK, Status.WARNING)
_UNRANKED = 2**62
"""A number of a tenure that no run has reached: who wrote to the sink last does not matter here."""


def preflight(config: Config, check_sink: SinkCheck | None = None, *, has_sink: bool = True) -> list[Finding]:
    """``check_sink``: of the sink that the caller will give the run; None: of ``config.sink``. ``has_sink``: whether
    there will be one.

    Raises nothing but ConfigError, for a DSN that cannot be read.
    """
    findings = server_findings(
        slot_settings(config),
        will_create_slot=config.create_slot,
        parks_tables=config.on_poison == "park",
        column_names=renamed_columns(config.column_names),
    )
    is_reached = not _failed(findings, "connection", "replication")
    try:
        config.refuse_credentials()
    except ConfigError as error:
        findings.append(Finding.of_error("secrets", error))
    n_before = len(findings)
    findings.append(_check_storage(config))
    server = None
    if is_reached:
        try:
            with ReplicationConnection(slot_settings(config)) as connection:
                if findings[n_before].status in _USABLE:
                    findings += [_check_record(config, connection), *_parked_tables(config, connection)]
                    findings += _snapshot_findings(config, connection)
                server = _server_side(config, connection, is_stored=findings[n_before].status in _USABLE)
        except XidstreamError as error:
            findings.append(Finding.of_error("record", error))
    if not any(finding.check == "record" for finding in findings):
        why = "the server was not reached" if not is_reached else "there is no storage to read it from"
        findings.append(Finding.not_checked("record", f"what the storage records of the slot: {why}"))
    if _failed(findings, "publication"):
        findings.append(
            Finding.not_checked(
                "publication", "tables, columns and replica identity: a publication is missing"
            )
        )
    if has_sink:
        of_sink = _sink_findings(config, check_sink, server)
        if any(finding.check == "record" for finding in of_sink):
            findings = [finding for finding in findings if finding.check != "record"]
        findings += of_sink
    return findings + _open_to_others(config, has_sink=has_sink)


def _failed(findings: list[Finding], *checks: str) -> bool:
    return any(finding.check in checks and finding.status is Status.FAILED for finding in findings)


def _check_storage(config: Config) -> Finding:
    if not config.storage:
        return Finding.not_checked(
            "storage", "the storage: none is given", "give the run's: --storage, or storage in Python"
        )
    storage = Storage(config.storage)
    try:
        storage.probe()
        free = storage.free_bytes
    except XidstreamError as error:
        return Finding.of_error("storage", error)
    statement = f"storage {redacted(config.storage)} can be written"
    if free is None:
        return Finding.ok("storage", statement)
    statement += f": its disk has {human_bytes(free)} free"
    if free < _LITTLE_BYTES:
        return Finding.warning(
            "storage",
            f"{statement}; large transactions go there, and the journal (up to "
            f"{human_bytes(int(config.journal_max_bytes))})",
            "make room, or give a --storage on another disk",
        )
    return Finding.ok("storage", statement)


def _open_to_others(config: Config, *, has_sink: bool) -> list[Finding]:
    """Local folders with rows that others may read: they were there before the run, and keep their modes."""
    roots: dict[str, tuple[str | None, int]] = {}
    with suppress(XidstreamError):  # the checks of storage and sink have told it
        if config.storage:
            roots["storage"] = Storage(config.storage).local_root, _STORAGE_LEVELS
        if has_sink and config.sink:
            roots[f"{config.sink_kind.name.capitalize()} root"] = sink_type(config.sink).local_root(), 1
    found = []
    for name, (root, n_levels) in roots.items():
        if root is None or not os.path.isdir(root):
            continue
        try:
            who, is_open = who_else(root, config.storage_mode), is_anybodys(root)
            link, mover = planted_link(root, n_levels), who_may_move(root)
        except OSError:
            continue  # a folder above it that is ours neither: then it is not ours to judge
        if link is not None:
            what = f"{link} is a link that another login has made, and a run would write {name} through it"
            remedy = f"look who made it, and then remove it: rm {shlex.quote(link)}"
            found.append(Finding.of_error("storage_mode", PreconditionMissing(what, remedy=remedy)))
            continue
        if is_open:
            what = f"every login of this machine may change {name} {root}, and could have a run write through a link"
            remedy = f"chmod -R o-w {shlex.quote(root)}, or choose another folder"
            found.append(Finding.of_error("storage_mode", PreconditionMissing(what, remedy=remedy)))
            continue
        if who is not None:
            found.append(
                Finding.warning(
                    "storage_mode",
                    f"{name} {root} holds rows of the tables, and {who}",
                    f"chmod -R go= {shlex.quote(root)}, or set storage_mode to what you want, such as 0750",
                )
            )
        elif mover is not None:
            found.append(
                Finding.warning(
                    "storage_mode",
                    f"{mover}, and so {name} {root} may be replaced by another folder",
                    "use a folder that belongs to this user, below folders of this user or root",
                )
            )
    return found


def _check_record(config: Config, connection: ReplicationConnection) -> Finding:
    """Whether what the storage records of the slot fits this server, by timeline and by position; and where it records
    nothing, whether a run would be the first."""
    system = connection.identify_system()
    try:
        unrecorded = check_server(config, connection, remember=False).unrecorded
        if unrecorded is not None:
            return _no_record(config, unrecorded)
        _check_positions(config, connection, system)
    except XidstreamError as error:
        return Finding.of_error("record", error)
    return Finding.ok("record", "what the storage records of the slot fits this server")


def _no_record(config: Config, unrecorded: Unrecorded) -> Finding:
    lsn = unrecorded.witnesses.slot_lsn
    where = "with the slot that it creates" if lsn is None else f"at {lsn}, where the slot is"
    what = f"the storage has {NO_RECORD} {config.slot}"
    if unrecorded.verdict is BeginningVerdict.ANEW:
        return Finding.warning("record", f"{what}: a run begins anew {where}", SNAPSHOTS)
    return Finding.ok("record", f"{what}: a run would be its first, and begin {where}")


def _compare(config: Config, layout: Layout, login: Login, sink: SinkHolds) -> list[Finding]:
    """What a sink that remembers says of the slot, beside what the storage has. A finding "record" takes the place of
    the one without the sink."""
    storage = Storage(config.storage)
    try:
        record, begun = read_progress(storage, layout), read_beginning(storage, layout)
        if record is not None:
            check_sink(config.slot, record.held_lsn, sink, begun, anew_lsn(config))
            message = gap_text(config.slot, lsns) if (lsns := gap(begun, sink)) else None
            if lsns := unseen(begun, sink, record.delivered_lsn):
                message = unseen_text(config.slot, lsns)
        else:
            witnesses = witnesses_of(storage, layout, login, describe_slot(login, config.slot), sink)
            judged = judge(config, storage, witnesses)
            is_gap = judged is BeginningVerdict.ANEW and witnesses.slot_lsn is not None
            lsns = gap(Beginning(witnesses.anew_lsn), sink) if is_gap else None
            message = gap_text(config.slot, lsns) if lsns else None
    except XidstreamError as error:
        return [Finding.of_error("record", error)]
    return [] if message is None else [Finding.warning("gap", message, SNAPSHOTS)]


def _parked_tables(config: Config, connection: ReplicationConnection) -> list[Finding]:
    """The tables of which the run delivers nothing."""
    system = connection.identify_system()
    layout = Layout(int(system.system_identifier), config.slot, "check")
    try:
        record = read_progress(Storage(config.storage), layout)
    except XidstreamError:
        return []  # "record" has told it
    return [
        Finding.warning(
            "parked",
            f"a table is parked: {each}",
            f"remove the cause, and then `xidstream table resume --table {each.table}` (docs/parked.md)",
        )
        for each in (record.parked if record is not None else ())
        if each.is_parked
    ]


def _snapshot_findings(config: Config, connection: ReplicationConnection) -> list[Finding]:
    """What the run's snapshots need of the server; where it would take none, what is not read."""
    try:
        if not would_take_snapshots(config, connection):
            return _unread_findings(config, connection)
        with sql_connection(connection.same_server, "what snapshots need") as sql:
            return snapshot_findings(sql, config.publication, 2 * most_readers(config.snapshot_connections))
    except XidstreamError as error:
        return [Finding.of_error("snapshot", error)]


def _unread_findings(config: Config, connection: ReplicationConnection) -> list[Finding]:
    storage = Storage(config.storage)
    layout = Layout(int(connection.identify_system().system_identifier), config.slot, "check")
    record, begun = read_progress(storage, layout), read_beginning(storage, layout)
    is_first = record is None or (begun is not None and record.delivered_lsn <= begun.lsn)
    taken = {each.generation.relid for each in read_taken(storage, layout)} | set(
        read_wishes(storage, layout).requests
    )
    with sql_connection(connection.same_server, "the rows from before") as sql:
        may_ask = config.sink_kind.snapshots is not Snapshots.NONE
        return unread_findings(sql, config.publication, taken, is_first=is_first, may_ask=may_ask)


def _check_positions(config: Config, connection: ReplicationConnection, system: SystemIdentity) -> None:
    dsn = connection.same_server
    # In this order: a reader that is at work records a position before it confirms it, and WAL only grows.
    confirmed_lsn = describe_slot(dsn, config.slot).confirmed_flush
    layout = Layout(int(system.system_identifier), config.slot, "check")
    record = read_progress(Storage(config.storage), layout)
    if record is not None and confirmed_lsn is not None:
        check_positions(config.slot, record.confirmed_lsn, confirmed_lsn, settled_flush_lsn(dsn))


def _server_side(config: Config, connection: ReplicationConnection, *, is_stored: bool) -> ServerSide:
    dsn = connection.same_server
    with sql_connection(dsn, "the published tables") as sql:
        tables = published_names(sql, config.publication)
    system = connection.identify_system()
    history = connection.switch_points(system.timeline)

    def tenure() -> Tenure:
        return Tenure(_UNRANKED, "check", system.timeline, history, settled_flush_lsn(dsn))

    identity = identity_of(config, system)
    layout = Layout(identity.system_identifier, config.slot, "check")

    def compare(owner: int, commit_lsn: Lsn) -> list[Finding]:
        return _compare(config, layout, dsn, SinkHolds(owner, commit_lsn)) if is_stored else []

    return ServerSide(identity, tenure, tables, compare)


def _sink_findings(config: Config, check_sink: SinkCheck | None, server: ServerSide | None) -> list[Finding]:
    if check_sink is None and not config.sink:
        return [
            Finding.not_checked(
                "sink", "the sink: none is given", "give the run's: --sink, or sink in Python"
            )
        ]
    try:
        return (check_sink or check_of_spec(config.sink, config.storage))(server)
    except ConfigError as error:
        return [Finding.of_error("sink", error)]
