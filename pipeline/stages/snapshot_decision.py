"""Decide and record whether a slot's tables are to be read as they were before it, before the slot is created.

Called by the reader in each epoch, between the connection and the slot (``slot.opening``).
"""

from __future__ import annotations

from xidstream.pipeline.config import Config, SnapshotMode
from xidstream.pipeline.segments import Layout, Storage
from xidstream.pipeline.segments.snapshot_record import read_decision, write_decision
from xidstream.pipeline.slot.admin import describe_slot, sql_connection
from xidstream.pipeline.slot.connection import ReplicationConnection
from xidstream.pipeline.slot.snapshot_sources import survey
from xidstream.pipeline.snapshot.decision import Decision, takes_snapshots


def decide_snapshots(config: Config, connection: ReplicationConnection) -> Decision:
    """Raises Unsupported, StorageFault, SegmentCorrupt, and what connecting raises."""
    dsn = connection.same_server_dsn
    identifier = int(connection.identify_system().system_identifier)
    storage, layout = Storage(config.storage), Layout(identifier, config.slot, "snapshots")
    recorded = read_decision(storage, layout)
    creates_slot = config.create_slot and not describe_slot(dsn, config.slot).exists
    takes = takes_snapshots(
        SnapshotMode(config.snapshot) if config.snapshot else None,
        recorded,
        creates_slot=creates_slot,
        sink_is_delta=config.sink.startswith("delta:"),
    )
    published = {} if recorded is None else recorded.published
    if creates_slot:
        published = {}
        if takes:
            with sql_connection(dsn, "the published tables") as sql:
                sources = survey(sql, config.publication)
            published = {source.relation.relid: source.published_as for source in sources}
    decision = Decision(takes, published)
    if decision != recorded:
        write_decision(storage, layout, decision)
    return decision
