"""Open a slot for reading: everything between the settings and the first message, in a safe order.

The DSN may lead to another server each time (several hosts, a name that moves). So the streaming connection comes
first, ``check`` compares *its* server with the record, and all other connections go to that server
(``same_server``).

There are two steps. ``connect_slot`` reads the slot's state. The caller must compare the confirmed position in it with
its own record before it confirms anything. An idle walsender has no time limit, so there is time to prepare. ``start``
then begins replication. From there on the slot is ours: no other process can read it or use its storage. But the
server now expects feedback from us within wal_sender_timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ConnectionLost, PreconditionMissing, SlotLost, XidstreamError
from xidstream.pipeline.events import Event
from xidstream.pipeline.exchange import Opened, PrepareCover, SlotIdentity
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.pg_rules import Streaming
from xidstream.pipeline.postgres.admin import (
    PLUGIN,
    Blocker,
    SlotState,
    create_slot,
    describe_slot,
    drop_unread_slot,
    prepare_cover,
    settled_flush_lsn,
)
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.continuity import standbys_copy
from xidstream.pipeline.postgres.failures import REMEDY_CREATE_SLOT
from xidstream.pipeline.postgres.login import Login
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.stream_options import (
    StreamOptions,
    failover_command,
    stream_options,
)
from xidstream.pipeline.settings.config import Config

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenSlot:
    """A slot that can be started. ``connection`` belongs to the caller. ``flush_lsn`` is the end of the WAL when the
    slot was opened; a run with ``available_now`` ends there."""

    connection: ReplicationConnection
    options: StreamOptions
    identity: SlotIdentity
    confirmed_flush_lsn: Lsn
    flush_lsn: Lsn
    server_version: int
    proto_version: int
    streaming: str
    two_phase: bool
    wal_sender_timeout_s: float
    """0: the server waits for ever."""
    timeline: int
    history: Mapping[int, Lsn]
    """Where each timeline before ``timeline`` ended on the way to it."""
    no_prepare_sent: bool
    """Whether the slot has never sent a PREPARE to anybody: it is new, or had no two-phase until now."""
    pid: int
    """The pid of the connection's process on the server. A pooler may have told libpq another one."""
    made_at: Lsn | None = None
    """Where the slot began that was made for this; None: it was there."""

    def start(self, start_lsn: Lsn = INVALID_LSN) -> None:
        """START_REPLICATION from the confirmed position, or from ``start_lsn`` if that is further. Raises SlotInUse,
        SlotLost, PreconditionMissing."""
        self.connection.start_replication(self.identity.slot, start_lsn, self.options)

    def opened(
        self, start_lsn: Lsn = INVALID_LSN, last_owner: int | None = None, owner_before: int | None = None
    ) -> Opened:
        """To be asked after ``start``, with the same: until then another reader may have moved the slot.

        ``last_owner`` was read from the storage between the two, and ``owner_before`` before both. Raises
        ConnectionLost where the server has taken the slot from this connection meanwhile: another reader may have it,
        and be that owner. But a server that cannot decode what comes next ends the stream at once. Nobody has the slot
        then, and the owner is the one of before. What was sent is to be read, and so is the reason.
        """
        dsn = self.connection.same_server
        state = describe_slot(dsn, self.identity.slot)
        is_nobodys = state.active_pid is None and last_owner is not None and last_owner == owner_before
        if state.active_pid != self.pid and not is_nobodys:
            raise ConnectionLost(
                f"the server has ended the connection that read slot {self.identity.slot}, before anything was read"
            )
        confirmed_flush_lsn = state.confirmed_flush or self.confirmed_flush_lsn
        never_sent = self.no_prepare_sent and confirmed_flush_lsn == self.confirmed_flush_lsn
        return Opened(
            identity=self.identity,
            confirmed_flush_lsn=confirmed_flush_lsn,
            target_lsn=self.flush_lsn,
            server_version=self.server_version,
            proto_version=self.proto_version,
            streaming=self.streaming,
            two_phase=self.two_phase,
            cover=PrepareCover() if never_sent else prepare_cover(dsn),
            timeline=self.timeline,
            history=self.history,
            server=self.connection.server_options,
            start_lsn=start_lsn,
            last_owner=last_owner,
        )


def slot_settings(config: Config) -> SlotSettings:
    """The settings of the run that the connection needs."""
    return SlotSettings(
        dsn=config.dsn,
        slot=config.slot,
        publications=config.publication,
        streaming=Streaming(config.streaming),
        proto_version=config.proto_version,
        logical_decoding_work_mem=config.logical_decoding_work_mem,
        two_phase=config.two_phase,
        failover=config.failover,
        heartbeat_interval_s=config.heartbeat_interval_s,
        password_command=config.password_command,
    )


