"""Small files of a Delta table are merged by the commits themselves: deltalake, no Spark."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import multiprocessing
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from tests.s3_server import LosesAnswers
from xidstream.pipeline.delta import delta_table
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES, many_small

APP = "1/db/slot"
MANY = SIZE_CLASSES[0].many
VALUES: dict[pa.DataType, Any] = {
    pa.bool_(): True,
    pa.int16(): -3,
    pa.int32(): 4,
    pa.float32(): 0.5,
    pa.float64(): float("inf"),
    pa.decimal128(20, 4): decimal.Decimal("12.3456"),
    pa.string(): "Grüße",
    pa.binary(): b"\x00\xff",
    pa.date32(): datetime.date(1582, 10, 4),
    pa.timestamp("us"): datetime.datetime(1, 1, 1, 0, 0, 0, 1),
    pa.timestamp("us", tz="UTC"): datetime.datetime(9999, 12, 31, tzinfo=datetime.timezone.utc),
    pa.list_(pa.timestamp("us")): [datetime.datetime(2026, 1, 1), None],
    pa.list_(pa.decimal128(10, 2)): [decimal.Decimal("1.25")],
    pa.map_(pa.string(), pa.string()): [("k", None), ("l", "v")],
}
LSN = TableColumn("_commit_lsn", pa.int64(), "_commit_lsn")
COLUMNS = [LSN, *(TableColumn(f"c{i}", type_, f"c{i}") for i, type_ in enumerate(VALUES))]


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "public.t"))


def opened(location: Location, columns: list[TableColumn] = COLUMNS) -> DeltaTableWriter:
    return DeltaTableWriter.open_or_create(location, "public.t", columns)


def row(lsn: int) -> dict[str, Any]:
    """Every type of the contract; each second row has nulls alone."""
    values = {f"c{i}": value for i, value in enumerate(VALUES.values())}
    return {"_commit_lsn": lsn, **(values if lsn % 2 else dict.fromkeys(values))}


def written(
    location: Location, rows: list[dict[str, Any]], columns: list[TableColumn] = COLUMNS
) -> list[WrittenFile]:
    schema = pa.schema([column.field for column in columns])
    files = ParquetFiles(location, f"data-{rows[0]['_commit_lsn']:05d}", schema, "_commit_lsn")
    files.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    return files.close()


def commit(writer: DeltaTableWriter, location: Location, lsn: int) -> None:
    writer.commit(written(location, [row(lsn)]), {APP: lsn})


def rows_of(location: Location) -> list[dict[str, Any]]:
    table = DeltaTable(location.uri, storage_options=location.storage_options).to_pyarrow_table()
    return sorted(table.to_pylist(), key=lambda each: int(each["_commit_lsn"]))


def paths(location: Location) -> list[str]:
    return pa.table(DeltaTable(location.uri).get_add_actions(flatten=True))["path"].to_pylist()


def log_of(location: Location, version: int) -> list[dict[str, Any]]:
    text = (Path(location.uri) / "_delta_log" / f"{version:020d}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_hundred_commits_leave_all_rows_as_they_were_in_a_few_files(location: Location) -> None:
    writer = opened(location)
    most = 0
    for lsn in range(1, 101):
        commit(writer, location, lsn)
        most = max(most, len(paths(location)))
    assert most == MANY - 1
    assert rows_of(location) == [row(lsn) for lsn in range(1, 101)]
    assert opened(location).watermark(APP) == 100
    # A reader that is bounded by an LSN still skips files.
    found = writer.read(["_commit_lsn"], "_commit_lsn", 30, 40)
    assert sorted(found["_commit_lsn"].to_pylist()) == list(range(30, 41))


def test_a_merge_is_a_commit_of_its_own_that_removes_rows_and_adds_none(location: Location) -> None:
    """A follower that passes over commits with removals misses no row, and reads none twice."""
    writer = opened(location)
    for lsn in range(1, MANY + 1):
        commit(writer, location, lsn)
    rows = log_of(location, MANY)
    assert [a["add"]["dataChange"] for a in rows if "add" in a] == [True]
    assert not any("remove" in action for action in rows)
    actions = log_of(location, MANY + 1)
    assert [a["remove"]["dataChange"] for a in actions if "remove" in a] == [True] * MANY
    (added,) = (a["add"] for a in actions if "add" in a)
    assert added["dataChange"] is False
    assert json.loads(added["stats"]) == {
        "numRecords": MANY,
        "minValues": {"_commit_lsn": 1},
        "maxValues": {"_commit_lsn": MANY},
    }
    (told,) = (a["commitInfo"] for a in actions if "commitInfo" in a)
    assert told[delta_table.MERGED] == "true"


def compact(table: DeltaTable, **properties: Any) -> None:
    table.optimize.compact(**properties)


def z_order(table: DeltaTable, **properties: Any) -> None:
    table.optimize.z_order(["_commit_lsn"], **properties)


@pytest.mark.parametrize(("n_later", "retries"), [(0, None), (MANY + 8, 0)])
@pytest.mark.parametrize("rewrite", [compact, z_order])
def test_a_users_compaction_that_began_before_a_merge_is_refused(
    location: Location, rewrite: Any, retries: int | None, n_later: int
) -> None:
    columns = COLUMNS[:2]
    writer = opened(location, columns)
    for lsn in range(1, MANY):
        writer.commit(written(location, [{"_commit_lsn": lsn, "c0": True}], columns), {APP: lsn})
    table = DeltaTable(location.uri)
    n_rows = MANY + n_later
    for lsn in range(MANY, n_rows + 1):
        writer.commit(written(location, [{"_commit_lsn": lsn, "c0": True}], columns), {APP: lsn})
    properties = (
        {} if retries is None else {"commit_properties": CommitProperties(max_commit_retries=retries)}
    )
    with pytest.raises(CommitFailedError):
        rewrite(table, **properties)
    assert [each["_commit_lsn"] for each in rows_of(location)] == list(range(1, n_rows + 1))
    # As the error tells people to, it is asked for again.
    rewrite(DeltaTable(location.uri))
    writer.commit(written(location, [{"_commit_lsn": 1000, "c0": True}], columns), {APP: 1000})
    assert [each["_commit_lsn"] for each in rows_of(location)] == [*range(1, n_rows + 1), 1000]


def test_a_users_compaction_beside_new_rows_alone_goes_through(location: Location) -> None:
    writer = opened(location)
    for lsn in range(1, 10):
        commit(writer, location, lsn)
    table = DeltaTable(location.uri)
    for lsn in range(10, 20):
        commit(writer, location, lsn)
    table.optimize.compact()
    for lsn in range(20, 80):
        commit(writer, location, lsn)
    assert rows_of(location) == [row(lsn) for lsn in range(1, 80)]


@pytest.mark.parametrize("name", ["delta.appendOnly", "delta.enableChangeDataFeed"])
def test_a_table_whose_rows_are_never_removed_or_whose_changes_are_followed_is_not_merged(
    location: Location, name: str
) -> None:
    opened(location)
    DeltaTable(location.uri).alter.set_table_properties({name: "true"})
    writer = opened(location)
    for lsn in range(1, MANY + 4):
        commit(writer, location, lsn)
    assert len(paths(location)) == MANY + 3
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 4)]


def test_a_file_from_before_a_column_was_added_has_nulls_in_it(location: Location) -> None:
    writer = opened(location, COLUMNS[:2])
    for lsn in range(1, MANY + 1):
        writer.commit(written(location, [{"_commit_lsn": lsn, "c0": True}], COLUMNS[:2]), {APP: lsn})
    writer.add_columns(COLUMNS[2:])
    commit(writer, location, 101)
    assert len(paths(location)) == 2
    none = dict.fromkeys(column.name for column in COLUMNS)
    assert rows_of(location) == [
        *({**none, "_commit_lsn": lsn, "c0": True} for lsn in range(1, MANY + 1)),
        row(101),
    ]


def listed(sizes: list[int], name: str = "data-{}") -> pa.Table:
    return pa.table(
        {
            "path": [name.format(i) for i in range(len(sizes))],
            "size_bytes": sizes,
            "num_records": [1] * len(sizes),
            "min._commit_lsn": range(len(sizes), 0, -1),
        }
    )


@pytest.mark.parametrize("size_class", SIZE_CLASSES)
def test_as_many_files_of_one_class_go_together_those_with_the_lowest_lsns_first(size_class: Any) -> None:
    least, below, many = size_class
    assert not many_small(listed([least] * (many - 1)), "_commit_lsn").num_rows
    found = many_small(listed([below - 1] * (many + 3) + [below] * 3), "_commit_lsn")
    assert found["path"].to_pylist() == [f"data-{i}" for i in range(many + 2, 2, -1)]


def test_neither_large_files_nor_those_of_others_are_touched() -> None:
    large = SIZE_CLASSES[-1].below_bytes
    assert not many_small(listed([large] * 100), "_commit_lsn").num_rows
    assert not many_small(listed([100] * 100, "part-{}"), "_commit_lsn").num_rows
    assert not many_small(listed([100] * 100, "snapshot-{}"), "_commit_lsn").num_rows
    assert not many_small(listed([]), "_commit_lsn").num_rows


@pytest.mark.parametrize("content", [None, b"PAR1 no more"], ids=["gone", "damaged"])
def test_small_files_that_cannot_be_read_hold_up_no_commit_and_are_tried_again_after_a_while(
    location: Location,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
) -> None:
    monkeypatch.setattr(delta_table, "CHECKPOINT_EVERY", 5)
    writer = opened(location)
    for lsn in range(1, MANY):
        commit(writer, location, lsn)
    spoiled = Path(location.uri) / "data-00007" / "part-00000.parquet"
    whole = spoiled.read_bytes()
    spoiled.unlink()
    if content is not None:
        spoiled.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for lsn in range(MANY, MANY + 5):
            commit(writer, location, lsn)
    assert len(caplog.messages) == 1, "not with each commit"
    assert "Delta table public.t: small files could not be merged" in caplog.messages[0]
    assert len(paths(location)) == MANY + 4 and opened(location).watermark(APP) == MANY + 4
    spoiled.write_bytes(whole)
    commit(writer, location, MANY + 5)
    assert len(paths(location)) == 6
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 6)]


def test_a_file_without_the_rows_that_the_log_says_is_not_merged(location: Location) -> None:
    writer = opened(location)
    for lsn in range(1, MANY):
        commit(writer, location, lsn)
    (file,) = written(location, [row(MANY)])
    least = '{"_commit_lsn": 0}'
    stats = f'{{"numRecords": 2, "minValues": {least}, "maxValues": {least}}}'
    lie = AddAction(file.path, file.size, {}, 0, True, stats)
    table = DeltaTable(location.uri)
    table.create_write_transaction([lie], "append", table.schema())
    with pytest.raises(SinkFailed):
        replaced = many_small(opened(location).files(), "_commit_lsn")
        delta_table.merge(location, replaced, COLUMNS, "_commit_lsn", "data-m")
    commit(opened(location), location, MANY + 1)
    assert len(paths(location)) == MANY + 1


def test_rows_are_there_once_though_a_user_compacts_at_the_same_moment(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake lets a commit pass that removes what ``optimize`` has removed already."""
    writer = opened(location)
    for lsn in range(1, MANY):
        commit(writer, location, lsn)
    merge = delta_table.merge

    def merge_while_they_compact(*arguments: Any) -> list[WrittenFile]:
        written = merge(*arguments)
        assert DeltaTable(location.uri).optimize.compact()["numFilesRemoved"] == MANY
        return written

    monkeypatch.setattr(delta_table, "merge", merge_while_they_compact)
    commit(writer, location, MANY)
    monkeypatch.setattr(delta_table, "merge", merge)
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 1)]
    commit(writer, location, MANY + 1)
    assert len(paths(location)) == 2


