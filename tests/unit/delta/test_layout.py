"""Merged files of a Delta table in the order of a column: deltalake and DuckDB read them, no Spark."""

from __future__ import annotations

import datetime
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.unit.delta.test_small_files import APP, LSN, log_of, rows_of
from tests.waiting import wait_until
from xidstream.pipeline.delta import upkeep
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.delta.upkeep import Upkeep, UpkeepPace, UpkeepStep
from xidstream.pipeline.log_tables import clustered_files, small_files
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.layout import LAYOUT
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.small_files import CLUSTERED, SizeClass, many_small
from xidstream.pipeline.log_tables.table_metadata import STATISTICS, TableMetadata
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import Column, ReplicaIdentity
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION
from xidstream.pipeline.settings.log_layout import LogLayout

MANY = 4
SEQ = TableColumn("_seq", pa.int64(), "_seq")
DAY = TableColumn("day", pa.date32(), "day")
NOTE = TableColumn("note", pa.string(), "note")
COLUMNS = [LSN, SEQ, DAY, NOTE]
OWN = {STATISTICS: "_commit_lsn"}
"""As each table of a log has it."""
BY_DAY = TableMetadata("", OWN, {}, layout="day")
BEGAN = datetime.date(2026, 1, 1)


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "public.t"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small files become one in the commit."""
    monkeypatch.setattr(small_files, "SIZE_CLASSES", (SizeClass(0, 16 << 10, MANY),))


@pytest.fixture
def middling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files of some kilobytes are merged beside the commits, into files of some kilobytes."""
    classes = (SizeClass(2_000, 1 << 20, MANY),)
    monkeypatch.setattr(small_files, "SIZE_CLASSES", (SizeClass(0, 1_000, 1_000),))
    monkeypatch.setattr(small_files, "MIDDLING", classes)
    monkeypatch.setattr(upkeep, "MIDDLING", classes)
    monkeypatch.setattr(small_files, "CLUSTERED_BYTES", 6_000)
    monkeypatch.setattr(upkeep, "PACES", {UpkeepStep.LOG: UpkeepPace(1, 0)})


@pytest.fixture
def keeping() -> Iterator[Upkeep]:
    made = Upkeep(DEFAULT_RETENTION)
    yield made
    made.close()


def opened(
    location: Location, about: TableMetadata = BY_DAY, columns: list[TableColumn] = COLUMNS
) -> DeltaTableWriter:
    writer = DeltaTableWriter.open_or_create(location, "public.t", columns, about)
    writer.describe(about)
    return writer


def row(lsn: int, seq: int, day: int | None, note_bytes: int = 0) -> dict[str, Any]:
    note = random.Random(f"{lsn}/{seq}").randbytes(note_bytes).hex()
    date = None if day is None else BEGAN + datetime.timedelta(days=day)
    return {"_commit_lsn": lsn, "_seq": seq, "day": date, "note": note}


def put(writer: DeltaTableWriter, rows: list[dict[str, Any]], columns: list[TableColumn] = COLUMNS) -> None:
    """One commit with one file, of one LSN."""
    schema = pa.schema([column.field for column in columns])
    lsn = rows[0]["_commit_lsn"]
    files = ParquetFiles(writer.location, f"data-{lsn:05d}", schema, "_commit_lsn")
    files.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    writer.commit(files.close(), {APP: lsn})


def in_order(location: Location) -> list[dict[str, Any]]:
    return sorted(rows_of(location), key=lambda each: (each["_commit_lsn"], each["_seq"]))


def paths(location: Location) -> list[str]:
    found: list[str] = pa.table(DeltaTable(location.uri).get_add_actions(flatten=True))["path"].to_pylist()
    return found


def stats_of(location: Location) -> dict[str, dict[str, Any]]:
    """By path, of all files that were ever added."""
    version = DeltaTable(location.uri).version()
    actions = [action for each in range(version + 1) for action in log_of(location, each)]
    return {a["add"]["path"]: json.loads(a["add"]["stats"]) for a in actions if "add" in a}


