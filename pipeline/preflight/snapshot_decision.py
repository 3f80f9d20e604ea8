"""Decide and record whether a slot's tables are to be read as they were before it, before the slot is created.

Called by the reader in each epoch, between the connection and the slot (``postgres.opening``), and by the preflight,
which records nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.postgres.admin import describe_slot, sql_connection
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.modes import SnapshotMode
from xidstream.pipeline.settings.sink_kinds import Snapshots
from xidstream.pipeline.snapshot.decision import Decision, takes_snapshots
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import read_decision, write_decision
from xidstream.pipeline.storage.storage import Storage


@dataclass(frozen=True)
class _Case:
    """A decision, and the facts that it is made from."""

    storage: Storage
    layout: Layout
    recorded: Decision | None
    creates_slot: bool
    takes: bool


def would_take_snapshots(config: Config, connection: ReplicationConnection) -> bool:
    """Whether a run would. Raises Unsupported, StorageFault, SegmentCorrupt, and what connecting raises."""
    return _case(config, connection).takes


def decide_snapshots(config: Config, connection: ReplicationConnection) -> Decision:
    """The decision, which is on record now. Raises as ``would_take_snapshots``."""
    case = _case(config, connection)
    kept = None if case.creates_slot else case.recorded
    published = {} if kept is None else kept.published
    if case.creates_slot and case.takes:
        with sql_connection(connection.same_server, "the published tables") as sql:
            sources = survey(sql, config.publication)
        published = {source.relation.relid: source.published_as for source in sources}
    decision = Decision(case.takes, published, None if kept is None else kept.slot_xmax)
    # A run into the console decides nothing for those into tables.
    may_take = config.sink_kind.snapshots is not Snapshots.NONE
    if decision != case.recorded and (may_take or case.recorded is None):
        write_decision(case.storage, case.layout, decision)
    return decision


def with_slot_xmax(config: Config, connection: ReplicationConnection, decision: Decision) -> Decision:
    """The decision with ``slot_xmax`` on record. To be called when the slot is there. (Any later answer is as true, so
    a run that died in between costs nothing.) Raises StorageFault, and what connecting raises."""
    if decision.slot_xmax is not None or not decision.published:
        return decision  # a table that was not published before is waited for anyway
    identifier = int(connection.identify_system().system_identifier)
    # The xmax of a snapshot would not do: it is behind the last one that has *ended*. Nothing waits for a rollback.
    with (
        sql_connection(connection.same_server, "the transactions beside the slot") as sql,
        sql.transaction(force_rollback=True),
    ):
        row = sql.execute("SELECT txid_current()").fetchone()
    assert row is not None
    decision = dataclasses.replace(decision, slot_xmax=int(row[0]))
    write_decision(Storage(config.storage), Layout(identifier, config.slot, "snapshots"), decision)
    return decision


def _case(config: Config, connection: ReplicationConnection) -> _Case:
    identifier = int(connection.identify_system().system_identifier)
    storage, layout = Storage(config.storage), Layout(identifier, config.slot, "snapshots")
    recorded = read_decision(storage, layout)
    exists = describe_slot(connection.same_server, config.slot).exists
    creates_slot = config.create_slot and not exists
    asked = SnapshotMode(config.snapshot) if config.snapshot else None
    takes = takes_snapshots(asked, recorded, creates_slot=creates_slot, sink=config.sink_kind)
    if takes and _is_standby(connection.same_server):
        if asked is not None:
            raise Unsupported(
                "a snapshot cannot be taken on a standby: it does not know which transactions are open",
                remedy="give the primary's dsn, or --snapshot never",
            )
        takes = False
    return _Case(storage, layout, recorded, creates_slot, takes)


def _is_standby(dsn: Dsn) -> bool:
    with sql_connection(dsn, "what the server is") as connection:
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return row is not None and bool(row[0])
