"""What the preflight says of a failover: whether the slot would survive one, and what would be missing after it.

All of it is advice. A run without a failover slot works until its primary is lost, and many servers have no standby.
``postgres.preflight`` calls it where there is a slot, or will be.

Seen from the primary: whether the slot is a failover slot; whether its changes wait for the standbys that may be
promoted (``synchronized_standby_slots``). Seen from a standby: whether it synchronises slots at all, and has this one.
The primary cannot tell that. So each standby that the DSN names beside the primary is asked.

"There is a standby" means here that somebody reads a physical slot: without one no standby synchronises slots.
pg_stat_replication was rejected: it shows standbys, pg_receivewal and backups alike, and what they are to few roles.
"""

from __future__ import annotations

import os
from typing import Any, Final

import psycopg

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.findings import Finding, enumerate_names
from xidstream.pipeline.postgres.admin import SlotState, sql_connection
from xidstream.pipeline.postgres.conninfo import complete, parse
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.stream_options import PG17, PG18

_CHECK: Final = "failover"
_SEE: Final = "docs/failover.md has the steps"
_ASK_TIMEOUT_S: Final = 3


def failover_findings(
    connection: psycopg.Connection[Any], settings: SlotSettings, slot: SlotState
) -> list[Finding]:
    """``slot`` may not exist yet. Raises what psycopg raises."""
    findings = _check_hosts(settings.dsn)
    version = connection.info.server_version
    if version < PG17:
        if settings.failover:
            findings.append(
                Finding.failed(
                    _CHECK,
                    "a failover slot needs PostgreSQL 17",
                    "leave failover (--failover) out, or upgrade",
                )
            )
        return findings
    if _is_standby(connection):
        return findings
    standbys = [
        name
        for (name,) in connection.execute(
            "SELECT slot_name::text FROM pg_replication_slots WHERE slot_type = 'physical' AND active ORDER BY 1"
        )
    ]
    if slot.failover or settings.failover:
        return findings + _check_failover_slot(connection, settings, slot, standbys)
    if standbys and slot.exists:
        findings.append(
            Finding.warning(
                _CHECK,
                f"slot {slot.name} is no failover slot: it is lost when a standby ({enumerate_names(standbys)}) "
                "takes the primary's place",
                f"run with failover = true (--failover), which sets it for good; {_SEE}",
            )
        )
    return findings


def _check_hosts(dsn: str) -> list[Finding]:
    given = parse(dsn)
    wanted = given.get("target_session_attrs", os.environ.get("PGTARGETSESSIONATTRS", "any"))
    if not _hosts(dsn) or "service" in given or wanted in ("read-write", "primary"):
        return []
    return [
        Finding.warning(
            "target_session_attrs",
            "the dsn names several hosts, and the first that answers is taken, a standby as well",
            "add target_session_attrs=read-write to the dsn",
        )
    ]


def _check_failover_slot(
    connection: psycopg.Connection[Any], settings: SlotSettings, slot: SlotState, standbys: list[str]
) -> list[Finding]:
    findings = []
    if connection.info.server_version < PG18 and (slot.two_phase or settings.two_phase):
        findings.append(
            Finding.warning(
                _CHECK,
                "PostgreSQL 17 does not synchronise where two_phase began, and may refuse failover until later",
                f"make the slot without failover, and turn it on later, or upgrade to PostgreSQL 18; {_SEE}",
            )
        )
    if slot.exists and not slot.failover:
        findings.append(
            Finding.warning(
                _CHECK,
                f"slot {slot.name} was made without failover; the run will turn it on for good",
                "leave failover (--failover) out if that is not meant",
            )
        )
    row = connection.execute("SELECT current_setting('synchronized_standby_slots')").fetchone()
    waited_for = [name.strip().strip('"') for name in (row[0] if row else "").split(",") if name.strip()]
    idle = [name for name in waited_for if name not in standbys]
    if not waited_for:
        findings.append(
            Finding.warning(
                _CHECK,
                "synchronized_standby_slots is empty: what was delivered may be missing on a promoted standby, and the "
                "run then ends with status 4",
                "name in it the physical slot of each standby that may be promoted, then SELECT pg_reload_conf()",
            )
        )
    elif idle:
        findings.append(
            Finding.warning(
                _CHECK,
                f"synchronized_standby_slots names {enumerate_names(idle)}, which no standby reads: the server sends "
                "no change before one does",
                "start the standby, or take its slot out of synchronized_standby_slots",
            )
        )
    findings += _check_standbys(settings)
    waits = f"waits for {enumerate_names(waited_for)}"
    return findings or [Finding.ok(_CHECK, f"slot {slot.name} is a failover slot, and {waits}")]


def _check_standbys(settings: SlotSettings) -> list[Finding]:
    """Each standby that the DSN names, asked by itself."""
    findings = []
    for host, port in _hosts(settings.dsn):
        where = f"standby {host}" + (f":{port}" if port else "")
        options = {"host": host, "target_session_attrs": "any", "connect_timeout": str(_ASK_TIMEOUT_S)}
        if port:
            options["port"] = port
        try:
            with sql_connection(complete(settings.dsn, **options), where) as connection:
                if _is_standby(connection):
                    findings += _check_standby(connection, settings.slot, where)
        except XidstreamError as error:
            findings.append(Finding.not_checked(_CHECK, f"whether {host} has the slot: {error.message}"))
    return findings


def _check_standby(connection: psycopg.Connection[Any], slot: str, where: str) -> list[Finding]:
    settings = ("sync_replication_slots", "hot_standby_feedback", "primary_slot_name")
    asked = ", ".join(f"current_setting('{name}')" for name in settings)
    values = connection.execute(f"SELECT {asked}".encode()).fetchone() or ()
    off = [name for name, value in zip(settings, values, strict=True) if value in ("off", "")]
    if off:
        return [
            Finding.warning(
                _CHECK,
                f"{where} does not synchronise slots: {enumerate_names(off)} must be set there",
                f"sync_replication_slots = on, hot_standby_feedback = on, and primary_slot_name; {_SEE}",
            )
        ]
    # A temporary one is not complete yet, and a promotion drops it.
    found = connection.execute(
        "SELECT FROM pg_replication_slots WHERE slot_name = %s AND synced AND NOT temporary"
        " AND invalidation_reason IS NULL",
        (slot,),
    )
    if not found.rowcount:
        return [
            Finding.warning(
                _CHECK,
                f"{where} has no copy of slot {slot} yet: promoted now, it would not have the slot",
                f"the standby's log says what it waits for; {_SEE}",
            )
        ]
    return []


def _is_standby(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def _hosts(dsn: str) -> list[tuple[str, str]]:
    """Host and port of each, the port empty where it is libpq's own; none where the DSN itself names fewer than two."""
    given = parse(dsn)
    hosts = given.get("host", "").split(",")
    ports = given.get("port", "").split(",")
    if len(hosts) < 2 or "hostaddr" in given:
        return []
    return list(zip(hosts, ports if len(ports) == len(hosts) else ports[:1] * len(hosts), strict=True))
