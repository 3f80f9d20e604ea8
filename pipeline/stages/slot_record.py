"""Compare what the storage records of a slot with the server, before the slot is created or read.

Called by the reader in each epoch, and by the preflight, so that a person hears of it before Spark has started.
The rules are ``pipeline.slot.continuity``'s.
"""

from __future__ import annotations

import dataclasses

from xidstream.pipeline.config import Config
from xidstream.pipeline.segments import (
    Layout,
    Storage,
    other_servers,
    read_progress,
    read_timeline,
    write_timeline,
)
from xidstream.pipeline.slot.admin import describe_slot
from xidstream.pipeline.slot.connection import ReplicationConnection
from xidstream.pipeline.slot.continuity import Recorded, check_continuity
from xidstream.pipeline.slot.opening import slot_settings
from xidstream.pipeline.slot.settings import SlotSettings


def check_server(config: Config, connection: ReplicationConnection, *, remember: bool) -> None:
    """Raise what ``check_continuity`` says of the connection's server; ``remember`` writes its timeline down.

    Raises also StorageFault, SegmentCorrupt, and what connecting raises.
    """
    system = connection.identify_system()
    storage, layout = Storage(config.storage), Layout(int(system.system_identifier), config.slot, "check")
    progress, timeline = read_progress(storage, layout), read_timeline(storage, layout)
    slot = describe_slot(connection.same_server, config.slot)
    is_new_timeline = timeline is not None and timeline < system.timeline
    check_continuity(
        config.slot,
        system,
        Recorded(
            None if progress is None else progress.confirmed_lsn,
            timeline,
            () if progress is not None else other_servers(storage, layout),
        ),
        slot_exists=slot.exists,
        is_standby=connection.pgconn.parameter_status(b"in_hot_standby") == b"on",  # PostgreSQL 14
        switch_points=connection.switch_points(system.timeline) if is_new_timeline else {},
        awaits_promotion=slot.awaits_promotion,
    )
    if remember and timeline != system.timeline:
        write_timeline(storage, layout, system.timeline)


def without_publications(config: Config) -> SlotSettings:
    """Settings for a connection that streams nothing: a command may not have been given a publication."""
    return slot_settings(dataclasses.replace(config, publication=config.publication or ("-",)))
