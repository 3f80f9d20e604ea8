"""Snapshots that wait for a function, in a folder or in an object store: it gets what is written there, and nothing of
it stays; and a run that has lost the slot meanwhile removes and records nothing."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyarrow import fs

from tests.s3_server import S3Server
from tests.snapshot_tables import commit_one, output_of
from tests.unit.initial_copy.test_snapshot_book import BOUNDS, LAYOUT, source_of
from xidstream.pipeline.errors import StorageFault, Superseded
from xidstream.pipeline.initial_copy.staged_snapshots import StagedSnapshots
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, contract_schema, snapshot_rows
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.parquet_frames import StoredFiles
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import check_owner, claim_slot
from xidstream.pipeline.storage.snapshot_record import read_delivered
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_folder import StoredFolder

ROWS = LAYOUT.snapshot_rows_prefix
NEXT = Layout(LAYOUT.system_identifier, LAYOUT.slot, "next")
GENERATION = Generation(source_of(1).relation, 1, BOUNDS, None)


def staged_of(storage: Storage, layout: Layout) -> StagedSnapshots:
    return StagedSnapshots(
        storage, layout, partial(check_owner, storage, layout, claim_slot(storage, layout))
    )


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return Storage(str(tmp_path))
    return Storage(request.getfixturevalue("s3").uri(f"{uuid.uuid4().hex}/root"))


def written(target: SnapshotOutput, n_rows: int, range_number: int = 0) -> list[WrittenFile]:
    """As a snapshot reader does: the target arrives there pickled."""
    target = pickle.loads(pickle.dumps(target))
    files = ParquetFiles(
        target.table, f"{target.directory}-{range_number}-x", target.conform.schema, "_commit_lsn"
    )
    ids = pa.array(range(n_rows), pa.int64())
    text = pa.nulls(n_rows, CONTRACT_FIELDS[-1].type)
    place = {"snapshot_lsn": BOUNDS.snapshot_lsn, "taken_at_us": BOUNDS.taken_at_us}
    rows = snapshot_rows(GENERATION.relation, [ids], text, **place, first_seq=0)
    files.write(target.conform(rows))
    return files.close()


def read_back(folder: StoredFolder, paths: tuple[str, ...]) -> list[int]:
    """The ids, as an executor reads them: the function arrives there pickled."""
    files = pickle.loads(pickle.dumps(StoredFiles(paths, contract_schema(GENERATION.relation), folder)))
    numbers = pa.RecordBatch.from_arrays([pa.array(range(len(paths)))], ["id"])
    return [id_ for rows in files([numbers]) for id_ in rows.column("id").to_pylist()]


def objects_below(storage: Storage, key: str) -> list[str]:
    """Objects, folders and their markers in a store."""
    filesystem, root = fs.FileSystem.from_uri(storage.uri)
    return [i.path for i in filesystem.get_file_info(fs.FileSelector(f"{root}/{key}", True, True))]


def test_what_readers_wrote_is_what_the_function_gets_and_nothing_of_it_stays(storage: Storage) -> None:
    staged = staged_of(storage, LAYOUT)
    target = output_of(staged, GENERATION.relation, Lsn(1))
    files = written(target, 5) + written(target, 3, range_number=1)
    staged.discard(SnapshotOutput(target.table, "another", target.conform))
    assert not commit_one(staged, GENERATION, files)
    given: list[list[int]] = []

    def give(batch: Any) -> None:
        folder = batch._folder or StoredFolder(storage, ROWS)
        paths = [path.rpartition(f"{ROWS}/")[2] for path in batch._paths]
        given.append(read_back(folder, tuple(paths)))
        staged.complete()

    staged.deliver(cast(Any, None), give, lambda: False)
    assert given == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert commit_one(staged, GENERATION, files)
    assert objects_below(storage, ROWS) == []


def test_what_a_failed_attempt_wrote_goes_and_what_another_wrote_stays(storage: Storage) -> None:
    staged = staged_of(storage, LAYOUT)
    failed, other = (output_of(staged, GENERATION.relation, Lsn(1)) for _ in range(2))
    written(failed, 5)
    written(failed, 5, range_number=1)
    (kept,) = written(other, 1)
    staged.discard(failed)
    assert storage.list_keys(ROWS) == [f"{ROWS}/{kept.path}"]


def test_rows_in_a_store_that_are_gone_or_damaged_are_a_fault_of_the_storage(s3: S3Server) -> None:
    """The supervisor tries again, where what else an executor raises is taken for the function's own."""
    storage = Storage(s3.uri(uuid.uuid4().hex))
    (file,) = written(output_of(staged_of(storage, LAYOUT), GENERATION.relation, Lsn(1)), 5)
    folder = StoredFolder(storage, ROWS)
    with pytest.raises(StorageFault, match=r"cannot read .*gone"):
        read_back(folder, ("gone",))
    data = storage.read_bytes(f"{ROWS}/{file.path}")
    storage.write_bytes(f"{ROWS}/{file.path}", data[: len(data) // 2])
    with pytest.raises(StorageFault, match="cannot read"):
        read_back(folder, (file.path,))


def test_what_an_earlier_run_has_read_goes_and_what_the_rightful_run_reads_stays(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stood still where it looked what there is took the folder away from under the next one's readers."""
    rows = ROWS
    storage.write_bytes(f"{rows}/1-earlier/0.parquet", b"rows")
    if storage.local_root is not None:
        half = Path(storage.local_root, rows, "1-earlier", ".1.parquet.0123456789abcdef.tmp")
        half.write_bytes(b"half")
    stopped = staged_of(storage, LAYOUT)
    list_keys = Storage.list_keys

    def later(self: Storage, prefix: str) -> list[str]:
        monkeypatch.setattr(Storage, "list_keys", list_keys)
        staged_of(storage, NEXT).clean()
        assert objects_below(storage, rows) == []
        storage.write_bytes(f"{rows}/1-rightful/0.parquet", b"rows")
        return self.list_keys(prefix)

    monkeypatch.setattr(Storage, "list_keys", later)
    with pytest.raises(Superseded):
        stopped.clean()
    assert storage.list_keys(rows) == [f"{rows}/1-rightful/0.parquet"]


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_the_function_was_given_by_a_run_that_lost_the_slot_is_not_recorded_as_given(
    storage: Storage, is_taken_over: bool
) -> None:
    """The rightful run has begun a generation of the same number, with other bounds."""
    staged = staged_of(storage, LAYOUT)
    file = WrittenFile("1-x/0.parquet", 4, 1, 1, 1)
    storage.write_bytes(f"{LAYOUT.snapshot_rows_prefix}/{file.path}", b"rows")
    assert not commit_one(staged, GENERATION, [file])
    given: list[Any] = []

    def give(batch: Any) -> None:
        given.append(batch)
        if is_taken_over:
            claim_slot(storage, NEXT)
        staged.complete()

    if is_taken_over:
        with pytest.raises(Superseded):
            staged.deliver(cast(Any, None), give, lambda: False)
    else:
        staged.deliver(cast(Any, None), give, lambda: False)
    assert len(given) == 1
    assert read_delivered(storage, LAYOUT) == ([] if is_taken_over else [GENERATION])
