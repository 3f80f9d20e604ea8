"""Watermarks, fencing and columns of one Delta table: deltalake, no Spark."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from tests.s3_server import LosesAnswers
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import SinkFailed, UsageError
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.table_metadata import metadata_of_source
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity

APP = "1/db/slot"
COLUMNS = [TableColumn("x", pa.int64(), "x"), TableColumn("_commit_lsn", pa.int64(), "_commit_lsn")]
X = Column("x", 20, -1, is_key=True)
RELATION = RelationVersion(1, "public", "a b", ReplicaIdentity.DEFAULT, (X,))
ABOUT = metadata_of_source(RELATION)


def since(lsn: int, relation: RelationVersion = RELATION) -> VersionSince:
    return VersionSince(
        APP, lsn, relation, [TableColumn(c.name, c.type.arrow, c.name) for c in relation.columns]
    )


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path / "with space" / "public.a~20b"))


def opened(location: Location) -> DeltaTableWriter:
    return DeltaTableWriter.open_or_create(location, "public.a b", COLUMNS, ABOUT)


def written(location: Location, lsn: int, directory: str) -> list[WrittenFile]:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.array([lsn - 1, lsn])], schema=pa.schema([c.field for c in COLUMNS])
    )
    files = ParquetFiles(location, directory, batch.schema, "_commit_lsn")
    files.write(batch)
    return files.close()


def commit(writer: DeltaTableWriter, location: Location, lsn: int, directory: str, app: str = APP) -> None:
    writer.commit(written(location, lsn, directory), {app: lsn})


def n_rows(location: Location) -> int:
    return int(DeltaTable(location.uri).to_pyarrow_table().num_rows)


def test_open_without_a_table_gives_none(location: Location) -> None:
    assert DeltaTableWriter.open(location, "t") is None


def test_create_is_idempotent_and_keeps_what_is_there(location: Location) -> None:
    commit(opened(location), location, 20, "a")
    again = opened(location)
    assert again.watermark(APP) == 20
    assert n_rows(location) == 2


def test_watermarks_move_with_the_rows_and_by_application(location: Location) -> None:
    writer = opened(location)
    assert writer.watermark(APP) == 0
    commit(writer, location, 20, "a")
    commit(writer, location, 30, "b", "2/other/slot")
    commit(writer, location, 40, "c")
    assert (writer.watermark(APP), writer.watermark("2/other/slot")) == (40, 30)
    assert n_rows(location) == 6


def test_a_commit_does_not_ask_for_versions_that_it_has_moved_or_knew(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake takes as long for one of them as for a commit."""
    writer = opened(location)
    assert (writer.watermark("slot"), writer.watermark("cut")) == (0, 0)
    asked = []
    ask = DeltaTable.transaction_version
    monkeypatch.setattr(DeltaTable, "transaction_version", lambda t, id_: asked.append(id_) or ask(t, id_))
    writer.commit([], {"slot": 100}, marks={"slot/owner": 1})
    found = writer.watermark("slot"), writer.watermark("slot/owner"), writer.watermark("cut")
    assert (found, asked) == ((100, 1, 0), ["slot/owner"])

    other = opened(location)
    other.commit([], {"elsewhere": 7, "cut": 50})
    writer.commit([], {"slot": 200})  # two commits further than its snapshot
    assert (writer.watermark("slot"), writer.watermark("cut"), writer.watermark("elsewhere")) == (200, 50, 7)


@pytest.mark.parametrize("lsn", [20, 19])
def test_a_version_never_falls_also_from_a_fresh_handle(location: Location, lsn: int) -> None:
    commit(opened(location), location, 20, "a")
    with pytest.raises(UsageError):
        commit(opened(location), location, lsn, "b")
    assert n_rows(location) == 2


def test_a_commit_lsn_beyond_63_bits_is_refused(location: Location) -> None:
    writer = opened(location)
    with pytest.raises(UsageError):
        writer.commit([], {APP: 1 << 63})


def test_two_files_of_one_name_are_not_committed_because_one_has_replaced_the_other(
    location: Location,
) -> None:
    files = written(location, 20, "a")
    with pytest.raises(SinkFailed, match="one name"):
        opened(location).commit([*files, *files], {APP: 20})
    assert (n_rows(location), opened(location).watermark(APP)) == (0, 0)


def test_a_second_writer_with_the_same_identity_needs_a_new_snapshot(location: Location) -> None:
    first, second = opened(location), opened(location)
    commit(first, location, 20, "a")
    with pytest.raises(SnapshotOutdated):
        commit(second, location, 30, "b")
    assert n_rows(location) == 2


def test_a_ghost_that_wakes_up_needs_one_after_its_first_commit_too(location: Location) -> None:
    ghost = opened(location)
    commit(ghost, location, 20, "a")
    commit(opened(location), location, 30, "b")
    with pytest.raises(SnapshotOutdated):
        commit(ghost, location, 30, "c")
    assert n_rows(location) == 4


