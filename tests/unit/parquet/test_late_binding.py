"""A file that is written before its commit is known, and filled in after it: everybody reads the same rows of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.parquet.files import COMMIT, NAMES, XID, batches, every_type, relation, released, write
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, UsageError
from xidstream.pipeline.parquet import (
    CommitStamp,
    FilledOtherwise,
    FillRefused,
    RowFile,
    bound_tail,
    file_schema,
    fill,
    read_rows,
    rewrite_head,
    unbound,
    verify,
    verify_tail,
    write_rows,
)
from xidstream.pipeline.parquet.row_file import LATE_COLUMNS, PLACEHOLDERS, encoded_crc
from xidstream.pipeline.schema import RelationVersion, rows

SIMPLE = relation(("id", 20), ("note", 25), ("days", 1182))
OTHER = CommitStamp(COMMIT.commit_lsn + 1, COMMIT.commit_timestamp_us)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.parquet"


def read(path: Path, table: RelationVersion, file: RowFile, commit: CommitStamp = COMMIT) -> pa.Table:
    found = read_rows(pa.py_buffer(path.read_bytes()), table, file, commit, name="s")
    return pa.Table.from_batches(found, rows.contract_schema(table))


def read_natively(path: Path, table: RelationVersion) -> pa.Table:
    """By pyarrow alone, page sums verified, in the contract's order of columns."""
    found = pq.ParquetFile(path, page_checksum_verification=True).read()
    schema = rows.contract_schema(table)
    positions = [file_schema(table).get_field_index(name) for name in schema.names]
    return pa.table([found.column(i) for i in positions], schema=schema)


