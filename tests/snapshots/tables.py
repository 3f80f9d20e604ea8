"""The tables whose snapshots are taken: pgbench's four and others, from none to ``n`` rows.

Each kind that a fold treats in a way of its own is there: keyed, with a key of two columns, with an identity that is an
index, keyless with whole old tuples, keyless and only inserted into, with TOAST values (keyed and FULL), partitioned
with leaves of another layout, truncated, with odd names, and of many types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CHUNK_ROWS = 50_000
SCHEMA = "public"


@dataclass(frozen=True)
class Table:
    """``share``: its rows are that many times ``n``, and at least ``least``. ``fill``: a query of the rows of
    {ids}, a FROM item with a column ``i``. ``uncompared``: columns whose text DuckDB writes otherwise than
    PostgreSQL."""

    name: str
    create: str
    fill: str
    share: float
    least: int = 0
    uncompared: tuple[str, ...] = ()

    def n_rows(self, n: int) -> int:
        return max(self.least, int(n * self.share))

    def fills(self, n: int) -> Iterator[str]:
        """Statements, each a transaction."""
        last = self.n_rows(n)
        for first in range(1, last + 1, CHUNK_ROWS):
            ids = f"generate_series({first}::bigint, {min(last, first + CHUNK_ROWS - 1)}::bigint) i"
            yield f"INSERT INTO {quoted(self.name)} {self.fill.format(ids=ids)}"


TABLES = (
    Table(
        "pgbench_accounts",
        "(aid int PRIMARY KEY, bid int, abalance int, filler char(84))",
        "SELECT i, 1, 0, '' FROM {ids}",
        1,
    ),
    Table(
        "pgbench_branches",
        "(bid int PRIMARY KEY, bbalance int, filler char(88))",
        "SELECT i, 0, NULL FROM {ids}",
        0,
        1,
    ),
    Table(
        "pgbench_tellers",
        "(tid int PRIMARY KEY, bid int, tbalance int, filler char(84))",
        "SELECT i, 1, 0, NULL FROM {ids}",
        0,
        10,
    ),
    Table(
        "pgbench_history",
        "(tid int, bid int, aid int, delta int, mtime timestamp, filler char(22))",
        "SELECT i % 10 + 1, 1, i, i % 5000, timestamp '2024-01-01' + i * interval '1 s', NULL FROM {ids}",
        0.5,
    ),
    Table(
        "ledger",
        "(account int, amount numeric(12,2), note text)",
        "SELECT i % 1000, i % 7 * 1.25, 'note ' || i % 50 FROM {ids}",
        0.2,
    ),
    Table(
        "documents",
        "(id int PRIMARY KEY, title text, body text)",
        "SELECT i, 'title ' || i, repeat(md5(i::text), 100 + (i % 400)::int) FROM {ids}",
        0.004,
        60,
    ),
    Table(
        "papers",
        "(id int PRIMARY KEY, title text, body text)",
        "SELECT i, 'title ' || i, repeat(md5(i::text), 150) FROM {ids}",
        0.004,
        60,
    ),
    Table(
        "orders",
        "(id bigint, day date, total numeric(10,2), note text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "SELECT i, date '2020-01-01' + (i % 3000)::int, i * 0.25, 'order ' || i FROM {ids}",
        0.5,
    ),
    Table(
        "events",
        "(id bigint PRIMARY KEY, at timestamptz, kind text, payload jsonb, tags text[], amount numeric,"
        " score float8, flag bool, key uuid, raw bytea, until date)",
        "SELECT i, timestamptz '2024-01-01 00:00:00+00' + i * interval '1.5 s', 'kind ' || i % 9,"
        " jsonb_build_object('id', i), ARRAY['a', 'b' || i], i / 7.0, i / 3.0, i % 2 = 0, md5(i::text)::uuid,"
        " decode(md5(i::text), 'hex'), CASE i % 3 WHEN 0 THEN date 'infinity' WHEN 1 THEN date '2024-01-01' END"
        " FROM {ids}",
        0.2,
        uncompared=("at", "payload", "tags", "score", "raw"),
    ),
    Table(
        "by_index",
        "(id bigint, k bigint NOT NULL UNIQUE, note text)",
        "SELECT i, i, 'note ' || i FROM {ids}",
        0.1,
    ),
    Table(
        'Odd "N" äme',
        '("A col" int, "select" text, value int, PRIMARY KEY ("A col", "select"))',
        "SELECT i, 's' || i % 3, 0 FROM {ids}",
        0.05,
    ),
    Table("queue", "(id bigint PRIMARY KEY, v text)", "SELECT i, 'v' FROM {ids}", 0.01),
    Table("pile", "(n int, v text)", "SELECT i % 10, 'v' FROM {ids}", 0.01),
    Table("empty", "(id int PRIMARY KEY)", "SELECT i FROM {ids}", 0),
)

_AFTER = """
    ALTER TABLE ledger REPLICA IDENTITY FULL;
    ALTER TABLE pile REPLICA IDENTITY FULL;
    ALTER TABLE papers REPLICA IDENTITY FULL;
    ALTER TABLE documents ALTER body SET STORAGE EXTERNAL;
    ALTER TABLE papers ALTER body SET STORAGE EXTERNAL;
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_k_key;
    CREATE TABLE orders_old PARTITION OF orders FOR VALUES FROM (MINVALUE) TO ('2024-01-01');
    CREATE TABLE orders_new (junk int, note text, total numeric(10,2), day date NOT NULL, id bigint NOT NULL);
    ALTER TABLE orders_new DROP COLUMN junk;
    ALTER TABLE orders ATTACH PARTITION orders_new FOR VALUES FROM ('2024-01-01') TO (MAXVALUE);
    CREATE TABLE tick (at bigint);
"""


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def set_up_statements() -> list[str]:
    """All tables, empty, and publication p of them."""
    made = [f"CREATE TABLE {quoted(table.name)} {table.create}" for table in TABLES]
    names = ", ".join(quoted(table.name) for table in TABLES)
    return [*made, _AFTER, f"CREATE PUBLICATION p FOR TABLE {names} WITH (publish_via_partition_root = true)"]