def test_a_commit_that_landed_though_its_answer_was_lost_shows_in_the_next_snapshot(
    answers_lost: LosesAnswers,
) -> None:
    """deltalake sends it again by itself, meets its own commit, and reports a conflict."""
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{answers_lost.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }
    location = Location.parse(f"s3://{answers_lost.bucket}/t", options)
    writer = opened(location)
    answers_lost.n_to_lose = 1
    file = WrittenFile("a/part-00000.parquet", 10, 1, 20, 20)
    with pytest.raises(SnapshotOutdated):
        writer.commit([file], {APP: 20}, marks={f"{APP}/owner": 3})
    assert answers_lost.n_to_lose == 0
    again = opened(location)
    assert (again.watermark(APP), again.watermark(f"{APP}/owner"), again.version) == (20, 3, 1)


@pytest.fixture
def answers_lost() -> Iterator[LosesAnswers]:
    server = LosesAnswers()
    yield server
    server.stop()


def test_marks_go_with_a_commit_may_stay_and_never_fall(location: Location) -> None:
    writer = opened(location)
    writer.commit([], {}, marks={"owner": 2})
    writer.commit(written(location, 20, "a"), {APP: 20}, marks={"owner": 2})
    with pytest.raises(UsageError, match="would fall"):
        writer.commit(written(location, 30, "b"), {APP: 30}, marks={"owner": 1})
    assert (opened(location).watermark("owner"), n_rows(location)) == (2, 2)


# -- on disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What this process has asked the kernel to put on disk, in order."""
    paths: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_all_that_a_commit_names_is_on_disk_before_it_and_the_commit_when_it_returns(
    location: Location, flushed: list[Path]
) -> None:
    writer = opened(location)
    table = Path(location.uri)
    assert set(flushed) >= {
        table / "_delta_log" / f"{0:020d}.json",
        table / "_delta_log",
        table,
        table.parent,
    }
    flushed.clear()
    (file,) = written(location, 20, "a")
    assert set(flushed) == {table / file.path, table / "a", table}
    flushed.clear()
    writer.commit([file], {APP: 20})
    assert set(flushed) == {table / "_delta_log" / f"{1:020d}.json", table / "_delta_log", table}
    flushed.clear()
    writer.add_columns([TableColumn("y", pa.string(), "y")])
    assert table / "_delta_log" / f"{2:020d}.json" in flushed


def test_a_checkpoint_is_put_on_disk_with_its_commit(location: Location, flushed: list[Path]) -> None:
    writer = opened(location)
    for i in range(100):
        writer.commit([], {APP: 20 + i})
    log = Path(location.uri) / "_delta_log"
    checkpoints = list(log.glob("*.checkpoint.parquet"))
    assert checkpoints and {*checkpoints, log / "_last_checkpoint"} <= set(flushed)


def test_the_commit_of_a_run_that_died_before_it_was_on_disk_is_there_when_the_table_is_opened(
    location: Location, flushed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(location)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTableWriter, "refresh", _die)
        with pytest.raises(KeyboardInterrupt):
            writer.commit(written(location, 20, "a"), {APP: 20})
    DeltaTable(location.uri).alter.add_columns(
        [Field("theirs", PrimitiveType("long"))]
    )  # somebody else, after it
    log = Path(location.uri) / "_delta_log"
    commits = [log / f"{version:020d}.json" for version in range(3)]
    assert not set(commits[1:]) & set(flushed)
    flushed.clear()
    assert opened(location).watermark(APP) == 20
    assert commits[1] in flushed and commits[2] in flushed and log in flushed
    assert commits[0] not in flushed, "what lies before a commit of ours was on disk before it"


def _die(self: DeltaTableWriter) -> None:
    raise KeyboardInterrupt


def test_a_writer_of_another_slot_does_not_fence(location: Location) -> None:
    first, second = opened(location), opened(location)
    commit(first, location, 20, "a")
    commit(second, location, 30, "b", "1/db/other")
    assert n_rows(location) == 4


def test_columns_changed_by_another_ask_for_a_new_snapshot(location: Location) -> None:
    writer = opened(location)
    DeltaTable(location.uri).alter.add_columns([Field("theirs", PrimitiveType("long"))])
    with pytest.raises(SnapshotOutdated):
        commit(writer, location, 20, "a")
    commit(opened(location), location, 20, "b")
    assert n_rows(location) == 2


def test_added_columns_remember_their_source(location: Location) -> None:
    added = TableColumn("x__string", pa.string(), "x")
    writer = opened(location)
    writer.add_columns([added])
    assert writer.columns == (*COLUMNS, added)
    again = opened(location)
    assert again.columns == (*COLUMNS, added)
    again.add_columns([added])
    assert again.columns == (*COLUMNS, added)


