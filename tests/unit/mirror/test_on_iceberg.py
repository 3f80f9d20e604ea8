"""Base tables on Iceberg: made, read by other engines, cut short, overtaken, changed by others, and vacuumed."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from duckdb_extensions import import_extension
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, NestedField

from tests.iceberg_rest import IcebergRestServer
from tests.spark.change_log_maker import BOOL, DATE, INT4, INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.support import IDENTITY, LocalSegments, batch_of, memory_frame, put_memory, read_memory
from tests.typed_table import ORDERS, ROW, ROWS
from tests.unit.delta.test_small_files import s3 as s3
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.base_stores import BoundedFile
from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.manifest import (
    MANIFEST,
    ManifestLine,
    ManifestWriter,
    base_at,
    newest,
    read_lines,
)
from xidstream.pipeline.errors import ComponentLost, ConfigError, StorageFault, Superseded
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg import staged_commits
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import TableMetadata
from xidstream.pipeline.mirror import vacuum as vacuums
from xidstream.pipeline.mirror.base_table import LEFT_OUT
from xidstream.pipeline.mirror.base_tables import BaseTables, Refreshed
from xidstream.pipeline.mirror.refresh import Answer
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE
from xidstream.pipeline.settings.catalog_names import CatalogName
from xidstream.pipeline.sinks.iceberg_sink import IcebergSink
from xidstream.pipeline.sinks.sink_findings import check_of_iceberg
from xidstream.pipeline.spark.frames import SinkBatch

SMALL_FILES = 4 << 10
TIMESTAMPTZ = 1184
A = keyed("a", {"id": INT8, "name": TEXT}, "id", relid=1)
B = keyed("b", {"id": INT8, "name": TEXT}, "id", relid=2)
MORE = keyed("a", {"id": INT8, "name": TEXT, "more": DATE}, "id", relid=1)
LESS = keyed("a", {"id": INT8, "more": DATE}, "id", relid=1)
BACK = keyed("a", {"id": INT8, "more": DATE, "name": TEXT}, "id", relid=1)
HOUR = datetime.timedelta(hours=1)


def no_session() -> Any:
    raise AssertionError("nothing here is for Spark")


class Log(LogMaker):
    """Beside a Delta log, which nobody reads here."""

    def alter(self, relation: RelationVersion) -> None:
        names = [c.name for c in relation.columns]
        held = self.tables[relation.name]
        held[:] = [{name: row.get(name) for name in names} for row in held]

    def update(self, relation: RelationVersion, id_: int, **values: Any) -> int:
        (row,) = (row for row in self.tables[relation.name] if row["id"] == id_)
        row.update(values)
        return self.commit((relation, [{**row, "_change": UPDATE_POSTIMAGE}]))

    @property
    def address(self) -> IcebergAddress:
        return IcebergAddress.parse(str(self.iceberg))

    @property
    def bases(self) -> IcebergBases:
        return IcebergBases(self.address)

    def mirror(self) -> BaseTables:
        return BaseTables(f"iceberg:{self.iceberg}", None, SMALL_FILES)

    def lines(self) -> list[ManifestLine]:
        return read_lines(self.bases, IDENTITY.application_id)

    def table(self, key: str = "public__a") -> Table:
        catalog = self.address.open(makes=False)
        assert catalog is not None
        return catalog.load_table(f"shop_current.{key}")

    def rows(self, line: ManifestLine) -> list[Any]:
        """By pyiceberg alone, as any engine would."""
        found = self.table(line.directory).scan(snapshot_id=line.version).to_arrow().to_pylist()
        return as_rows([{k: v for k, v in row.items() if k != "_text"} for row in found])

    def check(self) -> None:
        """All moments that are named are right."""
        for line in self.lines():
            assert self.rows(line) == self.states[line.lsn][line.table], (line.table, line.lsn)

    def files_on_disk(self, key: str = "public__a") -> set[str]:
        folder = urlparse(self.table(key).location()).path
        return {os.path.join(at, name) for at, _, names in os.walk(folder) for name in names}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    yield from log_in(tmp_path, f"{tmp_path}/lake/shop")


def log_in(tmp_path: Path, iceberg: str) -> Iterator[Log]:
    segments = LocalSegments(str(tmp_path / "segments"))

    def make_batch(*units: Any, number: int = 0) -> SinkBatch:
        batch = batch_of(units, segments, number)
        return SinkBatch(batch, no_session, memory_frame, segments, read_memory, put_memory, segments.storage)

    made = Log(tmp_path / "delta", None, make_batch, iceberg=iceberg)
    yield made
    for sink in made.sinks:
        sink.close()


def filled(n: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"name {i}" * 5} for i in range(n)]


def refreshed(tables: BaseTables) -> Refreshed:
    found = tables.refresh(no_session)
    assert found is not None and not found.left_out
    return found


def answers(found: Refreshed) -> list[Answer]:
    return [each.answer for each in found.tables]


def test_base_tables_are_built_swapped_and_named_as_delta_tables_are(log: Log) -> None:
    log.snapshot(A, filled(2_000))
    log.snapshot(B, filled(1))
    log.insert(A, {"id": 5_000, "name": "x"})
    tables = log.mirror()
    assert answers(refreshed(tables)) == [Answer.BUILD] * 2
    assert len(log.table().inspect.files()) > 5
    log.update(A, 700, name="new")
    found = refreshed(tables)
    assert answers(found) == [Answer.SWAP, Answer.KEEP]
    assert [each.n_files_written for each in found.tables] == [1, 0]
    assert tables.refresh(no_session) is None, "there is nothing new"
    with log.table("public__b").transaction() as transaction:
        transaction.remove_properties("gc.enabled")  # then an engine might expire what the manifest names
    log.insert(B, {"id": 7, "name": None})
    assert answers(refreshed(tables)) == [Answer.KEEP, Answer.SWAP]
    assert log.table("public__b").properties["gc.enabled"] == "false"
    assert len(log.lines()) == 6 and len(newest(log.lines())) == 2
    log.check()


@pytest.fixture
def behind_glue(
    s3: tuple[Location, Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Log]:
    location, _ = s3
    endpoint = (location.storage_options or {})["AWS_ENDPOINT_URL"]
    for name, value in {
        "TYPE": "glue",
        "GLUE__ENDPOINT": endpoint,
        "GLUE__REGION": "us-east-1",
        "S3__ENDPOINT": endpoint,
        "S3__REGION": "us-east-1",
        "WAREHOUSE": f"s3://{location.uri.split('/')[2]}/lake",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{name}", value)
    yield from log_in(tmp_path, "prod/shop")


@pytest.fixture
def behind_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    server = IcebergRestServer(tmp_path)
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "rest")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", server.uri)
    yield from log_in(tmp_path, "prod/shop")
    server.stop()


@pytest.mark.parametrize("where", [pytest.param("behind_glue", marks=pytest.mark.slow), "behind_rest"])
def test_it_is_so_behind_other_catalogs_and_in_a_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    log: Log = request.getfixturevalue(where)
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    log.snapshot(A, filled(300))
    log.insert(A, {"id": 5_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    log.update(A, 70, name="new")
    older = log.mirror()
    assert answers(refreshed(older)) == [Answer.SWAP]
    with pytest.raises(Superseded):
        tables.refresh(no_session)
    log.alter(MORE)
    log.insert(MORE, {"id": 6_000, "name": "y", "more": datetime.date(2026, 11, 28)})
    refreshed(older)
    log.check()
    assert len(log.lines()) == 3 and older.vacuum(0).n_files > 0
    assert len(log.lines()) == 1 and len(log.table().metadata.snapshots) == 1
    log.check()
    log.update(MORE, 71, name="new")
    refreshed(older)
    log.check()


@contextmanager
def duck() -> Iterator[duckdb.DuckDBPyConnection]:
    import_extension("avro")
    import_extension("iceberg")
    with duckdb.connect() as session:
        session.sql("LOAD avro; LOAD iceberg")
        yield session


def read_by_duck(
    session: duckdb.DuckDBPyConnection, log: Log, line: ManifestLine, where: str = ""
) -> list[dict[str, Any]]:
    scan = f"iceberg_scan('{log.table().metadata_location}', snapshot_from_id={line.version})"
    found: list[dict[str, Any]] = session.sql(f"SELECT * FROM {scan} {where}").to_arrow_table().to_pylist()
    return found


def test_duckdb_and_polars_read_what_the_manifest_names(log: Log) -> None:
    log.snapshot(A, filled(500))
    log.insert(A, {"id": 5_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    log.update(A, 3, name="new")
    refreshed(tables)
    with duck() as session:
        for line in log.lines():
            wanted = log.states[line.lsn]["public.a"]
            assert as_rows(read_by_duck(session, log, line)) == wanted
            (one,) = read_by_duck(session, log, line, "WHERE id = 3")
            assert tuple(sorted(one.items())) in wanted and one["id"] == 3
            read = pl.scan_iceberg(log.table(), snapshot_id=line.version).collect()
            assert as_rows(read.to_dicts()) == wanted


def test_columns_come_and_go_and_come_back_and_every_moment_keeps_its_own(log: Log) -> None:
    day = datetime.date(2026, 11, 28)
    log.snapshot(A, filled(300))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    found = []
    for n, (relation, values) in enumerate(
        [(MORE, {"name": "y", "more": day}), (LESS, {"more": day}), (BACK, {"more": day, "name": "back"})]
    ):
        log.alter(relation)
        log.insert(relation, {"id": 2_000 + n, **values})
        found += answers(refreshed(tables))
    assert found == [Answer.SWAP, Answer.REWRITE, Answer.SWAP]
    log.check()
    with duck() as session:
        for line in log.lines():
            assert as_rows(read_by_duck(session, log, line)) == log.states[line.lsn][line.table], line
    ids = {field.name: field.field_id for field in log.table().schema().fields}
    assert ids["id"] == 1 and ids["more"] == 3 and ids["name"] == 4, "a column that came back is another one"


def test_values_of_every_kind_are_what_the_source_has_to_each_reader(log: Log) -> None:
    log.snapshot(ORDERS, ROWS)
    log.insert(ORDERS, {**ROW, "id": 3})
    tables = log.mirror()
    refreshed(tables)
    log.update(ORDERS, 3, is_paid=False)
    assert answers(refreshed(tables)) == [Answer.SWAP]
    wanted = [*ROWS, {**ROW, "id": 3, "is_paid": False}]
    table = log.table("public__orders")
    with duck() as session:
        where = f"iceberg_scan('{table.metadata_location}')"
        session.sql("SET TimeZone = 'UTC'")
        found = [
            table.scan().to_arrow(),
            session.sql(f"SELECT * FROM {where}").to_arrow_table(),
            pl.scan_iceberg(table).collect().to_arrow(),
        ]
    for rows in found:
        assert sorted(rows.to_pylist(), key=lambda row: int(row["id"])) == wanted


KEYS: list[tuple[int, Callable[[int], Any]]] = [
    (INT4, lambda i: i - 50),
    (INT8, lambda i: (i - 50) << 40),
    (TEXT, lambda i: f"{'äa'[i % 2]}{i:04d}" * (1 + i % 3)),
    (DATE, lambda i: datetime.date(1950, 1, 1) + datetime.timedelta(days=i * 31)),
    (
        TIMESTAMPTZ,
        lambda i: datetime.datetime(1969, 1, 1, microsecond=1, tzinfo=datetime.timezone.utc) + i * HOUR * 97,
    ),
]


@pytest.mark.parametrize(("type_", "value"), KEYS)
def test_bounds_of_each_type_of_key_find_the_touched_file_and_no_other(
    log: Log, type_: int, value: Callable[[int], Any]
) -> None:
    table = keyed("k", {"id": type_, "note": TEXT}, "id", relid=7)
    dice = random.Random(type_)
    log.snapshot(table, [{"id": value(i), "note": f"{dice.random()}"} for i in range(1_500)])
    log.update(table, value(1), note="first")
    tables = log.mirror()
    refreshed(tables)
    assert len(log.table("public__k").inspect.files()) > 3
    log.update(table, value(1_001), note="new")
    (done,) = refreshed(tables).tables
    assert done.answer is Answer.SWAP and done.n_files_removed == 1
    log.check()
    wanted = value(1_001)
    moment = wanted.isoformat() if isinstance(wanted, datetime.datetime) else wanted
    found = log.table("public__k").scan(row_filter=EqualTo("id", moment)).to_arrow()
    assert found["note"].to_pylist() == ["new"], "other engines skip by the same bounds"


def test_a_key_with_a_name_of_any_letters_has_bounds(log: Log) -> None:
    table = keyed("odd", {"Größe in cm": INT8, "note": TEXT}, "Größe in cm", relid=9)
    rows = [{"Größe in cm": i, "note": f"note {i}" * 9} for i in range(1_500)]
    log.snapshot(table, rows)
    log.insert(table, {"Größe in cm": -1, "note": "x"})
    tables = log.mirror()
    refreshed(tables)
    log.insert(table, {"Größe in cm": 9_000, "note": "y"})
    (done,) = refreshed(tables).tables
    assert done.answer is Answer.SWAP and done.n_files_removed < len(log.table("public__odd").inspect.files())
    log.check()


def test_a_key_of_booleans_alone_has_no_bounds_and_the_table_is_written_as_a_whole(log: Log) -> None:
    table = keyed("flags", {"is_on": BOOL, "note": TEXT}, "is_on", relid=8)
    log.snapshot(table, [{"is_on": True, "note": "x"}])
    log.insert(table, {"is_on": False, "note": "y"})
    tables = log.mirror()
    refreshed(tables)
    log.truncate(table)
    assert answers(refreshed(tables)) == [Answer.REWRITE]
    log.check()


# -- cut short, overtaken ---------------------------------------------------------------------------------

POINTS = (
    "writing_base",
    "base_written",
    "iceberg_committing",
    "base_committed",
    "committing_manifest",
    "manifest_committed",
)


@pytest.mark.parametrize("point", POINTS)
def test_a_refresh_that_ends_anywhere_has_changed_nothing_for_readers_and_the_next_goes_on(
    log: Log, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    for relation in (A, B):
        log.snapshot(relation, filled(300))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    before = log.lines()
    log.update(A, 3, name="new")
    log.update(B, 4, name="new")
    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "_plan", FaultPlan(f"{point}:error=ComponentLost", None))
        with pytest.raises(ComponentLost):
            tables.refresh(no_session)
    assert (log.lines() == before) is (point != "manifest_committed")
    log.check()
    after = log.mirror()  # a process of its own
    if point != "manifest_committed":
        assert refreshed(after).lsn == log.lsn
    assert {line.lsn for line in newest(log.lines())} == {log.lsn}
    log.check()


class _Between:
    """A plan of faults that acts at one point, once."""

    def __init__(self, point: str, act: Callable[[], object]) -> None:
        self._point, self._act = point, act

    def reach(self, point: str, tag: str | None = None) -> None:
        if point == self._point:
            self._point = ""
            self._act()


@pytest.mark.parametrize("point", ["base_written", "committing_manifest"])
def test_a_mirror_that_is_overtaken_commits_nothing_more(
    log: Log, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    log.snapshot(A, filled(300))
    log.insert(A, {"id": 1_000, "name": "x"})
    older, newer = log.mirror(), log.mirror()
    refreshed(older)
    log.update(A, 3, name="new")
    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "_plan", _Between(point, lambda: newer.refresh(no_session)))
        with pytest.raises(Superseded, match=r"mirror of slot .* Iceberg table"):
            older.refresh(no_session)
    assert len(log.lines()) == 2 and newer.owner == 2
    log.check()
    n_snapshots = len(log.table().metadata.snapshots)
    with pytest.raises(Superseded):
        older.refresh(no_session)
    assert len(log.table().metadata.snapshots) == n_snapshots


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_commit_that_is_there_and_is_told_to_have_lost_keeps_its_files(
    log: Log, monkeypatch: pytest.MonkeyPatch, is_followed: bool
) -> None:
    """As Glue's client tells it, which sends a request again where the answer was lost."""
    log.snapshot(A, filled(30))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    log.update(A, 3, name="new")
    commit_table = SqlCatalog.commit_table
    refused: list[Any] = []

    def told_too_late(catalog: SqlCatalog, table: Table, *given: Any) -> Any:
        found = commit_table(catalog, table, *given)
        if table.name()[-1] == "public__a" and not refused:
            refused.append(table.name())
            if is_followed:
                with (
                    ThreadPoolExecutor() as others
                ):  # what a thread writes meanwhile is taken for the commit's own
                    others.submit(log.table().append, log.table().scan().to_arrow().slice(0, 0)).result()
            raise CommitFailedException("somebody else was first")
        return found

    monkeypatch.setattr(SqlCatalog, "commit_table", told_too_late)
    if is_followed:
        with pytest.raises(StorageFault):
            tables.refresh(no_session)
    else:
        assert answers(refreshed(tables)) == [Answer.SWAP]
    assert refused
    log.check()
    log.update(A, 4, name="newer")
    refreshed(tables)
    log.check()


