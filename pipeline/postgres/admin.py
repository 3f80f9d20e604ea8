"""Slots, over an ordinary SQL connection: describe, create, drop; positions and statistics.

Each function takes a DSN and makes a connection for its own call: they are rare, and the reader's own
connection is busy with COPY. ``SlotState`` holds every column of pg_replication_slots that decides something,
None where the server's version has no such column.

Creating a slot waits until every transaction that was open when it began has ended, prepared ones included
(fact 28), which may be never. So it runs asynchronously, and while it waits ``on_wait`` is told for whom. And a
server that only waits does not see that its client was killed: it would hold the half-made slot until then, and leave
it behind whole. So it is told to look.
"""

from __future__ import annotations

import datetime
import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.rows import dict_row

from xidstream.pipeline.errors import (
    ConnectionLost,
    EnvironmentFault,
    PreconditionMissing,
    SlotInUse,
    Unsupported,
)
from xidstream.pipeline.exchange import PrepareCover
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pg_rules import check_slot_name
from xidstream.pipeline.postgres.failures import from_error, from_result
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.sessions import open_session
from xidstream.pipeline.postgres.stream_options import (
    PG10,
    PG14,
    PG15,
    PG17,
    quote_literal,
    version_text,
)

PLUGIN: Final = "pgoutput"
_CLIENT_CHECK_INTERVAL_MS: Final = 1000


@dataclass(frozen=True)
class SlotState:
    """One slot, as pg_replication_slots had it. Where ``exists`` is False the rest is None.

    ``wal_status``: reserved, extended, unreserved or lost (13+). ``invalidation_reason``: 17+.
    ``two_phase``: 14+. ``two_phase_at``: 18+, None without two-phase. ``failover``: 17+. ``awaits_promotion``: the
    server is a standby, and the slot its copy of the primary's (17+).
    """

    name: str
    exists: bool
    plugin: str | None = None
    database: str | None = None
    active: bool | None = None
    active_pid: int | None = None
    confirmed_flush: Lsn | None = None
    restart_lsn: Lsn | None = None
    wal_status: str | None = None
    invalidation_reason: str | None = None
    two_phase: bool | None = None
    two_phase_at: Lsn | None = None
    failover: bool | None = None
    awaits_promotion: bool = False

    @property
    def is_lost(self) -> bool:
        return self.wal_status == "lost" or self.invalidation_reason is not None


@dataclass(frozen=True)
class StreamStats:
    """One row of pg_stat_replication_slots (14+): what the server has decoded since its statistics were reset."""

    stream_txns: int
    stream_count: int
    stream_bytes: int
    total_txns: int
    total_bytes: int


@dataclass(frozen=True)
class Blocker:
    """A transaction that the creation of a slot waits for.

    ``gid`` where it is prepared, else ``pid`` of the session that has it open.
    """

    xid: int
    pid: int | None = None
    gid: str | None = None
    database: str | None = None
    user: str | None = None
    application: str | None = None
    since: datetime.datetime | None = None

    def __str__(self) -> str:
        where = f" in database {self.database}" if self.database else ""
        since = f" since {self.since:%Y-%m-%d %H:%M:%S %Z}" if self.since else ""
        if self.gid is not None:
            return f"prepared transaction {self.gid!r} (xid {self.xid}){where}{since}"
        session = f" of session {self.pid} ({self.user}, {self.application!r})" if self.pid else ""
        return f"open transaction {self.xid}{session}{where}{since}"


@contextmanager
def sql_connection(
    dsn: Dsn, doing: str, settings: Mapping[str, str] | None = None
) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection whose errors, inside the block too, are ours and without secrets. ``settings``: over
    those of all sessions."""
    with open_session(dsn, doing, settings) as connection, translated(doing):
        yield connection


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Errors of psycopg inside the block become ours, without secrets."""
    try:
        yield
    except (psycopg.errors.CharacterNotInRepertoire, UnicodeDecodeError):
        # The error itself is not kept as the cause, because it quotes the bytes.
        raise Unsupported(
            f"{doing}: a name in the server's catalog is not valid UTF-8 (the database is SQL_ASCII)",
            remedy="rename the table or column, or leave the table out of the publication",
        ) from None
    except psycopg.Error as error:
        raise from_error(error, doing) from None


