"""One snapshot of an Iceberg table as the log's readers take it: what files say, and what is refused. No Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestWriterV2
from pyiceberg.typedef import Record
from pyiceberg.types import LongType, StringType

from tests.spark.support import INT4, INT8, TEXT, relation
from tests.unit.iceberg.test_iceberg_table import SLOT, A, columns_of, commit, opened, raw, table_of
from xidstream.pipeline.changelog.iceberg_root import IcebergLogTable, IcebergRoot
from xidstream.pipeline.errors import StorageFault, Unsupported
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import source_of, table_name
from xidstream.pipeline.iceberg.log_reading import IcebergTableSnapshot
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.parquet_files import ColumnRange, WrittenFile
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA


def snapshot_of(root: Path) -> IcebergTableSnapshot:
    return IcebergTableSnapshot(table_of(root))


def named(snapshot: IcebergTableSnapshot) -> dict[str, tuple[str, ...]]:
    return {column.names[0]: column.names for column in snapshot.file_columns}


def add_file(root: Path, monkeypatch: pytest.MonkeyPatch, path: str = "", **more: Any) -> None:
    """A file that another program names."""
    table = raw(root)
    path = path or f"{table.location()}/data/x.parquet"
    file = DataFile.from_args(
        **{
            "content": DataFileContent.DATA,
            "file_path": path,
            "file_format": FileFormat.PARQUET,
            "partition": Record(),
            "record_count": 1,
            "file_size_in_bytes": 1,
            **more,
        }
    )
    file.spec_id = 0
    with monkeypatch.context() as patched:
        if file.content is not DataFileContent.DATA:
            patched.setattr(ManifestWriterV2, "content", lambda self: ManifestContent.DELETES)
        with table.transaction() as change, change.update_snapshot().fast_append() as append:
            append.append_data_file(file)


def test_files_have_their_size_rows_and_range_and_one_snapshot_stays_what_it_is(tmp_path: Path) -> None:
    commit(table_of(tmp_path), 100, 1, 2)
    before = IcebergLogTable(snapshot_of(tmp_path))
    commit(table_of(tmp_path), 200, 3)
    after = IcebergLogTable(snapshot_of(tmp_path))
    assert [(file.min_lsn, file.max_lsn, file.n_rows) for file in before.files()] == [(100, 100, 2)]
    assert before.watermark(SLOT) == 100 and after.watermark(SLOT) == 200
    assert before.watermark("7/shop/other") is None and before.slots() == [SLOT]
    assert [(f.min_lsn, f.max_lsn) for f in after.files(101)] == [(200, 200)] and len(after.files()) == 2
    assert all(file.n_bytes > 500 for file in after.files())
    assert (after.count(100), after.count(200), after.count(150)) == (2, 1, 0)
    assert after.read(["id", "_commit_lsn"]).sort_by("id").to_pydict() == {
        "id": [1, 2, 3],
        "_commit_lsn": [100, 100, 200],
    }
    (file,) = after.files(200)
    assert after.read_file(file, ["id"], pc.field("id") > 3).num_rows == 0


def test_ranges_of_times_are_times_and_a_file_without_ranges_may_have_every_lsn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = opened(tmp_path)
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    key = locations.TRANSACTIONS
    table = tables.open_or_create(key, key, columns, tables.about_own(key))
    ranges = (
        ColumnRange("commit_timestamp", "2023-11-14T22:13:20.000Z", "2023-11-14T22:13:21.000Z"),
        ColumnRange("xid", 7, 9),
    )
    table.commit([WrittenFile("data-x/nobody.parquet", 5, 3, 200, 250, ranges)], {SLOT: 250}, "commit_lsn")
    found = IcebergRoot(IcebergAddress.parse(f"{tmp_path}/lake/shop")).open(key)
    assert found is not None
    (file,) = found.files(column="commit_lsn")
    assert (file.min_lsn, file.max_lsn, file.n_rows, file.n_bytes) == (200, 250, 3, 5)
    assert found.least("xid") == {file.path: 7} and found.greatest("xid") == {file.path: 9}
    assert found.greatest("commit_timestamp")[file.path].isoformat() == "2023-11-14T22:13:21+00:00"
    commit(table_of(tmp_path), 100, 1)
    add_file(tmp_path, monkeypatch)
    theirs = IcebergLogTable(snapshot_of(tmp_path)).files(10**9)
    assert [(f.path, f.min_lsn) for f in theirs] == [("data/x.parquet", 0)]


def test_deleted_rows_other_places_and_other_formats_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (more, said) in enumerate(
        (
            (
                {"content": DataFileContent.POSITION_DELETES},
                "another program has deleted rows of Iceberg table",
            ),
            ({"path": "file:///elsewhere/x.parquet"}, "in another place than the table"),
            ({"file_format": FileFormat.ORC}, "it is in ORC"),
        )
    ):
        root = tmp_path / str(number)
        commit(table_of(root), 100, 1)
        add_file(root, monkeypatch, **more)
        with pytest.raises(Unsupported, match=said):
            IcebergLogTable(snapshot_of(root)).files()


def test_the_scheme_of_a_files_place_may_be_written_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(table_of(tmp_path), 100, 1)
    there = raw(tmp_path).location().removeprefix("file://")
    for path in (f"file:{there}/data/x.parquet", f"{there}/data/y.parquet"):
        add_file(tmp_path, monkeypatch, path)
    found = {file.path: file.is_own for file in snapshot_of(tmp_path).files}
    assert {path for path, is_own in found.items() if not is_own} == {"data/x.parquet", "data/y.parquet"}
    assert len(found) == 3


def described(root: Path, *versions: Any) -> IcebergTableWriter:
    table = table_of(root)
    brought = [VersionSince(SLOT, lsn, each, table.columns) for lsn, each in versions]
    table.describe(opened(root).about(A), brought)
    return table


def test_a_renamed_column_keeps_its_names_and_layouts_are_told_with_todays(tmp_path: Path) -> None:
    described(tmp_path, (100, A))
    with raw(tmp_path).update_schema() as update:
        update.rename_column("name", "label")
    found = snapshot_of(tmp_path)
    assert named(found)["label"] == ("label", "name") and named(found)["id"] == ("id",)
    (version,) = json.loads(found.properties["xidstream.versions"])
    assert version["columns"]["name"] == {"type": "text", "column": "label"}
    # The mapping may be lost. The former schemas say it, too.
    with raw(tmp_path).transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    assert named(snapshot_of(tmp_path))["label"] == ("label", "name")


def test_a_name_that_two_sources_had_is_refused_and_a_column_that_came_back_is_the_same(
    tmp_path: Path,
) -> None:
    table_of(tmp_path)
    with raw(tmp_path).update_schema() as update:
        update.delete_column("name")
    table = table_of(tmp_path)
    table.take_columns(columns_of(A))
    assert named(snapshot_of(tmp_path))["name"] == ("name",)
    with raw(tmp_path).update_schema() as update:
        update.rename_column("name", "label")
    with raw(tmp_path).update_schema() as update:
        update.add_column("name", StringType())
    with pytest.raises(Unsupported, match="has a name that another column had before"):
        snapshot_of(tmp_path)


def test_a_column_that_came_back_with_another_type_is_refused(tmp_path: Path) -> None:
    table_of(tmp_path)
    with raw(tmp_path).update_schema() as update:
        update.delete_column("name")
    with raw(tmp_path).update_schema() as update:
        update.add_column("name", LongType())
    with pytest.raises(Unsupported, match=r"column name of Iceberg table public\.a"):
        snapshot_of(tmp_path)


def test_a_column_may_have_narrower_files_where_it_was_widened_or_its_source_was(tmp_path: Path) -> None:
    def widened(snapshot: IcebergTableSnapshot) -> list[str]:
        return [column.names[0] for column in snapshot.file_columns if column.is_widened]

    wider = relation("public.a", ("id", INT8), ("name", TEXT))
    described(tmp_path / "one", (100, A))
    assert widened(snapshot_of(tmp_path / "one")) == []
    table_of(tmp_path / "one").take_columns([*columns_of(wider)])
    assert widened(snapshot_of(tmp_path / "one")) == ["id"]
    # A table that was made by a batch with both: its column was a long from the beginning.
    tables = opened(tmp_path / "two")
    brought = [VersionSince(SLOT, lsn, each, columns_of(wider)) for lsn, each in ((100, A), (110, wider))]
    made = tables.open_or_create("public__a", "public.a", columns_of(wider), tables.about(wider), brought)
    assert widened(IcebergTableSnapshot(made)) == ["id"]
    other = relation("public.a", ("id", INT4), ("name", 1043, 24))
    described(tmp_path / "three", (100, A), (110, other))
    assert widened(snapshot_of(tmp_path / "three")) == [], "a text is a text"


def test_a_table_whose_files_are_gone_is_a_fault_of_the_storage(tmp_path: Path) -> None:
    commit(table_of(tmp_path), 100, 1)
    table = raw(tmp_path)
    root = IcebergRoot(IcebergAddress.parse(f"{tmp_path}/lake/shop"))
    (manifest,) = table.current_snapshot().manifests(table.io)
    Path(manifest.manifest_path.removeprefix("file://")).unlink()
    found = root.open("public__a")
    assert found is not None
    with pytest.raises(StorageFault, match="Iceberg table public__a cannot be read"):
        found.files()
    Path(table.metadata_location.removeprefix("file://")).unlink()
    with pytest.raises(StorageFault, match="Iceberg table public__a cannot be read"):
        root.open("public__a")


NAMES = [
    ("public", "a"),
    ("public", "a__b"),
    ("_s", "_t_"),
    ("a.b", "c d"),
    ("ä", '"quoted"'),
    ("x~y", "~~"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tables_name_tells_its_source(name: tuple[str, str]) -> None:
    assert source_of(table_name(*name)) == name


def test_the_namespaces_tables_are_those_of_sources_and_long_names_are_asked_for(tmp_path: Path) -> None:
    tables = opened(tmp_path)
    long = ("ü" * 31, "ö" * 31)
    for name in (*NAMES, long):
        made = relation(f"{name[0]}.t", ("id", INT4))
        made = type(made)(made.relid, *name, made.replica_identity, made.columns)
        key = tables.key_of(*name)
        tables.open_or_create(key, key, columns_of(made), tables.about(made))
    assert "~~" in tables.key_of(*long)
    own = tables.about_own(locations.TRANSACTIONS)
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    tables.open_or_create(locations.TRANSACTIONS, locations.TRANSACTIONS, columns, own)
    catalog = tables.address.open(makes=False)
    assert catalog is not None
    catalog.create_table("shop.notes", pa.schema([("x", pa.int64())]))
    assert sorted(tables.sources()) == sorted([*NAMES, long])
    assert IcebergRoot(IcebergAddress.parse(f"{tmp_path}/lake/nothing")).table_names() == []
    assert IcebergRoot(IcebergAddress.parse(f"{tmp_path}/no-lake/shop")).table_names() == []
