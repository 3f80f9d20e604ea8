"""Iceberg tables after a Glue catalog: moto's server, in another process, for Glue and for S3."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.iceberg.test_iceberg_table import SLOT, written
from tests.unit.iceberg.test_rest import OWNER, ids, table_of
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated


def test_rows_and_watermark_are_there_and_a_run_that_was_taken_over_commits_nothing(
    s3: tuple[Location, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    location, _ = s3
    assert location.storage_options is not None
    endpoint = location.storage_options["AWS_ENDPOINT_URL"]
    for name, value in {
        "TYPE": "glue",
        "GLUE__ENDPOINT": endpoint,
        "GLUE__REGION": "us-east-1",
        "S3__ENDPOINT": endpoint,
        "S3__REGION": "us-east-1",
        "WAREHOUSE": f"s3://{location.uri.split('/')[2]}/lake",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{name}", value)
    stale = table_of()
    stale.commit(written(stale, 100, 1, 2), {SLOT: 100}, marks={OWNER: 1})
    assert (table_of().watermark(SLOT), ids()) == (100, [1, 2])
    table_of().commit([], {}, marks={OWNER: 2})
    with pytest.raises(SnapshotOutdated):
        stale.commit(written(stale, 110, 3), {SLOT: 110}, marks={OWNER: 1})
    assert (table_of().watermark(SLOT), ids()) == (100, [1, 2])