@pytest.mark.usefixtures("small")
def test_merged_rows_are_in_the_order_of_the_column_nulls_last_and_equals_as_committed(
    location: Location,
) -> None:
    writer = opened(location)
    days = [[3, 1], [None, 3], [2, None], [1, 3]]
    for lsn, each in enumerate(days, 1):
        put(writer, [row(lsn, seq, day) for seq, day in enumerate(each)])
    (path,) = paths(location)
    found = pq.read_table(Path(location.uri) / path)
    order = [(1, 1), (4, 0), (3, 0), (1, 0), (2, 1), (4, 1), (2, 0), (3, 1)]
    assert list(zip(found["_commit_lsn"].to_pylist(), found["_seq"].to_pylist(), strict=True)) == order
    assert stats_of(location)[path] == {
        "numRecords": 8,
        "minValues": {"_commit_lsn": 1, "day": "2026-01-02"},
        "maxValues": {"_commit_lsn": 4, "day": "2026-01-04"},
    }
    assert in_order(location) == [
        row(lsn, seq, day) for lsn, each in enumerate(days, 1) for seq, day in enumerate(each)
    ]


@pytest.mark.usefixtures("middling")
def test_an_engine_skips_files_by_the_date_and_all_readers_find_the_same_rows(
    location: Location, tmp_path: Path, keeping: Upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("duckdb_extensions").import_extension("delta")
    monkeypatch.setattr(clustered_files, "GROUP_ROWS", 2)
    plain = Location.parse(str(tmp_path / "public.plain"))
    chance = random.Random(36)
    batches = [
        [row(lsn, seq, chance.choice([None, *range(40)]), 150) for seq in range(20)]
        for lsn in range(1, MANY + 3)
    ]
    ordered = opened(location)
    ordered.upkeep = keeping
    unordered = opened(plain, TableMetadata("", OWN, {}))
    for batch in batches[:MANY]:
        put(ordered, batch)
        put(unordered, batch)
    wait_until(lambda: keeping._tables[location.uri].merge is not None)
    for batch in batches[MANY:]:  # these files have no range of the column
        put(ordered, batch)
        put(unordered, batch)
    clustered = [path for path in paths(location) if CLUSTERED in path]
    assert len(clustered) > 2 and len(paths(location)) == len(clustered) + 2
    # They are never merged again, and each lies within the LSNs of those that it replaced.
    assert not many_small(ordered.files(), "_commit_lsn", [SizeClass(0, 1 << 20, 3)]).num_rows
    stats = [stats_of(location)[path] for path in sorted(clustered)]
    assert all(
        1 <= each["minValues"]["_commit_lsn"] <= each["maxValues"]["_commit_lsn"] <= MANY for each in stats
    )
    ranges = [
        (each["minValues"]["day"], each["maxValues"]["day"]) for each in stats if "day" in each["minValues"]
    ]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))

    expected = [each for batch in batches for each in batch]
    assert in_order(location) == in_order(plain) == expected
    for table, n_files in ((location, 1 + 2), (plain, MANY + 2)):
        with duckdb.connect() as connection:
            connection.execute("load delta")
            query = f"from delta_scan('{table.uri}') where day <= date '2026-01-03'"
            found = connection.execute(f"select _commit_lsn, _seq {query} order by all").fetchall()
            wanted = [
                each
                for each in expected
                if each["day"] is not None and each["day"] <= datetime.date(2026, 1, 3)
            ]
            assert found == [(each["_commit_lsn"], each["_seq"]) for each in wanted] and found
            (plan,) = (text for _, text in connection.execute(f"explain analyze select * {query}").fetchall())
            assert f"Total Files Read: {n_files}" in plan
            null = connection.execute(f"select count(*) from delta_scan('{table.uri}') where day is null")
            assert null.fetchone() == (sum(each["day"] is None for each in expected),)
        # deltalake takes a column for one with ranges in every file, if the table lists it.
        dataset = DeltaTable(table.uri).to_pyarrow_dataset()
        assert dataset.to_table(filter=pa.compute.field("day") <= datetime.date(2026, 1, 3)).num_rows == len(
            wanted
        )


