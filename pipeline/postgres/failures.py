"""Turns the reports of PostgreSQL and libpq into ``pipeline.errors``.

There are two sources of reports:

- *Once connected*, every report has a SQLSTATE, which does not depend on the server's language (``_RULES``). One state
  may mean several things: 55000 is a lost slot, a low wal_level and more. Then the reporting function
  (PG_DIAG_SOURCE_FUNCTION) or the English text decides. The connection may ask the catalog as well.
- *While connecting*, libpq gives only text, its own or the server's (``_CONNECT_RULES``). If a server speaks another
  language, the last rule applies: ConnectionLost with the server's text. A wrong password is then retried a few times
  before a person reads it. That was preferred to guessing.

No detail, hint, context or query of the server ever gets into a message, because these can hold a row's values; only
an LSN is taken from the context. For SQLSTATEs of class 22 (data exceptions) the primary text is left out, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import pq

from xidstream.pipeline.errors import (
    ConnectionLost,
    EnvironmentFault,
    LoginRefused,
    PoisonedChange,
    PreconditionMissing,
    SlotInUse,
    SlotLost,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.postgres.conninfo import scrub

_MAX_TEXT: Final = 500
_CHANGE_LSN: Final = re.compile(
    r"output plugin \"pgoutput\".* (?:LSN )?([0-9A-F]{1,8}/[0-9A-F]{1,8})$", re.MULTILINE
)
"""The end of output_plugin_error_callback's line (logical.c), in any language."""

REMEDY_PRIVILEGE: Final = (
    "ALTER ROLE … REPLICATION (on managed services: grant the provider's replication role)"
)
REMEDY_CREATE_SLOT: Final = (
    "`xidstream slot create`, or `run --create-slot` (in Python create_slot=True); a slot has no changes from before "
    "its creation"
)
REMEDY_WAL_LEVEL: Final = "ALTER SYSTEM SET wal_level = logical, then restart the server"
REMEDY_PASSWORD: Final = (
    "check user and password (a passfile, a service file, PGPASSWORD or password_command keeps it off "
    "the command line)"
)
REMEDY_OUTPUT_PLUGIN: Final = "add pgoutput to the server's output_plugin_libraries and reload"


@dataclass(frozen=True)
class ServerReport:
    """The fields that we use of one ErrorResponse or NoticeResponse."""

    sqlstate: str
    message: str
    source_function: str
    change_lsn: str | None = None
    """The LSN of the change that was being decoded. Nothing else is taken from the context."""

    @classmethod
    def of(cls, result: pq.abc.PGresult) -> ServerReport:
        def field(code: pq.DiagnosticField) -> str:
            return (result.error_field(code) or b"").decode(errors="replace")

        return cls(
            sqlstate=field(pq.DiagnosticField.SQLSTATE),
            message=field(pq.DiagnosticField.MESSAGE_PRIMARY)
            or result.error_message.decode(errors="replace"),
            source_function=field(pq.DiagnosticField.SOURCE_FUNCTION),
            change_lsn=found[1]
            if (found := _CHANGE_LSN.search(field(pq.DiagnosticField.CONTEXT))) is not None
            else None,
        )

    @property
    def lacks_publication(self) -> bool:
        """Whether a publication is gone. Before PostgreSQL 18 the stream ends with this error at the first change after
        that."""
        return self.sqlstate == "42704" and bool(
            re.search(
                "GetPublicationByName|get_publication_oid|publication",
                f"{self.source_function} {self.message}",
            )
        )

    @property
    def is_too_large(self) -> bool:
        """Whether a value has more bytes than the server can send."""
        limit = {"54000": _STRING_LIMIT, "XX000": _ALLOCATION_LIMIT}.get(self.sqlstate)
        return limit is not None and bool(re.search(limit, f"{self.source_function} {self.message}"))

    @property
    def skips_publication(self) -> bool:
        """Whether the server skips a missing publication: PostgreSQL 18 does so with this warning, and no error."""
        return self.sqlstate == "55000" and self.source_function == "LoadPublications"


@dataclass(frozen=True)
class _Rule:
    states: str
    """A regular expression over SQLSTATE."""
    error: type[XidstreamError]
    remedy: str | None = None
    function: str | None = None
    """A regular expression over the source function or the message's text; None: always."""
    because: str | None = None
    """The text of a PoisonedChange, in place of the server's."""


TOO_LARGE: Final = "more bytes than the server can send in one message: 1 GB, and twice the bytes of a bytea"

_STRING_LIMIT: Final = "enlargeStringInfo|string buffer exceeds|out of memory"
_ALLOCATION_LIMIT: Final = "invalid memory alloc request size"

