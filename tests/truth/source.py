"""A source that a seed changes: DML, and every DDL that may change a table after its stream's back.

A step is one transaction, or the commit of one that was left open for some steps. What a statement may not do at this
moment (a column that is there, a lock that somebody has) is rolled back to its savepoint. Nobody else writes, so the
truth between two steps stands still: it is read in a REPEATABLE READ session after each step, for every table that is
there, in the columns and rows that are published.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import psycopg

from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import table_label

Rows = Counter[tuple[tuple[str, str | None], ...]]
"""Of each row its columns and their text, ordered by name."""

GENERATED: Final = "g int GENERATED ALWAYS AS (n + 1) STORED"
KEYED: Final = f"id bigint PRIMARY KEY, n int, t text, price numeric(12,2), m mood, {GENERATED}"
PARTED: Final = "id bigint, n int, PRIMARY KEY (id)"
SETUP: Final = (
    "CREATE SCHEMA other",
    "CREATE TYPE mood AS ENUM ('fine', 'sad')",
    f"CREATE TABLE k ({KEYED})",
    "ALTER TABLE k ALTER t SET STORAGE EXTERNAL",
    f"CREATE TABLE f ({KEYED.replace(' PRIMARY KEY', '')})",
    "ALTER TABLE f REPLICA IDENTITY FULL",
    f"CREATE TABLE w ({KEYED})",
    "ALTER TABLE w REPLICA IDENTITY FULL",
    f"CREATE TABLE p ({PARTED}) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (50)",
    "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (50) TO (100)",
)
TABLES: Final = ("k", "f", "w", "p")
PUBLICATIONS: Final = (
    "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)",
    "CREATE PUBLICATION p FOR TABLE k, f, w, p WITH (publish_via_partition_root)",
    "CREATE PUBLICATION p FOR TABLES IN SCHEMA public WITH (publish_via_partition_root)",
)

DDL_SHARE: Final = 0.1
"""Of the statements. Each ends a snapshot, and the next one takes seconds: with more there is little to compare."""
# {t} is a table, {i} and {j} keys, {v} a number that was never used before.
DML: Final = (
    "INSERT INTO {t} (id, n) SELECT i, {v} FROM generate_series({i}, {j}) i ON CONFLICT DO NOTHING",
    "INSERT INTO {t} (id, n, t) SELECT i, {v}, repeat(md5(i::text), 200) FROM generate_series({i}, {j}) i",
    "UPDATE {t} SET n = {v} WHERE id BETWEEN {i} AND {j}",
    "UPDATE {t} SET price = {v} / 3.0 WHERE id % 3 = {i} % 3",
    "UPDATE {t} SET id = {v} WHERE id = {i}",
    "DELETE FROM {t} WHERE id BETWEEN {i} AND {j}",
    "DELETE FROM {t} WHERE n % 7 = {i} % 7",
)
DDL: Final = (
    ("TRUNCATE {t}",),
    ("ALTER TABLE {t} ALTER n TYPE int USING n * 2",),
    ("ALTER TABLE {t} ALTER n TYPE bigint",),
    ("ALTER TABLE {t} ALTER n TYPE int USING (n % 1000)::int",),
    ("ALTER TABLE {t} ALTER price TYPE numeric",),
    ("ALTER TABLE {t} ALTER price TYPE numeric(12,2)",),
    ("ALTER TABLE {t} ADD a{c} int",),
    ("ALTER TABLE {t} ADD a{c} int DEFAULT 5",),
    ("ALTER TABLE {t} ADD a{c} float8 DEFAULT random()",),
    ("ALTER TABLE {t} DROP a{c}",),
    ("ALTER TABLE {t} DROP a{c}", "ALTER TABLE {t} ADD a{c} text DEFAULT 'x'"),
    ("ALTER TABLE {t} RENAME a{c} TO b{c}",),
    ("ALTER TABLE {t} RENAME b{c} TO a{c}",),
    ("ALTER TABLE {t} ADD b{c} int GENERATED ALWAYS AS (n + {c}) STORED",),
    ("ALTER TABLE {t} ALTER g DROP EXPRESSION",),
    ("ALTER TABLE {t} ALTER g SET EXPRESSION AS (n * {v})",),
    ("CREATE TABLE s (LIKE {t} INCLUDING ALL)", "INSERT INTO s (id, n) VALUES ({i}, {v})", "DROP TABLE {t}",
     "ALTER TABLE s RENAME TO {t}"),
    ("ALTER TABLE {t} RENAME TO x{c}", "CREATE TABLE {t} (LIKE x{c} INCLUDING ALL)"),
    ("DROP TABLE x{c}",),
    ("ALTER TABLE {t} SET SCHEMA other", "UPDATE other.{t} SET n = {v}", "ALTER TABLE other.{t} SET SCHEMA public"),
    ("ALTER TABLE {t} SET UNLOGGED", "UPDATE {t} SET n = {v}", "ALTER TABLE {t} SET LOGGED"),
    ("ALTER TABLE {t} REPLICA IDENTITY FULL",),
    ("ALTER TABLE {t} REPLICA IDENTITY DEFAULT",),
    ("ALTER TABLE {t} REPLICA IDENTITY FULL", "UPDATE {t} SET n = {v} WHERE id = {i}",
     "ALTER TABLE {t} REPLICA IDENTITY DEFAULT"),
    ("ALTER TYPE mood RENAME VALUE 'fine' TO 'good'", "ALTER TYPE mood RENAME VALUE 'good' TO 'fine'"),
    ("ALTER TYPE mood RENAME VALUE 'sad' TO 'low'",),
    ("ALTER TYPE mood RENAME VALUE 'low' TO 'sad'",),
    # What changes no row.
    ("GRANT SELECT ON {t} TO public",),
    ("CREATE INDEX ON {t} (n)",),
    ("ALTER TABLE {t} ALTER n SET STATISTICS {i}",),
    ("COMMENT ON TABLE {t} IS '{v}'",),
)  # fmt: skip
PARTITIONS: Final = (
    ("TRUNCATE p2",),
    ("ALTER TABLE p DETACH PARTITION p2",),
    ("ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (50) TO (100)",),
    ("ALTER TABLE p DETACH PARTITION p2", "UPDATE p2 SET n = {v}",
     "ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (50) TO (100)"),
    ("CREATE TABLE p3 (LIKE p INCLUDING ALL)", "INSERT INTO p3 (id, n) VALUES (150, {v})",
     "ALTER TABLE p ATTACH PARTITION p3 FOR VALUES FROM (100) TO (200)"),
    ("DROP TABLE p3",),
)  # fmt: skip
PUBLISHED: Final = (
    ("ALTER PUBLICATION p SET (publish = 'insert, update')", "DELETE FROM {t} WHERE id % 3 = {i} % 3",
     "ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')"),
    ("ALTER PUBLICATION p DROP TABLE {t}", "UPDATE {t} SET n = {v}", "ALTER PUBLICATION p ADD TABLE {t}"),
    ("ALTER PUBLICATION p DROP TABLE {t}",),
    ("ALTER PUBLICATION p ADD TABLE {t}",),
    ("ALTER PUBLICATION p SET TABLE k, f, w, p",),
    ("ALTER PUBLICATION p SET TABLE k WHERE (id > {i}), f, w, p",),
    ("ALTER PUBLICATION p SET TABLE k (id, n), f, w, p",),
    ("ALTER PUBLICATION p SET (publish_generated_columns = stored)",),
    ("ALTER PUBLICATION p SET (publish_generated_columns = none)",),
)  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What stood from the last commit at or after ``begin`` on. That commit's LSN is in ``begin`` to before ``end``.
    ``story``: the statements that led here. ``tables``: those that are published, by label.
    ``filtered``: those of them with a row filter."""

    begin: Lsn
    end: Lsn
    tables: dict[str, Rows]
    story: tuple[str, ...]
    filtered: frozenset[str] = frozenset()


