"""Who writes while the snapshots are taken: pgbench, short hostile transactions, truncates, and one giant transaction.

Each writer changes rows of its own (ids are dealt by their last digit), so nobody waits for another's lock; and the
giant has ids that no other touches, because it holds its locks to the end.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.postgres_fixtures import Database
from tests.snapshots.tables import TABLES

N_WRITERS = 3
_PAUSE_S = 0.03
"""Faster writers would be ahead of the run on a machine of two cores, and every round would wait for it at its end."""
_GIANT_FROM = 1_000_000_000
_PIECES = 40

_STATEMENTS = (
    ("pgbench_accounts", "UPDATE pgbench_accounts SET filler = 'f{n}' WHERE aid = {mine}"),
    (
        "pgbench_accounts",
        (
            "UPDATE pgbench_accounts SET aid = {new} WHERE aid = {mine}"
            " AND NOT EXISTS (SELECT FROM pgbench_accounts WHERE aid = {new})"
        ),
    ),
    ("pgbench_accounts", "DELETE FROM pgbench_accounts WHERE aid = {mine}"),
    ("ledger", "INSERT INTO ledger VALUES ({mine}, {n} / 4.0, 'new')"),
    ("ledger", "UPDATE ledger SET amount = amount + 1 WHERE ctid = {some_ledger}"),
    ("ledger", "DELETE FROM ledger WHERE ctid = {some_ledger}"),
    ("documents", "UPDATE documents SET title = title || '.' WHERE id = {mine}"),
    ("documents", "UPDATE documents SET body = repeat('b', 3000 + {n} % 500) WHERE id = {mine}"),
    (
        "documents",
        (
            "UPDATE documents SET id = {new}, title = 'moved' WHERE id = {mine}"
            " AND NOT EXISTS (SELECT FROM documents WHERE id = {new})"
        ),
    ),
    (
        "documents",
        (
            "UPDATE documents SET id = {mine}, title = 'back' WHERE id = {new}"
            " AND NOT EXISTS (SELECT FROM documents WHERE id = {mine})"
        ),
    ),
    ("documents", "INSERT INTO documents VALUES ({new}, 'new', repeat('n', 9000)) ON CONFLICT DO NOTHING"),
    ("papers", "UPDATE papers SET title = title || '.' WHERE id = {mine}"),
    ("papers", "UPDATE papers SET body = repeat('p', 4000 + {n} % 100) WHERE id = {mine}"),
    ("orders", "UPDATE orders SET total = {n} WHERE id = {mine}"),
    ("orders", "UPDATE orders SET day = day + 1500 WHERE id = {mine} AND day < '2024-01-01'"),
    ("orders", "INSERT INTO orders VALUES ({new}, '2026-01-01', 1.5, 'new') ON CONFLICT DO NOTHING"),
    ("orders", "DELETE FROM orders WHERE id = {mine}"),
    ("events", "UPDATE events SET flag = NOT flag, until = '-infinity' WHERE id = {mine}"),
    ("by_index", "UPDATE by_index SET note = 'changed' WHERE id = {mine}"),
    (
        "by_index",
        "UPDATE by_index SET k = {new} WHERE id = {mine} AND NOT EXISTS (SELECT FROM by_index WHERE k = {new})",
    ),
    ('Odd "N" äme', 'UPDATE "Odd ""N"" äme" SET value = value + 1 WHERE "A col" = {mine}'),
    ("queue", "INSERT INTO queue VALUES ({new}, 'again') ON CONFLICT (id) DO UPDATE SET v = excluded.v"),
    ("queue", "DELETE FROM queue WHERE id = {mine}"),
    ("pile", "INSERT INTO pile SELECT {n} % 10, 'more' FROM generate_series(1, 3)"),
    ("empty", "INSERT INTO empty VALUES ({new}) ON CONFLICT DO NOTHING"),
)
_ROWS = {table.name: table for table in TABLES}


class Writers:
    """``start`` and ``stop``; ``giant`` is a context with the giant transaction open."""

    def __init__(self, database: Database, n: int, seed: int, folder: Path) -> None:
        self._database = database
        self._n = n
        self._seed = seed
        self._folder = folder
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(N_WRITERS)]
        self._threads.append(threading.Thread(target=self._truncate, daemon=True))
        self._pgbench: subprocess.Popen[bytes] | None = None
        self.n_transactions = 0

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        script = self._folder / "tpcb.sql"
        # pgbench's own script takes the accounts' number from a table of fixed size.
        script.write_text(
            f"\\set aid random(1, {max(1, self._n // 2)})\n\\set tid random(1, 10)\n\\set delta random(-5000, 5000)\n"
            "BEGIN;\nUPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;\n"
            "SELECT abalance FROM pgbench_accounts WHERE aid = :aid;\n"
            "UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;\n"
            "UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = 1;\n"
            "INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)"
            " VALUES (:tid, 1, :aid, :delta, CURRENT_TIMESTAMP);\n"
            "END;\n"
        )
        command = [str(self._database.server.bin("pgbench")), "-n", "-c", "2", "-R", "30", "-T", "86400"]
        command += ["--random-seed", str(self._seed), "-f", str(script), self._database.dsn()]
        self._pgbench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """Raises what a writer raised."""
        self._stop.set()
        if self._pgbench is not None:
            assert self._pgbench.poll() is None, "pgbench ended by itself"
            self._pgbench.terminate()
            self._pgbench.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self._failures:
            raise self._failures[0]

    @contextlib.contextmanager
    def giant(self) -> Iterator[psycopg.Connection[Any]]:
        """An open transaction that goes on to write, with savepoints that are rolled back; it commits at the end."""
        n_piece = max(50, self._n // 10 // _PIECES)
        with self._database.connect() as connection:
            connection.execute(b"BEGIN")
            ended = threading.Event()
            pieces = threading.Thread(
                target=self._write_pieces, args=(connection, n_piece, ended), daemon=True
            )
            pieces.start()
            try:
                yield connection
            finally:
                ended.set()
                pieces.join()
                is_broken = connection.info.transaction_status is psycopg.pq.TransactionStatus.INERROR
                connection.execute(b"ROLLBACK" if is_broken else b"COMMIT")

    def _write_pieces(
        self, connection: psycopg.Connection[Any], n_piece: int, ended: threading.Event
    ) -> None:
        try:
            for piece in range(_PIECES):
                first = _GIANT_FROM + piece * n_piece
                ids = f"generate_series({first}, {first + n_piece - 1}) i"
                kept = piece % 4 != 3
                connection.execute(f"SAVEPOINT p{piece}".encode())
                for statement in (
                    f"INSERT INTO pgbench_accounts SELECT i, 1, 7, 'giant' FROM {ids}",
                    f"INSERT INTO ledger SELECT i % 100, i % 9, 'giant' FROM {ids}",
                    f"INSERT INTO orders SELECT i, date '2023-12-01' + i % 60, 1, 'giant' FROM {ids}",
                    f"UPDATE events SET kind = 'giant' WHERE id % 10 = 9 AND id % {_PIECES} = {piece}",
                    f"UPDATE documents SET title = 'giant' WHERE id % 10 = 9 AND id % {_PIECES} = {piece}",
                ):
                    connection.execute(statement.encode())
                connection.execute(f"{'RELEASE' if kept else 'ROLLBACK TO'} p{piece}".encode())
                if ended.wait(0.5):
                    break
        except BaseException as error:
            self._failures.append(error)

    # -- short transactions ----------------------------------------------------------------------------

    def _run(self, number: int) -> None:
        dice = random.Random(f"{self._seed}/{number}")
        try:
            with self._database.connect() as session:
                session.execute(b"SET lock_timeout = '20s'")
                while not self._stop.wait(_PAUSE_S):
                    self._transaction(session, dice, number)
                    self.n_transactions += 1
        except BaseException as error:
            self._failures.append(error)

    def _transaction(self, session: psycopg.Connection[Any], dice: random.Random, number: int) -> None:
        session.execute(b"BEGIN")
        session.execute(f"SET LOCAL synchronous_commit = {dice.choice(['on', 'off'])}".encode())
        for _ in range(dice.randint(1, 5)):
            inside = dice.random() < 0.3
            if inside:
                session.execute(b"SAVEPOINT a")
            session.execute(self._statement(dice, number))
            if inside and dice.random() < 0.5:
                session.execute(b"ROLLBACK TO a")
        if dice.random() < 0.1:
            gid = f"{self._seed} {number} {self.n_transactions}"
            session.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
            self._stop.wait(dice.random() / 3)
            end = dice.choice(["COMMIT", "COMMIT", "ROLLBACK"])
            session.execute(sql.SQL(end + " PREPARED {}").format(sql.Literal(gid)))
        else:
            session.execute(b"ROLLBACK" if dice.random() < 0.12 else b"COMMIT")

    def _statement(self, dice: random.Random, number: int) -> sql.Composed:
        table, statement = dice.choice(_STATEMENTS)
        # The last digit deals the rows: 9 is the giant's.
        n_tens = max(2, min(_ROWS[table].n_rows(self._n), 30_000) // 10)
        step = max(1, _ROWS[table].n_rows(self._n) // 10 // n_tens)
        place = dice.randrange(n_tens) * step
        values: dict[str, sql.Composable] = {
            "mine": sql.Literal(10 * place + dice.choice((0, 3, 6)) + number),
            "new": sql.Literal(500_000_000 + 10 * dice.randrange(2000) + number),
            "n": sql.Literal(dice.randrange(1_000_000)),
            "some_ledger": sql.SQL(
                f"(SELECT ctid FROM ledger WHERE account % 3 = {number} LIMIT 1 FOR UPDATE SKIP LOCKED)"
            ),
        }
        return sql.SQL(statement).format(**values)

    def _truncate(self) -> None:
        """Tables that are small enough to lose all rows; a table that is being read is locked, and left alone."""
        dice = random.Random(f"{self._seed}/truncate")
        try:
            with self._database.connect() as session:
                session.execute(b"SET lock_timeout = '100ms'")
                while not self._stop.wait(0.5 + 2 * dice.random()):
                    names = dice.choice(("queue", "pile", "queue, pile"))
                    with contextlib.suppress(psycopg.errors.LockNotAvailable):
                        session.execute(f"TRUNCATE {names}".encode())
        except BaseException as error:
            self._failures.append(error)