# -- written, filled, read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_every_type_come_back_as_released(path: Path, seed: int) -> None:
    table = every_type()
    sizes = [(1,), (40, 3), (0, 17, 0)][seed % 3]
    made = batches(table, *sizes, seed=seed)
    wanted = released(table, made)
    file = write(path, table, made, row_group_bytes=[1, 4_000, 1 << 30][seed // 3 % 3])
    assert read(path, table, file).equals(wanted)
    fill(path, file, COMMIT, name="s")
    assert read(path, table, file).equals(wanted)
    assert read_natively(path, table).equals(wanted)


def test_a_filled_file_is_right_in_duckdb(path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    made = batches(SIMPLE, 5_000, 3)
    file = write(path, SIMPLE, made, row_group_bytes=100_000)
    assert len(file.page_offsets) > 1
    fill(path, file, COMMIT, name="s")
    found = duckdb.sql(
        f"SELECT count(*), min(_commit_lsn), max(_commit_lsn), min(epoch_us(_commit_timestamp)), "
        f"max(epoch_us(_commit_timestamp)), sum(_seq), count(id) FROM '{path}' "
        f"WHERE _commit_lsn = {COMMIT.commit_lsn}"
    ).fetchall()
    wanted = released(SIMPLE, made)
    lsn, timestamp = COMMIT.commit_lsn, COMMIT.commit_timestamp_us
    total = sum(wanted.column("_seq").to_pylist())
    n_ids = wanted.num_rows - wanted.column("id").null_count
    assert found == [(5_003, lsn, lsn, timestamp, timestamp, total, n_ids)]


def test_a_filled_file_is_right_in_deltalake(tmp_path: Path) -> None:
    import deltalake
    from deltalake.transaction import AddAction

    made = batches(SIMPLE, 5_000, 3)
    wanted = released(SIMPLE, made)
    table = deltalake.DeltaTable.create(tmp_path / "table", pa.schema(wanted.schema))
    path = tmp_path / "table" / "rows.parquet"
    file = write(path, SIMPLE, made, row_group_bytes=100_000)
    fill(path, file, COMMIT, name="s")
    add = AddAction("rows.parquet", file.n_bytes, {}, 0, True, json.dumps({"numRecords": file.n_rows}))
    table.create_write_transaction([add], mode="append", schema=table.schema(), partition_by=[])
    table.update_incremental()
    found = pa.table(
        deltalake.QueryBuilder()
        .register("t", table)
        .execute(f"SELECT * FROM t WHERE _commit_lsn = {COMMIT.commit_lsn} AND _seq > 100 ORDER BY _seq")
        .read_all()
    )
    assert found.column("_seq").to_pylist() == [s for s in wanted.column("_seq").to_pylist() if s > 100]
    assert set(found.column("_commit_timestamp").cast(pa.int64()).to_pylist()) == {COMMIT.commit_timestamp_us}


@pytest.mark.parametrize("n_crc_bytes", [2, 3, 4])
def test_a_short_checksum_keeps_its_place(path: Path, n_crc_bytes: int) -> None:
    # 15 of 16 checksums take five bytes by themselves; others are written longer than they need be.
    def crc_bytes(lsn: int) -> int:
        crc = zlib.crc32(lsn.to_bytes(8, "little"))
        zigzag = 2 * crc if crc < 1 << 31 else 2 * ((1 << 32) - crc) - 1
        return max(1, -(-zigzag.bit_length() // 7))

    lsn = next(lsn for lsn in range(1 << 30, 1 << 31) if crc_bytes(lsn) == n_crc_bytes)
    commit = CommitStamp(lsn, COMMIT.commit_timestamp_us)
    made = batches(SIMPLE, 30)
    file = write(path, SIMPLE, made)
    fill(path, file, commit, name="s")
    assert read_natively(path, SIMPLE).equals(released(SIMPLE, made, commit))
    duckdb = pytest.importorskip("duckdb")
    assert duckdb.sql(f"SELECT DISTINCT _commit_lsn FROM '{path}'").fetchall() == [(lsn,)]


def test_the_placeholders_leave_room_for_every_checksum() -> None:
    assert all(encoded_crc(value)[-1] for value in PLACEHOLDERS)


def test_a_table_of_1600_columns(path: Path) -> None:
    oids = (20, 25, 1009, 1114, 16)
    table = relation(*[(f"column {i}", oids[i % len(oids)]) for i in range(1_600)])
    made = batches(table, 7, 5)
    file = write(path, table, made)
    fill(path, file, COMMIT, name="s")
    wanted = released(table, made)
    assert read(path, table, file).equals(wanted)
    assert read_natively(path, table).equals(wanted)


def test_names_that_look_like_paths_stay_names(path: Path) -> None:
    table = relation(*[(name, 1009 if i % 2 else 25) for i, name in enumerate(NAMES)])
    made = batches(table, 50)
    file = write(path, table, made)
    fill(path, file, COMMIT, name="s")
    wanted = released(table, made)
    assert read(path, table, file).equals(wanted)
    assert read_natively(path, table).equals(wanted)


def test_a_value_that_equals_a_placeholder_is_no_constant(path: Path) -> None:
    table = relation(("a", 20), ("b", 17), ("c", 1016))
    [batch] = batches(table, 3)
    number = int.from_bytes(PLACEHOLDERS[0], "little", signed=True)
    columns = [
        *batch.columns[:5],
        pa.array([number] * 3),
        pa.array([PLACEHOLDERS[1]] * 3),
        pa.array([[number]] * 3),
    ]
    made = [pa.RecordBatch.from_arrays(columns, schema=batch.schema)]
    file = write(path, table, made)
    fill(path, file, COMMIT, name="s")
    assert read_natively(path, table).equals(released(table, made))


def test_a_file_without_rows(path: Path) -> None:
    file = write(path, SIMPLE, [])
    assert (file.n_rows, file.page_offsets, file.head_bytes) == (0, (), path.stat().st_size)
    fill(path, file, COMMIT, name="s")
    assert read(path, SIMPLE, file).num_rows == 0
    assert bound_tail(b"", file, COMMIT, name="s") == b""


# -- the form of the file ------------------------------------------------------------------------------------


def test_every_column_is_compressed_and_has_statistics_but_floats_and_the_late_ones(path: Path) -> None:
    table = every_type()
    write(path, table, batches(table, 9))
    metadata = pq.read_metadata(path)
    assert metadata.metadata == {b"org.apache.spark.version": b"3.5.7"}
    group = metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    assert tuple(c.path_in_schema for c in columns[-2:]) == LATE_COLUMNS
    for column in columns[:-2]:
        assert column.compression == "SNAPPY"
        assert column.is_stats_set == (column.physical_type not in ("FLOAT", "DOUBLE")), (
            "of NaN they say nothing"
        )
        assert column.has_dictionary_page == (column.path_in_schema in ("_change_type", "_xid"))
    [change_types] = [c.statistics for c in columns if c.path_in_schema == "_change_type"]
    written = read_natively(path, table).column("_change_type").to_pylist()
    assert (change_types.min, change_types.max) == (min(written), max(written))
    for column in columns[-2:]:
        assert column.compression == "UNCOMPRESSED" and not column.is_stats_set
        assert column.physical_type == "INT64" and column.has_dictionary_page


def test_rows_in_memory_are_one_row_group_whatever_their_blocks(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, *[10] * 30))
    assert len(file.page_offsets) == pq.read_metadata(path).num_row_groups == 1


def test_one_wide_row_after_the_other_has_a_row_group_of_its_own(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 8), row_group_bytes=1)
    assert len(file.page_offsets) == 8


def test_wide_rows_do_not_fill_a_page_of_many_megabytes() -> None:
    # The writer holds a page and its compressed copy.
    table = relation(("a", 25))
    [batch] = batches(table, 48)
    wide = pa.array([f"{i % 10}" * 500_000 for i in range(48)])
    made = unbound(batch.set_column(5, batch.schema.field(5), wide), table, XID)
    sizes: list[int] = []
    write_rows(lambda data: sizes.append(memoryview(data).nbytes), table, [made])
    pages = [n for n in sizes if n > 20_000]
    assert len(pages) >= 12, "a page for a few rows, not one for all 24 MB"


def test_the_record_travels_by_pickle_and_json(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 8), row_group_bytes=200)
    assert pickle.loads(pickle.dumps(file)) == file
    assert RowFile.from_json(json.loads(json.dumps(file.to_json()))) == file
    assert file.checksum == f"crc32:{zlib.crc32(path.read_bytes()):08x}"
    assert file.head_crc == zlib.crc32(path.read_bytes()[: file.head_bytes])


def test_rows_of_another_layout_are_refused(path: Path) -> None:
    with pytest.raises(UsageError):
        write_rows(lambda _: None, SIMPLE, batches(SIMPLE, 3))


def test_a_full_disk_is_the_callers_error() -> None:
    def full(data: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_rows(full, SIMPLE, [unbound(batch, SIMPLE, XID) for batch in batches(SIMPLE, 3)])


def test_an_unfilled_file_shows_what_it_is(path: Path) -> None:
    write(path, SIMPLE, batches(SIMPLE, 3))
    found = pq.read_table(path)
    assert set(found.column("_commit_lsn").to_pylist()) == {
        int.from_bytes(PLACEHOLDERS[0], "little", signed=True)
    }
    assert max(found.column("_commit_lsn").to_pylist()) < 0


# -- filling -------------------------------------------------------------------------------------------------


def test_filling_again_changes_nothing(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 100, 100), row_group_bytes=4_000)
    fill(path, file, COMMIT, name="s")
    filled = path.read_bytes()
    fill(path, file, COMMIT, name="s")
    assert path.read_bytes() == filled


def test_filling_after_a_failed_flush_writes_all_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of a page that it could not write once, and takes it for written from then on."""
    file = write(path, SIMPLE, batches(SIMPLE, 100))
    flush, write_at, written = os.fdatasync, os.pwrite, []

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def noted(descriptor: int, data: bytes, offset: int) -> int:
        written.append(offset)
        return write_at(descriptor, data, offset)

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageFault):
        fill(path, file, COMMIT, name="s")
    monkeypatch.setattr(os, "fdatasync", flush)
    monkeypatch.setattr(os, "pwrite", noted)
    fill(path, file, COMMIT, name="s")
    assert written == [slot.offset for slot in file.slots()]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_file_that_may_not_be_changed_is_refused_and_not_a_fault(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 100))

    def refuse(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FillRefused, match="cannot be changed in place"):
        fill(path, file, COMMIT, name="s")


def test_a_file_that_is_filled_in_part_is_completed(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 100), row_group_bytes=4_000)
    written = path.read_bytes()
    fill(path, file, COMMIT, name="s")
    filled = path.read_bytes()
    for slot in list(file.slots()):
        path.write_bytes(filled[: slot.end] + written[slot.end :])
        verify(pa.py_buffer(path.read_bytes()), file, name="s")
        fill(path, file, COMMIT, name="s")
        assert path.read_bytes() == filled


def test_another_commit_is_refused_and_nothing_is_changed(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 100), row_group_bytes=4_000)
    fill(path, file, COMMIT, name="s")
    filled = path.read_bytes()
    for other in (OTHER, CommitStamp(COMMIT.commit_lsn, COMMIT.commit_timestamp_us - 1)):
        with pytest.raises(FilledOtherwise, match="another commit"):
            fill(path, file, other, name="s")
        with pytest.raises(FilledOtherwise, match="another commit"):
            bound_tail(filled[file.head_bytes :], file, other, name="s")
    assert path.read_bytes() == filled


def test_a_file_of_another_length_or_none_is_refused(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 100))
    written = path.read_bytes()
    path.write_bytes(written[:-1])
    with pytest.raises(SegmentCorrupt, match=r"'s' has .* bytes"):
        fill(path, file, COMMIT, name="s")
    path.unlink()
    with pytest.raises(SegmentCorrupt, match="'s' is missing"):
        fill(path, file, COMMIT, name="s")
    path.mkdir()
    with pytest.raises(StorageFault, match="'s'"):
        fill(path, file, COMMIT, name="s")


@pytest.mark.parametrize("part", [0, 1], ids=["lsn's checksum", "lsn"])
@pytest.mark.parametrize("first_half", [True, False])
def test_a_write_that_a_kill_tore_is_completed(path: Path, part: int, first_half: bool) -> None:
    # A kernel may end a write of a killed process between two pages, and a power cut one between two blocks.
    for n in range(1, 2_000):
        file = write(path, SIMPLE, batches(SIMPLE, n))
        slot = list(file.slots(COMMIT))[part]
        if slot.offset // 512 != (slot.end - 1) // 512:
            break
    else:
        pytest.fail("no file whose slot crosses a block")
    edge = -slot.offset % 512
    wanted = path.read_bytes()
    halves = (slot.bound, slot.written) if first_half else (slot.written, slot.bound)
    torn = halves[0][:edge] + halves[1][edge:]
    assert torn not in (slot.bound, slot.written)
    path.write_bytes(wanted[: slot.offset] + torn + wanted[slot.end :])
    fill(path, file, COMMIT, name="s")
    again = path.with_name("again")
    again.write_bytes(wanted)
    fill(again, file, COMMIT, name="s")
    assert path.read_bytes() == again.read_bytes()


def test_the_tail_of_a_copy_is_that_of_the_filled_file(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 300), row_group_bytes=4_000)
    written = path.read_bytes()
    fill(path, file, COMMIT, name="s")
    filled = path.read_bytes()
    head = filled[: file.head_bytes]
    assert head == written[: file.head_bytes]
    for stored in (written, filled):
        verify_tail(stored[file.head_bytes :], file, name="s")
        assert head + bound_tail(stored[file.head_bytes :], file, COMMIT, name="s") == filled


def test_a_damaged_tail_is_refused(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 300))
    tail = path.read_bytes()[file.head_bytes :]
    for position in range(0, len(tail), 7):
        damaged = bytearray(tail)
        damaged[position] ^= 0x10
        with pytest.raises((SegmentCorrupt, FilledOtherwise)):
            bound_tail(bytes(damaged), file, COMMIT, name="s")
        if not any(slot.offset <= file.head_bytes + position < slot.end for slot in file.slots()):
            with pytest.raises(SegmentCorrupt, match="checksum"):
                verify_tail(bytes(damaged), file, name="s")
    with pytest.raises(SegmentCorrupt):
        bound_tail(tail[1:], file, COMMIT, name="s")


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filled", [False, True])
def test_a_flipped_bit_is_found_wherever_it_is(path: Path, filled: bool) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 400), row_group_bytes=8_000)
    if filled:
        fill(path, file, COMMIT, name="s")
    content = path.read_bytes()
    slots = {position for slot in file.slots() for position in range(slot.offset, slot.end)}
    for position in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[position] ^= 0x04
        found = read_rows(pa.py_buffer(bytes(damaged)), SIMPLE, file, COMMIT, name="s")
        if position in slots:
            next(found)
        else:
            with pytest.raises(SegmentCorrupt, match="'s' has checksum"):
                next(found)


def test_a_flipped_bit_in_a_slot_changes_no_row_and_is_not_filled(path: Path) -> None:
    made = batches(SIMPLE, 50)
    file = write(path, SIMPLE, made)
    content = path.read_bytes()
    for slot in file.slots():
        damaged = bytearray(content)
        damaged[slot.offset] ^= 0x04
        path.write_bytes(bytes(damaged))
        assert read(path, SIMPLE, file).equals(released(SIMPLE, made))
        with pytest.raises(FilledOtherwise):
            fill(path, file, COMMIT, name="s")
        assert path.read_bytes() == bytes(damaged)


def test_a_torn_file_gives_no_row_at_any_length(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 50))
    content = path.read_bytes()
    for length in (0, 1, 4, len(content) // 2, file.head_bytes, len(content) - 1):
        with pytest.raises(SegmentCorrupt, match=f"'s' has {length} bytes"):
            next(read_rows(pa.py_buffer(content[:length]), SIMPLE, file, COMMIT, name="s"))


def test_a_file_of_another_table_is_refused(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 50))
    with pytest.raises(SegmentCorrupt, match="other"):
        read(path, relation(("id", 20), name="other"), file)
    with pytest.raises(SegmentCorrupt, match="51 were written"):
        read(path, SIMPLE, dataclasses.replace(file, n_rows=51))


def test_what_is_no_parquet_is_refused() -> None:
    content = b"not Parquet at all, but summed all the same"
    file = RowFile(1, len(content), f"crc32:{zlib.crc32(content):08x}", 0, ())
    with pytest.raises(SegmentCorrupt, match="not a Parquet file"):
        next(read_rows(pa.py_buffer(content), SIMPLE, file, COMMIT, name="s"))


def test_the_sums_of_pages_find_a_flipped_bit_in_another_reader(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 400))
    fill(path, file, COMMIT, name="s")
    content = path.read_bytes()
    group = pq.read_metadata(path).row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        damaged = bytearray(content)
        # The last byte of a column chunk is its last page's content, not a header.
        start = column.dictionary_page_offset or column.data_page_offset
        damaged[start + column.total_compressed_size - 1] ^= 0x01
        path.write_bytes(bytes(damaged))
        with pytest.raises(OSError, match=r"(?i)crc"):
            pq.read_table(path, page_checksum_verification=True)


# -- rolled back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 1, 0.3, 0.999])
def test_the_head_of_a_file_is_a_file_of_its_own(path: Path, share: float) -> None:
    table = every_type()
    made = batches(table, 100, 50, 80)
    file = write(path, table, made, row_group_bytes=20_000)
    wanted = released(table, made)
    seqs = wanted.column("_seq").to_pylist()
    end_seq = seqs[math.floor(share * (len(seqs) - 1))] + (1 if share == 1 else 0)
    again = path.with_name("again.parquet")
    with again.open("wb") as out:
        head = rewrite_head(pa.py_buffer(path.read_bytes()), table, file, end_seq, out.write, name="s")
    kept = wanted.filter(pa.compute.less(wanted.column("_seq"), end_seq))
    assert head.n_rows == kept.num_rows == sum(seq < end_seq for seq in seqs)
    assert read(again, table, head).equals(kept)
    fill(again, head, COMMIT, name="s")
    assert read_natively(again, table).equals(kept)


def test_the_head_of_a_damaged_file_is_not_written(path: Path) -> None:
    file = write(path, SIMPLE, batches(SIMPLE, 50))
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    with pytest.raises(SegmentCorrupt):
        rewrite_head(pa.py_buffer(bytes(damaged)), SIMPLE, file, 10, lambda _: None, name="s")