# -- others -----------------------------------------------------------------------------------------------


def delete_a_row(log: Log) -> None:
    log.table().delete("id = 5")


def compact(log: Log) -> None:
    table = log.table()
    table.overwrite(table.scan().to_arrow())


def rename_a_column(log: Log) -> None:
    with log.table().update_schema() as update:
        update.rename_column("name", "title")


def drop_a_column(log: Log) -> None:
    with log.table().update_schema() as update:
        update.delete_column("name")


def set_back(log: Log) -> None:
    first = log.table().history()[0].snapshot_id
    log.table().manage_snapshots().set_current_snapshot(snapshot_id=first).commit()


@pytest.mark.parametrize("change", [delete_a_row, compact, rename_a_column, drop_a_column, set_back])
def test_a_table_that_another_program_has_changed_is_built_anew(
    log: Log, change: Callable[[Log], None]
) -> None:
    log.snapshot(A, filled(300))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    log.update(A, 2, name="newer")
    refreshed(tables)
    change(log)
    log.update(A, 3, name="new")
    assert answers(refreshed(tables)) == [Answer.BUILD]
    line = newest(log.lines())[0]
    assert log.rows(line) == log.states[line.lsn][line.table]
    assert log.table().scan().to_arrow().num_rows == len(log.tables["public.a"])
    log.update(A, 4, name="new")
    assert answers(refreshed(tables)) == [Answer.SWAP], "and kept up from there"


