"""Iceberg tables whose catalog is in PostgreSQL, as pyiceberg's own configuration names it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.postgres_fixtures import Database
from tests.unit.iceberg.test_iceberg_table import SLOT, A, columns_of, written
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.sinks.sink import sink_type

pytestmark = [pytest.mark.postgres, pytest.mark.parametrize("postgres_server", [18], indirect=True)]


@pytest.fixture
def prod(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = conninfo_to_dict(database.dsn())
    query = "&".join(f"{name}={found[name]}" for name in ("host", "port") if name in found)
    uri = f"postgresql+psycopg://{found['user']}@/{found['dbname']}?{query}"
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", uri)
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__WAREHOUSE", f"file://{tmp_path}/warehouse")
    return tmp_path


def table_of() -> IcebergTableWriter:
    tables = IcebergTables(IcebergAddress.parse("prod/shop"), makes=True)
    return tables.open_or_create("public__a", "public.a", columns_of(A), tables.about(A))


def test_tables_are_where_the_catalog_says_and_whoever_only_looks_makes_nothing(
    prod: Path, database: Database
) -> None:
    assert sink_type("iceberg:prod/shop").holds(SLOT) == (0, 0)
    assert sink_type("iceberg:prod/shop").check("")(None)[0].check == "sink"
    assert database.execute("SELECT count(*) FROM pg_class WHERE relname LIKE 'iceberg%'") == [(0,)]
    table = table_of()
    table.commit(written(table, 100, 1, 2), {SLOT: 100}, marks={f"{SLOT}/owner": 1})
    assert table.location.uri == f"{prod}/warehouse/shop/public__a"
    rows = database.execute("SELECT table_namespace, table_name, metadata_location FROM iceberg_tables")
    ((namespace, name, location),) = rows
    assert (namespace, name) == ("shop", "public__a") and location.startswith(f"file://{prod}/warehouse/")
    again = table_of()
    assert again.watermark(SLOT) == 100
    assert sorted(again.read(["id"], "_commit_lsn", 0, 100)["id"].to_pylist()) == [1, 2]


def _write(slot: str, start: int) -> None:
    table = table_of()
    for lsn in range(start, start + 5):
        table.commit(written(table, lsn, lsn), {slot: lsn}, marks={f"{slot}/owner": 1})


def test_two_processes_of_two_slots_lose_no_row_and_leave_nothing_behind(prod: Path) -> None:
    table_of()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=each) for each in (("one", 100), ("two", 200))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    table = table_of()
    found = sorted(table.read(["id"], "_commit_lsn", 0, 300)["id"].to_pylist())
    assert found == [*range(100, 105), *range(200, 205)]
    there = {path.name for path in (prod / "warehouse/shop/public__a/metadata").iterdir()}
    raw = table._table
    names = {raw.metadata_location, *(each.metadata_file for each in raw.metadata.metadata_log)}
    for snapshot in raw.snapshots():
        names |= {snapshot.manifest_list, *(m.manifest_path for m in snapshot.manifests(raw.io))}
    assert there == {Path(name).name for name in names}


def test_a_run_that_was_taken_over_commits_nothing(prod: Path) -> None:
    stale = table_of()
    stale.commit(written(stale, 100, 1), {SLOT: 100}, marks={f"{SLOT}/owner": 1})
    table_of().commit([], {}, marks={f"{SLOT}/owner": 2})
    with pytest.raises(SnapshotOutdated):
        stale.commit(written(stale, 110, 2), {SLOT: 110}, marks={f"{SLOT}/owner": 1})
    assert table_of().watermark(SLOT) == 100
