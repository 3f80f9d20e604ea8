"""Base tables in an S3 that is a process of its own: made, read, killed in the middle, and rid of what nobody needs."""

from __future__ import annotations

import datetime
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.spark.change_log_maker import INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.support import IDENTITY, LocalSegments, batch_of, memory_frame, put_memory, read_memory
from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.mirror.bases import SLOT, TABLE, PlainMirror, table_of
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current
from xidstream.pipeline.changelog.manifest import ManifestLine, newest, read_lines
from xidstream.pipeline.log_tables.erased_keys import StoredColumn, parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror import vacuum as vacuums
from xidstream.pipeline.mirror.base_table import BaseTable, MirrorMarks
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.mirror.erased_base import (
    ErasedBase,
    copies_in_base,
    erase_base,
    keys_of_base,
    remove_copies,
)
from xidstream.pipeline.mirror.refresh import Answer
from xidstream.pipeline.mirror.table_folder import stored
from xidstream.pipeline.mirror.vacuum import vacuum
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE
from xidstream.pipeline.spark.frames import SinkBatch

HOUR = datetime.timedelta(hours=1)
AT_ONCE = datetime.timedelta(0)
SMALL_FILES = 4 << 10
HELD = {"id": [StoredColumn("id", pa.int32(), "bigint")]}
A = keyed("a", {"id": INT8, "name": TEXT}, "id", relid=1)
B = keyed("b", {"id": INT8, "balance": INT8}, "id", relid=2)
C = keyed("c", {"id": INT8, "balance": INT8}, "id", relid=3)
N_ACCOUNTS, BALANCE = 40, 100


@pytest.fixture
def root(s3: tuple[Location, Connection]) -> Location:
    location, _ = s3
    return Location(f"{location.uri.rpartition('/')[0]}/shop", location.storage_options)


def no_session() -> Any:
    raise AssertionError("nothing here is for Spark")


@pytest.fixture
def log(root: Location, tmp_path: Path) -> Iterator[LogMaker]:
    segments = LocalSegments(str(tmp_path / "segments"))

    def make_batch(*units: Any, number: int = 0) -> SinkBatch:
        batch = batch_of(units, segments, number)
        return SinkBatch(batch, no_session, memory_frame, segments, read_memory, put_memory, segments.storage)

    maker = LogMaker(root.uri, None, make_batch, storage_options=root.storage_options)
    yield maker
    maker.sink.close()


def base_tables(root: Location) -> BaseTables:
    return BaseTables(root.uri, None, SMALL_FILES, root.storage_options)


def lines_of(root: Location) -> list[ManifestLine]:
    return read_lines(DeltaBases(root), IDENTITY.application_id)


def table_at(root: Location, directory: str, version: int | None = None) -> DeltaTable:
    location = current(root).child(directory)
    return DeltaTable(location.uri, version=version, storage_options=location.storage_options)


def rows_at(root: Location, line: ManifestLine) -> list[dict[str, Any]]:
    """By deltalake alone, as any engine would."""
    found: list[dict[str, Any]] = table_at(root, line.directory, line.version).to_pyarrow_table().to_pylist()
    return found


def test_base_tables_in_a_store_are_built_swapped_and_named_as_in_a_folder(
    root: Location, log: LogMaker
) -> None:
    log.snapshot(A, [{"id": i, "name": f"name {i}" * 5} for i in range(2_000)])
    log.snapshot(B, [{"id": 1, "balance": BALANCE}])
    log.insert(A, {"id": 5_000, "name": "x"})
    tables = base_tables(root)
    refreshed = tables.refresh(no_session)
    assert refreshed is not None and [each.answer for each in refreshed.tables] == [Answer.BUILD] * 2
    assert len(table_at(root, "public.a").file_uris()) > 5
    log.tables["public.a"][700]["name"] = "new"
    log.commit((A, [{"id": 700, "name": "new", "_change": UPDATE_POSTIMAGE}]))
    refreshed = tables.refresh(no_session)
    assert refreshed is not None
    assert [each.answer for each in refreshed.tables] == [Answer.SWAP, Answer.KEEP]
    assert [each.n_files_written for each in refreshed.tables] == [1, 0]
    assert tables.refresh(no_session) is None, "there is nothing new"
    assert len(lines_of(root)) == 4
    for line in lines_of(root):
        assert as_rows(rows_at(root, line)) == log.states[line.lsn][line.table], (line.table, line.lsn)


# -- what goes ------------------------------------------------------------------------------------------


def files_below(root: Location) -> set[str]:
    table = current(root).child(TABLE)
    return {f"{table.uri}/{path}" for path in stored(table, "") if not path.startswith("_delta_log/")}


def test_a_vacuum_in_a_store_takes_what_no_named_version_needs_and_leaves_what_is_young(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20, 30, 40):
        mirror.refresh(lsn)
    for left in ("public.a/net-x/00000.parquet", "notes/of a person.parquet"):
        with current(root).create(left) as file:
            pq.write_table(pa.table({"n": [1]}), file)
    before = files_below(root)
    assert vacuum(root, SLOT, mirror.manifest, AT_ONCE).n_files == 0 and files_below(root) == before
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    assert vacuum(root, SLOT, mirror.manifest, AT_ONCE).n_files == 3
    assert files_below(root) == set(table_of(root).file_uris()) and [
        x.lsn for x in read_lines(DeltaBases(root))
    ] == [40]
    assert list(stored(current(root).child("notes"), "")) == ["of a person.parquet"]
    mirror.refresh(50)


