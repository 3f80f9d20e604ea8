"""The net of a short tail without Spark: the last word on each key, and what is left to Spark."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as t

from xidstream.pipeline.changelog.generations import TableGeneration
from xidstream.pipeline.changelog.log_table import DeltaLogTable
from xidstream.pipeline.changelog.shape import ColumnShape, TableShape
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.log_tables import parquet_files
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.mirror import local_swap
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.net_rows import NetRows
from xidstream.pipeline.mirror.plan import BaseFile, KeyRange, in_key_order, plan_swap, removed
from xidstream.pipeline.mirror.tail_rows import net_of
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

FIELDS = [pa.field("n", pa.int64()), pa.field("v", pa.string())]
SCHEMA = pa.schema([*FIELDS, *CONTRACT_FIELDS])
KEY = RangedKey.of(["n"], {"n": pa.int64()})
HELD = {"n": ColumnShape(t.LongType(), ("n",)), "v": ColumnShape(t.StringType(), ("v",))}
EVERYTHING = [BaseFile("f", 1, 1, KeyRange((0,), (100,)))]


def change(lsn: int, seq: int, n: int | None, v: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "_change_type": "update_postimage",
        "_commit_lsn": lsn,
        "_seq": seq,
        "_xid": 1,
        "n": n,
        "v": v,
        **more,
    }


def log_of(folder: Path, *files: list[dict[str, Any]], held: dict[str, ColumnShape] = HELD) -> TableAt:
    """A table of the log with these files, whose snapshot is valid from 100."""
    location = Location.parse(str(folder))
    columns = [TableColumn(field.name, field.type, field.name) for field in SCHEMA]
    writer = DeltaTableWriter.open_or_create(location, "t", columns)
    for number, rows in enumerate(files, 1):
        parquet = ParquetFiles(location, f"data-{number}", SCHEMA, "_commit_lsn")
        for i in range(0, len(rows), 1_000):
            parquet.write(pa.RecordBatch.from_pylist(rows[i : i + 1_000], schema=SCHEMA))
        writer.commit(parquet.close(), {"slot": number})
    bounds = SnapshotBounds(Lsn(99), Lsn(100), 5, 5, (), 0)
    generation = TableGeneration("public.t", 1, 1, bounds, ("n",), None)
    return TableAt(DeltaLogTable(location), generation, TableShape("public.t", held, ("n",)), Lsn(300))


def net(log: TableAt, since: int = 100, texts: Sequence[str] = ()) -> NetRows | None:
    return net_of(log, log.tail_files(since), since, FIELDS, KEY, texts)


def rows_of(found: NetRows | None) -> tuple[list[tuple[int, str | None]], int]:
    """What is set, and how many keys there are."""
    assert found is not None
    rows = found.arriving(found.slots(EVERYTHING), [0], pa.schema(FIELDS)).to_pylist()
    return [(row["n"], row["v"]) for row in rows], len(found)


def test_the_last_word_on_a_key_counts_in_commit_order_whatever_file_it_is_in(tmp_path: Path) -> None:
    later = [
        change(200, 0, 1, "last"),
        change(200, 1, 2, _change_type="delete"),
        change(301, 0, 1, "too late"),
    ]
    earlier = [
        change(100, 0, 9, "in the base"),
        change(150, 0, 1, "first"),
        change(150, 1, 2, "x"),
        change(150, 2, 3, _change_type="delete"),
        change(150, 3, 3, "again"),
        change(150, 4, 4, _change_type="update_preimage"),
        change(150, 5, 5, "moved", _change_type="update_postimage"),
    ]
    log = log_of(tmp_path, later, earlier)
    for texts in ([], ["v"]):
        assert rows_of(net(log, texts=texts)) == ([(1, "last"), (3, "again"), (5, "moved")], 5)


@pytest.mark.parametrize("texts", [[], ["v"]])
def test_of_very_many_rows_of_few_keys_each_keys_last_one_counts_whatever_row_group_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    monkeypatch.setattr(parquet_files, "ROW_GROUP_ROWS", 1_000)
    changes = [change(150, i, i * 7 % 50, f"{i}") for i in range(20_000)]
    log = log_of(tmp_path, changes)
    (file,) = log.tail_files(100)
    assert pq.read_metadata(tmp_path / file.path).num_row_groups == 20
    found, n_keys = rows_of(net(log, texts=texts))
    last = {row["n"]: row["v"] for row in changes}
    assert (dict(found), n_keys) == (last, 50)


def test_a_full_old_tuple_under_the_same_key_is_no_last_word(tmp_path: Path) -> None:
    log = log_of(
        tmp_path, [change(150, 0, 1, "old", _change_type="update_preimage"), change(150, 1, 1, "new")]
    )
    assert rows_of(net(log)) == ([(1, "new")], 1)


def test_a_column_that_is_held_under_another_name_is_read_from_there(tmp_path: Path) -> None:
    held = {"n": HELD["n"], "w": ColumnShape(t.StringType(), ("v",))}
    log = log_of(tmp_path, [change(150, 0, 1, "value")], held=held)
    found = net_of(log, log.tail_files(100), 100, [FIELDS[0], pa.field("w", pa.string())], KEY)
    assert found is not None
    schema = pa.schema([("w", pa.string())])
    assert found.arriving(found.slots(EVERYTHING), [0], schema).to_pylist() == [{"w": "value"}]


@pytest.mark.parametrize("texts", [[], ["v"]])
def test_a_file_of_the_log_without_a_column_has_no_values_of_it(tmp_path: Path, texts: list[str]) -> None:
    log = log_of(tmp_path, [change(150, 0, 1)], [change(160, 0, 2, "x")])
    # As it was written before the column was added.
    first = next(tmp_path / file.path for file in log.tail_files(100) if file.max_lsn == 150)
    pq.write_table(pq.read_table(first).drop_columns(["v"]), first)
    assert rows_of(net(log, texts=texts)) == ([(1, None), (2, "x")], 2)


@pytest.mark.parametrize(
    "row",
    [
        change(150, 1, None, _change_type="truncate"),
        change(150, 1, 2, _unchanged=["v"]),
        change(150, 1, None, "a key that its column cannot hold"),
    ],
    ids=["truncate", "unchanged value", "null key"],
)
def test_what_takes_more_than_the_last_word_is_left_to_spark(tmp_path: Path, row: dict[str, Any]) -> None:
    assert net(log_of(tmp_path, [change(150, 0, 1, "x"), row])) is None


def test_rows_that_the_snapshot_may_contain_and_columns_in_two_places_are_left_to_spark(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path, [change(150, 0, 1, "x")])
    assert net(log, since=99) is None and net(log, since=100) is not None
    held = {**HELD, "v": ColumnShape(t.StringType(), ("v", "v_1"))}
    assert net(TableAt(log.log_table, log.generation, TableShape("public.t", held, ("n",)), log.lsn)) is None


def test_more_rows_than_this_process_is_to_hold_are_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, [change(150, i, i, "x") for i in range(10)])
    monkeypatch.setattr(local_swap, "NET_ROWS", 9)
    assert net(log) is None
    monkeypatch.setattr(local_swap, "NET_ROWS", 10)
    assert net(log) is not None
    monkeypatch.setattr(local_swap, "NET_BYTES", 100)
    assert net(log) is None


def test_files_that_are_refreshed_by_random_tails_hold_what_the_changes_say(tmp_path: Path) -> None:
    dice = random.Random(18)
    model = {i: f"old {i}" for i in range(0, 600, 2)}
    pq.write_table(pa.table({"n": list(model), "v": list(model.values())}), tmp_path / "base.parquet")
    paths, lsn = ["base.parquet"], 100
    for number in range(8):
        rows = []
        for seq in range(dice.choice([0, 1, 5, 300])):
            n, v = dice.randrange(700), f"{number}.{seq}"
            kind = dice.choice(["insert", "update_postimage", "update_preimage", "delete"])
            rows.append(change(lsn + 1 + seq // 7, seq, n, v, _change_type=kind))
            if kind in ("delete", "update_preimage"):
                model.pop(n, None)
            else:
                model[n] = v
        log = log_of(tmp_path / f"log-{number}", rows or [change(lsn, 0, 0)])
        log = TableAt(log.log_table, log.generation, log.shape, Lsn(lsn + 100))
        facts = [KEY.facts_of(str(tmp_path / path)) for path in paths]
        sizes = [(tmp_path / path).stat().st_size for path in paths]
        files = in_key_order(
            BaseFile(path, size, f.n_rows, f.range) for path, size, f in zip(paths, sizes, facts, strict=True)
        )
        found = net(log, lsn, dice.choice([[], ["v"]]))
        assert files and found is not None
        counts = found.counts(files)
        groups = plan_swap(files, counts.touched, counts.arriving, 2_000)
        swap = local_swap.LocalSwap(
            Location.parse(str(tmp_path)), pa.schema(FIELDS), files, found, ["n"], lambda: None
        )
        gone = {file.path for file in removed(files, groups)}
        paths = [path for path in paths if path not in gone] + swap.write(groups, f"refresh-{number}")
        held = [row for path in paths for row in pq.read_table(tmp_path / path).to_pylist()]
        assert sorted((row["n"], row["v"]) for row in held) == sorted(model.items())
        lsn += 100
    assert len(paths) > 1