def connect_slot(
    settings: SlotSettings,
    *,
    create: bool,
    on_wait: Callable[[tuple[Blocker, ...]], None] | None = None,
    check: Callable[[ReplicationConnection], SlotIdentity] | None = None,
) -> OpenSlot:
    """Connect; if the slot is missing and ``create`` is true, create it then. What fails after that drops it again.

    ``check`` is given the connection before anything is created or read, and says whose slot it is; without it the
    server does. Raises what it raises, PreconditionMissing, SlotLost, ConnectionLost, Unsupported.
    """
    connection = ReplicationConnection(settings)
    try:
        identity = None if check is None else check(connection)
        return _connected(settings, connection, identity, create, on_wait)
    except BaseException:
        connection.close()
        raise


def _connected(
    settings: SlotSettings,
    connection: ReplicationConnection,
    identity: SlotIdentity | None,
    create: bool,
    on_wait: Callable[[tuple[Blocker, ...]], None] | None,
) -> OpenSlot:
    dsn = connection.same_server
    state = describe_slot(dsn, settings.slot)
    if state.exists:
        return _described(settings, connection, identity, state, made_at=None)
    if not create:
        raise PreconditionMissing(
            f"slot {settings.slot} does not exist",
            remedy=REMEDY_CREATE_SLOT,
        )
    made_at = create_slot(
        dsn, settings.slot, two_phase=settings.two_phase, failover=settings.failover, on_wait=on_wait
    )
    with dropped_again(dsn, settings.slot, made_at):
        state = describe_slot(dsn, settings.slot)
        return _described(settings, connection, identity, state, made_at=made_at)


@contextmanager
def dropped_again(login: Login, slot: str, made_at: Lsn) -> Iterator[None]:
    """What fails in here is of a slot that was just made, at ``made_at``: it is dropped, for else it would keep WAL for
    ever if nobody tries again. One that cannot be dropped is told. It stays where another run, which found it there,
    has confirmed something meanwhile: what comes after that is in the slot alone."""
    try:
        yield
    except BaseException as error:
        try:
            drop_unread_slot(login, slot, made_at)
        except XidstreamError as reason:
            text = (
                f"slot {slot}, which was just made, could not be dropped again ({reason.message}): it keeps WAL "
                "until it is read or dropped (`xidstream slot drop`)"
            )
            _LOGGER.warning(Event("slot_left", text, slot=slot, error=type(error).__name__))
        raise


def _described(
    settings: SlotSettings,
    connection: ReplicationConnection,
    identity: SlotIdentity | None,
    state: SlotState,
    *,
    made_at: Lsn | None,
) -> OpenSlot:
    dsn = connection.same_server
    no_prepare_sent = made_at is not None or not state.two_phase
    if state.plugin != PLUGIN:
        raise PreconditionMissing(
            f"slot {settings.slot} uses the plugin {state.plugin}, not {PLUGIN}",
            remedy="give another slot: this one belongs to another consumer, which needs what it holds",
        )
    if state.awaits_promotion:
        raise standbys_copy(settings.slot)
    if state.is_lost:
        raise SlotLost(
            f"slot {settings.slot} was invalidated by the server ({state.invalidation_reason or state.wal_status})"
        )
    if settings.failover and not state.failover:
        connection.execute(
            failover_command(settings.slot, connection.server_version),
            f"making slot {settings.slot} a failover slot",
        )
    flush_lsn = settled_flush_lsn(dsn)
    system = connection.identify_system()
    if state.database != system.dbname:
        raise PreconditionMissing(
            f"slot {settings.slot} belongs to database {state.database}, the DSN leads to {system.dbname}",
            remedy="connect to the slot's database",
        )
    options = stream_options(settings, connection.server_version)
    return OpenSlot(
        connection=connection,
        options=options,
        identity=identity or SlotIdentity(int(system.system_identifier), system.dbname, settings.slot),
        confirmed_flush_lsn=state.confirmed_flush or INVALID_LSN,
        flush_lsn=flush_lsn,
        server_version=connection.server_version,
        proto_version=options.proto_version,
        streaming=options.streaming.value,
        two_phase=bool(state.two_phase) or options.two_phase,
        wal_sender_timeout_s=_seconds(connection.show("wal_sender_timeout")),
        timeline=system.timeline,
        history=connection.switch_points(system.timeline),
        no_prepare_sent=no_prepare_sent,
        pid=connection.server_pid(),
        made_at=made_at,
    )


_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(text: str) -> float:
    """A time as SHOW prints it: ``1min``, ``500ms``, ``0``."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(digits or 0) * _UNITS_S.get(text[len(digits) :], 0.001)
