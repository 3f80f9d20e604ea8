"""What tests of scenarios stand on: a streamed slot and its twin over one database, each through a LocalPipeline.

Used by ``from tests.differential.scenario import *`` in a test module, with the fixtures of
``tests/postgres_fixtures.py`` in the folder's conftest. ``scenario`` runs a test at each protocol and mode;
``TWO_PHASE`` leaves out those that have no two-phase. By default the server streams *every* change at once
(``debug_logical_replication_streaming``), so that a few rows make the interleavings for which real memory
pressure needs thousands.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.differential.compare import check_confirmations, difference
from tests.differential.local_pipeline import LocalPipeline, Options, Released, Sink
from tests.differential.runner import IMMEDIATE
from tests.postgres_fixtures import Database
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, describe_slot, stream_stats

__all__ = ["EXTREMES", "MODES", "TWO_PHASE", "Scenario", "Side", "scenario"]

MODES = [(2, "on"), (3, "on"), (4, "on"), (4, "parallel")]


def _modes(*modes: tuple[int, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", modes, indirect=True, ids=lambda m: f"proto{m[0]}-{m[1]}")


TWO_PHASE = _modes(*MODES[1:])
EXTREMES = _modes(MODES[0], MODES[-1])
"""For a fact of the protocol that no mode changes."""


class Side:
    """One slot with its sink, storage, and the pipeline that reads it now, if any. ``wire``: messages as they came."""

    def __init__(
        self,
        database: Database,
        slot: str,
        options: Options,
        folder: Path,
        dsn: str,
        publications: tuple[str, ...],
    ) -> None:
        self.database = database
        self.slot = slot
        self.options = options
        self.folder = folder
        self.sink = Sink()
        self.wire: list[bytes] = []
        self._dsn = dsn
        self._publications = publications
        self._pipeline: LocalPipeline | None = None
        self._epoch = 0

    @property
    def pipeline(self) -> LocalPipeline:
        if self._pipeline is None:
            self._epoch += 1
            # Opening waits a while for WAL that is not flushed, and an open transaction's may never be.
            flush(self.database)
            self._pipeline = LocalPipeline(
                self._dsn,
                self.slot,
                self._publications,
                self.folder,
                self.sink,
                self.options,
                epoch=f"{self._epoch:04d}",
                peek=self.wire.append,
            )
        return self._pipeline

    def crash(self) -> None:
        """The pipeline is gone, with all it had in memory; the next read starts another from storage."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
            self._pipeline = None

    def confirmed_flush(self) -> Lsn:
        lsn = describe_slot(self.database.dsn(), self.slot).confirmed_flush
        assert lsn is not None
        return lsn

    def kinds(self) -> str:
        """The type bytes of all messages that came, in order."""
        return "".join(chr(data[25]) for data in self.wire)

    def bodies(self, kind: str) -> list[bytes]:
        """What follows the type byte, of each message of a type."""
        return [data[26:] for data in self.wire if data[25] == ord(kind)]


def flush(database: Database) -> Lsn:
    """Flush all WAL, open transactions' too, by a commit that nobody publishes; its end."""
    database.execute("SELECT pg_create_restore_point('flush'), txid_current()")
    return Lsn.parse(database.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])


