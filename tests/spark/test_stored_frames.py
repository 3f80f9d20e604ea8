"""Rows for a session that cannot reach Ray's object store: inside the function, or through the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.support import INT8, TEXT, Transaction, batch_of, relation
from xidstream.actors.driver import stored_frames, users_session
from xidstream.actors.driver.stored_frames import FEW_BYTES, StoredFrames
from xidstream.actors.driver.users_session import try_executors
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.spark.frames import SinkBatch, simple_types, spark_schema
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.spark

WIDE = relation("public.wide", ("id", INT8), ("text", TEXT))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


@pytest.fixture
def frames(storage: Storage) -> StoredFrames:
    return StoredFrames(storage, Layout(7001, "s", "e"))


def transaction(lsn: int, n_rows: int, text: str) -> Transaction:
    return Transaction(lsn, [(WIDE, [{"id": i, "text": f"{text}{i}"} for i in range(n_rows)])])


@pytest.mark.parametrize(
    ("text", "n_objects"), [("few ", 0), ("x" * 2_000, 2)], ids=["inside the function", "in the storage"]
)
def test_rows_of_several_objects_arrive_in_order_and_leave_nothing_behind(
    spark: Any, storage: Storage, frames: StoredFrames, text: str, n_objects: int
) -> None:
    units = [transaction(100 + n, 150, text) for n in range(4)]
    size = sum(part.n_bytes for unit in units for part in unit.seal(None).memory)
    assert (size > FEW_BYTES) == bool(n_objects)
    batch = SinkBatch(
        batch_of(units), lambda: spark, frames.frame, SegmentReader(storage.uri), frames.read, frames.put
    )
    frame = batch.dataframe("public.wide")
    assert len(storage.list_keys("7001")) == n_objects, "a task for each core"
    assert frame.rdd.getNumPartitions() == max(1, n_objects)
    found = [(row._commit_lsn, row._seq, row.id, row.text) for row in frame.collect()]
    assert found == [(100 + n, i, i, f"{text}{i}") for n in range(4) for i in range(150)]
    frames.forget()
    assert storage.list_keys("7001") == []


def test_a_table_of_the_drivers_own_is_read_back_as_it_was(spark: Any, frames: StoredFrames) -> None:
    table = pa.table({"id": [1, 2], "at": pa.array([0, None], pa.timestamp("us"))})
    ref = frames.put(table)
    assert pa.Table.from_batches(frames.read(ref)) == table
    frame = frames.frame(spark, table.schema, [ref])
    assert simple_types(frame.schema) == simple_types(spark_schema(table.schema))
    assert [row.id for row in frame.collect()] == [1, 2]


def test_a_storage_that_executors_do_not_reach_is_told_before_anything_is_read(
    spark: Any, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The suite may have left this process a RayDP session, which is not asked.
    monkeypatch.setattr(users_session, "reads_ray_objects", lambda session: False)
    try_executors(spark, storage.uri)
    assert storage.list_folders() == [] and not list(Path(storage.uri).glob(".xidstream*"))
    monkeypatch.setattr(users_session, "RowsReader", lambda uri: stored_frames.RowsReader("/nowhere"))
    with pytest.raises(PreconditionMissing, match="executors do not reach the storage"):
        try_executors(spark, storage.uri)