def describe_slot(dsn: Dsn, slot: str) -> SlotState:
    with sql_connection(dsn, f"slot {slot}") as connection:
        return read_slot(connection, slot)


def prepare_cover(dsn: Dsn) -> PrepareCover:
    """What stands now, for a storage that begins with it.

    A standby does not list what is prepared, so nothing is covered there.
    """
    with sql_connection(dsn, "the prepared transactions") as connection:
        # In this order: whatever was committed before the list was read lies before the position.
        rows = connection.execute(
            "SELECT transaction::text::bigint FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchall()
        position = connection.execute(
            "SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn()::text END"
        ).fetchone()
    assert position is not None
    since_lsn = Lsn.parse(position[0]) if position[0] is not None else Lsn(2**64 - 1)
    return PrepareCover(since_lsn, frozenset(Xid(xid) for (xid,) in rows))


def existing_slot(dsn: Dsn, slot: str) -> SlotState:
    """``describe_slot`` where the slot must be there. Raises PreconditionMissing if it is not."""
    with sql_connection(dsn, f"slot {slot}") as connection:
        return require_slot(connection, slot)


def read_slot(connection: psycopg.Connection[Any], slot: str) -> SlotState:
    """``describe_slot`` over a connection that is there already."""
    with connection.cursor(row_factory=dict_row) as cursor:
        # `*`, because each version has other columns.
        row = cursor.execute(
            "SELECT *, pg_is_in_recovery() AS is_standby FROM pg_replication_slots WHERE slot_name = %s",
            (slot,),
        ).fetchone()
    if row is None:
        return SlotState(slot, exists=False)
    return SlotState(
        name=slot,
        exists=True,
        plugin=row["plugin"],
        database=row["database"],
        active=row["active"],
        active_pid=row["active_pid"],
        confirmed_flush=_lsn(row["confirmed_flush_lsn"]),
        restart_lsn=_lsn(row["restart_lsn"]),
        wal_status=row.get("wal_status"),
        invalidation_reason=row.get("invalidation_reason"),
        two_phase=row.get("two_phase"),
        two_phase_at=_lsn(row.get("two_phase_at")),
        failover=row.get("failover"),
        # On a primary the column means nothing: it stays true after a promotion.
        awaits_promotion=row["is_standby"] and bool(row.get("synced")),
    )


def require_slot(connection: psycopg.Connection[Any], slot: str) -> SlotState:
    """``read_slot`` of a slot that somebody named as one that is there. Raises PreconditionMissing if it is not."""
    state = read_slot(connection, slot)
    if state.exists:
        return state
    rows = connection.execute("SELECT slot_name::text FROM pg_replication_slots ORDER BY 1").fetchall()
    named = ", ".join(name for (name,) in rows)
    raise PreconditionMissing(
        f"slot {slot} does not exist",
        remedy=f"check its name and the server: {f'the slots there are {named}' if named else 'there are no slots'}",
    )


def create_slot(
    dsn: Dsn,
    slot: str,
    *,
    two_phase: bool = False,
    failover: bool = False,
    on_wait: Callable[[tuple[Blocker, ...]], None] | None = None,
    wait_notice_s: float = 2.0,
) -> Lsn:
    """Create a pgoutput slot and return its consistent point: only what commits after it will be delivered.

    As long as it waits, ``on_wait`` is called every ``wait_notice_s`` seconds with the transactions waited
    for (empty when they cannot be seen). An exception from it, or a signal, cancels the creation; the server
    then removes the half-made slot. Raises Unsupported for two_phase before PostgreSQL 15 and failover before
    17, PreconditionMissing for a name that is taken, a missing privilege, wal_level or free slot.
    """
    check_slot_name(slot)
    with sql_connection(dsn, f"creating slot {slot}") as connection:
        version = connection.info.server_version
        arguments = [quote_literal(slot), quote_literal(PLUGIN)]
        arguments += _creation_flags(version, two_phase=two_phase, failover=failover)
        _have_client_checked(connection)
        command = f"SELECT lsn::text FROM pg_create_logical_replication_slot({', '.join(arguments)})"

        def report() -> None:
            if on_wait is not None:
                on_wait(slot_creation_blockers(dsn, connection.info.backend_pid))

        try:
            result = _run_reporting(connection.pgconn, command, report, wait_notice_s)
        except BaseException:
            connection.cancel_safe(timeout=10)
            raise
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise from_result(result, f"creating slot {slot}")
        return Lsn.parse((result.get_value(0, 0) or b"").decode())


def slot_creation_blockers(dsn: Dsn, pid: int) -> tuple[Blocker, ...]:
    """The transactions that backend ``pid`` waits for: their xid locks are what it cannot get."""
    with sql_connection(dsn, "looking for what is waited for") as connection:
        rows = connection.execute(
            """
            SELECT wanted.transactionid::text::bigint AS xid, activity.pid, prepared.gid,
                   coalesce(prepared.database, activity.datname) AS database,
                   coalesce(prepared.owner, activity.usename) AS role,
                   activity.application_name, coalesce(prepared.prepared, activity.xact_start) AS since
            FROM pg_locks AS wanted
            LEFT JOIN pg_prepared_xacts AS prepared ON prepared.transaction = wanted.transactionid
            LEFT JOIN pg_locks AS held ON held.locktype = 'transactionid' AND held.granted
                AND held.transactionid = wanted.transactionid
            LEFT JOIN pg_stat_activity AS activity ON activity.pid = held.pid
            WHERE wanted.pid = %s AND wanted.locktype = 'transactionid' AND NOT wanted.granted
            """,
            (pid,),
        ).fetchall()
    return tuple(Blocker(*row) for row in rows)


def drop_slot(dsn: Dsn, slot: str) -> None:
    """Raises SlotInUse while somebody reads it, PreconditionMissing when there is none."""
    check_slot_name(slot)
    with sql_connection(dsn, f"dropping slot {slot}") as connection:
        require_slot(connection, slot)
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))


