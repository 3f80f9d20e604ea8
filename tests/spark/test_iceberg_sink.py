"""The Iceberg sink beside the Delta sink: of the same events both hold the same rows, whoever reads them.

The rules are the same code, and ``sink_contract`` runs them for both. Here it is what Iceberg does otherwise: how files
are named, columns that are widened, the pace of commits, and other programs that read the tables.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable
from duckdb_extensions import import_extension

from tests.spark.support import (
    IDENTITY,
    INT2,
    INT4,
    INT8,
    NUMERIC,
    TEXT,
    Transaction,
    numeric,
    plain_messages,
    relation,
)
from tests.spark.test_delta_sink import tenure_of
from tests.spark.test_frames import NATIVE, VALUES
from tests.spark.test_linked_tables import A, B, World, no_job, some
from xidstream.pipeline import faultpoints
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import AT_ONCE, Pace
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import table_name
from xidstream.pipeline.log_tables.locations import encode_table
from xidstream.pipeline.schema.rows import DELETE, TRUNCATE, UPDATE_POSTIMAGE
from xidstream.pipeline.settings.sink_settings import SinkSettings
from xidstream.pipeline.sinks.iceberg_sink import IcebergSink
from xidstream.pipeline.sinks.log_sink import LogSink
from xidstream.pipeline.sinks.sink import Sink, make_sink
from xidstream.pipeline.spark.frames import SinkBatch

pytestmark = pytest.mark.spark
assert no_job

Rows = list[dict[str, Any]]


class Both(World):
    """The same batches, into Delta tables and into Iceberg tables."""

    def __init__(self, folder: Path, spark: Any, duck: duckdb.DuckDBPyConnection) -> None:
        super().__init__(folder, spark)
        self.address = IcebergAddress.parse(f"{folder}/lake/shop")
        self._duck = duck
        self._iceberg: list[IcebergSink] = []
        self._n_iceberg = 0

    def iceberg(self, **more: Any) -> IcebergSink:
        sink = IcebergSink(self.address, IDENTITY, **{"commit_every_s": 0, **more})
        sink.open(lambda: self._spark)
        self._iceberg.append(sink)
        self._n_iceberg += 1
        sink.claim(tenure_of(self._n_iceberg, wal_end=1 << 40))
        return sink

    def close(self) -> None:
        for sink in self._iceberg:
            sink.close()
        super().close()

    def write(self, *units: Any) -> None:
        """Into both, by new runs."""
        for sink in (self.sink(), self.iceberg()):
            sink.write(self.batch(*units))

    def table(self, key: str) -> Any:
        catalog = self.address.open(makes=False)
        assert catalog is not None
        return catalog.load_table(f"shop.{key}")

    def by_pyiceberg(self, key: str) -> Rows:
        return ordered(self.table(key).scan().to_arrow().to_pylist())

    def by_duckdb(self, key: str) -> Rows:
        where = self.table(key).metadata_location
        return ordered(self._duck.sql(f"SELECT * FROM iceberg_scan('{where}')").to_arrow_table().to_pylist())

    def by_polars(self, key: str) -> list[int]:
        rows = pl.scan_iceberg(self.table(key)).select(lsn_of(key)).collect()
        return sorted(rows[lsn_of(key)].fill_null(0).to_list())

    def by_delta(self, directory: str) -> Rows:
        return ordered(DeltaTable(str(self.root / directory)).to_pyarrow_table().to_pylist())

    def check_same(self, *tables: tuple[str, str]) -> None:
        """All tables have the rows of the Delta tables, to pyiceberg and to DuckDB."""
        names = [(encode_table(*name), table_name(*name)) for name in tables]
        for directory, key in [*names, ("_transactions", "_transactions"), ("_messages", "_messages")]:
            wanted = self.by_delta(directory)
            assert self.by_pyiceberg(key) == wanted, key
            assert self.by_duckdb(key) == wanted, key
            assert self.by_polars(key) == sorted(row[lsn_of(key)] or 0 for row in wanted), key


def lsn_of(key: str) -> str:
    return "_commit_lsn" if "__" in key else "commit_lsn"


def ordered(rows: Rows) -> Rows:
    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) or 0 for name in ("_commit_lsn", "_seq", "commit_lsn", "lsn"))

    plain = [
        {name: dict(value) if name == "_text" and value else value for name, value in row.items()}
        for row in rows
    ]
    return sorted(plain, key=order)


@pytest.fixture(scope="session")
def duck(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    """DuckDB with its extension for Iceberg, from packages: nothing is fetched, and nothing is left at home."""
    folder = tmp_path_factory.mktemp("duckdb")
    connection = duckdb.connect(config={"extension_directory": str(folder)})
    for name in ("avro", "iceberg"):
        import_extension(name, con=connection)
    connection.sql("LOAD iceberg")
    return connection


@pytest.fixture
def both(
    tmp_path: Path, spark: Any, duck: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Both]:
    made = Both(tmp_path, spark, duck)
    yield made
    made.close()


def test_every_type_in_memory_and_in_segments_is_what_delta_has_to_pyiceberg_and_duckdb(
    both: Both, no_job: None
) -> None:
    name = (NATIVE.schema, NATIVE.table)
    both.write(
        Transaction(90, [(NATIVE, [VALUES, {"_change": TRUNCATE}])], messages=[(91, "p", b"\x00x")]),
        both.segments(100, [(NATIVE, [VALUES, {"i4": 1, "_change": DELETE}]), (A, some(1, 2))]),
        plain_messages((105, "q", b"y")),
    )
    both.check_same(name, ("public", "a"))
    found = both.table(table_name(*name)).schema()
    types = {field.name: str(field.field_type) for field in found.fields}
    assert (types["i2"], types["i4"], types["o"], types["n"]) == ("int", "int", "long", "decimal(10, 2)")
    assert (types["ts"], types["tz"], types["u"], types["big"]) == (
        "timestamp",
        "timestamptz",
        "string",
        "string",
    )


def test_segments_get_a_second_name_and_none_is_written_again(both: Both, no_job: None) -> None:
    unit = both.segments(100, [(A, some(1, 2)), (B, some(3)), (A, some(4))])
    both.iceberg().write(both.batch(unit))
    stored = {os.stat(path).st_ino for path in Path(both.storage.uri).rglob("*.parquet")}
    for key, n in (("public__a", 2), ("public__b", 1)):
        files = [task.file for task in both.table(key).scan().plan_files()]
        inodes = {os.stat(file.file_path.removeprefix("file://")).st_ino for file in files}
        assert len(inodes) == n and inodes <= stored
        bounds = {int.from_bytes(b, "little") for file in files for b in file.lower_bounds.values()}
        assert bounds == {100}


NARROW = relation(
    "public.n", ("i", INT2), ("k", INT4), ("f", 700), ("d", NUMERIC, numeric(6, 2)), ("l", 1007), relid=9
)
WIDE = relation(
    "public.n", ("i", INT4), ("k", INT8), ("f", 701), ("d", NUMERIC, numeric(9, 2)), ("l", 1016), relid=9
)


def narrow(**values: Any) -> dict[str, Any]:
    return {"i": 1, "k": 2, "f": 1.5, "d": None, "l": [1, None], **values}


def test_a_column_is_widened_in_place_and_segments_of_both_types_are_linked(both: Both, no_job: None) -> None:
    """A transaction that began before the ALTER may commit after one that began after it."""
    sink = both.iceberg()
    sink.write(both.batch(both.segments(100, [(NARROW, [narrow()])])))
    large = narrow(k=1 << 40, f=1e300, l=[1 << 40])
    sink.write(
        both.batch(both.segments(110, [(WIDE, [large])]), both.segments(120, [(NARROW, [narrow(k=7)])]))
    )
    sink.write(both.batch(Transaction(130, [(NARROW, [narrow(k=8)]), (WIDE, [large])])))
    rows = both.by_pyiceberg("public__n")
    assert rows == both.by_duckdb("public__n")
    assert [row["k"] for row in rows] == [2, 1 << 40, 7, 8, 1 << 40]
    assert [row["l"] for row in rows] == [[1, None], [1 << 40], [1, None], [1, None], [1 << 40]]
    assert [row["f"] for row in rows] == [1.5, 1e300, 1.5, 1.5, 1e300]
    columns = [field.name for field in both.table("public__n").schema().fields]
    assert columns[:5] == ["i", "k", "f", "d", "l"] and columns[5] == "_change_type"


def test_columns_that_come_go_and_change_their_name_or_type_are_as_in_delta(both: Both) -> None:
    layouts = [
        relation("public.s", ("id", INT8), ("name", TEXT), ("price", NUMERIC, numeric(10, 2)), relid=9),
        relation(
            "public.s",
            ("id", INT8),
            ("name", TEXT),
            ("price", NUMERIC, numeric(10, 2)),
            ("note", TEXT),
            relid=9,
        ),
        relation("public.s", ("id", INT8), ("title", TEXT), ("note", TEXT), relid=9),
        relation("public.s", ("id", TEXT), ("title", TEXT), ("note", TEXT), ("price", TEXT), relid=9),
    ]
    values = {"name": "n", "title": "t", "note": "o"}
    units: list[Any] = []
    for number, layout in enumerate(layouts):
        row = {c.name: values.get(c.name) for c in layout.columns}
        row["id"] = str(number) if number == 3 else number
        row["price"] = "7.50" if number == 3 else None
        given = {c.name: row[c.name] for c in layout.columns}
        lsn, rows = 100 + 10 * number, [(layout, [given])]
        units.append(both.segments(lsn, rows) if number % 2 else Transaction(lsn, rows))
    both.write(*units[:2])
    both.write(*units[2:])
    both.check_same(("public", "s"))
    names = [field.name for field in both.table("public__s").schema().fields]
    assert {"name", "title", "note", "price", "price__string", "id__string"} <= set(names)


STEPS: Sequence[str] = (
    "iceberg_committing",
    "committing_table",
    "table_committed",
    "committing_transactions",
    "transactions_committed",
    "segment_linked",
)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_with_crashes_between_any_two_steps_are_what_delta_has(
    both: Both, no_job: None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pick = random.Random(seed)
    units: list[Any] = []
    for n in range(24):
        lsn = 100 + 10 * n
        parts = [
            (table, some(*range(lsn, lsn + pick.randint(1, 3))))
            for table in pick.sample([A, B], pick.randint(1, 2))
        ]
        parts = [(t, rows if t is A else [{"id": r["id"]} for r in rows]) for t, rows in parts]
        if pick.random() < 0.3:
            parts = [(t, [{**rows[0], "_change": UPDATE_POSTIMAGE}, *rows[1:]]) for t, rows in parts]
            units.append(Transaction(lsn, parts, messages=[(lsn - 1, "p", b"x")]))
        else:
            units.append(both.segments(lsn, parts) if pick.random() < 0.5 else Transaction(lsn, parts))
    whole = both.sink()
    whole.write(both.batch(*units))
    begin = 0
    sink: Sink = both.iceberg()
    while begin < len(units):
        end = min(len(units), begin + pick.randint(1, 6))
        if pick.random() < 0.4:
            monkeypatch.setattr(
                faultpoints, "_plan", FaultPlan(f"{pick.choice(STEPS)}:error@{pick.randint(1, 2)}", None)
            )
        try:
            sink.write(both.batch(*units[begin:end]))
            begin = end
        except XidstreamError:
            monkeypatch.setattr(faultpoints, "_plan", None)
            sink = both.iceberg()
            begin = max(0, begin - pick.randint(0, 4))
    both.check_same(("public", "a"), ("public", "b"))
    catalog = {path.name for path in (Path(both.address.catalog) / "shop").iterdir()}
    assert catalog == {"public__a", "public__b", "_transactions", "_messages"}


def test_the_pace_counts_from_the_end_of_a_batch_and_knows_when_one_is_behind(
    both: Both, monkeypatch: pytest.MonkeyPatch, no_job: None
) -> None:
    now_s = [100.0]
    sink = both.iceberg(commit_every_s=1.0, clock=lambda: now_s[0])
    assert sink.pace() == AT_ONCE, "the first has nobody to wait for"
    write = LogSink.write

    def slowly(self: LogSink, batch: SinkBatch) -> None:
        write(self, batch)
        now_s[0] += 0.5

    monkeypatch.setattr(LogSink, "write", slowly)
    sink.write(both.batch(Transaction(100, [(A, some(1))])))
    assert sink.pace() == Pace(1.0, 50_000, 3.0)
    now_s[0] += 0.25
    assert sink.pace() == Pace(0.75, 50_000, 3.0)
    now_s[0] += 5
    assert sink.pace() == Pace(0.0, 50_000, 3.0)
    assert both.iceberg(commit_every_s=0).pace() == AT_ONCE


def test_the_setting_says_the_pace(tmp_path: Path) -> None:
    made = make_sink(f"iceberg:{tmp_path}/lake/shop", IDENTITY, SinkSettings(commit_every_s=2.5))
    assert isinstance(made, IcebergSink) and made._commit_every_s == 2.5
    assert list(tmp_path.iterdir()) == [], "nothing is touched before it is opened"