def test_a_table_that_somebody_has_partitioned_is_left_out_and_holds_up_no_other(log: Log) -> None:
    """It ended the refresh of all tables."""
    log.snapshot(A, filled(30))
    log.snapshot(B, filled(1))
    first = log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    with log.table().update_spec() as update:
        update.add_identity("name")
    log.update(A, 3, name="new")
    log.update(B, 0, name="new")
    found = tables.refresh(no_session)
    assert found is not None and answers(found) == [Answer.SWAP]
    assert "is partitioned by another program" in found.left_out["public.a"]
    assert [line.table for line in newest(log.lines())] == ["public.b"]
    assert base_at(log.bases, IDENTITY.application_id, "public.a", 1, first) is not None
    tables.vacuum(3_600)
    log.check()
    with log.table().update_spec() as update:
        update.remove_field("name")
    log.update(B, 0, name="newer")
    assert len(refreshed(tables).tables) == 2
    assert len(newest(log.lines())) == 2
    log.check()


@pytest.mark.parametrize("is_first", ["the log", "the mirror"])
def test_a_log_and_the_base_tables_of_another_one_cannot_be_in_one_namespace(log: Log, is_first: str) -> None:
    """Both call a table public__a."""
    log.snapshot(A, filled(3))
    log.insert(A, {"id": 1_000, "name": "x"})
    other = IcebergSink(IcebergAddress.parse(f"{log.iceberg}_current"), IDENTITY)
    tables = log.mirror()
    if is_first == "the log":
        other.open(no_session)
        with pytest.raises(ConfigError, match="has a change log"):
            tables.refresh(no_session)
    else:
        refreshed(tables)
        with pytest.raises(ConfigError, match="has the base tables of another log"):
            other.open(no_session)
        (finding,) = check_of_iceberg(f"{log.iceberg}_current".removeprefix("iceberg:"), "")(None)
        assert "base tables of another log" in finding.statement
        log.check()
    other.close()


