"""Rows that the driver hands to Spark's executors through the storage."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.storage.cleanup import clean_dead_epochs
from xidstream.pipeline.storage.handed_rows import HandedRows, RowsReader, write_rows
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

LAYOUT = Layout(7001, "s", "20260101T000000-a")
KEY = LAYOUT.handed_rows_key(0)


def stream(*ids: list[int]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("id", pa.int64())])) as writer:
        for each in ids:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(each, pa.int64())], ["id"]))
    return sink.getvalue().to_pybytes()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def test_streams_of_one_object_are_read_in_order_with_nothing_between_them_lost(storage: Storage) -> None:
    """An empty record batch does not end a stream, and the end of a stream does not end the object."""
    rows = write_rows(storage, KEY, [stream([1, 2], [], [3]), stream(), stream([4])])
    reader = pickle.loads(pickle.dumps(RowsReader(storage.uri)))
    assert [value for batch in reader(rows) for value in batch.column(0).to_pylist()] == [1, 2, 3, 4]


def test_an_object_without_rows_is_none(storage: Storage) -> None:
    assert list(RowsReader(storage.uri)(write_rows(storage, KEY, []))) == []


@pytest.mark.parametrize("cut", [1, len(stream([4]))])
def test_an_object_that_lost_its_end_is_corrupt_also_where_a_stream_ends(storage: Storage, cut: int) -> None:
    rows = write_rows(storage, KEY, [stream([1]), stream([4])])
    storage.write_bytes(KEY, storage.read_bytes(KEY)[:-cut])
    with pytest.raises(SegmentCorrupt, match="bytes of"):
        list(RowsReader(storage.uri)(rows))


def test_a_missing_object_is_corrupt_and_a_storage_that_fails_a_fault(
    storage: Storage, tmp_path: Path
) -> None:
    with pytest.raises(SegmentCorrupt, match="missing"):
        list(RowsReader(storage.uri)(HandedRows(KEY, 1)))
    (tmp_path / "7001").touch()
    with pytest.raises(StorageFault):
        write_rows(storage, KEY, [stream([1])])


def test_what_a_crash_leaves_is_removed_by_the_next_epoch(storage: Storage) -> None:
    write_rows(storage, KEY, [stream([1])])
    assert clean_dead_epochs(storage, Layout(7001, "s", "20260101T000001-b"), frozenset()) == 1
    assert storage.list_keys(LAYOUT.root) == []
