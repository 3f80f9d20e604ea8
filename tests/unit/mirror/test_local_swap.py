"""Files that this process writes for a swap: what is in them, and in how many."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror import file_chunks, local_swap
from xidstream.pipeline.mirror.file_chunks import read_chunks, repeating_texts, with_dictionaries
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.local_swap import LocalSwap, fits
from xidstream.pipeline.mirror.net_rows import NetRows
from xidstream.pipeline.mirror.plan import BaseFile, FileGroup, KeyRange

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string()), ("f", pa.float64())])
KEY = RangedKey.of(["id"], {"id": pa.int64()})


def base_file(folder: Path, name: str, ids: Sequence[int]) -> BaseFile:
    rows = pa.table({"id": pa.array(ids, pa.int64()), "v": [f"old {i}" for i in ids]})
    pq.write_table(rows, folder / name, row_group_size=7)
    return BaseFile(name, 1_000, len(ids), KeyRange((min(ids),), (max(ids),)))


def swap(
    folder: Path,
    files: Sequence[BaseFile],
    new: Mapping[int, str | None],
    check: Callable[[], None] = lambda: None,
    texts: Sequence[str] = (),
) -> LocalSwap:
    """``new``: id → its new value; None where it is gone. ``texts``: the columns that come with one dictionary."""
    text = pa.field("_text", pa.map_(pa.string(), pa.string()))
    schema = pa.schema([*SCHEMA, text, ("_change_type", pa.string())])
    kinds = {True: "delete", False: "update_postimage"}
    rows = [{"id": i, "v": v, "_change_type": kinds[v is None]} for i, v in new.items()]
    table = pa.Table.from_pylist(rows, schema=schema).cast(with_dictionaries(schema, texts))
    net = NetRows(table, ["id"], KEY)
    return LocalSwap(Location.parse(str(folder)), SCHEMA, files, net, ["id"], check)


def read(folder: Path, path: str) -> dict[int, Any]:
    rows = pq.read_table(folder / path)
    assert rows.schema.equals(SCHEMA)
    found = dict(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True))
    assert len(found) == rows.num_rows
    return found


def test_a_file_keeps_its_rows_but_the_changed_ones_and_gets_those_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_chunks, "_CHUNK_ROWS", 5)
    files = [base_file(tmp_path, "a", range(0, 40, 2)), base_file(tmp_path, "b", range(50, 90))]
    new = {4: "new", 7: "between", 6: None, 45: "behind", 60: "new", 61: None}
    paths = swap(tmp_path, files, new).write(
        [FileGroup((0,), (0,), 1), FileGroup((1,), (1,), 1)], "refresh-1"
    )
    first, second = (read(tmp_path, path) for path in paths)
    old = {i: f"old {i}" for i in range(0, 40, 2) if i != 6}
    assert first == {**old, 4: "new", 7: "between", 45: "behind"}
    assert second == {**{i: f"old {i}" for i in range(50, 90) if i != 61}, 60: "new"}


def test_the_writer_looks_at_its_pages_as_often_as_their_rows_are_wide() -> None:
    ids = pa.array(range(9), pa.int64())
    narrow = pa.table({"id": ids, "v": pa.array(["x" * 100_000] * 9).dictionary_encode()})
    wide = pa.table({"id": ids, "v": ["x" * 100_000] * 9})
    assert local_swap._rows_between_looks(narrow) > 100 * local_swap._rows_between_looks(wide)


def test_a_group_is_cut_by_key_and_one_without_rows_leaves_no_file(tmp_path: Path) -> None:
    files = [base_file(tmp_path, "a", [9, 1, 5, 3]), base_file(tmp_path, "b", [20, 21])]
    new = {2: "x", 7: "x", 20: None, 21: None, 100: "y", 101: "y"}
    groups = [FileGroup((0,), (0,), 1, 3), FileGroup((1,), (), 1)]
    paths = swap(tmp_path, files, new).write(groups, "refresh-1")
    assert [list(read(tmp_path, path)) for path in paths] == [[1, 2], [3, 5], [7, 9]]
    paths = swap(tmp_path, files, new).write([FileGroup((), (1,), 1, 2)], "refresh-2")
    assert [list(read(tmp_path, path)) for path in paths] == [[100], [101]]


def test_a_column_keeps_its_dictionary_or_its_lack_of_one_and_a_new_column_has_one(tmp_path: Path) -> None:
    rows = pa.table({"id": pa.array(range(9), pa.int64()), "v": ["same"] * 9})
    pq.write_table(rows, tmp_path / "a", use_dictionary=["v"])
    files = [BaseFile("a", 1, 9, KeyRange((0,), (8,)))]
    groups = [FileGroup((0,), (0,), 1), FileGroup((), (0,), 1)]
    for path in swap(tmp_path, files, {1: "new"}).write(groups, "refresh-1"):
        row_group = pq.read_metadata(tmp_path / path).row_group(0)
        assert [row_group.column(i).has_dictionary_page for i in range(3)] == [False, True, True]


def texts_of(n: int, length: int) -> list[str]:
    return [f"{i:0{length}d}" for i in range(n)]


@pytest.mark.parametrize("n_row_groups", [1, 5])
@pytest.mark.parametrize("new_values", ["the same", "others"])
def test_texts_that_repeat_pass_through_as_indexes_whatever_dictionaries_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_row_groups: int, new_values: str
) -> None:
    monkeypatch.setattr(file_chunks, "_CHUNK_ROWS", 300)
    n, texts = 5_000, texts_of(50, 400)
    # Each row group has a dictionary of its own.
    old = {i: texts[(i // 1_000 * 7 + i % 7) % 50] for i in range(n)}
    rows = pa.table({"id": pa.array(old, pa.int64()), "v": list(old.values())})
    pq.write_table(rows, tmp_path / "a", use_dictionary=["v"], row_group_size=n // n_row_groups)
    files = [BaseFile("a", 1, n, KeyRange((0,), (n - 1,)))]
    new = {i: texts[i % 50] if new_values == "the same" else f"{i}" * 9 for i in range(0, n, 9)}
    for group in (FileGroup((0,), (0,), 1), FileGroup((0,), (0,), 1, 3)):
        work = swap(tmp_path, files, {**new, 4: None})
        paths = work.write([group], f"refresh-{group.n_files}")
        held = {i: value for path in paths for i, value in read(tmp_path, path).items()}
        assert held == {i: value for i, value in {**old, **new}.items() if i != 4}
        dense = sum(len(value) for value in held.values())
        footers = [pq.read_metadata(tmp_path / path) for path in paths]
        chunks = [footer.row_group(i).column(1) for footer in footers for i in range(footer.num_row_groups)]
        assert all(chunk.has_dictionary_page for chunk in chunks)
        assert sum(chunk.total_uncompressed_size for chunk in chunks) < dense / 10


def test_a_dictionary_that_would_outgrow_its_page_begins_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_swap, "DICTIONARY_BYTES", 9_000)
    texts = texts_of(40, 400)
    old = {i: texts[i // 500 * 10 + i % 10] for i in range(2_000)}
    rows = pa.table({"id": pa.array(old, pa.int64()), "v": list(old.values())})
    pq.write_table(rows, tmp_path / "a", use_dictionary=["v"], row_group_size=500)
    files = [BaseFile("a", 1, 2_000, KeyRange((0,), (1_999,)))]
    (path,) = swap(tmp_path, files, {3: "new"}).write([FileGroup((0,), (0,), 1)], "refresh-1")
    assert read(tmp_path, path) == {**old, 3: "new"}
    footer = pq.read_metadata(tmp_path / path)
    # Two of the four dictionaries fit a page together.
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [999, 1_001]


def dictionary_sizes(path: Path) -> list[tuple[int, int]]:
    """Of each row group: how many entries the dictionary of ``v`` has, and how many texts the rows have."""
    with pq.ParquetFile(path, read_dictionary=["v"]) as file:
        groups = [file.read_row_group(i)["v"].combine_chunks() for i in range(file.num_row_groups)]
    return [(len(chunk.dictionary), len(pc.unique(chunk.cast(pa.string()).drop_null()))) for chunk in groups]


@pytest.mark.parametrize("n_files", [1, 3])
def test_the_dictionaries_of_refreshed_files_have_the_texts_of_their_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_files: int
) -> None:
    monkeypatch.setattr(file_chunks, "_CHUNK_ROWS", 300)
    n, n_slots = 4_000, 2
    held: dict[int, str | None] = {i: f"old {i % 9}" if i % 11 else "" for i in range(n)}
    groups = [dict(list(held.items())[i * n // n_slots :][: n // n_slots]) for i in range(n_slots)]
    paths = [f"{i}" for i in range(n_slots)]
    for path, old in zip(paths, groups, strict=True):
        rows = pa.table({"id": pa.array(old, pa.int64()), "v": [value or None for value in old.values()]})
        pq.write_table(rows, tmp_path / path, use_dictionary=["v"])
    for number in range(4):
        facts = [KEY.facts_of(str(tmp_path / path)) for path in paths]
        files = [BaseFile(path, 1, f.n_rows, f.range) for path, f in zip(paths, facts, strict=True)]
        new = {i: f"{number} {i}" for i in range(0, n, 7)}
        lows = [f.range.low[0] if f.range else -1 for f in facts]
        parts = [
            [i for i, low in enumerate(lows) if low // (n // n_slots) == slot] for slot in range(n_slots)
        ]
        work = [FileGroup(tuple(some), tuple(some), 1, n_files) for some in parts]
        paths = swap(tmp_path, files, new, texts=["v"]).write(work, f"refresh-{number}")
        held |= new
        found = {i: value for path in paths for i, value in read(tmp_path, path).items()}
        assert found == {i: value or None for i, value in held.items()}
        assert len(paths) == n_files * n_slots
        for path in paths:
            assert all(n_entries == n_texts for n_entries, n_texts in dictionary_sizes(tmp_path / path))


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("where", ["among the changes", "in the file's row groups"])
def test_texts_that_outgrow_their_page_together_are_written_as_they_are(
    tmp_path: Path, n_files: int, where: str
) -> None:
    dice, n = random.Random(18), 45_000
    texts = dict(enumerate(dice.randbytes(100).hex() for _ in range(n)))
    few = dict.fromkeys(range(n + 5_000), "the same")
    is_new = where == "among the changes"
    old, new = (few, texts) if is_new else (few | texts, {3: "new"})
    rows = pa.table({"id": pa.array(old, pa.int64()), "v": list(old.values())})
    pq.write_table(rows, tmp_path / "a", use_dictionary=["v"], row_group_size=4_500)
    assert repeating_texts([pq.read_metadata(tmp_path / "a")], SCHEMA, ["id"]) == ["v"]
    files = [BaseFile("a", 1, len(old), KeyRange((0,), (len(old) - 1,)))]
    work = swap(tmp_path, files, new, texts=["v"])
    paths = work.write([FileGroup((0,), (0,), 1, n_files)], "refresh-1")
    assert {i: value for path in paths for i, value in read(tmp_path, path).items()} == old | new
    for path in paths:
        footer = pq.read_metadata(tmp_path / path)
        chunks = [footer.row_group(i).column(1) for i in range(footer.num_row_groups)]
        sizes = [chunk.data_page_offset - chunk.dictionary_page_offset for chunk in chunks]
        # Arrow looks at the size now and then only.
        assert max(sizes) < 2.1 * file_chunks.DICTIONARY_BYTES


@pytest.mark.parametrize(("n_texts", "repeat"), [(1_000, True), (20_000, False)])
def test_texts_that_outgrew_their_dictionary_are_read_as_they_are(
    tmp_path: Path, n_texts: int, repeat: bool
) -> None:
    texts = texts_of(n_texts, 200)
    old = {i: texts[i % n_texts] for i in range(20_000)}
    rows = pa.table({"id": pa.array(old, pa.int64()), "v": list(old.values())})
    pq.write_table(rows, tmp_path / "a", use_dictionary=["v"])
    footer = pq.read_metadata(tmp_path / "a")
    assert footer.row_group(0).column(1).has_dictionary_page
    assert repeating_texts([footer], SCHEMA, ["id"]) == (["v"] if repeat else [])
    files = [BaseFile("a", 1, len(old), KeyRange((0,), (len(old) - 1,)))]
    (path,) = swap(tmp_path, files, {3: "new"}).write([FileGroup((0,), (0,), 1)], "refresh-1")
    assert read(tmp_path, path) == {**old, 3: "new"}


def test_a_group_is_cut_by_the_columns_that_have_ranges_first(tmp_path: Path) -> None:
    types = {"flag": pa.bool_(), "n": pa.int64(), "v": pa.string()}
    key = RangedKey.of(["flag", "n"], types)
    rows = pa.table({"flag": [i % 3 == 0 for i in range(9)], "n": range(9), "v": ["v"] * 9})
    pq.write_table(rows, tmp_path / "a")
    text = pa.field("_text", pa.map_(pa.string(), pa.string()))
    schema = pa.schema([*types.items(), text, ("_change_type", pa.string())])
    new = [{"flag": True, "n": 9, "v": "new", "_change_type": "insert"}]
    names = key.ahead_in(["flag", "n"])
    net = NetRows(pa.Table.from_pylist(new, schema=schema), names, key)
    files = [BaseFile("a", 1, 9, KeyRange((0,), (8,)))]
    table = Location.parse(str(tmp_path))
    work = LocalSwap(table, pa.schema(list(types.items())), files, net, names, lambda: None)
    paths = work.write([FileGroup((0,), (0,), 1, 2)], "refresh-1")
    assert [pq.read_table(tmp_path / path)["n"].to_pylist() for path in paths] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_floats_have_no_statistics_because_readers_order_nan_otherwise(tmp_path: Path) -> None:
    files = [base_file(tmp_path, "a", [1, 2])]
    (path,) = swap(tmp_path, files, {1: "new"}).write([FileGroup((0,), (0,), 1)], "refresh-1")
    footer = pq.read_metadata(tmp_path / path)
    assert [footer.row_group(0).column(i).statistics is None for i in range(3)] == [False, False, True]


def test_a_refresh_that_is_given_up_writes_no_further_file(tmp_path: Path) -> None:
    files = [base_file(tmp_path, f"{i}", [i]) for i in range(20)]
    asked = []

    def check() -> None:
        asked.append(1)
        if len(asked) > 3:
            raise ComponentLost("given up")

    with pytest.raises(ComponentLost):
        swap(tmp_path, files, dict.fromkeys(range(20), "x"), check).write(
            [FileGroup((i,), (i,), 1) for i in range(20)], "refresh-1"
        )
    assert len(asked) < 20


def test_a_large_part_of_a_table_and_a_large_group_that_must_be_sorted_are_for_spark() -> None:
    gigabyte = 1 << 30
    assert fits([FileGroup((0,), (0,), gigabyte), FileGroup((), (1,), gigabyte - 1, 20)])
    assert not fits([FileGroup((i,), (i,), gigabyte) for i in range(3)])
    assert not fits([FileGroup((0,), (0,), gigabyte, 2)])
    assert fits([FileGroup((0,), (0,), 100 << 20, 2)])
    assert not fits([FileGroup((i,), (i,), 100 << 20, 2) for i in range(2)]), (
        "each is sorted on a thread of its own"
    )


def test_a_chunk_of_values_that_repeat_in_a_dictionary_is_as_small_as_any(tmp_path: Path) -> None:
    n_rows, value = 8_000, "x" * 20_000
    pq.write_table(pa.table({"id": range(n_rows), "v": [value] * n_rows}), tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 1 << 20
    found = list(read_chunks(Location.parse(str(tmp_path)), "a"))
    assert max(chunk.nbytes for chunk in found) < 40 << 20
    assert sum(chunk.num_rows for chunk in found) == n_rows


def test_the_rows_of_other_row_groups_make_a_chunk_no_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_chunks, "_CHUNK_BYTES", 100_000)
    wide, narrow = (pa.table({"v": ["x" * length] * n}) for length, n in ((10_000, 100), (1, 30_000)))
    with pq.ParquetWriter(tmp_path / "a", wide.schema, use_dictionary=False) as writer:
        for rows in (wide, narrow):
            writer.write_table(rows)
    found = list(read_chunks(Location.parse(str(tmp_path)), "a", row_group=0))
    assert max(chunk.nbytes for chunk in found) < 150_000
    assert sum(chunk.num_rows for chunk in found) == 100