def drop_unread_slot(dsn: Dsn, slot: str, made_at: Lsn) -> None:
    """Drop the slot that ``create_slot`` has just made at ``made_at``. One that is gone by now is no error. Raises
    SlotInUse while somebody reads it, and where somebody has: it has been confirmed to since, or is another of that
    name."""
    check_slot_name(slot)
    with sql_connection(dsn, f"dropping slot {slot}") as connection:
        dropped = connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE slot_name = %s AND confirmed_flush_lsn = %s::text::pg_lsn",
            (slot, str(made_at)),
        ).fetchone()
        if dropped is None and read_slot(connection, slot).exists:
            raise SlotInUse(f"slot {slot} has been read by somebody else by now")


def advance_slot(dsn: Dsn, slot: str, lsn: Lsn, timeout_s: float = 10.0) -> None:
    """Tell the server that all before ``lsn`` is delivered, where there is no replication connection to say it on.

    It decodes what it passes over without the output plugin, so what pgoutput cannot send is no obstacle. A reader that
    has just gone is waited for. Raises SlotInUse, and what connecting raises.
    """
    deadline = time.monotonic() + timeout_s
    with sql_connection(dsn, f"confirming on slot {slot}") as connection:
        while True:
            try:
                connection.execute(
                    "SELECT pg_replication_slot_advance(%s, %s::text::pg_lsn)", (slot, str(lsn))
                )
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def current_flush_lsn(dsn: Dsn) -> Lsn:
    """The end of the flushed WAL; on a standby, of the replayed."""
    with sql_connection(dsn, "reading the WAL position") as connection:
        return _flush_lsn(connection)