def test_a_table_in_a_store_that_is_left_out_is_emptied_after_the_retention_and_built_anew_when_it_comes_back(
    root: Location, log: LogMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.snapshot(A, [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}])
    log.snapshot(B, [{"id": 1, "balance": BALANCE}])
    log.insert(A, {"id": 3, "name": "three"})
    tables = base_tables(root)
    tables.refresh(no_session)
    location = current(root).child("public.a")
    left_out = BaseTable.open(
        DeltaBases(root), "public.a", "public.a", MirrorMarks(IDENTITY.application_id, tables.owner)
    )
    assert left_out is not None
    left_out.leave_out("it is of no use")
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    named = [line for line in lines_of(root) if line.table != "public.a"]
    with monkeypatch.context() as patch:
        patch.setattr(tables._manifest, "lines", lambda: named)
        tables.vacuum(0.0)
        tables.vacuum(0.0)  # which finds an empty one
    assert not table_at(root, "public.a").file_uris()
    assert {path.partition("/")[0] for path in stored(location, "")} == {"_delta_log"}
    log.insert(A, {"id": 4, "name": "four"})
    refreshed = tables.refresh(no_session)
    assert refreshed is not None and not refreshed.left_out
    assert refreshed.tables[0].answer is Answer.BUILD
    for line in newest(lines_of(root)):
        assert as_rows(rows_at(root, line)) == log.states[log.lsn][line.table]


def test_an_erasure_in_a_store_takes_rows_out_of_the_base_table_and_leaves_no_copy(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20):
        mirror.refresh(lsn)
    location, wanted = current(root).child(TABLE), parse_keys(["id = 1"])
    done = erase_base(root, SLOT, TABLE, wanted, HELD)
    assert done == ErasedBase(2, 2, 3)
    keys = keys_of_base(location, TABLE, wanted, HELD)
    assert keys is not None
    left = copies_in_base(location, keys, TABLE)[0]
    assert sorted({path.partition("/")[0] for path in left}) == ["_delta_log", "refresh-1-10", "refresh-1-20"]
    remove_copies(root, SLOT, TABLE, keys)
    assert copies_in_base(location, keys, TABLE)[0] == []
    assert {row["id"] for row in table_of(root).to_pyarrow_table().to_pylist()} == {2}
    assert [(line.slot, line.lsn, line.version) for line in read_lines(DeltaBases(root))] == [(SLOT, 20, 3)]
    mirror.refresh(30)


# -- transfers ------------------------------------------------------------------------------------------


def refresh_for_ever(root: Location) -> None:
    tables = base_tables(root)
    for turn in range(1_000_000):
        tables.refresh(no_session)
        if turn % 5 == 4:
            tables.vacuum(60.0)


@pytest.mark.slow
def test_a_mirror_in_a_store_that_is_killed_again_and_again_shows_no_torn_moment_of_transfers(
    root: Location, log: LogMaker
) -> None:
    """The log is the sink's own, and money moves between two tables in one transaction. A process refreshes, and is
    killed while it does. Whoever reads by the manifest sees the sum of all accounts, always."""
    dice = random.Random(37)
    for relation in (B, C):
        log.snapshot(relation, [{"id": i, "balance": BALANCE} for i in range(N_ACCOUNTS)])
    is_over, transfer_failed = threading.Event(), list[BaseException]()

    def transfer() -> None:
        try:
            while not is_over.is_set():
                amount = dice.randint(1, 9)
                changes = []
                for relation, sign in ((B, -1), (C, 1)):
                    row = dice.choice(log.tables[relation.name])
                    row["balance"] += sign * amount
                    changes.append((relation, [{**row, "_change": UPDATE_POSTIMAGE}]))
                log.commit(*changes)
        except BaseException as error:
            transfer_failed.append(error)
            raise

    clients = threading.Thread(target=transfer)
    clients.start()
    context = multiprocessing.get_context("spawn")
    moments, n_kills = set[int](), 0
    deadline_s = time.monotonic() + 120
    try:
        while (n_kills < 3 or len(moments) < 4) and time.monotonic() < deadline_s:
            process = context.Process(target=refresh_for_ever, args=(root,), daemon=True)
            process.start()
            seen = len(moments)
            # A life lasts until readers have seen a moment of it, and then ends at whatever it does.
            while len(moments) == seen and process.is_alive() and time.monotonic() < deadline_s:
                lines = newest(lines_of(root))
                if lines:
                    total = sum(row["balance"] for line in lines for row in rows_at(root, line))
                    assert len(lines) == 2 and total == 2 * N_ACCOUNTS * BALANCE, lines[0].lsn
                    moments.add(lines[0].lsn)
                else:
                    time.sleep(0.1)
            time.sleep(dice.random() * 0.3)
            assert process.is_alive(), process.exitcode
            process.kill()
            process.join()
            n_kills += 1
    finally:
        is_over.set()
        clients.join()
    assert not transfer_failed and n_kills >= 3 and len(moments) >= 4
    base_tables(root).refresh(no_session)
    for line in newest(lines_of(root)):
        assert as_rows(rows_at(root, line)) == log.state()[line.table]
    for line in lines_of(root):
        assert as_rows(rows_at(root, line)) == log.states[line.lsn][line.table], (line.table, line.lsn)
