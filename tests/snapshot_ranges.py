"""A table's snapshot on an embedded server, read range by range into Parquet files, for the tests of its readers."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.postgres_fixtures import Database
from xidstream.pipeline.initial_copy.range_reading import RangeOutput, RangeReader
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import CtidRange, Leaf, PublishedSource, RangeTask, plan_ranges

BOUNDS = SnapshotBounds(Lsn(0x100), Lsn(0x200), 700, 710, (705,), 1_700_000_000_000_000)


def relation_of(database: Database, table: str, columns: Sequence[str] | None = None) -> RelationVersion:
    """As R declares a table without domains, with these columns of it."""
    found = database.execute(
        "SELECT attrelid::int8, attname, atttypid::int8, atttypmod FROM pg_attribute"
        " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        table,
    )
    made = tuple(Column(n, oid, mod, False) for _, n, oid, mod in found if columns is None or n in columns)
    return RelationVersion(found[0][0] if found else 1, "public", table, ReplicaIdentity.DEFAULT, made)


def leaf_of(database: Database, table: str) -> Leaf:
    ((relid, schema, name, n_bytes, total),) = database.execute(
        "SELECT c.oid::int8, n.nspname, c.relname, pg_relation_size(c.oid), pg_table_size(c.oid)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE c.oid = %s::regclass",
        table,
    )
    return Leaf(relid, schema, name, n_bytes // 8192, total)


class Snapshot:
    """An exported snapshot of one table, and where its rows go."""

    def __init__(self, database: Database, source: PublishedSource, name: str, folder: Path) -> None:
        self.database = database
        self.source = source
        self.name = name
        self.target = RangeOutput(Location.parse(str(folder)), "snapshot-1")
        schema = contract_schema(source.relation)
        placed = map_columns((), schema)
        self.conform = Conform.of(placed.columns, placed.names)
        self.files: list[WrittenFile] = []

    def beside(self, relation: RelationVersion, folder: Path) -> Snapshot:
        """Another table under the same snapshot."""
        source = PublishedSource(relation, "", None, (leaf_of(self.database, f'"{relation.table}"'),))
        return Snapshot(self.database, source, self.name, folder)

    def task(self, pages: CtidRange) -> RangeTask:
        return RangeTask(self.source, self.name, pages)

    @property
    def whole(self) -> RangeTask:
        return self.task(CtidRange(self.source.leaves[0], 0, 0, None))

    def read(self, task: RangeTask, reader: RangeReader | None = None) -> list[WrittenFile]:
        own = reader or RangeReader(self.database.dsn())
        try:
            files = own.read(task, BOUNDS, self.target, self.conform)
        finally:
            if reader is None:
                own.close()
        self.files += files
        return files

    def read_all(self, range_bytes: int = 1 << 30) -> pa.Table:
        """All ranges by one reader."""
        reader = RangeReader(self.database.dsn())
        try:
            for pages in plan_ranges(self.source.leaves, by_range=True, range_bytes=range_bytes):
                self.read(self.task(pages), reader)
        finally:
            reader.close()
        return self.rows()

    def rows(self) -> pa.Table:
        """What the finished files hold."""
        tables = [pq.read_table(f"{self.target.table.uri}/{file.path}") for file in self.files]
        assert [table.num_rows for table in tables] == [file.n_rows for file in self.files]
        return pa.concat_tables(tables) if tables else self.conform.schema.empty_table()


@contextmanager
def snapshot_of(
    database: Database,
    relation: RelationVersion,
    folder: Path,
    *,
    leaves: Sequence[str] = (),
    row_filter: str | None = None,
) -> Iterator[Snapshot]:
    """A snapshot that is held until the end of the block. ``leaves``: names as SQL has them."""
    found = tuple(leaf_of(database, each) for each in leaves or [f'"{relation.table}"'])
    source = PublishedSource(relation, "", row_filter, found)
    # psycopg gives bytes where the server has no encoding.
    options = "-c idle_in_transaction_session_timeout=0"
    if database.version >= 17:
        options += " -c transaction_timeout=0"
    with database.connect(client_encoding="UTF8", options=options) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        exported = holder.execute("SELECT pg_export_snapshot()").fetchone()
        assert exported is not None
        yield Snapshot(database, source, exported[0], folder)


def growth_of_reading(dsn: str, snapshot: tuple[RangeTask, RangeOutput, Conform], small: RangeTask) -> int:
    """By how many bytes the peak memory of this process grows when it reads a range, after it has read a small one."""
    task, target, conform = snapshot
    peaks = []
    reader = RangeReader(dsn)
    for each in (small, task):
        reader.read(each, BOUNDS, target, conform)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    reader.close()
    return peaks[1] - peaks[0]


def wait_until_reading(database: Database, copy_of: str) -> None:
    """Until a session runs a COPY that names this."""
    for _ in range(600):
        if active_copies(database, copy_of):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody reads {copy_of}")


def active_copies(database: Database, copy_of: str) -> list[int]:
    found = database.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
        " AND query LIKE 'COPY (%%' AND query LIKE %s",
        f"%{copy_of}%",
    )
    return [pid for (pid,) in found]
