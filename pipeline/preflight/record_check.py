"""Compare what the storage records of a slot with the server, before the slot is created or read.

Called by the reader in each epoch, and by the preflight, so that a person hears of it before Spark has started.
The rules are ``pipeline.postgres.continuity``'s, and ``pipeline.postgres.beginning``'s where nothing is recorded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.postgres.beginning import BeginningVerdict, Witnesses
from xidstream.pipeline.postgres.connection import ReplicationConnection, SystemIdentity
from xidstream.pipeline.postgres.continuity import Recorded, check_continuity
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.preflight.slot_beginning import judge, note_beginning, witnesses_of
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.server_record import ServerRecord, read_server, write_server
from xidstream.pipeline.storage.storage import Storage


@dataclass(frozen=True)
class Unrecorded:
    """A storage without a record of the slot, and what it means."""

    verdict: BeginningVerdict
    witnesses: Witnesses

    def note(self, config: Config, layout: Layout, lsn: Lsn) -> None:
        """Write down that the storage begins at ``lsn``, before anything is read. Raises StorageFault."""
        note_beginning(Storage(config.storage), layout, lsn, self.verdict, self.witnesses)


def identity_of(config: Config, system: SystemIdentity) -> SlotIdentity:
    """Whose slot it is, by what the storage, if one is given, knows of the database. Raises StorageFault,
    SegmentCorrupt."""
    if not config.storage:
        return _identity(config, system, None)
    layout = Layout(int(system.system_identifier), config.slot, "check")
    return _identity(config, system, read_server(Storage(config.storage), layout))


def _identity(config: Config, system: SystemIdentity, known: ServerRecord | None) -> SlotIdentity:
    name = system.dbname if known is None else known.known_name(system.dbname, system.database_oid)
    return SlotIdentity(int(system.system_identifier), name, config.slot)


@dataclass(frozen=True)
class CheckedServer:
    """``unrecorded``: None where the storage has a record of the slot."""

    identity: SlotIdentity
    unrecorded: Unrecorded | None


def check_server(config: Config, connection: ReplicationConnection, *, remember: bool) -> CheckedServer:
    """Raise what ``check_continuity`` says of the connection's server, and SlotLost where nothing is recorded although
    there was an earlier run; ``remember`` writes the server's timeline and the database down.

    Raises also StorageFault, SegmentCorrupt, and what connecting raises.
    """
    system = connection.identify_system()
    storage, layout = Storage(config.storage), Layout(int(system.system_identifier), config.slot, "check")
    progress, known = read_progress(storage, layout), read_server(storage, layout)
    identity, timeline = _identity(config, system, known), None if known is None else known.timeline
    slot = describe_slot(connection.same_server, config.slot)
    is_new_timeline = timeline is not None and timeline < system.timeline
    check_continuity(
        config.slot,
        system,
        Recorded(None if progress is None else progress.confirmed_lsn, timeline),
        slot_exists=slot.exists,
        is_standby=connection.pgconn.parameter_status(b"in_hot_standby") == b"on",  # PostgreSQL 14
        switch_points=connection.switch_points(system.timeline) if is_new_timeline else {},
        awaits_promotion=slot.awaits_promotion,
    )
    unrecorded = None
    if progress is None:
        witnesses = witnesses_of(storage, layout, connection.same_server, slot)
        unrecorded = Unrecorded(judge(config, storage, witnesses), witnesses)
    record = ServerRecord(system.timeline, identity.database, system.database_oid)
    if remember and known != record:
        write_server(storage, layout, record)
    return CheckedServer(identity, unrecorded)


def without_publications(config: Config) -> SlotSettings:
    """Settings for a connection that streams nothing: a command may not have been given a publication."""
    return slot_settings(dataclasses.replace(config, publication=config.publication or ("-",)))