_RULES: Final = (
    _Rule("55006", SlotInUse),
    _Rule(
        "55000",
        SlotLost,
        None,
        r"can no longer (get changes|access)|cannot read from logical replication slot",
    ),
    _Rule(
        "55000|22023", PreconditionMissing, REMEDY_WAL_LEVEL, r"CheckLogicalDecodingRequirements|wal_level"
    ),
    _Rule("55000", PreconditionMissing, "use a slot that was created in this database, with pgoutput"),
    _Rule("58P01", SlotLost, None, r"has already been removed"),
    _Rule(
        "42704",
        PreconditionMissing,
        "create it again, or correct its name",
        r"GetPublicationByName|publication",
    ),
    _Rule(
        "42704",
        PreconditionMissing,
        REMEDY_CREATE_SLOT,
        r"ReplicationSlotAcquire|replication slot",
    ),
    _Rule("42704", PreconditionMissing),
    _Rule("42710", PreconditionMissing, "choose another name, or use the slot as it is"),
    _Rule("28P01", LoginRefused, REMEDY_PASSWORD),
    _Rule("28...", LoginRefused, "correct the role, or the server's pg_hba.conf"),
    _Rule("3D000", PreconditionMissing, "correct the database's name"),
    _Rule("42501", PreconditionMissing, REMEDY_OUTPUT_PLUGIN, r"output plugin|output_plugin"),
    _Rule("42501", PreconditionMissing, REMEDY_PRIVILEGE),
    _Rule("0A000|42...", PreconditionMissing, REMEDY_OUTPUT_PLUGIN, r"output plugin|output_plugin"),
    _Rule("53300", PreconditionMissing, "raise max_connections", "connection"),
    _Rule("53400", PreconditionMissing, "drop a slot that nobody uses, or raise max_replication_slots"),
    _Rule("0A000", Unsupported),
    _Rule("08...|57P..|57014|25P..", ConnectionLost),
    _Rule("42...|22023", PreconditionMissing),
    _Rule("54000", PoisonedChange, None, _STRING_LIMIT, TOO_LARGE),
    _Rule("XX000", PoisonedChange, None, _ALLOCATION_LIMIT, TOO_LARGE),
    _Rule(
        "22...",
        PoisonedChange,
        because="a value that the server itself cannot send as UTF8 (its text is withheld)",
    ),
)


def from_report(report: ServerReport, doing: str) -> XidstreamError:
    """The error for a report. ``doing`` says what was tried, without secrets: ``START_REPLICATION``,
    ``reading slot "s"``."""
    message = _shorten(report.message)
    for rule in _RULES:
        if re.fullmatch(rule.states, report.sqlstate) is None:
            continue
        if rule.function is not None and not re.search(
            rule.function, f"{report.source_function} {report.message}"
        ):
            continue
        if rule.error is PoisonedChange:
            where = f"the change at LSN {report.change_lsn} has" if report.change_lsn else "a change has"
            message = f"{where} {rule.because}"
        return rule.error(f"{doing}: {message} (SQLSTATE {report.sqlstate})", remedy=rule.remedy)
    if not report.sqlstate:
        return ConnectionLost(f"{doing}: {message}")
    return EnvironmentFault(f"{doing}: {message} (SQLSTATE {report.sqlstate})")


def from_result(result: pq.abc.PGresult, doing: str) -> XidstreamError:
    return from_report(ServerReport.of(result), doing)


def from_error(error: psycopg.Error, doing: str) -> XidstreamError:
    """The error for a psycopg error of an established connection. Without a SQLSTATE the connection itself broke."""
    if error.pgresult is not None:
        return from_result(error.pgresult, doing)
    if error.sqlstate:
        return from_report(ServerReport(error.sqlstate, str(error), "ERROR", ""), doing)
    return ConnectionLost(f"{doing}: {_shorten(str(error))}")


@dataclass(frozen=True)
class _ConnectRule:
    text: str
    error: type[XidstreamError]
    statement: str
    """This goes before the server's own text."""
    remedy: str | None


_TLS_REFUSED: Final = (
    # libpq's own words: certificates and their files, and servers without TLS
    r"certificate|private key|does not support SSL|SSL (connection )?(was|is) required|does not match host name"
    r"|direct SSL|ALPN|channel binding|no encryption|SSL protocol version|SSL context|SSL key|SSL engine"
    r"|host name must be specified"
    # OpenSSL's: versions and ciphers. Its "unexpected eof while reading" is a cut.
    r"|certificate verify failed|unknown ca|alert protocol version|unsupported protocol|no protocols available"
    r"|no shared cipher|no ciphers available|alert handshake failure|key too small|too weak"
    r"|alert (bad|unsupported|revoked|expired|unknown) certificate|unrecognized name"
)
"""Failures that would come again at the next attempt."""