def held_wal_bytes(connection: psycopg.Connection[Any], state: SlotState) -> int | None:
    """How much WAL the server keeps for the slot; None where there is no such slot, or none is kept."""
    if state.restart_lsn is None:
        return None
    return max(0, _flush_lsn(connection) - state.restart_lsn)


def _flush_lsn(connection: psycopg.Connection[Any]) -> Lsn:
    row = connection.execute(
        "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
        " ELSE pg_current_wal_flush_lsn() END::text"
    ).fetchone()
    if row is None or row[0] is None:
        raise EnvironmentFault("the server has no WAL position yet")
    return Lsn.parse(row[0])


def settled_flush_lsn(dsn: Dsn, timeout_s: float = 2.0) -> Lsn:
    """A flushed position after every commit that has returned, asynchronous ones included.

    With synchronous_commit=off a COMMIT returns before its WAL is flushed; the WAL writer follows within a fraction
    of a second. The insert position itself is no target: at the start of a page it lies beyond every record's end.
    """
    with sql_connection(dsn, "reading the WAL position") as connection:
        deadline = time.monotonic() + timeout_s
        inserted = connection.execute(
            "SELECT CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_insert_lsn()::text END"
        ).fetchone()
        target = Lsn.parse(inserted[0]) if inserted is not None and inserted[0] is not None else None
        while target is not None and time.monotonic() < deadline:
            row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert row is not None
            if Lsn.parse(row[0]) >= target.record_end:
                return Lsn.parse(row[0])
            time.sleep(0.02)
    return current_flush_lsn(dsn)


def stream_stats(dsn: Dsn, slot: str) -> StreamStats | None:
    """The slot's statistics; None where the server has none of it, or is older than 14."""
    with sql_connection(dsn, f"statistics of slot {slot}") as connection:
        if connection.info.server_version < PG14:
            return None
        row = connection.execute(
            "SELECT stream_txns, stream_count, stream_bytes, total_txns, total_bytes"
            " FROM pg_stat_replication_slots WHERE slot_name = %s",
            (slot,),
        ).fetchone()
    return None if row is None else StreamStats(*row)


def _creation_flags(version: int, *, two_phase: bool, failover: bool) -> list[str]:
    """The arguments after the plugin: temporary, two_phase (14+; in pgoutput 15+), failover (17+)."""
    if version < PG10:
        raise Unsupported(f"PostgreSQL {version_text(version)} has no pgoutput")
    if two_phase and version < PG15:
        raise Unsupported("a two_phase slot needs PostgreSQL 15", remedy="leave two_phase (--two-phase) out")
    if failover and version < PG17:
        raise Unsupported("a failover slot needs PostgreSQL 17", remedy="leave --failover out")
    flags = ["false"]
    if version >= PG14:
        flags.append(str(two_phase).lower())
    if version >= PG17:
        flags.append(str(failover).lower())
    return flags


def _have_client_checked(connection: psycopg.Connection[Any]) -> None:
    """Have the server end what it does for a client that is gone (14+, where its system can tell)."""
    if connection.info.server_version < PG14:
        return
    try:
        connection.execute(f"SET client_connection_check_interval = {_CLIENT_CHECK_INTERVAL_MS}".encode())
    except psycopg.errors.InvalidParameterValue:
        pass  # a server on a system without POLLRDHUP refuses it, and then nothing can tell it


def _run_reporting(
    pgconn: pq.abc.PGconn, command: str, report: Callable[[], None], interval_s: float
) -> pq.abc.PGresult:
    """Run one statement without a time limit, calling ``report`` each ``interval_s`` until it ends."""
    pgconn.send_query(command.encode())
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    due = time.monotonic() + interval_s
    last: pq.abc.PGresult | None = None
    pgconn.flush()
    while True:
        while pgconn.is_busy():
            if poll.poll(max(0.0, due - time.monotonic()) * 1000):
                pgconn.consume_input()
            else:
                report()
                due = time.monotonic() + interval_s
        result = pgconn.get_result()
        if result is None:
            break
        last = result
    if last is None:
        raise ConnectionLost("the server gave no answer")
    return last


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)