@pytest.mark.parametrize(
    "type_",
    [
        pa.bool_(), pa.int16(), pa.int32(), pa.float32(), pa.float64(),
        pa.decimal128(20, 4), pa.string(), pa.binary(),
        pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC"), pa.list_(pa.timestamp("us")),
        pa.list_(pa.decimal128(10, 2)), pa.map_(pa.string(), pa.string()),
    ],
    ids=str,
)  # fmt: skip
def test_every_type_of_the_contract_comes_back_from_delta_as_it_was(
    location: Location, type_: pa.DataType
) -> None:
    writer = DeltaTableWriter.open_or_create(location, "t", [*COLUMNS, TableColumn("a", type_, "a")])
    writer.add_columns([TableColumn("b", type_, "b")])
    assert [c.type for c in opened(location).columns] == [pa.int64(), pa.int64(), type_, type_]


def test_a_partitioned_table_is_not_ours(location: Location) -> None:
    schema = pa.schema([c.field for c in COLUMNS])
    DeltaTable.create(location.uri, schema=schema, partition_by=["x"])
    with pytest.raises(SinkFailed):
        opened(location)


def test_watermark_survives_checkpoints(location: Location) -> None:
    writer = opened(location)
    for i in range(105):
        commit(writer, location, 20 + 2 * i, f"d{i}")
    assert list(Path(location.uri).glob("_delta_log/*.checkpoint.parquet"))
    assert opened(location).watermark(APP) == 20 + 2 * 104


@pytest.mark.parametrize("is_kept", [False, True])
def test_expired_files_of_the_log_go_once_in_a_hundred_commits_unless_the_table_keeps_them(
    location: Location, is_kept: bool
) -> None:
    """deltalake would list the whole log for them after every commit."""
    commit(opened(location), location, 20, "a")
    table = DeltaTable(location.uri)
    if is_kept:
        table.alter.set_table_properties({"delta.enableExpiredLogCleanup": "false"})
    table.create_checkpoint()
    first, *_ = expired = sorted((Path(location.uri) / "_delta_log").iterdir())
    for file in expired:
        os.utime(file, (time.time() - 40 * 86_400,) * 2)
    writer = opened(location)
    while writer.version < 99:
        writer.commit([], {APP: 100 + writer.version})
    assert first.exists()
    writer = opened(location)
    writer.commit([], {APP: 200})
    assert first.exists() == is_kept
    for lsn in range(201, 301):
        writer.commit([], {APP: lsn})
    assert opened(location).watermark(APP) == 300


# -- readers ---------------------------------------------------------------------------------------------


def found_by_filters(location: Location) -> list[int]:
    """Rows that a filter on each column finds, through the dataset that pyarrow, pandas and DuckDB read."""
    dataset = DeltaTable(location.uri).to_pyarrow_dataset()
    filters = [pc.field("x") == 1, pc.field("x").isin([1, 2]), pc.field("_commit_lsn") <= 19]
    return [dataset.count_rows(filter=f) for f in filters]


def test_a_filter_on_a_column_without_statistics_finds_its_rows(location: Location) -> None:
    commit(opened(location), location, 20, "a")
    assert found_by_filters(location) == [1, 2, 1]
    DeltaTable(location.uri).optimize.compact()
    assert found_by_filters(location) == [1, 2, 1]


def test_a_table_of_an_earlier_version_gets_its_properties_once(location: Location) -> None:
    DeltaTable.create(location.uri, schema=pa.schema([column.field for column in COLUMNS]))
    writer = opened(location)
    commit(writer, location, 20, "a")
    assert found_by_filters(location) == [0, 0, 1], (
        "deltalake finds rows without it: the property is not needed"
    )
    writer.describe(ABOUT)
    assert found_by_filters(location) == [1, 2, 1]
    version = writer.version
    writer.describe(ABOUT)
    opened(location).describe(ABOUT)
    assert writer.version == opened(location).version == version
    commit(writer, location, 30, "b")
    assert found_by_filters(location) == [2, 4, 1]


def test_a_commit_of_another_while_the_properties_are_set_makes_the_snapshot_outdated(
    location: Location,
) -> None:
    DeltaTable.create(location.uri, schema=pa.schema([column.field for column in COLUMNS]))
    writer, ghost = opened(location), opened(location)
    commit(ghost, location, 20, "a")
    with pytest.raises(SnapshotOutdated):
        writer.describe(ABOUT)


# -- what a table says of itself -------------------------------------------------------------------------


def said(location: Location) -> dict[str, str | None]:
    configuration = DeltaTable(location.uri).metadata().configuration
    return {
        key.removeprefix("xidstream."): configuration[key] for key in configuration if key.startswith("x")
    }


