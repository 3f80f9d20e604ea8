"""A table's snapshot, taken and held on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.postgres_fixtures import Database
from tests.slot_changes import make_slot, slot_changes
from tests.waiting import wait_until
from xidstream.pipeline.errors import SnapshotInterrupted, SnapshotLost
from xidstream.pipeline.slot.snapshot_sources import survey
from xidstream.pipeline.slot.table_holder import Held, TableHolder
from xidstream.pipeline.snapshot.tables import PublishedSource

pytestmark = pytest.mark.postgres


@pytest.fixture
def holder(database: Database) -> Iterator[TableHolder]:
    database.execute("SET synchronous_commit = on")
    holder = TableHolder(database.dsn(), ["p"])
    yield holder
    holder.close()


def source_of(database: Database, name: str) -> PublishedSource:
    (found,) = (source for source in survey(database.connection, ["p"]) if source.name == name)
    return found


def rows_in(database: Database, held: Held, columns: str = "*") -> list[tuple[Any, ...]]:
    """What a reader sees that imports the snapshot, over all leaves."""
    found: list[tuple[Any, ...]] = []
    with database.connect() as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        reader.execute(f"SET TRANSACTION SNAPSHOT '{held.snapshot_name}'".encode())
        for leaf in held.source.leaves:
            query = f'SELECT {columns} FROM ONLY "{leaf.schema}"."{leaf.table}"'
            found += reader.execute(query.encode()).fetchall()
    return sorted(found)


def test_a_reader_sees_what_was_there_and_nothing_that_came_later(
    database: Database, holder: TableHolder
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 1000) i")
    held = holder.hold(source_of(database, "public.t"), wait_for_writers=False)
    database.execute("INSERT INTO t VALUES (2000, 'later')")
    assert len(rows_in(database, held)) == 1000
    assert held.by_range and held.source.leaves[0].n_pages > 0
    assert held.bounds.place < held.bounds.valid_from
    wait_until(lambda: holder.flushed_past(held.bounds.valid_from))
    holder.release(held.source.relation.relid)
    with pytest.raises(psycopg.Error):
        rows_in(database, held)


def test_the_lost_row_of_a_transaction_that_wrote_before_the_table_was_published(
    database: Database, holder: TableHolder
) -> None:
    """With the wait the snapshot has both rows. Without it the first one is in neither the snapshot nor the stream."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE TABLE u (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE u")
    make_slot(database)
    writer = database.connect()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO t VALUES (1)")
    database.execute("ALTER PUBLICATION p ADD TABLE t")
    source = source_of(database, "public.t")

    hasty = holder.hold(source, wait_for_writers=False)
    assert rows_in(database, hasty) == []

    told: list[str] = []
    done: list[Held] = []
    patient = TableHolder(database.dsn(), ["p"])
    waiting = threading.Thread(
        target=lambda: done.append(
            patient.hold(source, wait_for_writers=True, on_wait=lambda found: told.extend(map(str, found)))
        )
    )
    waiting.start()
    wait_until(lambda: bool(told))
    assert not done and f"session {writer.info.backend_pid}" in told[0]
    assert list(patient.waiting_for()) == [source.relation.relid]
    writer.execute("INSERT INTO t VALUES (2)")
    writer.execute("COMMIT")
    waiting.join(60)
    (held,) = done
    assert patient.waiting_for() == {}
    assert rows_in(database, held) == [(1,), (2,)]
    patient.close()

    (stream,) = slot_changes(database).transactions
    assert stream.inserted == ["2"], "the row before ALTER PUBLICATION is not in the stream"
    assert held.bounds.contains(stream.xid, stream.commit_lsn), "so the stream's part of it is left out"
    assert not hasty.bounds.contains(stream.xid, stream.commit_lsn)
    writer.close()


def test_a_table_whose_holder_ended_before_the_last_row_was_read_is_not_confirmed(
    database: Database, holder: TableHolder
) -> None:
    """Its lock may have been gone meanwhile, and a crash of the server may have taken what the snapshot saw."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    source = source_of(database, "public.t")
    held = holder.hold(source, wait_for_writers=False)
    holder.confirm(source.relation.relid, held.bounds.valid_from)
    database.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND state = 'idle in transaction'"
    )
    with pytest.raises(SnapshotLost):
        holder.confirm(source.relation.relid, held.bounds.valid_from)
    with pytest.raises(SnapshotLost):
        TableHolder(database.dsn(), ["p"]).confirm(source.relation.relid, held.bounds.valid_from)


def test_a_partition_that_is_attached_while_the_snapshot_waits_is_not_left_out(
    database: Database, holder: TableHolder
) -> None:
    for statement in (
        "CREATE TABLE t (id int, day int) PARTITION BY RANGE (day)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root = true)",
    ):
        database.execute(statement)
    source = source_of(database, "public.t")
    failures: list[BaseException] = []

    def hold() -> None:
        try:
            holder.hold(source, wait_for_writers=True)
        except BaseException as error:
            failures.append(error)

    with database.connect() as writer:
        writer.execute(b"BEGIN")
        writer.execute(b"INSERT INTO t VALUES (1, 1)")
        waiting = threading.Thread(target=hold)
        waiting.start()
        wait_until(lambda: bool(holder.waiting_for()))
        # Our lock does not stop ATTACH. Its rows are in the snapshot, and in no leaf that was found before.
        database.execute("CREATE TABLE t2 (id int, day int)")
        database.execute("INSERT INTO t2 VALUES (2, 12)")
        database.execute("ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)")
        writer.execute(b"COMMIT")
    waiting.join(60)
    (failure,) = failures
    assert isinstance(failure, SnapshotInterrupted)
    held = holder.hold(source_of(database, "public.t"), wait_for_writers=True)
    assert rows_in(database, held) == [(1, 1), (2, 12)]


def test_a_table_that_is_released_while_its_snapshot_waits_is_not_held_later(
    database: Database, holder: TableHolder
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    source = source_of(database, "public.t")
    failures: list[BaseException] = []

    def hold() -> None:
        try:
            holder.hold(source, wait_for_writers=True)
        except BaseException as error:
            failures.append(error)

    with database.connect() as writer:
        writer.execute(b"BEGIN")
        writer.execute(b"INSERT INTO t VALUES (1)")
        waiting = threading.Thread(target=hold)
        waiting.start()
        wait_until(lambda: bool(holder.waiting_for()))
        holder.release(source.relation.relid)
        waiting.join(60)
        assert [type(failure) for failure in failures] == [SnapshotLost]
        writer.execute(b"COMMIT")
    database.execute("SET lock_timeout = '1s'")
    database.execute("TRUNCATE t")