def test_a_merge_by_a_ghost_of_this_writer_leaves_each_row_once(location: Location) -> None:
    ghost = opened(location)
    for lsn in range(1, MANY):
        commit(ghost, location, lsn)
    commit(opened(location), location, MANY)
    with pytest.raises(SnapshotOutdated):
        ghost.commit(written(location, [row(MANY + 1)]), {APP: MANY + 1})
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 1)]


def test_a_merge_that_another_writer_overtook_is_left_to_the_next_commit(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(location)
    for lsn in range(1, MANY):
        commit(writer, location, lsn)
    merge = delta_table.merge

    def merge_while_rows_of_this_slot_come(*arguments: Any) -> list[WrittenFile]:
        written = merge(*arguments)
        monkeypatch.setattr(delta_table, "merge", merge)
        commit(opened(location), location, MANY + 1)
        return written

    monkeypatch.setattr(delta_table, "merge", merge_while_rows_of_this_slot_come)
    with pytest.raises(SnapshotOutdated):
        commit(writer, location, MANY)
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 2)]


def test_files_are_swapped_in_that_version_alone_which_the_snapshot_shows(location: Location) -> None:
    writer = opened(location)
    for lsn in (1, 2):
        commit(writer, location, lsn)
    DeltaTable(location.uri).optimize.compact()
    old = paths(location)
    (new,) = written(location, [row(3)])
    action = AddAction(new.path, new.size, {}, 0, True, '{"numRecords": 2}')
    with pytest.raises(SnapshotOutdated):
        writer.swap([action], ["data-00001/part-00000.parquet", "data-00002/part-00000.parquet"], {APP: 3})
    writer = opened(location)
    table = DeltaTable(location.uri)
    table.create_write_transaction([], "append", table.schema())
    with pytest.raises(SnapshotOutdated):
        writer.swap([action], None, {APP: 3})
    assert paths(location) == old


