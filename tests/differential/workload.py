"""A hostile workload, reproduced exactly by its seed: one thread drives several sessions step by step.

A step is one statement (or a few) of one session. A lock that another session holds is waited for until
``lock_timeout`` and then counts as a failed statement, as does any other error: the session goes back to its last
savepoint, or aborts. No other session moves meanwhile, so whether a lock is granted is decided by the
seed, not by time (autovacuum must be off). Sizes and choices come from one ``random.Random``.

The workload knows what the comparison needs and the stream cannot tell: ``dropped_messages`` are the contents
of transactional messages of rolled-back subtransactions, which a stream delivers all the same (fact 10).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from tests.differential.source_schema import TYPES, type_columns
from tests.differential.statements import GIDS, INSERTS, SIZES, SPECIALS, UPDATES

N_SESSIONS = 4
_TABLE = re.compile(r"\b(?:s|s2|s3|f|r|hidden)\.(\w+)")
_CHANGES_CATALOG = re.compile(r"\b(ALTER|DROP|CREATE|TRUNCATE)\b")


class Session:
    """A connection, its transaction's savepoints, and the messages written under each of them."""

    def __init__(self, number: int, connection: psycopg.Connection[Any]) -> None:
        self.number = number
        self.connection = connection
        self.next_id = number * 1_000_000_000
        self.in_transaction = False
        self.levels: list[list[bytes]] = []  # one for the top level, one for each savepoint
        self.names = 0
        self.n_rows = 0
        self.has_origin = False
        self.began = 0
        self.altered: set[str] = set()
        self.tainted: set[str] = set()
        self.altered_in_subtransaction = False

    def __repr__(self) -> str:
        return f"<session {self.number}, {len(self.levels)} levels>"