@pytest.mark.usefixtures("small")
def test_a_column_that_is_dropped_or_changes_its_type_midway_stops_nothing(location: Location) -> None:
    writer = opened(location)
    for lsn in range(1, 3):
        put(writer, [row(lsn, 0, 9 - lsn)])
    # ALTER … TYPE timestamp, as ``map_columns`` has it; then the column is gone.
    later = TableColumn("day__timestamp_ntz", pa.timestamp("us"), "day")
    writer.take_columns([later])
    noon = datetime.datetime(2026, 1, 5, 12)
    put(writer, [{"_commit_lsn": 3, "_seq": 0, later.name: noon}], [LSN, SEQ, later])
    put(writer, [{"_commit_lsn": 4, "_seq": 0}], [LSN, SEQ])
    (path,) = paths(location)
    found = pq.read_table(Path(location.uri) / path)
    assert found["_commit_lsn"].to_pylist() == [3, 2, 1, 4]
    assert stats_of(location)[path]["maxValues"] == {
        "_commit_lsn": 4,
        "day": "2026-01-09",
        "day__timestamp_ntz": "2026-01-05T12:00:00.000",
    }


@pytest.mark.usefixtures("small")
def test_a_table_without_the_column_or_with_one_of_no_such_type_keeps_commit_order(
    location: Location,
) -> None:
    for name in ("gone", "note"):
        table = location.child(name)
        writer = opened(table, TableMetadata("", OWN, {}, layout=name))
        for lsn in range(1, MANY + 1):
            put(writer, [row(lsn, 0, 9 - lsn, 1)])
        (path,) = paths(table)
        assert pq.read_table(Path(table.uri) / path)["_commit_lsn"].to_pylist() == [1, 2, 3, 4]
        assert list(stats_of(table)[path]["minValues"]) == ["_commit_lsn"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("year", [0, 10_000])
def test_a_date_that_no_text_in_the_log_can_say_leaves_the_file_without_a_range(
    location: Location, year: int
) -> None:
    writer = opened(location)
    days = (year - 1970) * 366
    schema = pa.schema([column.field for column in COLUMNS])
    for lsn in range(1, MANY + 1):
        arrays = [
            pa.array([lsn]),
            pa.array([0]),
            pa.array([days], pa.int32()).cast(pa.date32()),
            pa.array(["x"]),
        ]
        files = ParquetFiles(location, f"data-{lsn:05d}", schema, "_commit_lsn")
        files.write(pa.RecordBatch.from_arrays(arrays, schema=schema))
        writer.commit(files.close(), {APP: lsn})
    (path,) = paths(location)
    assert stats_of(location)[path]["minValues"] == {"_commit_lsn": 1}


@pytest.mark.usefixtures("small")
def test_rows_of_more_than_one_run_are_ordered_in_each(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustered_files, "RUN_BYTES", 1)
    writer = opened(location)
    for lsn in range(1, MANY + 1):
        put(writer, [row(lsn, seq, 9 - seq) for seq in range(3)])
    assert len(paths(location)) == MANY
    assert in_order(location) == [row(lsn, seq, 9 - seq) for lsn in range(1, MANY + 1) for seq in range(3)]


def test_the_layout_is_told_to_the_table_changed_and_taken_back(location: Location) -> None:
    def told() -> str | None:
        return DeltaTable(location.uri).metadata().configuration.get(LAYOUT)

    opened(location, TableMetadata("", OWN, {}, layout=""))
    assert told() is None and DeltaTable(location.uri).version() == 0
    opened(location)
    assert told() == "day"
    opened(location, TableMetadata("", OWN, {}))  # as who adds a snapshot, or erases
    assert told() == "day"
    opened(location, TableMetadata("", OWN, {}, layout=""))
    assert not told()


def test_a_relation_without_such_a_column_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = DeltaTables(
        Location.parse(str(tmp_path)), layout=LogLayout.parse("public.a=at, public.b=at, public.*=id")
    )

    def relation(name: str, *columns: Column) -> RelationVersion:
        return RelationVersion(
            16384, "public", name, ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True), *columns)
        )

    good = relation("a", Column("at", 1184, -1, False))
    assert tables.about(good).layout == "at" and tables.about(relation("c")).layout == "id"
    assert not caplog.messages
    for _ in range(2):
        assert tables.about(relation("a")).layout == "at"
        tables.about(relation("b", Column("at", 25, -1, False)))
    assert ["table public.a has no column at" in caplog.text, len(caplog.messages)] == [True, 2]
    assert "public.b has at as string" in caplog.messages[1]
