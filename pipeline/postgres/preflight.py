"""The server's part of the preflight: its preconditions, checked one by one. Nothing is changed, nothing printed.

``pipeline.preflight.checks`` calls it, and adds storage, record and sink.

The order is that of dependence: without a connection there is one finding. What can be tried is tried (a
replication connection is opened, so that pg_hba.conf, the privilege and a free walsender are known together,
also on managed services, whose privilege is not the role attribute); the rest is read from the catalogs.
"""

from __future__ import annotations

import datetime
from types import MappingProxyType
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import (
    RESYNC,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.pg_rules import ColumnNames, Streaming
from xidstream.pipeline.postgres.admin import PLUGIN, SlotState, read_slot, sql_connection
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.conninfo import display
from xidstream.pipeline.postgres.continuity import standbys_copy
from xidstream.pipeline.postgres.ddl_trigger import trigger_finding
from xidstream.pipeline.postgres.failover_findings import failover_findings
from xidstream.pipeline.postgres.failures import (
    REMEDY_CREATE_SLOT,
    REMEDY_OUTPUT_PLUGIN,
    REMEDY_PRIVILEGE,
    REMEDY_WAL_LEVEL,
)
from xidstream.pipeline.postgres.published import check_publications
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.stream_options import (
    PG10,
    PG13,
    PG16,
    stream_options,
    version_text,
)
from xidstream.pipeline.quantities import human_s

_NEWEST_TESTED_MAJOR: Final = 18
_CLOCKS_AGREE_S: Final = 1.0
"""Less is no matter: the lag of a small transaction is told in tenths of a second."""


def server_findings(
    settings: SlotSettings,
    *,
    will_create_slot: bool = False,
    parks_tables: bool = False,
    column_names: ColumnNames = MappingProxyType({}),
) -> list[Finding]:
    """``will_create_slot``: a slot that does not exist is no failure. ``parks_tables``: what a
    table with bytes that cannot be decoded costs. Raises nothing but ConfigError."""
    findings: list[Finding] = []
    try:
        with sql_connection(settings.login, "preflight") as connection:
            version = connection.info.server_version
            findings.append(
                Finding.ok("connection", f"PostgreSQL {version_text(version)} at {display(settings.dsn)}")
            )
            findings.append(_check_version(version))
            if version < PG10:
                return findings
            findings += _check_server(connection, version, parks_tables=parks_tables)
            findings += _check_replication(connection, settings)
            findings += check_publications(connection, settings.publications, column_names)
            slot = read_slot(connection, settings.slot)
            findings += _check_slot(connection, settings, slot, will_create_slot=will_create_slot)
            findings.append(_check_streaming(settings, version))
            findings += _check_two_phase(connection, settings, slot)
            findings += failover_findings(connection, settings, slot)
            findings += _check_heartbeat(connection, settings)
            findings += trigger_finding(connection)
    except XidstreamError as error:
        findings.append(Finding.of_error("connection", error))
    return findings


def _check_version(version: int) -> Finding:
    text = version_text(version)
    if version < PG10:
        return Finding.failed(
            "version", f"PostgreSQL {text} has no pgoutput", "upgrade: 14 or newer streams", Unsupported
        )
    if version // 10_000 > _NEWEST_TESTED_MAJOR:
        return Finding.warning(
            "version",
            f"PostgreSQL {text} is newer than xidstream was tested with ({_NEWEST_TESTED_MAJOR})",
            "try it on a copy first",
        )
    return Finding.ok("version", f"PostgreSQL {text} is supported")


def _check_server(connection: psycopg.Connection[Any], version: int, *, parks_tables: bool) -> list[Finding]:
    findings = []
    wal_level = setting_of(connection, "wal_level")
    if wal_level == "logical":
        findings.append(Finding.ok("wal_level", "wal_level is logical"))
    else:
        statement, remedy = f"wal_level is {wal_level}, must be logical", REMEDY_WAL_LEVEL
        if waits_for_restart(connection, "wal_level"):
            statement, remedy = (
                f"{statement}: a new value is set, and counts after a restart",
                "restart the server",
            )
        findings.append(Finding.failed("wal_level", statement, remedy))
    plugins = setting_of(connection, "output_plugin_libraries")
    if plugins is not None:
        findings.append(check_output_plugin_libraries(plugins))
    if setting_of(connection, "server_encoding") == "SQL_ASCII":
        findings.append(
            Finding.warning(
                "encoding",
                "the database's encoding is SQL_ASCII: bytes that are not UTF-8 "
                + ("park their table" if parks_tables else "stop the run"),
                "make a database with encoding UTF8, or be sure that it holds nothing else",
            )
        )
    findings.append(_check_clock(connection))
    if _value(connection, "SELECT pg_is_in_recovery()"):
        if version < PG16:
            findings.append(
                Finding.failed(
                    "primary",
                    "this is a standby, and a standby decodes from PostgreSQL 16 on",
                    "use the primary",
                )
            )
        else:
            findings.append(Finding.ok("primary", "this is a standby, which can decode"))
    return findings


def _check_clock(connection: psycopg.Connection[Any]) -> Finding:
    def now() -> datetime.datetime:
        return datetime.datetime.now(datetime.timezone.utc)

    return check_clock(now(), _value(connection, "SELECT clock_timestamp()"), now())


def check_clock(
    asked_at: datetime.datetime, server_at: datetime.datetime, answered_at: datetime.datetime
) -> Finding:
    """``server_at``: what the server's clock said between the other two, which are this machine's."""
    ahead_s = max(asked_at - server_at, server_at - answered_at).total_seconds()
    if ahead_s <= _CLOCKS_AGREE_S:
        return Finding.ok("clock", "this machine's clock and the server's agree")
    side = "ahead of" if server_at < asked_at else "behind"
    return Finding.warning(
        "clock",
        f"this machine's clock is {human_s(ahead_s)} {side} the server's: lags that a run shows are wrong by so much, "
        "and what it delivers is not",
        "have both set by NTP",
    )


def check_output_plugin_libraries(value: str) -> Finding:
    """Fact 29: since the minor releases of 2026 (16.15, 18.6) a plugin must be on the server's list."""
    if PLUGIN in (name.strip().strip('"') for name in value.split(",")):
        return Finding.ok("output_plugin_libraries", f"output_plugin_libraries allows {PLUGIN}")
    return Finding.failed(
        "output_plugin_libraries", f"output_plugin_libraries does not list {PLUGIN}", REMEDY_OUTPUT_PLUGIN
    )


def _check_replication(connection: psycopg.Connection[Any], settings: SlotSettings) -> list[Finding]:
    row = connection.execute(
        "SELECT rolname, rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user"
    ).fetchone()
    role, privileged = row if row is not None else ("?", False)
    findings = []
    senders, limit = (
        _count(connection, "pg_stat_replication"),
        int(setting_of(connection, "max_wal_senders") or 0),
    )
    if senders >= limit:
        findings.append(
            Finding.failed(
                "max_wal_senders",
                f"all {limit} walsenders are in use",
                "end one, or " + _raised(connection, "max_wal_senders"),
            )
        )
    else:
        findings.append(Finding.ok("max_wal_senders", f"{limit - senders} of {limit} walsenders are free"))
    try:
        with ReplicationConnection(settings) as replication:
            replication.identify_system()
            findings.insert(0, Finding.ok("replication", f"role {role} opened a replication connection"))
            if replication.server_version >= PG13:
                work_mem = replication.show("logical_decoding_work_mem")
                findings.append(
                    Finding.ok(
                        "logical_decoding_work_mem",
                        f"logical_decoding_work_mem is {work_mem} in the reader's session",
                    )
                )
    except XidstreamError as error:
        if privileged or not isinstance(error, PreconditionMissing):
            findings.insert(0, Finding.of_error("replication", error))
        else:
            findings.insert(
                0, Finding.failed("replication", f"role {role} may not replicate", REMEDY_PRIVILEGE)
            )
    return findings


def _check_slot(
    connection: psycopg.Connection[Any], settings: SlotSettings, slot: SlotState, *, will_create_slot: bool
) -> list[Finding]:
    if not slot.exists:
        return _check_new_slot(connection, settings, will_create_slot=will_create_slot)
    name = f"slot {slot.name}"
    if slot.plugin != PLUGIN:
        what = "is physical" if slot.plugin is None else f"has the plugin {slot.plugin}"
        return [Finding.failed("slot", f"{name} {what}, not {PLUGIN}", "use another name")]
    database = _value(connection, "SELECT current_database()")
    if slot.database != database:
        return [
            Finding.failed(
                "slot",
                f"{name} belongs to database {slot.database}, the DSN leads to {database}",
                "correct dbname, or use another name",
            )
        ]
    if slot.awaits_promotion:
        error = standbys_copy(slot.name)
        return [Finding.warning("slot", error.message, error.remedy)]
    if slot.is_lost:
        reason = f" ({slot.invalidation_reason})" if slot.invalidation_reason else ""
        return [
            Finding.failed(
                "slot",
                f"{name} is lost{reason}: the server removed WAL that it needs",
                f"raise max_slot_wal_keep_size; {RESYNC}",
                SlotLost,
            )
        ]
    if slot.active:
        return [
            Finding.failed(
                "slot",
                f"{name} is read by somebody: the server sends to it with its process {slot.active_pid}",
                f"end that reader (pg_stat_replication has its address, in the row with pid {slot.active_pid}), or use "
                "another slot",
                SlotInUse,
            )
        ]
    if slot.wal_status == "unreserved":
        return [
            Finding.warning(
                "slot",
                f"{name} is about to be lost: it is beyond max_slot_wal_keep_size",
                "start reading it now",
            )
        ]
    return [Finding.ok("slot", f"{name} is there, confirmed up to {slot.confirmed_flush}")]


def _check_new_slot(
    connection: psycopg.Connection[Any], settings: SlotSettings, *, will_create_slot: bool
) -> list[Finding]:
    findings = []
    if will_create_slot:
        findings.append(Finding.ok("slot", f"slot {settings.slot} will be created"))
    else:
        findings.append(
            Finding.failed(
                "slot",
                f"there is no slot {settings.slot}",
                REMEDY_CREATE_SLOT,
            )
        )
    slots = _count(connection, "pg_replication_slots")
    limit = int(setting_of(connection, "max_replication_slots") or 0)
    if slots >= limit:
        findings.append(
            Finding.failed(
                "max_replication_slots",
                f"all {limit} replication slots are taken",
                "drop one that nobody reads, or " + _raised(connection, "max_replication_slots"),
            )
        )
    else:
        findings.append(
            Finding.ok("max_replication_slots", f"{limit - slots} of {limit} replication slots are free")
        )
    return findings


def _check_streaming(settings: SlotSettings, version: int) -> Finding:
    try:
        options = stream_options(settings, version)
    except Unsupported as error:
        return Finding.of_error("streaming", error)
    what = f"streaming={options.streaming.value}, protocol {options.proto_version}"
    if options.streaming is Streaming.OFF and settings.streaming is not Streaming.OFF:
        return Finding.warning(
            "streaming",
            f"no streaming ({what}): transactions arrive after their COMMIT",
            "PostgreSQL 14 and protocol 2 stream",
        )
    return Finding.ok("streaming", what)


def _check_heartbeat(connection: psycopg.Connection[Any], settings: SlotSettings) -> list[Finding]:
    if not settings.heartbeat_interval_s:
        return []
    if _value(connection, "SELECT pg_is_in_recovery()"):
        return [
            Finding.warning(
                "heartbeat",
                "this is a standby: no heartbeat can be written, and the run goes on without",
                "leave heartbeat_interval_s out, or connect to the primary",
            )
        ]
    return [Finding.ok("heartbeat", f"a heartbeat each {settings.heartbeat_interval_s:g} s")]


def _check_two_phase(
    connection: psycopg.Connection[Any], settings: SlotSettings, slot: SlotState
) -> list[Finding]:
    if not settings.two_phase:
        return []
    findings = []
    if setting_of(connection, "max_prepared_transactions") == "0":
        findings.append(
            Finding.warning(
                "two_phase",
                "max_prepared_transactions is 0: nothing can be prepared",
                f"{_raised(connection, 'max_prepared_transactions')}, or leave two_phase (--two-phase) out",
            )
        )
    if slot.exists and not slot.two_phase:
        findings.append(
            Finding.warning(
                "two_phase",
                f"slot {slot.name} was made without two_phase; the run will turn it on for good",
                "leave two_phase (--two-phase) out if that is not meant",
            )
        )
    return findings or [Finding.ok("two_phase", "prepared transactions are sent at PREPARE")]


def setting_of(connection: psycopg.Connection[Any], name: str) -> str | None:
    """A server setting's value, or None where this version has no such setting."""
    value = _value(connection, "SELECT current_setting(%s, true)", name)
    return None if value is None else str(value)


def waits_for_restart(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether another value of a setting is written, and counts after a restart. A server that was not told to reload
    its files does not know it; a superuser sees the files themselves."""
    if _value(connection, "SELECT pending_restart FROM pg_settings WHERE name = %s", name):
        return True
    if not _value(connection, "SELECT has_table_privilege('pg_file_settings', 'SELECT')"):
        return False
    written = _value(
        connection, "SELECT setting FROM pg_file_settings WHERE name = %s ORDER BY seqno DESC LIMIT 1", name
    )
    return written is not None and written != setting_of(connection, name)


def _raised(connection: psycopg.Connection[Any], name: str) -> str:
    """The remedy of a setting that is too small."""
    if waits_for_restart(connection, name):
        return f"restart the server: a new value of {name} is set already"
    return f"raise {name} and restart the server"


def _count(connection: psycopg.Connection[Any], view: str) -> int:
    return int(_value(connection, f"SELECT count(*) FROM {view}"))  # a constant of this module, no input


def _value(connection: psycopg.Connection[Any], query: str, *arguments: object) -> Any:
    row = connection.execute(query.encode(), arguments or None).fetchone()
    return None if row is None else row[0]
