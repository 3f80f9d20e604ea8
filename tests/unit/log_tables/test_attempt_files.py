"""The files of a snapshot's attempt: on a disk, and in an object store that deltalake asks."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.delta.test_small_files import s3 as s3
from xidstream.pipeline.log_tables.attempt_files import missing, remove
from xidstream.pipeline.log_tables.locations import Location

OURS = [
    "snapshot-a-0-1/part-00000.parquet",
    "snapshot-a-0-1/part-00001.parquet",
    "snapshot-a-1-2/part-00000.parquet",
]
OTHERS = [
    "snapshot-b-0-1/part-00000.parquet",
    "data-a/part-00000.parquet",
    "_delta_log/00000000000000000000.json",
]


@pytest.mark.parametrize("store", ["disk", "s3"])
def test_what_an_attempt_wrote_is_found_and_removed_and_nothing_else(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    table = Location.parse(str(tmp_path / "public.t"))
    if store == "s3":
        found: tuple[Location, Connection] = request.getfixturevalue("s3")
        table = found[0]
    assert remove(table, "snapshot-a") == 0, "there is no table yet"
    for path in OURS + OTHERS:
        with table.create(path) as file:
            pq.write_table(pa.table({"id": [1]}), file)
    asked = [*OURS, "snapshot-a-2-3/part-00000.parquet"]
    assert missing(table, asked) == asked[-1:]
    assert remove(table, "snapshot-a") == 3
    assert missing(table, OURS + OTHERS) == OURS
    assert remove(table, "snapshot-a") == 0
