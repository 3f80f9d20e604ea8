"""Delta tables whose files are segments: what the sink commits without a Spark job, and what other engines read."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from tests.late_segments import late_part, late_segment
from tests.spark.support import (
    COMMIT_US,
    IDENTITY,
    INT4,
    INT8,
    TEXT,
    Transaction,
    batch_of,
    memory_frame,
    put_memory,
    read_memory,
    record_batch,
    relation,
)
from tests.spark.test_delta_sink import tenure_of
from xidstream.pipeline import faultpoints, parquet
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, Superseded
from xidstream.pipeline.exchange import Sealed, SegmentPart
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.sinks import log_sink, written_rows
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.spark

DATE, TIMESTAMP, TIMESTAMPTZ = 1082, 1114, 1184
A = relation("public.a", ("id", INT8), ("name", TEXT), relid=1)
B = relation("public.b", ("id", INT4), relid=2)


class World:
    """One storage, one root, and batches of what is in the storage."""

    def __init__(self, folder: Path, spark: Any) -> None:
        self.folder = folder
        self.storage = Storage(str(folder / "storage"))
        self.root = folder / "delta"
        self.n_tenures = 0
        self._spark = spark
        self._sinks: list[DeltaSink] = []

    def sink(self) -> DeltaSink:
        sink = DeltaSink(str(self.root), IDENTITY)
        sink.open(lambda: self._spark)
        self._sinks.append(sink)
        self.n_tenures += 1
        sink.claim(tenure_of(self.n_tenures, wal_end=1 << 40))
        return sink

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def segments(
        self,
        commit_lsn: int,
        rows: Sequence[tuple[RelationVersion, Sequence[dict[str, Any]]]],
        gid: str | None = None,
    ) -> Sealed:
        """A transaction that is in the storage, a segment for each member of ``rows``."""
        parts: list[SegmentPart] = []
        seq = 0
        for number, (version, given) in enumerate(rows):
            name = f"1/s/epochs/e/7-{commit_lsn:016X}/{number}.parquet"
            segment = late_segment(self.storage, name, version, given, first_seq=seq)
            parts.append(late_part(segment, commit_lsn))
            seq += len(given)
        row = {
            "xid": 7,
            "commit_lsn": commit_lsn,
            "end_lsn": commit_lsn + 8,
            "commit_timestamp": COMMIT_US + commit_lsn,
            "gid": gid,
            "origin": None,
            "streamed": True,
            "rows": seq,
            "tables": sorted({version.name for version, _ in rows}),
        }
        return Sealed(record_batch([row], TRANSACTIONS_SCHEMA), (), tuple(parts), (), seq, 0)

    def batch(self, *units: Transaction | Sealed) -> Any:
        from xidstream.pipeline.spark.frames import SinkBatch

        reader = SegmentReader(self.storage.uri)
        return SinkBatch(
            batch_of(units), lambda: self._spark, memory_frame, reader, read_memory, put_memory, self.storage
        )

    def rows(self, directory: str) -> list[tuple[Any, ...]]:
        found = DeltaTable(str(self.root / directory)).to_pyarrow_table().to_pylist()
        return sorted((r["_commit_lsn"], r["_seq"], r["id"]) for r in found)

    def transactions(self) -> list[int]:
        return sorted(r[0] for r in self._column("_transactions", "commit_lsn"))

    def _column(self, directory: str, name: str) -> list[tuple[int]]:
        table = DeltaTable(str(self.root / directory)).to_pyarrow_table(columns=[name])
        return [(value,) for value in table[name].to_pylist()]

    def linked(self, directory: str) -> list[str]:
        return [p for p in DeltaTable(str(self.root / directory)).file_uris() if "-segments/" in p]


@pytest.fixture
def world(tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, spark)
    yield world
    world.close()


def some(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"row {i}"} for i in ids]


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any) -> None:
        raise AssertionError("a Spark job was run")

    monkeypatch.setattr(written_rows, "_run_job", run)


def test_a_transaction_in_segments_is_committed_without_a_spark_job(world: World, no_job: None) -> None:
    sink = world.sink()
    sink.write(world.batch(world.segments(100, [(A, some(1, 2)), (B, some(3)), (A, some(4))])))
    assert world.rows("public.a") == [(100, 0, 1), (100, 1, 2), (100, 3, 4)]
    assert world.rows("public.b") == [(100, 2, 3)]
    assert world.transactions() == [100]
    assert (len(world.linked("public.a")), len(world.linked("public.b"))) == (2, 1)


def test_segments_and_memory_of_one_batch_are_one_commit_of_each_table(world: World, no_job: None) -> None:
    sink = world.sink()
    units = [
        Transaction(90, [(A, some(1))]),
        world.segments(100, [(A, some(2, 3)), (B, some(4))]),
        Transaction(110, [(A, some(5))]),
    ]
    sink.write(world.batch(*units))
    assert world.rows("public.a") == [(90, 0, 1), (100, 0, 2), (100, 1, 3), (110, 0, 5)]
    assert world.rows("public.b") == [(100, 2, 4)]
    assert DeltaTable(str(world.root / "public.a")).version() == 1
    assert world.transactions() == [90, 100, 110]


def test_a_replay_after_a_crash_between_the_tables_links_only_what_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch, no_job: None
) -> None:
    first = world.segments(100, [(A, some(1)), (B, some(2))])
    second = world.segments(200, [(A, some(3)), (B, some(4))])
    real = DeltaTableWriter.commit

    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.label == "public.b":
            raise OSError(5, "power cut")
        real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTableWriter, "commit", commit)
        with pytest.raises(StorageFault):
            world.sink().write(world.batch(first))
    assert world.transactions() == []
    sink = world.sink()
    sink.write(world.batch(first, second))
    assert world.rows("public.a") == [(100, 0, 1), (200, 0, 3)]
    assert world.rows("public.b") == [(100, 1, 2), (200, 1, 4)]
    assert len(world.linked("public.a")) == 2
    sink.write(world.batch(first, second))
    assert len(world.linked("public.b")) == 2


def test_a_stale_run_cannot_name_what_its_successor_has_cleaned(world: World, no_job: None) -> None:
    stale = world.sink()
    first, second = world.segments(100, [(A, some(1))]), world.segments(200, [(A, some(2))])
    stale.write(world.batch(first))
    world.sink()
    world.storage.delete_folder("1/s/epochs/e")
    with pytest.raises(Superseded, match="taken over"):
        stale.write(world.batch(second))
    assert world.rows("public.a") == [(100, 0, 1)], "its link is its own name"
    assert world.transactions() == [100]


def test_a_stale_run_that_has_linked_cannot_commit(
    world: World, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = world.sink()
    first, second = world.segments(100, [(A, some(1))]), world.segments(200, [(A, some(2))])
    stale.write(world.batch(first))
    real = log_sink.SegmentLinks.give

    def give(self: Any, *args: Any) -> Any:
        given = real(self, *args)
        monkeypatch.setattr(log_sink.SegmentLinks, "give", real)
        world.sink().write(world.batch(second))
        world.storage.delete_folder("1/s/epochs/e")
        return given

    monkeypatch.setattr(log_sink.SegmentLinks, "give", give)
    with pytest.raises(Superseded):
        stale.write(world.batch(second))
    assert world.rows("public.a") == [(100, 0, 1), (200, 0, 2)]


def test_a_segment_that_is_missing_is_told_where_the_slot_is_ours(world: World, no_job: None) -> None:
    sink = world.sink()
    batch = world.batch(world.segments(100, [(A, some(1))]))
    world.storage.delete_folder("1/s/epochs/e")
    with pytest.raises(SegmentCorrupt, match="missing"):
        sink.write(batch)
    assert world.transactions() == []


def test_a_segment_that_was_filled_for_another_commit_is_written_by_spark(world: World) -> None:
    """A run filled it and failed; after a failover its COMMIT PREPARED stands elsewhere. It was refused for ever."""
    unit = world.segments(100, [(A, some(1, 2))], gid="g")
    (part,) = unit.segments
    path = world.storage.local_path(part.segment.key)
    assert path is not None
    parquet.fill(path, part.segment.file, parquet.CommitStamp(90, COMMIT_US), name="s")
    with pytest.warns(RuntimeWarning, match="another commit"):
        world.sink().write(world.batch(unit))
    assert world.rows("public.a") == [(100, 0, 1), (100, 1, 2)]
    assert world.transactions() == [100] and not world.linked("public.a")


@pytest.mark.parametrize("passage", [1, 2])
@pytest.mark.parametrize(
    "point",
    ["segment_filled_in_part", "segment_filled", "segment_linked", "committing_table", "table_committed"],
)
def test_a_fault_at_each_point_leaves_what_the_next_run_completes(
    world: World, no_job: None, monkeypatch: pytest.MonkeyPatch, point: str, passage: int
) -> None:
    """A disk that is full, or a store that fails, between any two steps of the sink."""
    unit = world.segments(100, [(A, some(1, 2)), (B, some(3)), (A, some(4))])
    plan = FaultPlan(f"{point}:error=StorageFault@{passage}", None)
    sink = world.sink()
    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "_plan", plan)
        with pytest.raises(StorageFault, match=point):
            sink.write(world.batch(unit))
    assert world.transactions() == []
    world.sink().write(world.batch(unit))
    assert world.rows("public.a") == [(100, 0, 1), (100, 1, 2), (100, 3, 4)]
    assert world.rows("public.b") == [(100, 2, 3)]
    assert world.transactions() == [100]


def test_vacuum_takes_the_names_that_no_log_has_and_leaves_the_others(
    world: World, no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(5, "power cut")

    unit = world.segments(100, [(A, some(1, 2))])
    sink = world.sink()
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTableWriter, "commit", commit)
        with pytest.raises(StorageFault):
            sink.write(world.batch(unit))
    sink.write(world.batch(unit))
    table = DeltaTable(str(world.root / "public.a"))
    gone = table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len([path for path in gone if "-segments/" in path]) == 1
    assert world.rows("public.a") == [(100, 0, 1), (100, 1, 2)]


# -- readers -----------------------------------------------------------------------------------------------

OLD = relation("public.t", ("id", INT8), ("d", DATE), ("ts", TIMESTAMP), ("tz", TIMESTAMPTZ), relid=3)
NEW = relation(
    "public.t", ("id", INT8), ("d", DATE), ("ts", TIMESTAMP), ("tz", TIMESTAMPTZ), ("extra", TEXT), relid=3
)
_DAYS = [datetime.date(y, 2, 28) for y in (1, 1582, 1899, 1970, 9999)]


def dated(first: int, n: int, **more: Any) -> list[dict[str, Any]]:
    out = []
    for i in range(first, first + n):
        day = _DAYS[i % len(_DAYS)]
        ts = datetime.datetime(day.year, 2, 28, 23, 59, 59, 999_999 - i)
        zoned = ts.replace(year=max(2, min(day.year, 9998)), tzinfo=datetime.timezone.utc)
        out.append({"id": i, "d": day, "ts": ts, "tz": zoned, **more})
    return out


def by_pyarrow(world: World, version: int | None, most: int | None) -> Any:
    table = DeltaTable(str(world.root / "public.t"), version=version)
    return table.to_pyarrow_table(filters=None if most is None else [("_commit_lsn", "<=", most)])


def by_datafusion(world: World, version: int | None, most: int | None) -> Any:
    table = DeltaTable(str(world.root / "public.t"), version=version)
    where = "" if most is None else f" where _commit_lsn <= {most}"
    found = QueryBuilder().register("t", table).execute(f"select * from t{where}")
    return pa.table(found.read_all())


def by_duckdb(world: World, version: int | None, most: int | None) -> Any:
    files = DeltaTable(str(world.root / "public.t"), version=version).file_uris()
    where = "" if most is None else f" where _commit_lsn <= {most}"
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        query = f"select * from read_parquet({files}, union_by_name=true){where}"
        found = connection.sql(query).to_arrow_table()
    if "extra" not in found.column_names:  # it reads files, none of which may have the column yet
        found = found.append_column("extra", pa.nulls(found.num_rows, pa.string()))
    return found


def by_spark(world: World, version: int | None, most: int | None) -> Any:
    from xidstream.pipeline.spark.spark_schemas import spark_schema

    table = DeltaTable(str(world.root / "public.t"), version=version)
    schema = spark_schema(pa.schema(table.schema().to_arrow()))
    frame = world._spark.read.schema(schema).parquet(*table.file_uris())
    found = frame if most is None else frame.where(f"_commit_lsn <= {most}")
    return pa.Table.from_batches(found._collect_as_arrow())


READERS: dict[str, Callable[[World, int | None, int | None], Any]] = {
    "pyarrow": by_pyarrow,
    "datafusion": by_datafusion,
    "duckdb": by_duckdb,
    "spark": by_spark,
}


def values(table: Any) -> list[tuple[Any, ...]]:
    """Everything that the rows were given, times as numbers: Python has no year 10000, and no zone here."""
    table = table.select(
        [*(f.name for f in NEW.arrow_fields), "_commit_lsn", "_commit_timestamp", "_seq", "_xid"]
    )
    names = ("ts", "tz", "_commit_timestamp")
    columns = []
    for name in table.column_names:
        column = table[name].combine_chunks()
        if name in names:
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
        columns.append(column.cast(pa.string() if name == "extra" else column.type).to_pylist())
    return sorted(zip(*columns, strict=True), key=lambda row: row[0])


def given(rows: list[tuple[int, list[dict[str, Any]]]]) -> list[tuple[Any, ...]]:
    def us(value: datetime.datetime) -> int:
        epoch = datetime.datetime(1970, 1, 1, tzinfo=value.tzinfo)
        return (value - epoch) // datetime.timedelta(microseconds=1)

    return [
        (r["id"], r["d"], us(r["ts"]), us(r["tz"]), r.get("extra"), lsn, COMMIT_US + lsn, seq, 7)
        for lsn, transaction in rows
        for seq, r in enumerate(transaction)
    ]


@pytest.mark.parametrize("reader", READERS)
def test_old_dates_added_columns_filters_and_time_travel_in_every_engine(
    world: World, no_job: None, reader: str
) -> None:
    """Each engine sees the same rows before and after the table was compacted, and when no segment is there."""
    sink = world.sink()
    transactions = [(100, dated(0, 50)), (200, dated(50, 50, extra="x")), (300, dated(100, 50, extra=None))]
    for lsn, rows in transactions:
        sink.write(world.batch(world.segments(lsn, [(OLD if lsn == 100 else NEW, rows)])))
    read, path = READERS[reader], str(world.root / "public.t")
    widened = (
        3  # 1: the first transaction; 2: what the table says of its types; 3: the column; 4, 5: the others
    )
    shutil.rmtree(world.folder / "storage")

    def check() -> None:
        assert values(read(world, None, None)) == given(transactions)
        assert values(read(world, None, 200)) == given(transactions[:2])
        assert values(read(world, widened + 1, None)) == given(transactions[:2])
        assert values(read(world, widened, 250)) == given(transactions[:1])

    check()
    assert DeltaTable(path).optimize.compact()["numFilesRemoved"] == 3
    check()
    assert len(world.linked("public.t")) == 0
    DeltaTable(path).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert values(read(world, None, None)) == given(transactions)
    assert values(read(world, None, 200)) == given(transactions[:2])


@pytest.mark.parametrize("reader", READERS)
def test_sixteen_hundred_columns_in_every_engine(world: World, no_job: None, reader: str) -> None:
    wide = relation("public.t", *[(f"c{i}", INT4) for i in range(1_600)], relid=4)
    rows = [{f"c{i}": 1_600 * row + i for i in range(1_600)} for row in range(20)]
    world.sink().write(world.batch(world.segments(100, [(wide, rows)])))
    picked = (0, 1, 799, 1_598, 1_599)
    found = READERS[reader](world, None, 100).select(["_seq", "_commit_lsn", *(f"c{i}" for i in picked)])
    found = found.sort_by("_seq")
    assert found["_commit_lsn"].to_pylist() == [100] * 20
    for i in picked:
        assert found[f"c{i}"].to_pylist() == [1_600 * row + i for row in range(20)]