def serve_s3(connection: Connection) -> None:
    """In a process of its own: deltalake holds the interpreter's lock while it waits for an answer to a write. Answers
    are lost, or not, as the connection says, until it closes. It says how many requests there were."""
    server = LosesAnswers()
    connection.send((server.port, server.bucket))
    with suppress(EOFError):
        while True:
            server.n_to_lose = connection.recv()
            connection.send(server.n_requests)


@pytest.fixture
def s3() -> Iterator[tuple[Location, Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_s3, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    port, bucket = ours.recv()
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }
    yield Location.parse(f"s3://{bucket}/public.t", options), ours
    ours.close()
    process.terminate()
    process.join()


def test_small_files_are_merged_on_s3_also_where_the_answer_to_the_commit_is_lost(
    s3: tuple[Location, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    location, server = s3
    writer = opened(location)
    for lsn in range(1, MANY):
        commit(writer, location, lsn)
    server.send(1)
    server.recv()
    with pytest.raises(SnapshotOutdated):
        commit(writer, location, MANY)
    assert opened(location).watermark(APP) == MANY and opened(location).files().num_rows == MANY
    # And to the merge after a commit.
    merge = delta_table.merge

    def merge_and_lose_the_answer(*arguments: Any) -> list[WrittenFile]:
        server.send(1)
        server.recv()
        return merge(*arguments)

    monkeypatch.setattr(delta_table, "merge", merge_and_lose_the_answer)
    writer = opened(location)
    commit(writer, location, MANY + 1)
    commit(writer, location, MANY + 2)
    assert opened(location).files().num_rows == 3
    assert rows_of(location) == [row(lsn) for lsn in range(1, MANY + 3)]
