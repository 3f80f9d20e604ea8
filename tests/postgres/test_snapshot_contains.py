"""What a snapshot contains, against a real stream: its rows and the transactions that it lacks make the table.

Writers insert, update and delete rows of their own, with savepoints, rollbacks, prepared and asynchronous transactions,
while snapshots are taken. Every snapshot, continued by the stream, must give the table as it is at the end, and every
earlier one the rows of each later one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from tests.pgoutput.messages import Delete, Insert, Update
from tests.postgres_fixtures import Database
from tests.slot_changes import Transaction, make_slot, slot_changes, texts
from tests.waiting import wait_until
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

pytestmark = pytest.mark.postgres

N_WRITERS, N_TRANSACTIONS, N_SNAPSHOTS = 4, 120, 12

State = dict[str, str]


def statement(chance: random.Random, first: int) -> str:
    """One change of the rows from ``first`` to before ``first + 50``, which no other writer touches."""
    row = first + chance.randrange(50)
    free = f"NOT EXISTS (SELECT FROM t WHERE id = {row + 25})"
    return chance.choice(
        [
            f"INSERT INTO t VALUES ({row}, {chance.randrange(1000)}) ON CONFLICT (id) DO UPDATE SET v = excluded.v",
            f"UPDATE t SET v = v + 1 WHERE id = {row}",
            f"UPDATE t SET id = id + 25, v = 7 WHERE id = {row} AND {row} < {first + 25} AND {free}",
            f"DELETE FROM t WHERE id = {row}",
        ]
    )


def write(database: Database, seed: str, number: int, stop: threading.Event) -> None:
    chance, first = random.Random(f"{seed}/{number}"), number * 50
    with database.connect() as connection:
        prepared: str | None = None
        for i in range(N_TRANSACTIONS):
            if stop.is_set():
                break
            connection.execute("BEGIN")
            connection.execute(f"SET LOCAL synchronous_commit = {chance.choice(['on', 'off'])}".encode())
            for k in range(chance.randrange(1, 6)):
                in_savepoint = chance.random() < 0.4
                if in_savepoint:
                    connection.execute(f"SAVEPOINT s{k}".encode())
                # The rows of a prepared transaction are locked until its end.
                connection.execute(statement(chance, first).encode())
                if in_savepoint and chance.random() < 0.5:
                    connection.execute(f"ROLLBACK TO s{k}".encode())
            if chance.random() < 0.2:
                prepared = f"{seed} {number} {i}"
                connection.execute(f"PREPARE TRANSACTION '{prepared}'".encode())
                stop.wait(chance.random() / 20)
                end = chance.choice(["COMMIT", "COMMIT", "ROLLBACK"])
                connection.execute(f"{end} PREPARED '{prepared}'".encode())
            else:
                connection.execute(b"COMMIT" if chance.random() < 0.8 else b"ROLLBACK")


def advanced(state: State, transactions: Iterable[Transaction]) -> State:
    state = dict(state)
    for transaction in transactions:
        for change in transaction.changes:
            if isinstance(change, Update) and change.key is not None:
                state.pop(str(texts(change.key)[0]), None)
            if isinstance(change, (Insert, Update)):
                key, value = texts(change.new)
                state[str(key)] = str(value)
            elif isinstance(change, Delete):
                assert change.key is not None
                state.pop(str(texts(change.key)[0]), None)
    return state


def test_a_snapshot_and_the_transactions_that_it_lacks_make_the_table(database: Database) -> None:
    seed = f"{random.randrange(10**6)}"
    print(f"seed {seed}")
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    make_slot(database)
    database.execute("INSERT INTO t SELECT i, 0 FROM generate_series(0, 199, 3) i")
    (source,) = survey(database.connection, ["p"])
    holder, stop = TableHolder(database.dsn(), ["p"]), threading.Event()
    errors: list[BaseException] = []

    def writer(number: int) -> None:
        try:
            write(database, seed, number, stop)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(N_WRITERS)]
    snapshots: list[tuple[SnapshotBounds, State]] = []
    chance = random.Random(seed)
    for thread in threads:
        thread.start()

    def take() -> None:
        held = holder.hold(source, wait_for_writers=False)
        snapshots.append((held.bounds, state_in(database, held.snapshot_name)))

    try:
        for _ in range(N_SNAPSHOTS):
            stop.wait(chance.random() / 20)
            if chance.random() < 0.7:
                database.execute("CHECKPOINT")
            take()
        for thread in threads:
            thread.join(120)
        # Where a transaction was open since before each checkpoint so far, none told what a snapshot contains.
        database.execute("CHECKPOINT")
        take()
    finally:
        for thread in threads:
            thread.join(120)
        stop.set()
        holder.close()
    assert not errors
    wait_until(lambda: not any(thread.is_alive() for thread in threads))

    stream = slot_changes(database).transactions
    end = {str(key): str(value) for key, value in database.execute("SELECT id, v FROM t")}
    lacking = [
        [each for each in stream if not bounds.contains(each.xid, each.commit_lsn)] for bounds, _ in snapshots
    ]
    for (_, state), missing in zip(snapshots, lacking, strict=True):
        assert advanced(state, missing) == end
    for i, (bounds, state) in enumerate(snapshots):
        for before, earlier in zip(lacking[:i], snapshots[:i], strict=True):
            between = [each for each in before if bounds.contains(each.xid, each.commit_lsn)]
            assert advanced(earlier[1], between) == state
    bounded = [bounds for bounds, _ in snapshots if bounds.contained_upto >= stream[0].commit_lsn]
    assert bounded, "no checkpoint told what a snapshot contains"
    assert any(bounds.xip for bounds, _ in snapshots), "snapshots were taken while nobody wrote"


def state_in(database: Database, snapshot_name: str) -> State:
    with database.connect() as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        reader.execute(f"SET TRANSACTION SNAPSHOT '{snapshot_name}'".encode())
        rows: list[tuple[Any, ...]] = reader.execute("SELECT id, v FROM t").fetchall()
    return {str(key): str(value) for key, value in rows}