class Source:
    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], seed: int) -> None:
        """``connect`` gives sessions with autocommit on an empty database."""
        self._dice = random.Random(seed)
        self._close = ExitStack()
        self._main, self._long, self._reader = (self._close.enter_context(connect()) for _ in range(3))
        for session in (self._main, self._long):
            session.execute("SET lock_timeout = '300ms'")
        self._reader.prepare_threshold = None  # a prepared SELECT fails when a column's type has changed
        for statement in (*SETUP, PUBLICATIONS[seed % len(PUBLICATIONS)]):
            self._main.execute(statement.encode())
        self._is_long_open = False
        self._number = 1_000
        self.counts: Counter[str] = Counter()
        for table in TABLES:
            self._main.execute(
                f"INSERT INTO {table} (id, n) SELECT i, i FROM generate_series(1, 30) i".encode()
            )
        self.truths: list[Truth] = [self._truth(self._insert_lsn(), ("the setup",))]

    def close(self) -> None:
        self._close.close()

    def step(self) -> Truth:
        """Change something, and tell what stands after it. A step may change nothing."""
        if self._is_long_open and self._dice.random() < 0.25:
            begin, story = self._insert_lsn(), ("COMMIT of the long one",)
            self._long.execute(b"COMMIT")
            self._is_long_open = False
        elif not self._is_long_open and self._dice.random() < 0.1:
            self._long.execute(b"BEGIN")
            self._is_long_open = True
            begin, story = (
                self._insert_lsn(),
                tuple(self._statements(self._long, self._dice.randint(1, 2), ddl=0.0)),
            )
        else:
            self._main.execute(b"BEGIN")
            story = tuple(self._statements(self._main, self._dice.randint(1, 4), ddl=DDL_SHARE))
            is_kept = self._dice.random() < 0.88
            # Whoever writes while this is read ends with this step, or a later one.
            begin = self._insert_lsn()
            self._main.execute(b"COMMIT" if is_kept else b"ROLLBACK")
            story = (*story, "COMMIT" if is_kept else "ROLLBACK")
        truth = self._truth(begin, story)
        self.truths.append(truth)
        return truth

    def finish(self) -> None:
        """End what is open, so that every table can be held."""
        if self._is_long_open:
            begin = self._insert_lsn()
            self._long.execute(b"COMMIT")
            self._is_long_open = False
            self.truths.append(self._truth(begin, ("COMMIT of the long one",)))

    def _statements(self, session: psycopg.Connection[Any], n: int, *, ddl: float) -> Iterator[str]:
        for _ in range(n):
            if self._dice.random() < ddl:
                kind = self._dice.choices((DDL, PARTITIONS, PUBLISHED), (8, 2, 1))[0]
                group: tuple[str, ...] = self._dice.choice(kind)
            else:
                group = tuple(self._dice.choice(DML) for _ in range(self._dice.randint(1, 3)))
            table, i = self._dice.choice(TABLES), self._dice.randrange(60)
            values = {"t": table, "i": i, "j": i + self._dice.randrange(12), "c": self._dice.randrange(3)}
            taken_back = self._dice.random() < 0.1
            session.execute(b"SAVEPOINT a")
            try:
                for statement in group:
                    self._number += 1
                    text = statement.format(**values, v=self._number)
                    session.execute(text.encode())
                    yield text
                self.counts[" ".join(group[0].split()[:2])] += 1
            except psycopg.Error as error:
                session.execute(b"ROLLBACK TO a")
                yield f"-- taken back: {type(error).__name__}"
                continue
            if taken_back:
                session.execute(b"ROLLBACK TO a")
                yield "ROLLBACK TO a"

    def _insert_lsn(self) -> Lsn:
        row = self._reader.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return Lsn.parse(row[0])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._reader.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            yield
        finally:
            self._reader.execute(b"COMMIT")

    def _truth(self, begin: Lsn, story: tuple[str, ...]) -> Truth:
        end = self._insert_lsn()
        tables: dict[str, Rows] = {}
        with self._reading():
            published = {
                (schema, table): (columns, row_filter)
                for schema, table, columns, row_filter in self._reader.execute(
                    "SELECT schemaname, tablename, attnames::text[], rowfilter FROM pg_publication_tables"
                    " WHERE pubname = 'p'"
                )
            }
            there = self._reader.execute(
                "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
                " WHERE n.nspname IN ('public', 'other') AND c.relkind IN ('r', 'p')"
            ).fetchall()
            for schema, table in there:
                columns, row_filter = published.get((schema, table), (None, None))
                if columns is not None:
                    tables[table_label(schema, table)] = self._rows(schema, table, columns, row_filter)
        filtered = frozenset(
            table_label(*name) for name, (_, row_filter) in published.items() if row_filter is not None
        )
        return Truth(begin, end, tables, story, filtered)

    def _rows(self, schema: str, table: str, columns: list[str], row_filter: str | None) -> Rows:
        listed = ", ".join(f'"{name}"' for name in columns)
        where = "" if row_filter is None else f" WHERE {row_filter}"
        cursor = self._reader.execute(f'SELECT {listed} FROM "{schema}"."{table}"{where}'.encode())
        return Counter(row_of(dict(zip(columns, values, strict=True))) for values in cursor)


def row_of(values: dict[str, Any]) -> tuple[tuple[str, str | None], ...]:
    """A row as both sides have it: text of each value."""
    return tuple(sorted((name, _text(value)) for name, value in values.items()))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    # Python writes 0.00000000 as 0E-8.
    return format(value, "f") if isinstance(value, Decimal) else str(value)