def test_a_table_is_made_with_its_source_key_identity_types_description_and_comments_in_one_commit(
    location: Location,
) -> None:
    opened(location)
    table = DeltaTable(location.uri)
    assert table.version() == 0
    assert said(location) == {
        "source": "public.a b",
        "key": '["x"]',
        "replica_identity": "default",
        "types": '{"x": "bigint"}',
    }
    assert "public.a b" in (table.metadata().description or "")
    x, lsn = table.schema().fields
    assert x.metadata == {} and "identifies" in lsn.metadata["comment"]


def test_an_alter_changes_the_properties_in_one_commit_and_a_batch_of_the_same_layout_in_none(
    location: Location,
) -> None:
    writer = opened(location)
    commit(writer, location, 20, "a")
    full = dataclasses.replace(RELATION, replica_identity=ReplicaIdentity.FULL)
    wider = dataclasses.replace(full, columns=(X, Column("price", 1700, (10 << 16 | 2) + 4, is_key=True)))
    for relation in (wider, wider, wider):
        writer.describe(metadata_of_source(relation))
    assert writer.version == 2
    assert said(location)["types"] == '{"x": "bigint", "price": "numeric(10,2)"}'
    assert said(location)["key"] == '["x", "price"]' and said(location)["replica_identity"] == "full"
    commit(writer, location, 30, "b")
    again = opened(location)
    again.describe(metadata_of_source(wider))
    assert again.version == writer.version == 3
    assert again.watermark(APP) == 30


def recorded(location: Location) -> list[tuple[int, list[str]]]:
    """Each version's ``since``, with its columns."""
    return [(each["since"], list(each["columns"])) for each in json.loads(said(location)["versions"] or "")]


def test_versions_are_recorded_as_the_table_is_made_and_with_an_alter_in_the_commit_of_its_properties(
    location: Location,
) -> None:
    writer = DeltaTableWriter.open_or_create(location, "public.a b", COLUMNS, ABOUT, [since(20)])
    writer.describe(ABOUT, [since(20)])
    assert writer.version == 0 and recorded(location) == [(20, ["x"])]
    commit(writer, location, 20, "a")
    wider = dataclasses.replace(RELATION, columns=(X, Column("price", 20, -1, is_key=False)))
    about = metadata_of_source(wider)
    writer.describe(about, [since(25), since(30, wider)])
    writer.describe(about, [since(40, wider)])
    assert writer.version == 2
    assert recorded(location) == [(20, ["x"]), (30, ["x", "price"])]
    assert said(location)["types"] == '{"x": "bigint", "price": "bigint"}'


def test_a_table_of_an_earlier_version_begins_with_the_first_version_that_it_gets(location: Location) -> None:
    commit(opened(location), location, 20, "a")
    assert "versions" not in said(location)
    opened(location).describe(ABOUT, [since(30)])
    assert recorded(location) == [(30, ["x"])]


def test_what_others_commit_right_behind_a_commit_of_ours_is_looked_at_before_the_next_batch(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot's version is recorded between our commit and our next snapshot of the log."""
    writer = opened(location)
    writer.describe(ABOUT, [since(20)])
    other = dataclasses.replace(RELATION, replica_identity=ReplicaIdentity.FULL)
    refresh = DeltaTableWriter.refresh

    def late(self: DeltaTableWriter) -> None:
        monkeypatch.undo()
        opened(location).describe(ABOUT, [since(40, other)])
        refresh(self)

    monkeypatch.setattr(DeltaTableWriter, "refresh", late)
    commit(writer, location, 30, "a")
    writer.describe(ABOUT, [since(50)])
    assert [lsn for lsn, _ in recorded(location)] == [20, 40, 50]


def test_what_a_user_says_of_the_table_stays(location: Location) -> None:
    opened(location)
    theirs = DeltaTable(location.uri)
    theirs.alter.set_table_description("mine")
    theirs.alter.set_table_properties({"delta.appendOnly": "true"})
    writer = opened(location)
    commit(writer, location, 20, "a")
    writer.describe(
        metadata_of_source(dataclasses.replace(RELATION, replica_identity=ReplicaIdentity.NOTHING))
    )
    commit(writer, location, 30, "b")
    metadata = DeltaTable(location.uri).metadata()
    assert metadata.description == "mine" and metadata.configuration["delta.appendOnly"] == "true"
    assert said(location)["replica_identity"] == "nothing"


def test_rows_of_a_ghost_that_came_before_a_new_column_are_not_written_twice(location: Location) -> None:
    """The watermark that chose the rows is of the snapshot before the column: it must not be passed over."""
    writer, ghost = opened(location), opened(location)
    commit(ghost, location, 20, "a")
    with pytest.raises(SnapshotOutdated):
        writer.add_columns([TableColumn("y", pa.string(), "y")])
    assert opened(location).watermark(APP) == 20
