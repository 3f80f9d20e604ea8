"""Segments as files of a Delta table: linked, copied, refused; deltalake and real files, no Spark."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.late_segments import late_part, late_segment
from tests.spark.support import COMMIT_US, INT8, TEXT, relation
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.exchange import SegmentPart
from xidstream.pipeline.log_tables.batch_parts import TableParts, VersionParts
from xidstream.pipeline.log_tables.columns import TableColumn, map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WriteOutput, WrittenFile
from xidstream.pipeline.log_tables.segment_links import Reach, SegmentLinks, how_segments_reach
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.sinks.sink_findings import check_of_spec
from xidstream.pipeline.storage.storage import Storage

A = relation("public.a", ("id", INT8), ("name", TEXT))
APP = "1/db/slot"
KEY = "1/s/epochs/e/7-0000000000000010/0.parquet"


def key(number: int) -> str:
    return KEY.replace("/0.", f"/{number}.")


class World:
    """A storage and a root beside it, with one table."""

    def __init__(self, storage_uri: str, root_uri: str, options: dict[str, str] | None = None) -> None:
        self.storage = Storage(storage_uri)
        self.root = Location.parse(root_uri, options)
        self.table = self.root.child("public.a")
        self.links = SegmentLinks()
        self.n_jobs = 0

    def segment(self, number: int = 0, n_rows: int = 10, version: Any = A) -> Any:
        rows = [{"id": number * n_rows + i, "name": f"row {i}"} for i in range(n_rows)]
        return late_segment(self.storage, key(number), version, rows, first_seq=number * n_rows)

    def segment_there(self, number: int, n_rows: int = 10) -> Any:
        """One that another process wrote, by the same call of ``segment``."""
        with tempfile.TemporaryDirectory() as folder:
            other = World(folder, folder)
            segment = other.segment(number, n_rows)
        return segment

    def give(
        self,
        parts: list[SegmentPart],
        *,
        columns: tuple[TableColumn, ...] = (),
        watermark: int = 0,
    ) -> tuple[list[WrittenFile], TableParts]:
        self.n_jobs += 1
        versions = [VersionParts(A, contract_schema(A), [], parts)]
        target = WriteOutput(self.table, f"data-{self.n_jobs}", watermark)
        mapping = map_columns(columns, versions[0].schema)
        return self.links.give(TableParts(("public", "a"), versions), [mapping], target, self.storage)

    def commit(self, files: list[WrittenFile]) -> None:
        columns = [TableColumn(f.name, f.type, f.name) for f in contract_schema(A)]
        writer = DeltaTableWriter.open_or_create(self.table, "public.a", columns)
        writer.commit(files, {APP: max(f.max_commit_lsn for f in files)})

    def read(self, **filters: Any) -> list[dict[str, Any]]:
        table = DeltaTable(self.table.uri, storage_options=self.table.storage_options)
        rows: list[dict[str, Any]] = table.to_pyarrow_table(**filters).to_pylist()
        return sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"]))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(str(tmp_path / "storage"), str(tmp_path / "delta"))
    yield world
    world.links.close()


def check(rows: list[dict[str, Any]], commit_lsn: int, n: int) -> None:
    assert [(r["id"], r["_seq"], r["_commit_lsn"]) for r in rows] == [(i, i, commit_lsn) for i in range(n)]
    us = {r["_commit_timestamp"].timestamp() for r in rows}
    assert us == {(COMMIT_US + commit_lsn) / 1e6}


def test_linked_segments_are_the_tables_own_when_the_storage_is_gone(world: World) -> None:
    parts = [late_part(world.segment(i), 0x1000) for i in range(3)]
    files, left = world.give(parts)
    assert left.n_rows == 0
    assert [os.stat(f"{world.table.uri}/{f.path}").st_nlink for f in files] == [2, 2, 2]
    world.commit(files)
    check(world.read(), 0x1000, 30)
    world.storage.delete([key(i) for i in range(3)])
    shutil.rmtree(world.storage.uri)
    check(world.read(), 0x1000, 30)


def test_what_the_table_holds_already_is_neither_linked_nor_left(world: World) -> None:
    parts = [late_part(world.segment(0), 0x1000), late_part(world.segment(1), 0x2000)]
    files, left = world.give(parts, watermark=0x1000)
    assert [f.min_commit_lsn for f in files] == [0x2000]
    assert left.n_rows == 0


@pytest.mark.parametrize(
    "columns",
    [
        (TableColumn("id", pa.int32(), "id"),),
        (TableColumn("ID", pa.int64(), "ID"),),
        (TableColumn("name", pa.binary(), "name"),),
    ],
    ids=["another type", "another case", "a further column"],
)
def test_a_segment_of_another_layout_is_left_for_spark(
    world: World, columns: tuple[TableColumn, ...]
) -> None:
    files, left = world.give([late_part(world.segment(), 0x1000)], columns=columns)
    assert (files, left.n_rows) == ([], 10)


def test_a_table_with_more_columns_takes_the_segment(world: World) -> None:
    files, left = world.give(
        [late_part(world.segment(), 0x1000)], columns=(TableColumn("old", pa.int32(), "old"),)
    )
    assert (len(files), left.n_rows) == (1, 0)


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EPERM, errno.EMLINK], ids=errno.errorcode.get)
def test_where_the_file_system_gives_no_link_the_file_is_copied(
    world: World, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", refuse)
    assert how_segments_reach(world.root, world.storage.uri) is Reach.LINK, "neither folder is there yet"
    files, _ = world.give([late_part(world.segment(), 0x1000)])
    assert how_segments_reach(world.root, world.storage.uri) is Reach.COPY
    assert os.stat(f"{world.table.uri}/{files[0].path}").st_nlink == 1
    world.commit(files)
    check(world.read(), 0x1000, 10)


def test_a_copy_without_the_kernels_help_has_the_same_bytes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "copy_file_range", refuse)
    files, _ = world.give([late_part(world.segment(), 0x1000)])
    world.commit(files)
    check(world.read(), 0x1000, 10)


def test_no_probe_is_left_behind(world: World, tmp_path: Path) -> None:
    Path(world.storage.uri).mkdir()
    Path(world.root.uri).mkdir()
    assert how_segments_reach(world.root, world.storage.uri) is Reach.LINK
    assert how_segments_reach(world.root, f"file://{world.storage.uri}") is Reach.LINK
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_missing_segment_is_told_and_nothing_is_named(world: World) -> None:
    parts = [late_part(world.segment(i), 0x1000) for i in range(20)]
    world.storage.delete([key(13)])
    with pytest.raises(SegmentCorrupt, match=r"13\.parquet' is missing"):
        world.give(parts)


def test_a_segment_that_is_gone_between_fill_and_link_is_missing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = late_part(world.segment(), 0x1000)
    real = os.link

    def late(source: str, target: str) -> None:
        os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(SegmentCorrupt, match="missing"):
        world.give([part])


def test_a_full_disk_is_a_fault_of_the_storage_and_the_next_try_succeeds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = late_part(world.segment(), 0x1000)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("pwrite", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StorageFault, match="No space"):
                world.give([part])
    files, _ = world.give([part])
    world.commit(files)
    check(world.read(), 0x1000, 10)


def test_a_fill_that_broke_off_is_completed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    part = late_part(world.segment(), 0x1000)
    real, calls = os.pwrite, iter(range(100))

    def dies(descriptor: int, data: bytes, offset: int) -> int:
        if next(calls) == 2:
            raise OSError(errno.EIO, "power cut")
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", dies)
        with pytest.raises(StorageFault):
            world.give([part])
    files, _ = world.give([part])
    world.commit(files)
    check(world.read(), 0x1000, 10)


_GIVES = """
import sys
from pathlib import Path
from tests.late_segments import late_part
from tests.unit.log_tables.test_segment_links import World
world = World(sys.argv[1] + "/storage", sys.argv[1] + "/delta")
files, _ = world.give([late_part(world.segment(i), 0x1000) for i in range(3)])
world.commit(files)
"""


@pytest.mark.parametrize("fault", [
    "segment_filled_in_part:kill@1", "segment_filled_in_part:kill@6", "segment_filled:kill@2",
    "segment_linked:kill@1", "segment_linked:kill@3",
])  # fmt: skip
def test_a_kill_on_the_way_leaves_nothing_that_the_next_run_cannot_finish(
    world: World, tmp_path: Path, fault: str
) -> None:
    """The killed process and this one share the storage, as two runs share what was prepared."""
    root = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", _GIVES, str(tmp_path)],
        env={**os.environ, "XIDSTREAM_FAULTS": fault, "PYTHONPATH": str(root)},
        cwd=root,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "delta/public.a/_delta_log").exists()
    parts = [late_part(world.segment_there(i), 0x1000) for i in range(3)]
    world.n_jobs = 10
    files, _ = world.give(parts)
    world.commit(files)
    check(world.read(), 0x1000, 30)


def test_a_file_that_a_log_names_takes_no_other_commits_constants(world: World) -> None:
    segment = world.segment()
    files, _ = world.give([late_part(segment, 0x1000)])
    world.commit(files)
    with pytest.warns(RuntimeWarning, match="another commit"):
        given, left = world.give([late_part(segment, 0x2000), late_part(world.segment(1), 0x2000)])
    assert (given, left.n_rows) == ([], 20), "Spark reads them, and the file stays as it is"
    check(world.read(), 0x1000, 10)
    given, left = world.give([late_part(world.segment(1), 0x2000)])
    assert (len(given), left.n_rows) == (1, 0), "of other segments it says nothing"


def test_a_truncated_segment_and_one_without_a_footer_are_corrupt(world: World) -> None:
    part = late_part(world.segment(), 0x1000)
    path = Path(world.storage.local_path(KEY) or "")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-4] + b"XXXX"):
        path.write_bytes(damaged)
        with pytest.raises(SegmentCorrupt):
            world.give([part])


def test_a_name_is_younger_than_vacuums_retention_when_its_segment_was_filled_long_ago(world: World) -> None:
    part = late_part(world.segment(), 0x1000)
    world.give([part])
    old = 1_000_000_000
    os.utime(world.storage.local_path(KEY) or "", (old, old))
    files, _ = world.give([part])
    assert os.stat(f"{world.table.uri}/{files[0].path}").st_mtime > old


def test_statistics_let_a_bounded_reader_skip_files(world: World) -> None:
    parts = [late_part(world.segment(i), 0x1000 * (i + 1)) for i in range(3)]
    files, _ = world.give(parts)
    world.commit(files)
    actions = pa.table(DeltaTable(world.table.uri).get_add_actions(flatten=True)).to_pylist()
    stats = sorted((a["min._commit_lsn"], a["max._commit_lsn"], a["num_records"]) for a in actions)
    assert stats == [(0x1000 * i, 0x1000 * i, 10) for i in (1, 2, 3)]
    found = world.read(filters=[("_commit_lsn", "<=", 0x2000)])
    assert [r["id"] for r in found] == list(range(20))


def test_two_stores_have_no_way_but_spark(tmp_path: Path) -> None:
    local = Location.parse(str(tmp_path))
    assert how_segments_reach(local, "s3://bucket/x") is Reach.SPARK
    assert how_segments_reach(Location.parse("gs://bucket/x"), "gs://bucket/y") is Reach.SPARK
    assert how_segments_reach(Location.parse("s3://bucket/x"), str(tmp_path)) is Reach.SPARK
    other = Location.parse("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://other:9000"})
    assert how_segments_reach(other, "s3://bucket/y") is Reach.SPARK
    same = "s3://bucket/y?endpoint_override=other%3A9000&scheme=http"
    assert how_segments_reach(other, same) is Reach.SERVER_SIDE_COPY


def test_the_check_says_how_large_transactions_reach_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(sink: str, storage: str) -> list[str]:
        return [f.statement for f in check_of_spec(sink, storage)(None) if f.check == "sink_files"]

    assert told(f"delta:{tmp_path}/delta", "storage") == [
        "large transactions reach the Delta tables by hard links"
    ]
    assert told("delta:tables", "gs://bucket/x") == [
        "large transactions reach the Delta tables by files that Spark writes"
    ]
    assert told("delta:tables", "") == []


def test_both_ways_to_a_store_of_ones_own_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    root = Location.parse("s3://bucket/x")
    assert how_segments_reach(root, "s3://bucket/y") is Reach.SERVER_SIDE_COPY
    assert how_segments_reach(root, Storage("s3://bucket/y").uri) is Reach.SERVER_SIDE_COPY
    assert how_segments_reach(root, "s3://b/y?endpoint_override=127.0.0.1%3A9001") is Reach.SPARK
