"""Every session with the server begins here: connected, and with settings that nobody else decides.

A role, a database, the server, PGOPTIONS and ``options`` in the DSN may set what each session begins with (ALTER ROLE …
SET). Many of these settings would end what we do (``transaction_timeout`` ends a stream within a transaction,
``statement_timeout`` an advance that decodes for minutes) or change what we read (``datestyle``, ``search_path``,
``row_security``). So each session sets all of ``pinned`` anew, before it does anything else. A limit of our own stands
on top of that, where it is wanted.

Where each matters:

- *Time limits.* All kinds of sessions: stream, advance, creation of a slot, a table's holder, a reader of ranges, a
  question. ``tcp_user_timeout`` is one of them: while a reader is paused its window is shut, and the server's kernel
  would give the connection up.
- *wal_sender_timeout* is not set, because people set it with good reason, also for a role. But a role's or a database's
  that is very short ends the stream before it has begun, so a stream raises it to ``LEAST_WAL_SENDER_TIMEOUT_MS``.
- *Text formats.* The decoder reads the types' text, and a snapshot's text must be the stream's.
- *search_path.* The names of tables, functions and operators in our queries, in row filters, and in the text of values
  such as regclass. PostgreSQL's own subscriber pins it as well.
- *default_transaction_…* Serializable transactions wait or fail, and do not work on a standby. A read-only one cannot
  write a heartbeat.
- *row_security*: an error, and never rows that are missing without a word.
- *quote_all_identifiers* changes the text of a row filter, and by that one the snapshot of a table would seem outdated.
- *standard_conforming_strings*: else a backslash in a name would end our quotes.
- *client_min_messages*: the warning of a missing publication is all that PostgreSQL 18 says of lost changes.
- *exit_on_error* would end a session that asks again after an error, such as a lock that is not free yet.
- *synchronous_commit*: a standby that is away must not hold up a heartbeat or the proof of a snapshot.

Left as they are: what only a superuser may set (``lc_messages``, ``session_replication_role``, ``log_statement``),
``role``, which people use to lend a role its privileges, and ``lc_monetary``, which says what money looks like.

They are set by SET, in one round trip. The startup packet's ``options`` were rejected: they would have to be merged
with those of the DSN, PGOPTIONS and a service file, and PGTZ or PGDATESTYLE would outrank them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg

from xidstream.pipeline.postgres.conninfo import complete
from xidstream.pipeline.postgres.failures import from_connect_error, from_error
from xidstream.pipeline.postgres.login import Dsn, Login
from xidstream.pipeline.postgres.password_command import password_from
from xidstream.pipeline.postgres.stream_options import PG12, PG14, PG17, quote_literal

TEXT_FORMATS: Final = {
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "timezone": "UTC",
    "bytea_output": "hex",
}
"""Fact 32: what the decoder's text formats need, beside the encoding."""

_PINNED: Final = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "search_path": "pg_catalog",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "row_security": "off",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
    "client_min_messages": "warning",
    "exit_on_error": "off",
    "synchronous_commit": "local",
}
_PINNED_SINCE: Final = {
    "tcp_user_timeout": (PG12, "0"),
    "idle_session_timeout": (PG14, "0"),
    "transaction_timeout": (PG17, "0"),
}
LEAST_WAL_SENDER_TIMEOUT_MS: Final = 10_000
"""From START_REPLICATION to the first status a busy machine may take seconds."""
SHORT_WAL_SENDER_TIMEOUT: Final = f"""
    SELECT count(*)::text FROM pg_catalog.pg_settings
    WHERE name = 'wal_sender_timeout' AND source IN ('user', 'database', 'database user')
        AND setting::int BETWEEN 1 AND {LEAST_WAL_SENDER_TIMEOUT_MS - 1}
"""


def pinned(server_version: int) -> dict[str, str]:
    """The settings that all sessions have."""
    newer = {name: value for name, (since, value) in _PINNED_SINCE.items() if server_version >= since}
    return {**TEXT_FORMATS, **_PINNED, **newer}


def set_command(settings: Mapping[str, str]) -> str:
    """The settings as one command."""
    return "; ".join(f"SET {name} = {quote_literal(value)}" for name, value in settings.items())


def connect(dsn: Dsn, **options: str) -> psycopg.Connection[Any]:
    """An autocommit connection that has not set anything yet. The password command is called for it.

    Raises ConnectionLost, LoginRefused, PreconditionMissing and PasswordCommandFailed, never with a secret."""
    login = Login.of(dsn)
    conninfo = complete(login.dsn, **options)
    if login.password_command:
        conninfo = complete(conninfo, password=password_from(login.password_command))
    try:
        return psycopg.connect(conninfo, autocommit=True)
    except psycopg.Error as error:
        raise from_connect_error(error, conninfo) from None


def open_session(dsn: Dsn, doing: str, settings: Mapping[str, str] | None = None) -> psycopg.Connection[Any]:
    """``connect``, with the settings of all sessions, and ``settings`` over them."""
    # Without UTF8 the names of an SQL_ASCII database come as bytes.
    connection = connect(dsn, client_encoding="UTF8")
    try:
        connection.execute(
            set_command({**pinned(connection.info.server_version), **(settings or {})}).encode()
        )
    except psycopg.Error as error:
        connection.close()
        raise from_error(error, doing) from None
    return connection
