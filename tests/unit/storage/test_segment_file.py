"""Segments: what was written comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.storage.conftest import COMMIT, files_below, make_batch, read, released
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, UsageError
from xidstream.pipeline.exchange import MessageFile, SegmentPart
from xidstream.pipeline.parquet import fill
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, rows
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import (
    SegmentReader,
    shorten_segment,
    write_messages,
    write_segment,
)
from xidstream.pipeline.storage.storage import Storage

XID, FIRST_LSN = Xid(700), Lsn(0x16B3748)


@pytest.fixture
def messages_key(layout: Layout) -> str:
    return layout.messages_key(XID, FIRST_LSN, 3)


@pytest.fixture
def messages() -> list[pa.RecordBatch]:
    columns = [[None] * 3, [1, 2, 3], [None] * 3, [True] * 3, ["p"] * 3, [b"a", b"", b"c" * 100]]
    arrays = [pa.array(v, f.type) for v, f in zip(columns, rows.MESSAGES_SCHEMA, strict=True)]
    whole = pa.RecordBatch.from_arrays(arrays, schema=rows.MESSAGES_SCHEMA)
    return [whole, whole.slice(1)]


@pytest.fixture
def key(layout: Layout) -> str:
    return layout.segment_key(XID, FIRST_LSN, 0)


def test_rows_come_back_as_released(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    assert (segment.key, segment.relation, segment.n_rows) == (key, relation, 1_007)
    assert read(storage, segment) == released(relation, batches)
    stored = storage.read_bytes(key)
    assert segment.n_bytes == len(stored)
    assert segment.file.checksum == f"crc32:{zlib.crc32(stored):08x}"


def test_a_filled_segment_is_read_as_before(local, key, relation, batches) -> None:
    segment = write_segment(local, key, relation, 700, batches)
    fill(local.local_path(key), segment.file, COMMIT, name=key)
    assert read(local, segment) == released(relation, batches)


def test_a_shortened_segment_has_the_rows_before_its_end(storage, layout, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    shorter = shorten_segment(storage, segment, 1_003, layout.segment_key(XID, FIRST_LSN, 1))
    assert (shorter.n_rows, shorter.key) == (1_003, layout.segment_key(XID, FIRST_LSN, 1))
    assert read(storage, shorter) == released(relation, batches).slice(0, 1_003)
    assert read(storage, segment) == released(relation, batches), "the first one stays"


def test_messages_come_back_as_written_in_a_file_that_arrow_reads(storage, messages_key, messages) -> None:
    file = write_messages(storage, messages_key, messages)
    assert list(SegmentReader(storage.uri)(file)) == messages
    assert pa.ipc.open_file(storage.read_bytes(messages_key)).read_all() == pa.Table.from_batches(messages)


def test_a_segment_of_slices_holds_their_rows_only(storage, key, relation) -> None:
    whole = make_batch(relation, 0, 100_000)
    segment = write_segment(storage, key, relation, 700, [whole.slice(5, 3)])
    assert segment.n_bytes < 10_000
    assert read(storage, segment) == released(relation, [whole.slice(5, 3)])


def test_a_segment_without_rows_is_a_segment(storage, key, relation) -> None:
    segment = write_segment(storage, key, relation, 700, [])
    assert segment.n_rows == read(storage, segment).num_rows == 0


def test_a_reader_travels_by_pickle(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    part = SegmentPart(segment, COMMIT)
    reader, travelled = pickle.loads(pickle.dumps((SegmentReader(storage.uri), part)))
    assert travelled == part
    assert pa.Table.from_batches(reader(travelled)) == released(relation, batches)


def test_a_reader_shows_no_uri() -> None:
    assert "hunter2" not in repr(SegmentReader("s3://KEY:hunter2@bucket/x"))


def test_rows_of_a_deleted_segment_stay_readable(local, key, relation, batches) -> None:
    segment = write_segment(local, key, relation, 700, batches)
    held = read(local, segment)
    local.delete([key])
    assert held == released(relation, batches)


def test_a_segment_is_read_batch_by_batch(local, key, relation) -> None:
    made = [make_batch(relation, 0, 100_000)] * 8
    whole = released(relation, made).nbytes
    segment = write_segment(local, key, relation, 700, made)
    before = pa.total_allocated_bytes()
    n_rows = 0
    for batch in SegmentReader(local.uri)(SegmentPart(segment, COMMIT)):
        n_rows += batch.num_rows
        assert pa.total_allocated_bytes() - before < whole / 3
    assert n_rows == 800_000


def test_batches_of_another_layout_are_refused_before_anything_is_written(
    storage, key, relation, batches
) -> None:
    other = RelationVersion(1, "public", "t", ReplicaIdentity.FULL, (Column("a", 25, -1, True),))
    with pytest.raises(UsageError, match=r"public\.t"):
        write_segment(storage, key, other, 700, batches)
    assert not storage.exists(key)


# -- damage ------------------------------------------------------------------------------------------------


def test_a_torn_segment_gives_no_row_at_any_length(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    whole = storage.read_bytes(key)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        storage.write_bytes(key, whole[:length])
        with pytest.raises(SegmentCorrupt, match=f"{key}.*{length} bytes"):
            read(storage, segment)


def test_an_altered_byte_gives_no_row_wherever_it_is(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    whole = storage.read_bytes(key)
    for position in range(0, len(whole), len(whole) // 23):
        altered = bytearray(whole)
        altered[position] ^= 0x10
        storage.write_bytes(key, bytes(altered))
        with pytest.raises(SegmentCorrupt, match=f"{key}.*checksum"):
            read(storage, segment)


def test_a_missing_segment_is_named(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    storage.delete([key])
    with pytest.raises(SegmentCorrupt, match=f"{key}.*missing"):
        read(storage, segment)


def test_a_segment_of_another_table_is_corrupt_even_if_its_checksum_fits(
    storage, key, relation, batches
) -> None:
    segment = write_segment(storage, key, relation, 700, batches)
    narrowed = dataclasses.replace(relation, columns=relation.columns[:2])
    with pytest.raises(SegmentCorrupt, match="not a Parquet file of"):
        read(storage, dataclasses.replace(segment, relation=narrowed))


# -- damaged messages --------------------------------------------------------------------------------------


def rewritten(file: MessageFile, stored: bytes, **changes: object) -> MessageFile:
    """As a writer with a defect would have recorded it: the checksum fits, the content does not."""
    checksum = f"crc32:{zlib.crc32(stored):08x}"
    return dataclasses.replace(file, **{"n_bytes": len(stored), "checksum": checksum, **changes})


def test_an_altered_byte_gives_no_message_wherever_it_is(storage, messages_key, messages) -> None:
    file = write_messages(storage, messages_key, messages)
    whole = storage.read_bytes(messages_key)
    for position in range(0, len(whole), len(whole) // 23):
        altered = bytearray(whole)
        altered[position] ^= 0x10
        storage.write_bytes(messages_key, bytes(altered))
        with pytest.raises(SegmentCorrupt, match=f"{messages_key}.*checksum"):
            next(SegmentReader(storage.uri)(file))


def test_a_file_of_other_columns_is_corrupt_even_if_its_checksum_fits(
    storage, messages_key, messages
) -> None:
    file = write_messages(storage, messages_key, messages)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, messages[0].schema.remove(0)):
        pass
    storage.write_bytes(messages_key, sink.getvalue().to_pybytes())
    with pytest.raises(SegmentCorrupt, match="columns"):
        next(SegmentReader(storage.uri)(rewritten(file, storage.read_bytes(messages_key))))


def test_what_is_no_arrow_file_is_corrupt(storage, messages_key, messages) -> None:
    file = write_messages(storage, messages_key, messages)
    storage.write_bytes(messages_key, b"not an Arrow file, but long enough to be one")
    with pytest.raises(SegmentCorrupt, match="not an Arrow file"):
        next(SegmentReader(storage.uri)(rewritten(file, storage.read_bytes(messages_key))))


def test_a_wrong_number_of_messages_is_corrupt(storage, messages_key, messages) -> None:
    file = write_messages(storage, messages_key, messages)
    with pytest.raises(SegmentCorrupt, match="5 rows"):
        list(SegmentReader(storage.uri)(rewritten(file, storage.read_bytes(messages_key), n_rows=1)))


def test_an_unknown_checksum_is_not_passed_over(storage, messages_key, messages) -> None:
    file = write_messages(storage, messages_key, messages)
    with pytest.raises(SegmentCorrupt, match="md5"):
        next(SegmentReader(storage.uri)(dataclasses.replace(file, checksum="md5:00")))


# -- storage that fails ------------------------------------------------------------------------------------


def test_a_spill_to_a_full_disk_is_a_fault_and_leaves_nothing(
    local, key, relation, batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1_000))

    class FullAfterAWhile:
        @staticmethod
        def crc32(data: object, start: int = 0) -> int:
            if next(calls) == 9:
                raise OSError(28, "No space left on device")
            return zlib.crc32(data, start)  # type: ignore[arg-type]

    monkeypatch.setattr("xidstream.pipeline.parquet.writing.zlib", FullAfterAWhile)
    with pytest.raises(StorageFault, match=f"{key}.*No space left"):
        write_segment(local, key, relation, 700, batches)
    assert files_below(tmp_path / "local") == set()


def test_a_spill_below_a_file_is_a_fault(tmp_path: Path, key, relation, batches) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFault, match=key):
        write_segment(Storage(str(tmp_path / "file")), key, relation, 700, batches)


def test_internal_columns_come_first_whatever_the_table_calls_its_own(relation) -> None:
    assert rows.internal_schema(relation).names.count("ordinal") == 2