def test_a_vacuum_of_a_new_mirror_does_not_take_the_change_of_another_program_for_its_own(log: Log) -> None:
    log.snapshot(A, filled(30))
    log.snapshot(B, filled(1))
    log.insert(A, {"id": 1_000, "name": "x"})
    refreshed(log.mirror())
    tables = log.mirror()  # it gives its number to the table of which there is nothing new
    log.update(B, 0, name="new")
    assert answers(refreshed(tables)) == [Answer.KEEP, Answer.SWAP]
    delete_a_row(log)
    tables.vacuum(3_600)
    found = log.bases.open("public__a", "public.a")
    assert found is not None
    assert found.watermark(f"mirror/{IDENTITY.application_id}/owner") == tables.owner == 2
    assert not found.is_as_made
    log.update(B, 0, name="newer")
    assert answers(refreshed(tables)) == [Answer.BUILD, Answer.SWAP]
    log.check()


def test_tables_of_others_in_the_namespace_hold_up_no_vacuum(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    log.snapshot(A, filled(3))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    catalog = log.address.open(makes=False)
    assert catalog is not None
    field = NestedField(1, "day", DateType(), required=False)
    by_day = PartitionSpec(PartitionField(1, 1_000, IdentityTransform(), "day"))
    made = catalog.create_table("shop_current.report", Schema(field), partition_spec=by_day)
    made.append(pa.table({"day": [datetime.date(2026, 11, 28)]}))
    there = log.files_on_disk("report")
    log.update(A, 1, name="new")
    refreshed(tables)
    assert tables.vacuum(0).n_files == 1
    assert log.files_on_disk("report") == there
    log.check()


def test_a_manifest_whose_files_another_program_calls_by_another_form_of_uri_is_read(log: Log) -> None:
    log.snapshot(A, filled(3))
    lsn = log.insert(A, {"id": 1_000, "name": "x"})
    refreshed(log.mirror())
    table = log.table(MANIFEST)
    (old,) = (task.file for task in table.scan().plan_files())
    with table.transaction() as transaction, transaction.update_snapshot().overwrite() as producer:
        producer.delete_data_file(old)
        new = DataFile.from_args(
            content=old.content,
            file_path=f"file:{urlparse(old.file_path).path}",
            file_format=old.file_format,
            partition=old.partition,
            record_count=old.record_count,
            file_size_in_bytes=old.file_size_in_bytes,
            lower_bounds=old.lower_bounds,
            upper_bounds=old.upper_bounds,
        )
        new.spec_id = old.spec_id
        producer.append_data_file(new)
    found = base_at(log.bases, IDENTITY.application_id, "public.a", 1, lsn)
    assert found is not None and found.lsn == lsn


def test_a_table_that_was_dropped_is_made_anew_and_its_older_moments_have_no_base(log: Log) -> None:
    log.snapshot(A, filled(300))
    first = log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    catalog = log.address.open(makes=False)
    assert catalog is not None
    catalog.drop_table("shop_current.public__a")
    second = log.update(A, 3, name="new")
    assert answers(refreshed(tables)) == [Answer.BUILD]
    slot = IDENTITY.application_id
    assert base_at(log.bases, slot, "public.a", 1, first) is None
    found = base_at(log.bases, slot, "public.a", 1, second)
    assert found is not None and found.lsn == second


def test_a_table_that_is_dropped_while_it_is_refreshed_is_made_anew(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.snapshot(A, filled(30))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    log.update(A, 3, name="new")
    catalog = log.address.open(makes=False)
    assert catalog is not None
    drop = partial(catalog.drop_table, "shop_current.public__a")
    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "_plan", _Between("base_written", drop))
        assert answers(refreshed(tables)) == [Answer.BUILD]
    line = newest(log.lines())[0]
    assert log.rows(line) == log.states[line.lsn]["public.a"]


def test_a_catalog_of_glue_for_the_base_tables_is_refused(log: Log) -> None:
    log.snapshot(A, filled(1))
    with pytest.raises(ConfigError, match="mirror_catalog is for Delta tables"):
        BaseTables(f"iceberg:{log.iceberg}", None, SMALL_FILES, catalog=CatalogName.parse("glue:shop"))


# -- what goes --------------------------------------------------------------------------------------------


def named_files(log: Log, key: str = "public__a") -> set[str]:
    """The data files of all snapshots that there are."""
    table = log.table(key)
    found = [
        task for s in table.metadata.snapshots for task in table.scan(snapshot_id=s.snapshot_id).plan_files()
    ]
    return {urlparse(task.file.file_path).path for task in found}


def test_a_vacuum_takes_what_no_named_version_needs_and_leaves_what_is_young(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.snapshot(A, filled(300))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    for i in range(5):
        log.update(A, i, name=f"new {i}")
        refreshed(tables)
    folder = Path(urlparse(log.table().location()).path)
    left = folder / "refresh-x" / "00000.parquet"
    left.parent.mkdir()
    left.write_bytes(b"of a mirror that was killed")
    before = log.files_on_disk()
    assert tables.vacuum(60).n_files == 0 and log.files_on_disk() >= before, "all is named, or young"
    assert len(log.lines()) == 5
    tables.vacuum(0)
    assert len(log.lines()) == 1 and len(log.table().metadata.snapshots) > 1, (
        "readers have just found the others"
    )
    assert left.exists()
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    assert tables.vacuum(0).n_files >= 5
    assert [s.snapshot_id for s in log.table().metadata.snapshots] == [line.version for line in log.lines()]
    assert not left.exists()
    on_disk = {path for path in log.files_on_disk() if path.endswith(".parquet")}
    assert on_disk == named_files(log)
    assert len([path for path in log.files_on_disk() if "/snap-" in path]) == 1
    assert len(log.table(MANIFEST).metadata.snapshots) == 1
    log.check()
    log.update(A, 9, name="behind it")
    refreshed(tables)
    log.check()


def test_the_manifests_small_files_are_merged_and_its_lines_stay(log: Log) -> None:
    manifest = ManifestWriter(IcebergBases(log.address, makes=True), "7/shop/orders")
    manifest.claim()
    now = datetime.datetime.now(datetime.timezone.utc)
    for lsn in range(1, 41):
        manifest.append([ManifestLine("7/shop/orders", lsn, now, "public.a", "public__a", 1, 99, lsn)])
    assert [line.lsn for line in read_lines(log.bases)] == list(range(1, 41)) and manifest.look() == (40, 0)
    assert log.table(MANIFEST).inspect.files().num_rows < 20
    assert len(log.table(MANIFEST).inspect.manifests()) < 20


def test_a_table_of_many_files_is_written_anew_behind_manifests_of_files_that_are_gone(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, marks = TableMetadata("", {}, {}), {"mirror/x": 1}
    bases = IcebergBases(log.address, makes=True)
    table = bases.open_or_create("public__x", "public.x", [TableColumn("id", pa.int64(), "id")], about)
    names = [[f"refresh-{n}/{i}.parquet" for i in range(100)] for n in range(2)]
    first, second = ([BoundedFile(name, 100, 1) for name in each] for each in names)
    table.put(first, [], marks)
    for name in names[0][:3]:
        table.put([], [name], marks)
    manifests = log.table("public__x").inspect.manifests()
    monkeypatch.setattr(staged_commits, "MANIFEST_BYTES", max(manifests["length"].to_pylist()))
    table.put(second, None, marks)
    assert sorted(table.files()["path"].to_pylist()) == sorted(names[1])
    manifests = log.table("public__x").inspect.manifests()
    assert manifests["deleted_data_files_count"].to_pylist() == [0, 97], "what went before is told no more"


def test_a_snapshot_that_a_tag_names_stays_with_its_files(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    log.snapshot(A, filled(30))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    (line,) = log.lines()
    log.table().manage_snapshots().create_tag(line.version, "audit").commit()
    log.update(A, 3, name="new")
    refreshed(tables)
    log.update(A, 4, name="new")
    refreshed(tables)
    tables.vacuum(0)
    assert len(log.table().metadata.snapshots) == 2 and len(log.lines()) == 1
    assert log.rows(line) == log.states[line.lsn]["public.a"]


def test_a_table_that_is_left_out_says_so_and_is_emptied_after_the_retention(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    for relation in (A, B):
        log.snapshot(relation, filled(30))
    log.insert(A, {"id": 1_000, "name": "x"})
    tables = log.mirror()
    refreshed(tables)
    open_ = log.bases.open
    from xidstream.pipeline.mirror.base_table import BaseTable, MirrorMarks

    base = BaseTable.open(
        log.bases, "public__a", "public.a", MirrorMarks(IDENTITY.application_id, tables.owner)
    )
    assert base is not None
    base.leave_out("it is of no use")
    found = open_("public__a", "public.a")
    assert found is not None and "it is of no use" in found.properties[LEFT_OUT]
    log.update(B, 3, name="new")
    log.update(A, 3, name="new")
    # The table has no line any more: the refresh is as one that has left it out.
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    monkeypatch.setattr("xidstream.pipeline.mirror.base_tables._tables_at", _without_a(tables))
    tables.refresh(no_session)
    tables.vacuum(0)
    assert log.table().scan().to_arrow().num_rows == 0
    assert not [path for path in log.files_on_disk() if path.endswith(".parquet")]
    monkeypatch.undo()
    log.update(A, 3, name="it comes back")
    refreshed(tables)
    assert log.rows(newest(log.lines())[0]) == log.states[log.lsn]["public.a"]


def _without_a(tables: BaseTables) -> Callable[..., Any]:
    from xidstream.pipeline.mirror import base_tables

    real = base_tables._tables_at

    def at(*given: Any) -> Any:
        found, left_out = real(*given)
        return [t for t in found if t.shape.table != "public.a"], {**left_out, "public.a": "it is of no use"}

    return at


def test_the_files_have_the_field_ids_of_the_columns(log: Log) -> None:
    log.snapshot(A, filled(3))
    log.insert(A, {"id": 1_000, "name": "x"})
    refreshed(log.mirror())
    (path, *_) = named_files(log)
    schema = pa.parquet.read_schema(path)
    ids = {field.name: int(field.metadata[b"PARQUET:field_id"]) for field in schema}
    assert ids == {field.name: field.field_id for field in log.table().schema().fields}
