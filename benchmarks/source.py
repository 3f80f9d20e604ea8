"""The server that is read: one table of seven mixed columns, with rows in transactions of a chosen size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.pg import Lsn

SETTINGS = {
    # The disk is not what is measured, and nothing here needs to survive a power cut.
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "max_wal_size": "32GB",
    "shared_buffers": "512MB",
    "max_replication_slots": "64",
    "max_wal_senders": "64",
    "max_connections": "100",
}
COLUMNS = (
    "id bigint primary key, k int, note text, amount numeric(12,2), at timestamptz, score float8, flag bool"
)
ROWS = """select i, (i % 1000)::int, 'note number ' || i, i / 100.0, timestamptz '2024-01-01' + i * interval '1 second',
                 i * 0.5, i % 2 = 0 from generate_series({}::bigint, {}::bigint) i"""
PUBLICATION = "bench"
_HBA = (
    "local all all trust",
    "local replication all trust",
    "host all all 127.0.0.1/32 trust",  # Debezium speaks TCP alone
    "host replication all 127.0.0.1/32 trust",
)


class Source:
    """A fresh database of one server. ``connection`` is its writer.

    Readers use ``dsn``, over TCP, as in production; a walsender sends rows one by one, and TCP joins them on the way.
    ``socket_dsn`` uses the Unix socket.
    """

    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self.server = server
        self.name = name
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"create database {name}".encode())
        self.dsn = server.conninfo(name, over_tcp=True)
        self.socket_dsn = server.conninfo(name)
        self.connection: psycopg.Connection[Any] = psycopg.connect(self.dsn, autocommit=True)
        self.execute(f"create table t ({COLUMNS})")
        self.execute(f"create publication {PUBLICATION} for table t")
        self._next_row = 1

    def close(self) -> None:
        """Drop the slots and the database. A slot that stays would hold back the write-ahead log."""
        self.connection.close()
        with psycopg.connect(self.server.conninfo(), autocommit=True) as admin:
            for (slot,) in admin.execute(
                "select slot_name from pg_replication_slots where database = %s", [self.name]
            ).fetchall():
                admin.execute("select pg_drop_replication_slot(%s)", [slot])
            admin.execute(f"drop database {self.name} with (force)".encode())
            admin.execute("checkpoint")

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description is not None else []

    def slots(self, n: int, prefix: str = "slot") -> list[str]:
        """Make slots that begin here, one after the other, before any of the data."""
        names = [f"{self.name}_{prefix}_{i}" for i in range(n)]
        for name in names:
            self.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", name)
        return names

    def insert(self, n_rows: int, connection: psycopg.Connection[Any] | None = None) -> None:
        """Insert rows, in the open transaction of ``connection`` (default: the writer) or in one of its own."""
        first, self._next_row = self._next_row, self._next_row + n_rows
        statement = "insert into t " + ROWS.format(first, self._next_row - 1)
        (connection or self.connection).execute(statement.encode())

    def insert_in_transactions(self, n_rows: int, transaction_rows: int) -> None:
        first, self._next_row = self._next_row, self._next_row + n_rows
        rows = ROWS.format("at_row", f"at_row + {transaction_rows - 1}")
        self.execute(
            f"do $$ declare at_row bigint; begin for at_row in select generate_series({first}, {self._next_row - 1}, "
            f"{transaction_rows}) loop insert into t {rows}; commit; end loop; end $$"
        )

    def end_lsn(self) -> Lsn:
        """The end of all that was written. A reader can reach it, because it is flushed."""
        self.execute("select pg_switch_wal()")
        return Lsn.parse(self.execute("select pg_current_wal_flush_lsn()::text")[0][0])


@contextmanager
def server(version: int = 18) -> Iterator[EmbeddedPostgres]:
    with (
        tempfile.TemporaryDirectory(prefix="xs-bench-", ignore_cleanup_errors=True) as folder,
        EmbeddedPostgres(
            Path(folder) / "data", version=version, settings=SETTINGS, tcp=True, hba=_HBA
        ) as running,
    ):
        yield running
