"""Segments: what was written comes back, and nothing else does."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.segments.conftest import files_below, make_batch
from xidstream.pipeline import rows
from xidstream.pipeline.errors import ConfigError, SegmentCorrupt, StorageFault, UsageError
from xidstream.pipeline.exchange import Segment
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.relations import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.segments import Layout, SegmentReader, Storage, write_segment

XID, FIRST_LSN = Xid(700), Lsn(0x16B3748)


@pytest.fixture
def key(layout: Layout) -> str:
    return layout.segment_key(XID, FIRST_LSN, 0)


def read(storage: Storage, segment: Segment) -> list[pa.RecordBatch]:
    return list(SegmentReader(storage.uri)(segment))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_batches_come_back_as_written(storage, key, relation, batches, compression) -> None:
    segment = write_segment(storage, key, relation, batches, compression=compression)
    assert (segment.key, segment.relation, segment.n_rows) == (key, relation, 1_007)
    assert read(storage, segment) == batches
    stored = storage.read_bytes(key)
    assert segment.n_bytes == len(stored)
    assert segment.checksum == f"crc32:{zlib.crc32(stored):08x}"


def test_the_file_is_one_that_arrow_reads_by_itself(local, key, relation, batches) -> None:
    write_segment(local, key, relation, batches)
    assert pa.ipc.open_file(local.read_bytes(key)).read_all() == pa.Table.from_batches(batches)


def test_a_segment_of_slices_holds_their_rows_only(storage, key, relation) -> None:
    whole = make_batch(relation, 0, 100_000)
    segment = write_segment(storage, key, relation, [whole.slice(5, 3)])
    assert segment.n_bytes < 10_000
    assert read(storage, segment) == [whole.slice(5, 3)]


def test_a_segment_without_rows_is_a_segment(storage, key, relation) -> None:
    segment = write_segment(storage, key, relation, [])
    assert segment.n_rows == 0
    assert read(storage, segment) == []


def test_a_reader_travels_by_pickle(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    reader, travelled = pickle.loads(pickle.dumps((SegmentReader(storage.uri), segment)))
    assert list(reader(travelled)) == batches


def test_a_reader_shows_no_uri() -> None:
    assert "hunter2" not in repr(SegmentReader("s3://KEY:hunter2@bucket/x"))


def test_rows_of_a_deleted_segment_stay_readable(local, key, relation, batches) -> None:
    segment = write_segment(local, key, relation, batches)
    held = read(local, segment)
    local.delete([key])
    assert held == batches


def test_a_local_segment_is_read_in_place(local, key, relation) -> None:
    segment = write_segment(local, key, relation, [make_batch(relation, 0, 50_000)])
    before = pa.total_allocated_bytes()
    held = read(local, segment)
    assert held[0].num_rows == 50_000
    assert pa.total_allocated_bytes() - before < segment.n_bytes / 10


def test_batches_of_another_layout_are_refused_before_anything_is_written(
    storage, key, relation, batches
) -> None:
    other = RelationVersion(1, "public", "t", ReplicaIdentity.FULL, (Column("a", 25, -1, True),))
    with pytest.raises(UsageError, match=r"public\.t"):
        write_segment(storage, key, other, batches)
    assert not storage.exists(key)


def test_an_unknown_compression_is_a_setting_error(local, key, relation, batches) -> None:
    with pytest.raises(ConfigError):
        write_segment(local, key, relation, batches, compression="gzip")


# -- damage ------------------------------------------------------------------------------------------------


def test_a_torn_segment_gives_no_row_at_any_length(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    whole = storage.read_bytes(key)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        storage.write_bytes(key, whole[:length])
        with pytest.raises(SegmentCorrupt, match=f"{key}.*{length} bytes"):
            next(SegmentReader(storage.uri)(segment))


def test_an_altered_byte_gives_no_row_wherever_it_is(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    whole = storage.read_bytes(key)
    for position in range(0, len(whole), len(whole) // 23):
        altered = bytearray(whole)
        altered[position] ^= 0x10
        storage.write_bytes(key, bytes(altered))
        with pytest.raises(SegmentCorrupt, match=f"{key}.*checksum"):
            next(SegmentReader(storage.uri)(segment))


def test_a_missing_segment_is_named(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    storage.delete([key])
    with pytest.raises(SegmentCorrupt, match=f"{key}.*missing"):
        next(SegmentReader(storage.uri)(segment))


def rewritten(segment: Segment, stored: bytes, **changes: object) -> Segment:
    """As a writer with a defect would have recorded it: the checksum fits, the content does not."""
    values = {
        **segment.__dict__,
        "n_bytes": len(stored),
        "checksum": f"crc32:{zlib.crc32(stored):08x}",
        **changes,
    }
    return Segment(**values)


def test_a_segment_of_another_schema_is_corrupt_even_if_its_checksum_fits(
    storage, key, relation, batches
) -> None:
    segment = write_segment(storage, key, relation, batches)
    widened = RelationVersion(
        relation.relid, relation.schema, relation.table, relation.replica_identity, relation.columns[:2]
    )
    with pytest.raises(SegmentCorrupt, match="layout"):
        next(SegmentReader(storage.uri)(rewritten(segment, storage.read_bytes(key), relation=widened)))


def test_a_segment_that_is_no_arrow_file_is_corrupt(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    storage.write_bytes(key, b"not an Arrow file, but long enough to be one")
    with pytest.raises(SegmentCorrupt, match="not an Arrow file"):
        next(SegmentReader(storage.uri)(rewritten(segment, storage.read_bytes(key))))


def test_a_wrong_number_of_rows_is_corrupt(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    with pytest.raises(SegmentCorrupt, match="1007 rows"):
        list(SegmentReader(storage.uri)(rewritten(segment, storage.read_bytes(key), n_rows=1)))


def test_an_unknown_checksum_is_not_passed_over(storage, key, relation, batches) -> None:
    segment = write_segment(storage, key, relation, batches)
    with pytest.raises(SegmentCorrupt, match="md5"):
        next(SegmentReader(storage.uri)(rewritten(segment, storage.read_bytes(key), checksum="md5:00")))


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

    monkeypatch.setattr("xidstream.pipeline.segments.segment_file.zlib", FullAfterAWhile)
    with pytest.raises(StorageFault, match=f"{key}.*No space left"):
        write_segment(local, key, relation, batches)
    assert files_below(tmp_path / "local") == set()


def test_a_spill_below_a_file_is_a_fault(tmp_path: Path, key, relation, batches) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFault, match=key):
        write_segment(Storage(str(tmp_path / "file")), key, relation, batches)


def test_internal_columns_come_first_whatever_the_table_calls_its_own(relation) -> None:
    assert rows.internal_schema(relation).names.count("ordinal") == 2
