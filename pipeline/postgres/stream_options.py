"""START_REPLICATION: the options that a server of a given version supports, and the command's text.

Sources: pgoutput.c (parse_output_parameters), the manual's "Streaming Replication Protocol", repl_gram.y.
Replication commands take no parameters, so quoting is done here. A slot's name has no special characters
(``pg_rules``). It is quoted all the same, because it may begin with a digit or be a keyword of the command's
grammar. A publication's name is quoted as an identifier inside a literal. libpq's PQescapeLiteral writes ``E''``; it is
not used, because the command's scanner knows no backslash escapes.

``binary`` is never asked for: the decoder reads text, whose form does not depend on the server's version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import Streaming, check_slot_name
from xidstream.pipeline.postgres.settings import SlotSettings

PG10, PG11, PG12, PG13, PG14, PG15, PG16, PG17, PG18 = (major * 10_000 for major in range(10, 19))
"""Numbers like ``server_version_num``, e.g. 160014 for 16.14."""

_PROTO_VERSIONS: Final = ((PG16, 4), (PG15, 3), (PG14, 2), (PG10, 1))
_MIN_PROTO: Final = {Streaming.OFF: 1, Streaming.ON: 2, Streaming.PARALLEL: 4}


def server_proto_version(server_version: int) -> int:
    """The highest protocol version of a server (fact 1). Raises Unsupported below PostgreSQL 10."""
    for version, proto_version in _PROTO_VERSIONS:
        if server_version >= version:
            return proto_version
    raise Unsupported(
        f"PostgreSQL {version_text(server_version)} has no pgoutput: 10 is the oldest that has it"
    )


def version_text(server_version: int) -> str:
    """``160014`` → ``16.14``; before 10, ``90624`` → ``9.6.24``."""
    if server_version >= PG10:
        return f"{server_version // 10_000}.{server_version % 10_000}"
    return f"{server_version // 10_000}.{server_version // 100 % 100}.{server_version % 100}"


@dataclass(frozen=True)
class StreamOptions:
    """The options for pgoutput. The server's version supports all of them."""

    proto_version: int
    streaming: Streaming
    publications: tuple[str, ...]
    messages: bool
    two_phase: bool

    def text(self) -> str:
        """The options in parentheses, quoted, as START_REPLICATION has them."""
        names = ",".join(quote_identifier(name) for name in self.publications)
        options = [("proto_version", str(self.proto_version)), ("publication_names", names)]
        if self.streaming is not Streaming.OFF:
            options.append(("streaming", self.streaming.value))
        if self.messages:
            options.append(("messages", "true"))
        if self.two_phase:
            options.append(("two_phase", "on"))
        return "(" + ", ".join(f"{name} {quote_literal(value)}" for name, value in options) + ")"


def stream_options(settings: SlotSettings, server_version: int) -> StreamOptions:
    """The options that fit both the settings and the server.

    The default ``streaming=on`` falls back to off if server or protocol has no streaming (the preflight says so).
    Raises Unsupported for an option that the settings ask for by name and the server does not have.
    """
    proto_version = server_proto_version(server_version)
    if settings.proto_version is not None:
        if settings.proto_version > proto_version:
            raise Unsupported(
                f"PostgreSQL {version_text(server_version)} speaks protocol {proto_version} at most, "
                f"not {settings.proto_version}",
                remedy=f"leave proto_version (--proto-version) out, or give at most {proto_version}",
            )
        proto_version = settings.proto_version
    streaming = settings.streaming
    if proto_version < _MIN_PROTO[streaming]:
        if streaming is Streaming.PARALLEL:
            raise Unsupported(
                "streaming=parallel needs PostgreSQL 16", remedy="give streaming 'on' (--streaming on)"
            )
        streaming = Streaming.OFF
    if settings.two_phase and proto_version < 3:
        raise Unsupported("two_phase needs PostgreSQL 15", remedy="leave two_phase (--two-phase) out")
    return StreamOptions(
        proto_version=proto_version,
        streaming=streaming,
        publications=settings.publications,
        messages=server_version >= PG14,
        two_phase=settings.two_phase,
    )


def failover_command(slot: str, server_version: int) -> str:
    """The replication command that has standbys synchronise a slot. SQL has none. Raises Unsupported before 17."""
    check_slot_name(slot)
    if server_version < PG17:
        raise Unsupported("a failover slot needs PostgreSQL 17", remedy="leave failover (--failover) out")
    return f"ALTER_REPLICATION_SLOT {quote_identifier(slot)} (FAILOVER true)"


def start_replication_command(slot: str, start_lsn: Lsn, options: StreamOptions) -> str:
    """The command's text. A ``start_lsn`` at or below the slot's confirmed position, such as 0/0, means that position
    (fact 26)."""
    check_slot_name(slot)
    return f"START_REPLICATION SLOT {quote_identifier(slot)} LOGICAL {start_lsn} {options.text()}"


def quote_identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