class Scenario:
    """A database whose changes go to a streamed slot and to a twin without streaming."""

    def __init__(self, database: Database, folder: Path, proto_version: int, streaming: str) -> None:
        self.database = database
        self.proto_version = proto_version
        self.mode = streaming
        self._folder = folder
        self._sessions: list[psycopg.Connection[Any]] = []
        self._sides: list[Side] = []
        self.run("SET synchronous_commit = on")

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Each by itself, on a connection with autocommit; the rows of the last one."""
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            rows = self.database.execute(statement)
        return rows

    def session(self, *statements: str) -> psycopg.Connection[Any]:
        """A connection of its own, in a transaction, that has run ``statements``."""
        connection = self.database.connect()
        self._sessions.append(connection)
        connection.execute("SET synchronous_commit = on")
        connection.execute("BEGIN")
        for statement in statements:
            connection.execute(statement.encode())
        return connection

    def open(
        self,
        *,
        publication: str = "FOR ALL TABLES",
        two_phase: bool = False,
        immediate: bool = True,
        twin_two_phase: bool | None = None,
        create_two_phase: bool = False,
        **options: Any,
    ) -> None:
        """Create publication ``p`` (unless it is there) and the two slots: changes count from here on."""
        if not self.run("SELECT 1 FROM pg_publication WHERE pubname = 'p'"):
            self.run(f"CREATE PUBLICATION p {publication}")
        asked = Options(streaming=self.mode, proto_version=self.proto_version, two_phase=two_phase, **options)
        other = two_phase if twin_two_phase is None else twin_two_phase
        twin = Options(streaming="off", proto_version=3 if other else 1, two_phase=other, **options)
        plain = self.database.dsn()
        eager = self.database.dsn(options=IMMEDIATE) if immediate else plain
        for name, side_options, dsn in (("s", asked, eager), ("t", twin, plain)):
            slot = f"{name}_{self.database.name}"
            create_slot(plain, slot, two_phase=create_two_phase)
            self._sides.append(Side(self.database, slot, side_options, self._folder / name, dsn, ("p",)))

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(self._sides)

    @property
    def streamed(self) -> Side:
        return self._sides[0]

    @property
    def twin(self) -> Side:
        return self._sides[1]

    @property
    def sink(self) -> Sink:
        return self.streamed.sink

    @property
    def transactions(self) -> list[Released]:
        return self.sink.transactions

    def flush(self) -> Lsn:
        return flush(self.database)

    def read(self) -> Sink:
        """The streamed side reads all that is there, open transactions too, releases and confirms it."""
        self.streamed.pipeline.read_until(self.flush())
        return self.sink

    def ids(self, table: str = "public.t", column: str = "id") -> list[Any]:
        """One column of all released rows of a table, in order."""
        return [row[column] for row in self.sink.rows(table)]

    def changes(self, table: str | None = None) -> list[tuple[Any, ...]]:
        """(change type, the table's own columns …) of all released rows, in order."""
        out = []
        for row in self.sink.rows(table):
            own = [v for k, v in row.items() if not k.startswith("_") and k not in ("table", "relid", "keys")]
            out.append((row["_change_type"], *own))
        return out

    def agree(
        self,
        *,
        dropped: frozenset[bytes] = frozenset(),
        twin: bool = True,
        parked: frozenset[str] = frozenset(),
    ) -> None:
        """Read both sides to the end: they hold the same, and the server did stream to one only.

        Without ``twin`` only the streamed side is read, where the test has another oracle.
        """
        target = self.flush()
        for side in self._sides if twin else self._sides[:1]:
            side.pipeline.read_until(target)
            assert check_confirmations(side.sink, up_to=target) is None
            side.stop()
        stats = stream_stats(self.database.dsn(), self.streamed.slot)
        assert stats is not None and stats.stream_txns > 0, "nothing was streamed"
        if twin:
            found = difference(self.sink, self.twin.sink, dropped=dropped, parked=parked)
            assert found is None, found
            twin_stats = stream_stats(self.database.dsn(), self.twin.slot)
            assert twin_stats is None or twin_stats.stream_txns == 0
        assert self.left_in_storage() == []

    def tables(self, *names: str) -> None:
        """Tables of (id bigint PRIMARY KEY, v text), and the slots."""
        for name in names:
            self.run(f"CREATE TABLE {name} (id bigint PRIMARY KEY, v text)")
        self.open()

    def left_in_storage(self) -> list[str]:
        return [str(p) for p in (self._folder / "s").rglob("epochs/*/*/*")]

    def close(self) -> None:
        for side in self._sides:
            side.crash()
        for connection in self._sessions:
            connection.close()


@pytest.fixture(params=MODES, ids=lambda m: f"proto{m[0]}-{m[1]}")
def scenario(request: pytest.FixtureRequest, database: Database, tmp_path: Path) -> Iterator[Scenario]:
    made = Scenario(database, tmp_path, *request.param)
    yield made
    made.close()