class Workload:
    """``steps()`` does one step each time it is advanced, and leaves nothing open at its end."""

    def __init__(
        self,
        seed: int,
        dsn: str,
        *,
        n_steps: int,
        two_phase: bool,
        largest: int = 20_000,
        trace: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._dsn = dsn
        self._n_steps = n_steps
        self._prefix = f"{seed}"
        self._largest = largest
        self._trace = trace
        self.two_phase = two_phase
        self.dropped_messages: set[bytes] = set()
        self.prepared: list[str] = []
        self.history: list[str] = []
        self.n_failed = 0
        self.n_steps_done = 0
        self.ending = False
        """Set it to have ``steps`` end early, with nothing left open."""
        self._altered_at: dict[str, int] = {}
        self._altered_by_gid: dict[str, set[str]] = {}
        self._must_commit: set[str] = set()
        self._messages = 0
        self._columns = 0
        self._sessions: list[Session] = []

    # -- the drive -------------------------------------------------------------------------------------

    def steps(self) -> Iterator[None]:
        connections = [psycopg.connect(self._dsn, autocommit=True) for _ in range(N_SESSIONS)]
        try:
            for number, connection in enumerate(connections):
                connection.execute(
                    "SET lock_timeout = '15ms'; SET synchronous_commit = off; SET deadlock_timeout = '1h'"
                )
                connection.execute("SET client_min_messages = error; SET max_parallel_workers_per_gather = 0")
                self._sessions.append(Session(number, connection))
            for _ in range(self._n_steps):
                if self.ending:
                    break
                self._step(self._random.choice(self._sessions))
                yield
            for session in self._random.sample(self._sessions, N_SESSIONS):
                if session.in_transaction:
                    self._end(session)
                    yield
            while self.prepared:
                self._end_prepared(self._sessions[0])
                yield
            for session in self._sessions:
                if session.has_origin:
                    self._toggle_origin(session)
        finally:
            for connection in connections:
                connection.close()

    def _step(self, session: Session) -> None:
        r = self._random
        self.n_steps_done += 1
        if not session.in_transaction:
            what = r.random()
            if what < 0.10:
                self._change(session, guarded=False)  # autocommitted
            elif what < 0.13 and session.number == 0:
                self._toggle_origin(session)
            elif what < 0.20 and self.prepared:
                self._end_prepared(session)
            elif what < 0.22:
                self._message(session, transactional=r.random() < 0.5)
            else:
                self._do(session, "BEGIN")
                session.in_transaction = True
                session.began = self.n_steps_done
                session.altered, session.tainted = set(), set()
                session.altered_in_subtransaction = False
                session.levels = [[]]
                session.n_rows = 0
            return
        what = r.random()
        depth = len(session.levels)
        if what < 0.12:
            self._savepoint(session)
        elif what < 0.19 and depth > 1:
            self._roll_back_to(session, r.randrange(1, depth))
        elif what < 0.24 and depth > 1:
            self._release(session, r.randrange(1, depth))
        elif what < 0.32:
            self._end(session)
        elif what < 0.38:
            self._message(session, transactional=r.random() < 0.7)
        elif what < 0.44:
            self._exception_blocks(session)
        else:
            self._change(session, guarded=r.random() < 0.5)

    # -- transactions ----------------------------------------------------------------------------------

    def _savepoint(self, session: Session) -> None:
        session.names += 1
        if self._do(session, f"SAVEPOINT p{len(session.levels)}"):
            session.levels.append([])

    def _roll_back_to(self, session: Session, level: int) -> None:
        """``ROLLBACK TO`` keeps the savepoint itself."""
        session.tainted |= session.altered
        for messages in session.levels[level:]:
            self.dropped_messages.update(messages)
        del session.levels[level + 1 :]
        session.levels[level] = []
        self._do(session, f"ROLLBACK TO p{level}")

    def _release(self, session: Session, level: int) -> None:
        kept = [m for messages in session.levels[level:] for m in messages]
        del session.levels[level:]
        session.levels[-1] += kept
        self._do(session, f"RELEASE p{level}")

    def _end(self, session: Session) -> None:
        what = self._random.random()
        if self.two_phase and what < 0.45 and len(self.prepared) < len(GIDS):
            free = [g for g in GIDS if g not in self.prepared]
            gid = self._random.choice(free)
            # Without it a transaction may have changed nothing: then there is no b, or no P either, on the wire.
            if self._random.random() < 0.7:
                self._do(session, "INSERT INTO hidden.tick VALUES (1)")
            if not session.in_transaction:
                return
            if self._do(session, sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid))):
                self.prepared.append(gid)
                self._altered_by_gid[gid] = session.altered
                if session.altered_in_subtransaction:
                    self._must_commit.add(gid)
            else:
                session.connection.execute("ROLLBACK")
        elif what < 0.85:
            self._do(session, "COMMIT")
            self._committed(session.altered)
        else:
            self._do(session, "ROLLBACK")
        session.in_transaction = False
        session.levels = []

    def _end_prepared(self, session: Session) -> None:
        gid = self.prepared.pop(self._random.randrange(len(self.prepared)))
        word = "COMMIT" if self._random.random() < 0.7 or gid in self._must_commit else "ROLLBACK"
        self._must_commit.discard(gid)
        self._do(session, sql.SQL(word + " PREPARED {}").format(sql.Literal(gid)))
        self._committed(self._altered_by_gid.pop(gid))

    def _committed(self, altered: set[str]) -> None:
        self._altered_at.update(dict.fromkeys(altered, self.n_steps_done))

    def _toggle_origin(self, session: Session) -> None:
        if session.has_origin:
            self._do(session, "SELECT pg_replication_origin_session_reset()")
        else:
            self._do(session, "SELECT pg_replication_origin_session_setup('upstream ' || current_database())")
        session.has_origin = not session.has_origin

    def _message(self, session: Session, *, transactional: bool) -> None:
        self._messages += 1
        content = f"{self._prefix}:{self._messages}"
        padding = "x" * self._random.choice((0, 10, 3000))
        done = self._do(
            session, f"SELECT pg_logical_emit_message({transactional}, 'a prefix', '{content}:{padding}')"
        )
        if done and transactional and session.in_transaction:
            session.levels[-1].append(f"{content}:{padding}".encode())

    def _exception_blocks(self, session: Session) -> None:
        """Subtransactions by PL/pgSQL, every third of them rolled back."""
        n = self._random.choice((1, 5, 40, 150))
        start = self._take_ids(session, 4 * n)
        self._messages += 1
        marker = f"{self._prefix}:doomed:{self._messages}:"
        done = self._do(
            session,
            f"""DO $$ BEGIN FOR i IN 1..{n} LOOP
                INSERT INTO s.plain VALUES ({start} + 2 * i, i, 'kept');
                BEGIN
                  INSERT INTO s.plain VALUES ({start} + 2 * i + 1, i, 'inner');
                  IF i % 50 = 3 THEN PERFORM pg_logical_emit_message(true, 'doomed', '{marker}' || i); END IF;
                  IF i % 3 = 0 THEN RAISE division_by_zero; END IF;
                EXCEPTION WHEN division_by_zero THEN
                  INSERT INTO s.full_ VALUES ({start} + 2 * i, i, 'handler');
                END;
              END LOOP; END $$""",
        )
        doomed = {f"{marker}{i}".encode() for i in range(1, n + 1) if i % 50 == 3}
        gone = {m for m in doomed if int(m.rsplit(b":", 1)[1]) % 3 == 0}
        self.dropped_messages |= gone
        if done and session.in_transaction:
            session.levels[-1] += sorted(doomed - gone)
        elif not done:
            self.dropped_messages |= doomed

    # -- changes ---------------------------------------------------------------------------------------

    def _change(self, session: Session, *, guarded: bool) -> None:
        """One statement; ``guarded`` puts it in a savepoint of its own, so that a failure costs no more."""
        r = self._random
        guarded = guarded and session.in_transaction
        if guarded:
            self._savepoint(session)
            level = len(session.levels) - 1
        makers = (self._insert, self._update, self._delete, self._special, self._ddl)
        (make,) = r.choices(makers, (46, 26, 6, 10, 12))
        before = len(session.levels)
        make(session)
        if guarded and session.in_transaction and len(session.levels) == before > level:
            if r.random() < 0.2:
                self._roll_back_to(session, level)
            elif r.random() < 0.6:
                self._release(session, level)

    def _size(self, session: Session) -> int:
        if self._random.random() < 0.006:
            return self._largest
        return self._random.choice(SIZES)

    def _take_ids(self, session: Session, n: int) -> int:
        start = session.next_id
        session.next_id += max(n, 1)
        return start

    def _insert(self, session: Session) -> None:
        r, n = self._random, self._size(session)
        start = self._take_ids(session, n)
        ids = f"generate_series({start}, {start + n - 1}) i"
        table = r.choice(tuple(INSERTS))
        if table == "types":
            n = min(n, 100)
            values = [r.choice([*literals, "NULL"]) for literals in TYPES.values()]
            typed = ", ".join(f"CAST({v} AS {t})" for v, t in zip(values, TYPES, strict=True))
            columns = ", ".join(type_columns())
            self._do(
                session,
                f"INSERT INTO s.types (id, {columns}) SELECT i, {typed}"
                f" FROM generate_series({start}, {start + n - 1}) i",
            )
        elif table == "copy":
            self._copy(session, start, n)
        elif table == "moved":
            schema = "s2" if self._exists(session, "s2.moved") else "s3"
            self._do(session, f"INSERT INTO {schema}.moved SELECT i, 'moved ' || i FROM {ids}")
        elif table in ("toast", "toast_full", "toast_key"):
            n = min(n, 40)
            self._do(session, INSERTS[table].format(ids=f"generate_series({start}, {start + n - 1}) i"))
        else:
            self._do(session, INSERTS[table].format(ids=ids, k=r.randrange(0, 200)))

    def _copy(self, session: Session, start: int, n: int) -> None:
        """Many rows in one WAL record. (Nothing alters s.plain.)"""
        self._note(session, f"COPY s.plain: {n} from {start}")
        try:
            with session.connection.cursor() as cursor, cursor.copy("COPY s.plain FROM STDIN") as copy:
                for i in range(start, start + n):
                    copy.write_row((i, i % 7, "copied", "1.50"))
        except psycopg.Error as error:
            self._failed(session, error)

    def _update(self, session: Session) -> None:
        r = self._random
        low, high = self._own_range(session)
        template = r.choice(UPDATES)
        if "{moved}" in template:
            template = template.replace("{moved}", "s2" if self._exists(session, "s2.moved") else "s3")
        shift = 10_000_000_000 + self._take_ids(session, 1)
        self._do(
            session,
            template.format(
                where=f"id BETWEEN {low} AND {high}", shift=shift, k=r.randrange(200), n=session.next_id
            ),
        )

    def _delete(self, session: Session) -> None:
        low, high = self._own_range(session)
        table = self._random.choice(
            ("s.plain", "s.full_", "s.by_index", "s.toast", "s.toast_full", "s.leafy", "r.root", "s.types",
             "f.filtered", "f.listed", "s.switching", "s.b", "f.generated", "s.ddl2")
        )  # fmt: skip
        self._do(session, f"DELETE FROM {table} WHERE id BETWEEN {low} AND {high} AND id % 3 = 0")

    def _own_range(self, session: Session) -> tuple[int, int]:
        """Mostly the session's own latest ids, where no lock is in the way; sometimes all of another's."""
        if self._random.random() < 0.08:
            other = self._random.choice(self._sessions)
            return other.number * 1_000_000_000, other.next_id
        return max(
            session.number * 1_000_000_000, session.next_id - self._random.choice((10, 300, 2000))
        ), session.next_id

    def _special(self, session: Session) -> None:
        r = self._random
        start = self._take_ids(session, 100)
        statement = r.choice(SPECIALS)
        self._do(session, statement.format(start=start, before=start - r.choice((5, 50)), k=r.randrange(200)))

    def _ddl(self, session: Session) -> None:
        r = self._random
        table = r.choice(("s.ddl1", "s.ddl2", "s.ddl3"))
        if not self._exists(session, table):
            table = f"{table}_x" if self._exists(session, f"{table}_x") else table
        what = r.choice(
            ("add", "add", "add_default", "drop", "rename", "retype", "rename_table", "recreate", "schema",
             "identity", "switching", "switching", "attach", "index")
        )  # fmt: skip
        self._columns += 1
        new = f"x{self._columns}"
        if r.random() < 0.7:
            # Rows of the table on both sides of its change, in the transaction where there is one.
            self._some_rows(session, "s.switching" if what == "switching" else table)
            self._alter(session, what, table, new)
            self._some_rows(session, "s.switching" if what == "switching" else table)
        else:
            self._alter(session, what, table, new)

    def _some_rows(self, session: Session, table: str) -> None:
        start = self._take_ids(session, 4)
        if not self._exists(session, table):
            return
        columns, values = ("id, k, note", "i, i, 'x'") if table == "s.switching" else ("id, note", "i, 'x'")
        self._do(
            session,
            f"INSERT INTO {table} ({columns}) SELECT {values} FROM generate_series({start}, {start + 3}) i",
        )
        if table != "s.ddl3":
            self._do(
                session,
                f"UPDATE {table} SET note = note || '+', id = id + {self._random.choice((0, 20_000_000_000))}"
                f" WHERE id IN ({start}, {start + 2})",
            )

    def _alter(self, session: Session, what: str, table: str, new: str) -> None:
        r = self._random
        if what == "add":
            self._do(session, f"ALTER TABLE {table} ADD COLUMN {new} int")
        elif what == "add_default":
            self._do(session, f"ALTER TABLE {table} ADD COLUMN {new} text DEFAULT 'default {new}'")
        elif what in ("drop", "rename", "retype"):
            change = {
                "drop": "DROP COLUMN %I",
                "rename": f"RENAME COLUMN %I TO {new}",
                "retype": "ALTER COLUMN %I TYPE text USING %1$I::text",
            }[what]
            self._do(
                session,
                f"""DO $$ DECLARE c name; BEGIN
                    SELECT attname INTO c FROM pg_attribute WHERE attrelid = '{table}'::regclass
                      AND attnum > 2 AND NOT attisdropped ORDER BY attnum OFFSET {r.randrange(3)} LIMIT 1;
                    IF c IS NOT NULL THEN EXECUTE format('ALTER TABLE {table} {change}', c); END IF; END $$""",
            )
        elif what == "rename_table":
            other = table[2:-2] if table.endswith("_x") else f"{table[2:]}_x"
            self._do(session, f"ALTER TABLE {table} RENAME TO {other}")
        elif what == "recreate":
            extra = r.choice(("", ", extra int DEFAULT 5", ", extra text"))
            self._do(session, f"DROP TABLE {table}")
            if session.in_transaction or not self._exists(session, table):
                self._do(session, f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text{extra})")
        elif what == "schema":
            old, renamed = ("s2", "s3") if self._exists(session, "s2.moved") else ("s3", "s2")
            # Renaming locks no table, and what name a row beside it gets is a matter of when it is decoded.
            self._do(session, f"LOCK TABLE {old}.moved; ALTER SCHEMA {old} RENAME TO {renamed}")
        elif what == "identity":
            self._do(session, f"ALTER TABLE {table} REPLICA IDENTITY {r.choice(('FULL', 'DEFAULT'))}")
        elif what == "switching":
            identity = r.choice(("FULL", "DEFAULT", "USING INDEX switching_k_key"))
            self._do(session, f"ALTER TABLE s.switching REPLICA IDENTITY {identity}")
        elif what == "attach":
            low = 1000 + self._columns * 10
            self._do(session, f"CREATE TABLE s.leafy_{new} (LIKE s.leafy INCLUDING ALL, CHECK (k >= {low}))")
        else:
            self._do(session, f"CREATE INDEX ON {table} (note)")

    # -- statements ------------------------------------------------------------------------------------

    def _exists(self, session: Session, table: str) -> bool:
        try:
            row = session.connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
        except psycopg.Error as error:
            self._failed(session, error)
            return False
        return row is not None and row[0] is not None

    def _do(self, session: Session, statement: str | sql.Composed) -> bool:
        text = statement if isinstance(statement, str) else statement.as_string(session.connection)
        tables = {name.removesuffix("_x") for name in _TABLE.findall(text)}
        if session.in_transaction and (
            tables & session.tainted or any(self._altered_at.get(t, -1) >= session.began for t in tables)
        ):
            return False
        changes_catalog = _CHANGES_CATALOG.search(text) is not None
        if changes_catalog:
            session.altered |= tables | ({"b"} if "a" in tables else set())
            session.altered_in_subtransaction |= len(session.levels) > 1
        self._note(session, text)
        try:
            session.connection.execute(text.encode())
        except psycopg.Error as error:
            self._failed(session, error)
            return False
        if changes_catalog and not session.in_transaction:
            self._committed(tables | ({"b"} if "a" in tables else set()))
        return True

    def _failed(self, session: Session, error: psycopg.Error) -> None:
        self.n_failed += 1
        self._note(session, f"-- failed: {str(error).splitlines()[0]}")
        if not session.in_transaction:
            return
        if len(session.levels) > 1:
            self._roll_back_to(session, len(session.levels) - 1)
        else:
            self._note(session, "ROLLBACK")
            session.connection.execute("ROLLBACK")
            session.in_transaction = False
            session.levels = []

    def _note(self, session: Session, text: str) -> None:
        line = f"[{session.number}] {' '.join(text.split())[:220]}"
        self.history.append(line)
        if self._trace:
            print(line, flush=True)
