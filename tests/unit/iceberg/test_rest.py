"""Iceberg tables behind a REST catalog: pyiceberg's client, over HTTP, and a server for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.iceberg_rest import IcebergRestServer
from tests.unit.iceberg.test_iceberg_table import SLOT, A, columns_of, written
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.sinks.sink import sink_type

OWNER = f"{SLOT}/owner"


@pytest.fixture
def rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IcebergRestServer]:
    server = IcebergRestServer(tmp_path)
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "rest")
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", server.uri)
    yield server
    server.stop()


def table_of() -> IcebergTableWriter:
    tables = IcebergTables(IcebergAddress.parse("prod/shop"), makes=True)
    return tables.open_or_create("public__a", "public.a", columns_of(A), tables.about(A))


def ids() -> list[int]:
    found: list[int] = sorted(table_of().read(["id"], "_commit_lsn", 0, 999)["id"].to_pylist())
    return found


def test_rows_and_watermark_are_there_and_a_run_that_was_taken_over_commits_nothing(
    rest: IcebergRestServer,
) -> None:
    assert sink_type("iceberg:prod/shop").holds(SLOT) == (0, 0)
    stale = table_of()
    stale.commit(written(stale, 100, 1, 2), {SLOT: 100}, marks={OWNER: 1})
    assert (table_of().watermark(SLOT), ids()) == (100, [1, 2])
    table_of().commit([], {}, marks={OWNER: 2})
    with pytest.raises(SnapshotOutdated):
        stale.commit(written(stale, 110, 3), {SLOT: 110}, marks={OWNER: 1})
    assert (table_of().watermark(SLOT), ids()) == (100, [1, 2])


def test_a_commit_behind_another_slots_is_done_again(rest: IcebergRestServer) -> None:
    first = table_of()
    table_of().commit(written(first, 200, 7), {"two": 200})
    first.commit(written(first, 100, 1), {SLOT: 100})
    assert (table_of().watermark(SLOT), table_of().watermark("two"), ids()) == (100, 200, [1, 7])


def test_a_commit_whose_answer_was_lost_is_found_by_its_watermark(rest: IcebergRestServer) -> None:
    table = table_of()
    table.commit(written(table, 100, 1), {SLOT: 100})
    n_commits, rest.n_to_lose = rest.n_commits, 1
    with pytest.raises(StorageFault, match="does not answer"):
        table.commit(written(table, 110, 2), {SLOT: 110})
    assert rest.n_commits == n_commits + 1
    assert (table_of().watermark(SLOT), ids()) == (110, [1, 2])


def test_a_server_that_has_ended_is_a_fault_that_passes(rest: IcebergRestServer) -> None:
    table = table_of()
    rest.stop()
    with pytest.raises(StorageFault, match="does not answer"):
        table.commit(written(table, 100, 1), {SLOT: 100})