_TLS_CUT: Final = "the connection was cut while TLS was agreed on"
_REMEDY_TLS_CUT: Final = (
    "check that the server is up, and what stands between: a load balancer that cuts connections, a port that speaks "
    "another protocol"
)

_CONNECT_RULES: Final = (
    # sslmode=prefer tries without TLS after a cut, and pg_hba.conf refuses that, as it should.
    _ConnectRule(
        r"(?s)SSL (SYSCALL )?error.*no pg_hba\.conf entry[^\n]*(no encryption|SSL off)",
        ConnectionLost,
        _TLS_CUT,
        _REMEDY_TLS_CUT,
    ),
    _ConnectRule(
        r"password authentication failed|SASL authentication|no password supplied|SCRAM",
        LoginRefused,
        "wrong or missing password",
        REMEDY_PASSWORD,
    ),
    _ConnectRule(
        r"(PAM|LDAP|RADIUS|OAuth|IAM[^:]*|AAD|Entra[^:]*|AD) authentication failed|access token|AAD_AUTH",
        LoginRefused,
        "the server does not take this token or password",
        "check that the token is for this role and server, and has not expired (password_command gets a new one for "
        "each connection)",
    ),
    _ConnectRule(
        r"no pg_hba\.conf entry|pg_hba\.conf rejects|authentication failed",
        LoginRefused,
        "the server's pg_hba.conf refuses this connection",
        "add a line for this user, database (its name, not `replication`) and address to it, then reload",
    ),
    _ConnectRule(r'database ".*" does not exist', PreconditionMissing, "unknown database", "correct dbname"),
    _ConnectRule(
        r'role ".*" (does not exist|is not permitted)',
        LoginRefused,
        "unknown role, or one that may not log in",
        "correct user, or ALTER ROLE … LOGIN",
    ),
    _ConnectRule(
        r"to start WAL sender|to start walsender|permission denied",
        PreconditionMissing,
        "the role lacks a privilege",
        REMEDY_PRIVILEGE,
    ),
    _ConnectRule(
        r"exceeds \"?max_wal_senders|remaining connection slots|too many (clients|connections)",
        ConnectionLost,
        "the server has no free connection",
        "end other clients, or raise max_wal_senders or max_connections",
    ),
    _ConnectRule(
        _TLS_REFUSED,
        LoginRefused,
        "TLS cannot be agreed on",
        "check sslmode, sslrootcert and the server's certificate",
    ),
    # Whatever else ends a handshake is a cut: the server, or what stands before it, went away in the middle.
    _ConnectRule(
        r"SSL|negotiation",
        ConnectionLost,
        _TLS_CUT,
        _REMEDY_TLS_CUT,
    ),
    _ConnectRule(
        r"definition of service|service file", PreconditionMissing, "unknown service", "check PGSERVICEFILE"
    ),
    _ConnectRule(
        r"unrecognized configuration parameter|invalid value for parameter|invalid command-line argument",
        PreconditionMissing,
        "the server refuses a session setting",
        "check `options` in the DSN and PGOPTIONS",
    ),
    _ConnectRule(
        r"invalid (\S+ value|port number)|weak sslmode",
        PreconditionMissing,
        "libpq does not take a value of the DSN",
        "correct the option that the message names, in the DSN or its PG* variable",
    ),
    _ConnectRule(
        r"starting up|shutting down|in recovery mode|not in a primary|read-only|hot standby",
        ConnectionLost,
        "the server is not ready",
        "wait until it accepts connections",
    ),
    _ConnectRule(
        r"resolve host|translate host|Name or service not known",
        ConnectionLost,
        "unknown host",
        "check host and the name service",
    ),
    _ConnectRule(
        r"Connection refused|No such file or directory",
        ConnectionLost,
        "no server listens there",
        "check host and port, that the server is up, and its listen_addresses",
    ),
    _ConnectRule(
        r"timeout|timed out|No route|unreachable",
        ConnectionLost,
        "the server does not answer",
        "check host, port and firewalls, or raise connect_timeout",
    ),
    _ConnectRule(r"", ConnectionLost, "cannot connect", None),
)


def from_connect_error(error: psycopg.Error, dsn: str) -> XidstreamError:
    """The error for a failure of ``psycopg.connect``. It tells unreachable, unauthorised and unknown apart."""
    text = str(error)
    # With several hosts psycopg puts the last one's error first. That one decides; all are shown.
    judged = text.split("Multiple connection attempts failed")[0]
    rule = next(rule for rule in _CONNECT_RULES if re.search(rule.text, judged))
    shown = re.sub(r"^connection (failed|is bad): ", "", text).split("\n\tIs the server running")[0]
    return rule.error(f"{rule.statement}: {scrub(_shorten(shown), dsn)}", remedy=rule.remedy)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
