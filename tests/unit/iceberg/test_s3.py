"""Iceberg tables whose warehouse is in S3: moto's server, real clients of pyarrow and deltalake."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.late_segments import late_part, late_segment
from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.iceberg.test_iceberg_table import SLOT, A, columns_of, grown, written
from tests.waiting import wait_until
from xidstream.pipeline.changelog.iceberg_root import IcebergRoot
from xidstream.pipeline.findings import Status
from xidstream.pipeline.iceberg import expiring
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.expiring import KEPT_SNAPSHOTS
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.iceberg_types import RULES
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep, leftovers
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.batch_parts import TableParts, VersionParts
from xidstream.pipeline.log_tables.columns import map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WriteOutput
from xidstream.pipeline.log_tables.segment_links import SegmentLinks
from xidstream.pipeline.log_tables.watched_clock import WatchedClock
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.spark.parquet_frames import ColumnLookup, StoredFiles
from xidstream.pipeline.storage.storage import Storage

EVERY = 10


@pytest.fixture
def bucket(s3: tuple[Location, Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    location, _ = s3
    assert location.storage_options is not None
    found = location.uri.split("/")[2]
    for name, value in {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": f"s3://{found}/lake",
        "S3__ENDPOINT": location.storage_options["AWS_ENDPOINT_URL"],
        "S3__REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{name}", value)
    monkeypatch.setattr(expiring, "EXPIRES_EVERY", EVERY)
    return found


def table_of(upkeep: IcebergUpkeep | None = None) -> IcebergTableWriter:
    tables = IcebergTables(IcebergAddress.parse("prod/shop"), makes=True, upkeep=upkeep)
    return tables.open_or_create("public__a", "public.a", columns_of(A), tables.about(A))


def test_rows_watermark_and_upkeep_are_as_on_a_disk(bucket: str, tmp_path: Path) -> None:
    checked = sink_type("iceberg:prod/shop").check("")(None)
    assert all(each.status is not Status.FAILED for each in checked), checked
    upkeep = IcebergUpkeep(delay_s=0.0)
    table = table_of(upkeep)
    assert table.location.uri == f"s3://{bucket}/lake/shop/public__a"
    table.commit(written(table, 100, 1, 2), {SLOT: 100}, marks={f"{SLOT}/owner": 1})
    grown(tmp_path, table, range(101, 102 + KEPT_SNAPSHOTS + EVERY))
    assert table_of().watermark(SLOT) == 101 + KEPT_SNAPSHOTS + EVERY
    assert sorted(table.read(["id"], "_commit_lsn", 0, 100)["id"].to_pylist()) == [1, 2]
    store = attempt_files.store_of(table.location)

    def metadata() -> set[str]:
        found = store.get_file_info_selector(attempt_files.Below("metadata", recursive=True))
        return {info.base_name for info in found if info.base_name.endswith(".avro")}

    raw = table._table
    named = {each.manifest_list for each in raw.snapshots()}
    named |= {m.manifest_path for each in raw.snapshots() for m in each.manifests(raw.io)}
    wait_until(lambda: metadata() == {Path(name).name for name in named})
    upkeep.close()


def test_a_segment_of_a_storage_in_the_same_store_becomes_a_file_of_the_table(
    bucket: str, s3: tuple[Location, Connection]
) -> None:
    endpoint = (s3[0].storage_options or {})["AWS_ENDPOINT_URL"].removeprefix("http://")
    query = f"scheme=http&endpoint_override={quote(endpoint)}&region=us-east-1"
    storage = Storage(f"s3://{bucket}/segments?{query}")
    rows = [{"id": i, "name": f"row {i}"} for i in range(10)]
    segment = late_segment(storage, "1/s/epochs/e/7-0000000000000010/0.parquet", A, rows)
    version = VersionParts(A, contract_schema(A), [], [late_part(segment, 100)])
    table, links = table_of(), SegmentLinks()
    mapping = map_columns(table.columns, version.schema, RULES)
    target = WriteOutput(table.location, "data-1", 0)
    parts = TableParts(("public", "a"), [version])
    files, left = links.give(parts, [mapping], target, storage, RULES)
    links.close()
    assert left.n_rows == 0 and len(files) == 1
    table.commit(files, {SLOT: 100})
    read = table.read(["id", "name", "_commit_lsn"], "_commit_lsn", 100, 100).to_pylist()
    assert read == [{**row, "_commit_lsn": 100} for row in rows]


def test_the_logs_readers_find_files_and_rows_there(bucket: str) -> None:
    table = table_of()
    for lsn in (100, 110):
        table.commit(written(table, lsn, lsn, lsn + 1), {SLOT: lsn}, marks={f"{SLOT}/owner": lsn})
    found = IcebergRoot(IcebergAddress.parse("prod/shop")).open("public__a")
    assert (
        found is not None
        and found.watermark(SLOT) == 110
        and found.location.uri.startswith(f"s3://{bucket}/")
    )
    (file,) = found.files(101)
    assert found.read_file(file, ["id"], pc.field("id") > 110)["id"].to_pylist() == [111]
    lookups = tuple(ColumnLookup(each, (name,)) for each, name in enumerate(found.schema.names, 1))
    read = StoredFiles((file.path,), found.schema, found.location, lookups)
    (rows,) = read([pa.record_batch({"id": [0]})])
    assert rows.schema == found.schema and rows["id"].to_pylist() == [110, 111]


def test_leftovers_are_found_by_their_names_and_their_age(bucket: str) -> None:
    table = table_of()
    table.commit(written(table, 100, 1), {SLOT: 100})
    written(table, 110, 2)  # nobody names it
    young = WatchedClock()
    assert leftovers(table._table, table.location, young, young.began_at_s) == []
    steady = [0.0]
    later = WatchedClock(wall=lambda: young.began_at_s + steady[0], steady=lambda: steady[0])
    steady[0] = 8 * 24 * 3600.0
    (found,) = leftovers(table._table, table.location, later, young.began_at_s)
    assert found.startswith(f"s3://{bucket}/lake/shop/public__a/data-110-")
