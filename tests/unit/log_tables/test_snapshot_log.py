"""Snapshots in Delta tables: named once, told once, by the run that has the slot, beside a sink that writes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.snapshot_tables import commit_one, output_of
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.generations import generation_at, generations_of
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.delta.erased_table import erase_rows
from xidstream.pipeline.errors import (
    ComponentLost,
    PreconditionMissing,
    SinkDiverged,
    SnapshotInterrupted,
    Superseded,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.exchange import Batch, InlineMessages, Sealed, SlotIdentity, Tenure
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.erased_keys import parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine, SnapshotOutput
from xidstream.pipeline.log_tables.table_metadata import NOTHING_KNOWN
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import Column, ReplicaIdentity
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.ddl import AlteredTable, Ddl, Witnessed
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark.frames import SinkBatch

BOUNDS = SnapshotBounds(Lsn(99), Lsn(120), 700, 710, (705,), 1_700_000_000_000_000)
RELATION = RelationVersion(
    16384,
    "public",
    "a.b",
    ReplicaIdentity.DEFAULT,
    (Column("id", 20, -1, True), Column("name", 25, -1, False)),
)
GENERATION = Generation(RELATION, 1, BOUNDS)


def generation_of(number: int) -> Generation:
    """Each with a place of its own, as later snapshots have higher ones."""
    return Generation(RELATION, number, dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(98 + number)))


def log_of(
    root: Path,
    tenure: int = 1,
    slot: str = "orders",
    timeline: int = 1,
    history: Mapping[int, Lsn] = MappingProxyType({}),
    wal_end: int = 10**9,
    **options: Any,
) -> SnapshotLog:
    location = Location.parse(str(root), options or None)
    application_id = f"7/shop/{slot}"
    hold = Tenure(tenure, "epoch", timeline, history, Lsn(wal_end))
    owner = Ownership(application_id, f"{application_id}/messages", str(root), hold)
    return SnapshotLog(DeltaTables(location), application_id, owner)


def written(
    log: SnapshotLog, ids: range, relation: RelationVersion = RELATION, snapshot_lsn: int = 99
) -> list[WrittenFile]:
    target = output_of(log, relation, Lsn(snapshot_lsn))
    files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
    rows = [{"id": i, "_change_type": "snapshot", "_commit_lsn": snapshot_lsn, "_seq": i} for i in ids]
    files.write(target.conform(pa.RecordBatch.from_pylist(rows, schema=contract_schema(relation))))
    return files.close()


def ids(root: Path) -> list[int]:
    table = DeltaTable(str(root / "public.a~2Eb")).to_pyarrow_table()
    return sorted(table["id"].to_pylist())


def test_a_generation_is_named_and_told_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    files = written(log, range(5))
    for _ in range(2):
        assert commit_one(log, GENERATION, files)
    assert log_of(tmp_path).recover(GENERATION)
    assert ids(tmp_path) == [0, 1, 2, 3, 4]
    assert log.lines(True) == [
        GenerationLine('public."a.b"', 16384, 1, 99, 120, GenerationState.FINISHED, True)
    ]
    (row,) = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    assert row == {
        "table": 'public."a.b"',
        "relid": 16384,
        "generation": 1,
        "place": 99,
        "valid_from": 120,
        "xmin": 700,
        "xmax": 710,
        "xip": [705],
        "key": ["id"],
        "state": "finished",
        "reason": None,
        "until": None,
        "contained_upto": None,
        "rows": 5,
    }


@contextmanager
def crash_behind_the_rows() -> Iterator[None]:
    """The commit of the table goes through, and that of the line does not."""
    with pytest.MonkeyPatch.context() as armed:
        armed.setattr(faultpoints, "_plan", faultpoints.FaultPlan("snapshot_committed:error", None))
        with pytest.raises(ComponentLost):
            yield


def test_rows_that_a_crash_left_without_a_line_get_it_and_others_do_not(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    assert not log.recover(GENERATION), "there is not even a table"
    files = written(log, range(5))
    assert not log.recover(GENERATION), "no commit names the files"
    assert log.lines(True) == []
    with crash_behind_the_rows():
        commit_one(log_of(tmp_path), GENERATION, files)
    assert log.lines(True) == [] and ids(tmp_path) == [0, 1, 2, 3, 4]
    assert log.recover(GENERATION)
    assert [line.number for line in log.lines(True)] == [1] and ids(tmp_path) == [0, 1, 2, 3, 4]
    told = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table()
    assert told["rows"].to_pylist() == [5], "counted in the table"


def test_a_snapshot_whose_files_a_vacuum_has_removed_is_not_named(tmp_path: Path) -> None:
    """It took longer than the vacuum keeps what nobody names."""
    log = log_of(tmp_path)
    first, second = written(log, range(3)), written(log, range(3, 5))
    table = tmp_path / "public.a~2Eb"
    os.utime(table / first[0].path, (1.7e9, 1.7e9))
    assert DeltaTable(str(table)).vacuum(retention_hours=168, full=True, dry_run=False) == [first[0].path]
    with pytest.raises(
        SnapshotInterrupted, match=r'public\."a\.b": 1 of 2 files of its snapshot were removed'
    ):
        commit_one(log, GENERATION, [*first, *second])
    assert ids(tmp_path) == [] and log.lines(True) == []
    assert commit_one(log, GENERATION, written(log, range(5))) and ids(tmp_path) == [0, 1, 2, 3, 4]


def test_a_snapshot_that_is_committed_while_the_sink_writes_a_batch_does_not_have_it_written_again(
    tmp_path: Path,
) -> None:
    """A merge of small files would: commits that began before it are refused."""
    log = log_of(tmp_path)
    snapshot = written(log, range(5))
    location = Location.parse(str(tmp_path / "public.a~2Eb"))
    columns = DeltaTableWriter.open(location, "t").columns  # type: ignore[union-attr]
    schema = pa.schema([column.field for column in columns])

    def rows(lsn: int) -> list[WrittenFile]:
        files = ParquetFiles(location, f"data-{lsn}", schema, "_commit_lsn")
        row = {"id": lsn, "_change_type": "insert", "_commit_lsn": lsn, "_seq": 0}
        files.write(pa.RecordBatch.from_pylist([row], schema=schema))
        return files.close()

    for lsn in range(1000, 1000 + SIZE_CLASSES[0].many):
        sink = DeltaTableWriter.open(location, "t")
        assert sink is not None
        sink.commit(rows(lsn), {"7/shop/orders": lsn}, merges=False)
    assert commit_one(log, GENERATION, snapshot)
    sink.commit(rows(2000), {"7/shop/orders": 2000})
    assert len(ids(tmp_path)) == 5 + SIZE_CLASSES[0].many + 1


def test_what_a_failed_attempt_wrote_is_removed_unless_the_table_names_it(tmp_path: Path) -> None:
    log, table = log_of(tmp_path), tmp_path / "public.a~2Eb"
    named = written(log, range(5))
    assert commit_one(log, GENERATION, named)
    left = written(log, range(5, 7))
    targets = [
        dataclasses.replace(output_of(log, RELATION, Lsn(99)), directory=os.path.dirname(files[0].path))
        for files in (named, left)
    ]
    for target in targets:
        log.discard(target)
    assert ids(tmp_path) == [0, 1, 2, 3, 4] and not (table / left[0].path).exists()
    with pytest.raises(Superseded):
        log_of(tmp_path, tenure=2).lines(True)
        commit_one(
            log_of(tmp_path, tenure=2),
            generation_of(2),
            written(log_of(tmp_path, tenure=2), range(1), snapshot_lsn=100),
        )
        log.discard(targets[1])


def test_lines_of_an_earlier_version_are_read_and_a_run_adds_the_columns_that_they_lack(
    tmp_path: Path,
) -> None:
    log, uri = log_of(tmp_path), str(tmp_path / "_snapshots")
    commit_one(log, GENERATION, written(log, range(5)))
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    DeltaTableWriter.open_or_create(log._tables.location.child("_transactions"), "_transactions", columns)
    log.reach(Lsn(120))
    told = DeltaTable(uri).to_pyarrow_table()
    shutil.rmtree(uri)
    write_deltalake(uri, told.drop_columns(["until", "contained_upto", "rows"]))
    (found,) = LogFrames(str(tmp_path)).generations()['public."a.b"']
    assert (found.number, found.until, found.n_rows, found.bounds.contained_upto) == (1, None, None, 0)
    log_of(tmp_path).lines(True)
    assert set(DeltaTable(uri).to_pyarrow_table().column_names) == set(told.column_names)


def test_an_empty_table_has_a_generation_too(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    assert written(log, range(0)) == []
    assert commit_one(log, GENERATION, [])
    assert [line.state for line in log.lines(True)] == [GenerationState.FINISHED] and ids(tmp_path) == []


def test_an_ended_generation_is_told_with_its_reason_and_followed_by_the_next(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    (line,) = log.lines(True)
    for _ in range(2):
        log.end(line, "the table was rewritten")
    assert log.lines(True) == [dataclasses.replace(line, state=GenerationState.ENDED)]
    rows = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    assert sorted((r["state"], r["reason"]) for r in rows) == [
        ("ended", "the table was rewritten"),
        ("finished", None),
    ]
    commit_one(log, generation_of(2), written(log, range(2, 4)))
    assert [(each.number, each.state.value, each.is_ours) for each in log.lines(True)] == [
        (1, "ended", False),
        (2, "finished", True),
    ]


def test_a_parked_tables_generation_is_ended_once_and_one_from_behind_the_park_is_not(tmp_path: Path) -> None:
    log_of(tmp_path).park([ParkedTable(16384, 'public."a.b"', Lsn(300), Xid(1), "why")])
    log = log_of(tmp_path)
    assert not (tmp_path / "_snapshots").exists(), "a run without snapshots makes no table"
    commit_one(log, GENERATION, written(log, range(2)))
    log.park([ParkedTable(1, "public.other", Lsn(300), Xid(1), "why")])
    assert [each.state for each in log.lines(True)] == [GenerationState.FINISHED]
    parked = ParkedTable(16384, 'public."a.b"', Lsn(300), Xid(1), "a value that is not valid UTF-8")
    for _ in range(2):
        log.park([parked])
    rows = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    (reason,) = [row["reason"] for row in rows if row["state"] == "ended"]
    assert reason == "the table was parked at commit LSN 0/12C: a value that is not valid UTF-8"
    log = log_of(tmp_path)
    commit_one(log, generation_of(2), written(log, range(2, 4)))
    log.park([dataclasses.replace(parked, until_lsn=Lsn(100))])
    assert [(each.number, each.state.value) for each in log.lines(True)] == [(1, "ended"), (2, "finished")]
    log.park([dataclasses.replace(parked, until_lsn=Lsn(105))])
    assert [(each.number, each.state.value) for each in log.lines(True)] == [(1, "ended"), (2, "ended")]


def test_a_park_ends_every_generation_that_stands_behind_it_and_none_that_a_later_one_has_replaced_before(
    tmp_path: Path,
) -> None:
    """A snapshot is taken ahead of the stream. The one before it stands as long as the stream is behind it."""
    log = log_of(tmp_path)
    for number, snapshot_lsn in ((1, 40), (2, 50), (3, 1000)):
        bounds = dataclasses.replace(
            BOUNDS, snapshot_lsn=Lsn(snapshot_lsn), valid_from=Lsn(snapshot_lsn + 10)
        )
        commit_one(
            log, Generation(RELATION, number, bounds), written(log, range(number), snapshot_lsn=snapshot_lsn)
        )
    before = DeltaTable(str(tmp_path / "_snapshots")).version()
    parked = ParkedTable(16384, 'public."a.b"', Lsn(200), Xid(1), "why")

    def stands(lsn: int) -> int | None:
        rows = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
        try:
            return generation_at('public."a.b"', generations_of(rows)['public."a.b"'], Lsn(lsn)).number
        except PreconditionMissing:
            return None

    for _ in range(2):
        log.park([parked])
    assert DeltaTable(str(tmp_path / "_snapshots")).version() == before + 1, "one commit for all of them"
    assert [stands(lsn) for lsn in (50, 59, 60, 199, 200, 1009, 1010)] == [1, 1] + [None] * 5
    bounds = dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(1500), valid_from=Lsn(1510))
    log = log_of(tmp_path)
    commit_one(log, Generation(RELATION, 4, bounds), written(log, range(4), snapshot_lsn=1500))
    log.park([dataclasses.replace(parked, until_lsn=Lsn(1400))])
    assert [stands(lsn) for lsn in (59, 60, 1509, 1510)] == [1, None, None, 4]


def test_a_park_ends_the_former_generation_too_where_the_newest_has_ended_already(tmp_path: Path) -> None:
    """A look at the catalog, or at the record, came first."""
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    later = dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(1000), valid_from=Lsn(1010))
    commit_one(log, Generation(RELATION, 2, later), written(log, range(2), snapshot_lsn=1000))
    log.end(log.lines(True)[1], "the table was rewritten")
    for _ in range(2):
        log.park([ParkedTable(16384, 'public."a.b"', Lsn(200), Xid(1), "why")])
    rows = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    assert sorted((row["generation"], row["reason"]) for row in rows if row["state"] == "ended") == [
        (1, "the table was parked at commit LSN 0/C8: why"),
        (2, "the table was rewritten"),
    ]


def test_the_sink_ends_a_parked_tables_generation_before_transactions_says_that_all_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads in between would take what is there for the whole table."""
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    sink = DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders"))
    sink.claim(Tenure(2, "epoch", 1, {}, Lsn(10**9)))
    sink._threads = ThreadPoolExecutor(1)
    parked = ParkedTable(16384, 'public."a.b"', Lsn(300), Xid(1), "why")
    content = Batch(0, (), Lsn(290), Lsn(310), Lsn(314), 1, 0, 0, parked=(parked,))
    nothing: Any = None
    batch = SinkBatch(content, nothing, nothing, nothing, nothing, nothing)
    states: list[list[str]] = []

    def look(_: object) -> None:
        states.append([line.state.value for line in log_of(tmp_path, 2).lines(True)])

    monkeypatch.setattr(sink, "_transactions_of", look)
    for _ in range(2):
        sink.write(batch)
    assert states == [["ended"], ["ended"]]
    sink.close()


def test_a_snapshot_that_is_committed_behind_its_tables_park_ends_in_the_same_commit(tmp_path: Path) -> None:
    """Nobody looked at it before the next survey of the catalog, and until then it was read."""
    sink = DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders"))
    sink.claim(Tenure(2, "epoch", 1, {}, Lsn(10**9)))
    sink._threads = ThreadPoolExecutor(1)
    log = sink.snapshot_log()
    other = dataclasses.replace(RELATION, relid=5, table="other")
    files, others = written(log, range(3)), written(log, range(3), other)
    parked = ParkedTable(16384, 'public."a.b"', Lsn(90), Xid(1), "why")
    content = Batch(0, (), Lsn(80), Lsn(95), Lsn(99), 1, 0, 0, parked=(parked,))
    nothing: Any = None
    batch = SinkBatch(content, nothing, nothing, nothing, nothing, nothing)
    sink.write(batch)
    log.lines(True)
    before = DeltaTable(str(tmp_path / "_snapshots")).version()
    for _ in range(2):
        assert commit_one(sink.snapshot_log(), GENERATION, files)
    table = DeltaTable(str(tmp_path / "_snapshots"))
    assert table.version() == before + 1
    rows = table.to_pyarrow_table().to_pylist()
    assert sorted((row["state"], row["reason"]) for row in rows) == [
        ("ended", "the table was parked at commit LSN 0/5A: why"),
        ("finished", None),
    ]
    assert commit_one(sink.snapshot_log(), Generation(other, 1, BOUNDS), others)
    states = {line.table: line.state.value for line in log.lines(True)}
    assert states == {'public."a.b"': "ended", "public.other": "finished"}
    # In the next epoch it is resumed.
    sink.claim(Tenure(3, "epoch", 1, {}, Lsn(10**9)))
    resumed = dataclasses.replace(parked, until_lsn=Lsn(100))
    sink.write(SinkBatch(dataclasses.replace(content, parked=(resumed,)), *[nothing] * 5))
    log = sink.snapshot_log()
    assert commit_one(log, generation_of(2), written(log, range(2), snapshot_lsn=100))
    assert [line.state.value for line in log.lines(True) if line.relid == 16384] == ["ended", "finished"]
    sink.close()


def unlogged(lsn: int, relid: int = 16384, mark: int | None = 7) -> Ddl:
    return Ddl(Lsn(lsn), "ALTER TABLE", (AlteredTable(relid, (), rewritten=1),), mark)


def ended_rows(root: Path) -> list[tuple[int, int]]:
    """(generation, until), the last word on each."""
    rows = DeltaTable(str(root / "_snapshots")).to_pyarrow_table().to_pylist()
    return [
        (generation.number, int(generation.until))
        for generation in generations_of(rows)['public."a.b"']
        if generation.until is not None
    ]


def test_ddl_in_the_stream_ends_a_generation_once_and_one_from_behind_it_not(tmp_path: Path) -> None:
    DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders")).claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    assert log.prove(Lsn(130)).ended == ()
    log.note_ddl([unlogged(140, relid=5), Ddl(Lsn(150), "ALTER TABLE", (AlteredTable(16384),), 7)])
    assert [each.state for each in log.lines(True)] == [GenerationState.FINISHED], (
        "another's, and a harmless one"
    )
    for _ in range(2):
        log.note_ddl([unlogged(160), unlogged(170)])
    ((line, reason),) = log.prove(Lsn(135)).ended
    assert line.number == 1 and "UNLOGGED" in reason and ended_rows(tmp_path) == [(1, 130)]
    commit_one(log, generation_of(2), written(log, range(2, 4), snapshot_lsn=100))
    assert [each.state.value for each in log.lines(True)] == ["ended", "ended"], "taken before the DDL came"
    later = dataclasses.replace(
        generation_of(3), bounds=dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(180), valid_from=Lsn(181))
    )
    commit_one(log, later, written(log, range(2, 4), snapshot_lsn=180))
    log.note_ddl([unlogged(170)])
    assert [each.state.value for each in log.lines(True)] == ["ended", "ended", "finished"]


def test_a_generation_stands_up_to_the_ddl_that_ended_it_where_nothing_was_missed(tmp_path: Path) -> None:
    DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders")).claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    log.prove(Lsn(130))
    log.note_ddl([Ddl(Lsn(150), "ALTER TYPE", (), 7), unlogged(160)])
    ((line, _),) = log.prove(Lsn(131)).ended
    log.extend(line, Witnessed(8, Lsn(120)))
    assert ended_rows(tmp_path) == [(1, 130)], "the triggers were off for a while"
    for _ in range(2):
        log.extend(line, Witnessed(7, Lsn(120)))
        assert ended_rows(tmp_path) == [(1, 149)]
    commit_one(log, generation_of(2), written(log, range(2, 4), snapshot_lsn=100))
    # Found by a look at the catalog.
    log = log_of(tmp_path)
    bounds = dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(200), valid_from=Lsn(201))
    commit_one(log, Generation(RELATION, 3, bounds), written(log, range(2, 4), snapshot_lsn=200))
    log.prove(Lsn(230))
    log.note_ddl([Ddl(Lsn(250), "ALTER TYPE", (), 7)])
    log.end(log.lines(True)[-1], "the type of column name was altered", Witnessed(7, Lsn(120)))
    assert ended_rows(tmp_path)[-1] == (3, 249)


def test_what_is_told_already_is_not_told_again_and_a_proof_never_falls(tmp_path: Path) -> None:
    DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders")).claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    log.prove(Lsn(130))
    log.note_ddl([unlogged(160)])
    ((line, _),) = log.prove(Lsn(131)).ended
    log.extend(line, Witnessed(7, Lsn(120)))
    log.reach(Lsn(131))

    def versions() -> list[int]:
        return [DeltaTable(str(tmp_path / name)).version() for name in ("_snapshots", "_transactions")]

    before = versions()
    log.extend(line, Witnessed(7, Lsn(120)))
    for lsn in (131, 120):
        log.prove(Lsn(lsn))
        log.reach(Lsn(lsn))
    assert versions() == before and LogFrames(str(tmp_path)).proven_lsn == 131


def test_a_table_that_is_parked_does_not_stand_up_to_its_next_ddl(tmp_path: Path) -> None:
    DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders")).claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    (line,) = log.lines(True)
    log.prove(Lsn(130))
    log.park([ParkedTable(16384, 'public."a.b"', Lsn(140), Xid(1), "why")])
    log.note_ddl([unlogged(160)])
    log.end(line, "parked", Witnessed(7, Lsn(120)))
    log.extend(line, Witnessed(7, Lsn(120)))
    assert ended_rows(tmp_path) == [(1, 130)] and log.prove(Lsn(131)).ended == ()


def test_the_sink_ends_by_ddl_before_transactions_says_that_all_is_whole_and_keeps_no_message_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    sink = DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders"))
    sink.claim(Tenure(2, "epoch", 1, {}, Lsn(10**9)))
    sink._threads = ThreadPoolExecutor(1)
    told = {"version": 1, "tag": "DROP TABLE", "mark": 7, "tables": [{"relid": 16384, "dropped": True}]}
    rows = [
        {
            "commit_lsn": 300,
            "lsn": 280 + i,
            "xid": 1,
            "transactional": transactional,
            "prefix": prefix,
            "content": content,
        }
        for i, (transactional, prefix, content) in enumerate(
            [
                (True, "xidstream.ddl", json.dumps(told).encode()),
                (True, "theirs", b"1"),
                (True, "xidstream.ddl", b"not ours"),
                (False, "xidstream.ddl", b"2"),
            ]
        )
    ]
    messages = InlineMessages(pa.RecordBatch.from_pylist(rows, schema=MESSAGES_SCHEMA))
    transactions = pa.RecordBatch.from_pylist([], schema=TRANSACTIONS_SCHEMA)
    unit = Sealed(transactions, (), (), (messages,), 0, 0)
    content = Batch(0, (unit,), Lsn(290), Lsn(300), Lsn(304), 1, 0, 0)
    states: list[list[str]] = []

    def look(_: object) -> None:
        states.append([line.state.value for line in log_of(tmp_path, 2).lines(True)])

    monkeypatch.setattr(sink, "_transactions_of", look)
    nothing: Any = None
    for _ in range(2):
        sink.write(SinkBatch(content, nothing, nothing, nothing, nothing, nothing))
    assert states == [["ended"], ["ended"]]
    kept = DeltaTable(str(tmp_path / "_messages")).to_pyarrow_table().to_pylist()
    assert sorted((row["prefix"], row["content"]) for row in kept) == [
        ("theirs", b"1"),
        ("xidstream.ddl", b"2"),
    ]
    sink.close()


def transactions_batch(commit_lsn: int) -> SinkBatch:
    row = {
        "xid": 1,
        "commit_lsn": commit_lsn,
        "end_lsn": commit_lsn + 1,
        "commit_timestamp": 0,
        "streamed": False,
        "rows": 0,
        "tables": [],
    }
    rows = pa.RecordBatch.from_pylist([row], schema=TRANSACTIONS_SCHEMA)
    unit = Sealed(rows, (), (), (), 0, 0)
    content = Batch(0, (unit,), Lsn(commit_lsn - 1), Lsn(commit_lsn), Lsn(commit_lsn + 1), 1, 0, 0)
    nothing: Any = None
    return SinkBatch(content, nothing, nothing, nothing, nothing, nothing)


def test_a_batch_after_a_proof_reads_the_log_of_no_table_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log remembers the files of a day: to open it took longer than the commit."""
    sink = DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders"))
    sink.claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    sink._threads = ThreadPoolExecutor(1)
    log = sink.snapshot_log()
    sink.write(transactions_batch(100))
    log.prove(Lsn(100))
    opened: list[str] = []
    open_table = DeltaTableWriter.open
    monkeypatch.setattr(
        DeltaTableWriter, "open", lambda *a, **kw: opened.append(a[1]) or open_table(*a, **kw)
    )
    for lsn in (200, 300, 400):
        sink.write(transactions_batch(lsn))
        log.prove(Lsn(lsn))
    log.reach(Lsn(450))
    sink.write(transactions_batch(500))
    assert opened == []
    found = DeltaTable(str(tmp_path / "_transactions"))
    assert sorted(found.to_pyarrow_table()["commit_lsn"].to_pylist()) == [100, 200, 300, 400, 500]
    assert found.transaction_version("7/shop/orders/proven") == 400
    sink.close()


def test_a_run_that_was_followed_by_another_adds_no_batch_after_a_proof_of_its_own(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders"))
    sink.claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    sink._threads = ThreadPoolExecutor(1)
    sink.write(transactions_batch(100))
    sink.snapshot_log().prove(Lsn(100))
    log_of(tmp_path, tenure=2).prove(Lsn(110))
    with pytest.raises(Superseded):
        sink.write(transactions_batch(200))
    assert DeltaTable(str(tmp_path / "_transactions")).to_pyarrow_table().num_rows == 1
    sink.close()


def test_another_slots_generation_of_the_same_table_is_not_ours(tmp_path: Path) -> None:
    theirs = log_of(tmp_path, slot="other")
    commit_one(theirs, GENERATION, written(theirs, range(2)))
    assert [line.is_ours for line in log_of(tmp_path).lines(True)] == [False]


def test_a_run_that_was_taken_over_completes_no_snapshot(tmp_path: Path) -> None:
    before, after = log_of(tmp_path, tenure=1), log_of(tmp_path, tenure=2)
    files = written(before, range(5))
    commit_one(after, generation_of(1), written(after, range(10, 12)))
    with pytest.raises(Superseded):
        commit_one(before, generation_of(2), files)
    assert ids(tmp_path) == [10, 11]


def numbered(number: int) -> RelationVersion:
    return dataclasses.replace(RELATION, relid=20_000 + number, table=f"t{number}")


def test_lines_are_added_to_what_the_last_one_left_open_and_no_line_of_others_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()
    before = DeltaTables.open

    def spied(self: DeltaTables, key: str, label: str) -> DeltaTableWriter | None:
        opened.append(key)
        return before(self, key, label)

    log, other = log_of(tmp_path), log_of(tmp_path, slot="others")
    commit_one(log, GENERATION, written(log, range(2)))
    monkeypatch.setattr(DeltaTables, "open", spied)
    for number in range(3):
        commit_one(log, Generation(numbered(number), 1, BOUNDS), written(log, range(2), numbered(number)))
    assert "_snapshots" not in opened
    commit_one(other, Generation(numbered(9), 1, BOUNDS), written(other, range(2), numbered(9)))
    commit_one(log, Generation(numbered(3), 1, BOUNDS), written(log, range(2), numbered(3)))
    lines = [line.table for line in log_of(tmp_path).lines(False)]
    assert lines == ['public."a.b"', "public.t0", "public.t1", "public.t2", "public.t3", "public.t9"]


def group_of(log: SnapshotLog, n_tables: int) -> list[tuple[Generation, list[WrittenFile]]]:
    """Snapshots of so many tables, read and not committed: the table ``t3`` has 3 rows."""
    numbers = range(1, n_tables + 1)
    return [(Generation(numbered(n), 1, BOUNDS), written(log, range(n), numbered(n))) for n in numbers]


def told_rows(root: Path) -> dict[str, int]:
    lines = DeltaTable(str(root / "_snapshots")).to_pyarrow_table().to_pylist()
    return {line["table"]: line["rows"] for line in lines if line["state"] == "finished"}


def test_the_lines_of_tables_that_are_taken_together_are_one_commit_and_are_told_once(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.lines(True)
    group = group_of(log, 9)
    before = DeltaTable(str(tmp_path / "_snapshots")).version()
    for _ in range(2):
        assert log.commit(group) == [True] * 9
    assert DeltaTable(str(tmp_path / "_snapshots")).version() == before + 1
    assert told_rows(tmp_path) == {f"public.t{n}": n for n in range(1, 10)}
    assert all(log_of(tmp_path).recover(generation) for generation, _ in group), "each by itself, too"
    assert len(DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table()) == 9


def test_of_tables_that_are_taken_together_one_that_cannot_be_named_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path)
    group = group_of(log, 3)
    (tmp_path / "public.t2" / group[1][1][0].path).unlink()
    first, second, third = log.commit(group)
    assert (first, third) == (True, True) and isinstance(second, SnapshotInterrupted)
    assert told_rows(tmp_path) == {"public.t1": 1, "public.t3": 3}


def test_a_crash_between_the_rows_of_a_group_and_its_lines_leaves_what_the_next_run_tells(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path)
    group = group_of(log, 3)

    def dies(lines: object) -> None:
        raise ComponentLost("the driver ended")

    with pytest.MonkeyPatch.context() as armed, pytest.raises(ComponentLost):
        armed.setattr(log._lines, "add", dies)
        log.commit(group)
    assert log.lines(True) == []
    later = log_of(tmp_path, tenure=2)
    assert [later.recover(generation) for generation, _ in group] == [True] * 3
    assert told_rows(tmp_path) == {"public.t1": 1, "public.t2": 2, "public.t3": 3}


def test_two_groups_at_the_same_time_are_taken_into_iceberg_tables_once_each(tmp_path: Path) -> None:
    tables = IcebergTables(IcebergAddress.parse(f"{tmp_path}/lake/shop"), makes=True)
    hold = Tenure(1, "epoch", 1, {}, Lsn(10**9))
    log = SnapshotLog(
        tables, "7/shop/orders", Ownership("7/shop/orders", "7/shop/orders/messages", "root", hold)
    )
    log.lines(True)

    def taken(first: int) -> list[bool | XidstreamError]:
        relations = [numbered(n) for n in range(first, first + 6)]
        group = []
        for relation, target in zip(
            relations, log.outputs([(each, Lsn(99)) for each in relations]), strict=True
        ):
            assert isinstance(target, SnapshotOutput)
            files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
            rows = [{"id": 1, "_change_type": "snapshot", "_commit_lsn": 99, "_seq": 0}]
            files.write(target.conform(pa.RecordBatch.from_pylist(rows, schema=contract_schema(relation))))
            group.append((Generation(relation, 1, BOUNDS), files.close()))
        return [*log.commit(group), *log.commit(group)]

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(taken, (1, 11))] == [[True] * 12] * 2
    assert [line.state for line in log.lines(True)] == [GenerationState.FINISHED] * 12
    tables.close()


def test_a_table_of_a_group_that_was_altered_meanwhile_ends_with_its_line_and_the_others_stand(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path)
    DeltaSink(str(tmp_path), SlotIdentity(7, "shop", "orders")).claim(Tenure(1, "epoch", 1, {}, Lsn(10**9)))
    group = group_of(log, 3)
    log.note_ddl([unlogged(140, relid=numbered(2).relid)])
    assert log.commit(group) == [True] * 3
    states = {line.table: line.state.value for line in log.lines(True)}
    assert states == {"public.t1": "finished", "public.t2": "ended", "public.t3": "finished"}
    assert [line.table for line, _ in log.prove(Lsn(130)).ended] == ["public.t2"]


def test_a_table_that_a_snapshot_makes_is_the_runs_from_its_first_version_on(tmp_path: Path) -> None:
    log = log_of(tmp_path, tenure=3)
    output_of(log, RELATION, Lsn(99))
    table = DeltaTable(str(tmp_path / "public.a~2Eb"))
    assert table.version() == 0 and table.transaction_version("7/shop/orders/owner") == 3
    with pytest.raises(Superseded):
        output_of(log_of(tmp_path, tenure=2), RELATION, Lsn(99))


def test_a_table_that_cannot_be_made_says_why_and_the_others_of_its_group_are_there(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    (tmp_path / "public.t2").write_text("no folder")
    first, second, third = log.outputs([(numbered(n), Lsn(99)) for n in (1, 2, 3)])
    assert isinstance(second, XidstreamError)
    assert [each.key for each in (first, third) if isinstance(each, SnapshotOutput)] == [
        "public.t1",
        "public.t3",
    ]


def test_a_run_that_was_taken_over_adds_no_line_to_what_it_had_open(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    files = written(log, range(2), numbered(1))
    log_of(tmp_path, tenure=2).lines(True)
    with pytest.raises(Superseded):
        commit_one(log, Generation(numbered(1), 1, BOUNDS), files)
    assert [line.table for line in log_of(tmp_path, tenure=2).lines(False)] == ['public."a.b"']


def test_a_wider_table_takes_the_snapshot_and_a_wider_snapshot_widens_the_table(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(2)))
    wider = dataclasses.replace(RELATION, columns=(*RELATION.columns, Column("more", 23, -1, False)))
    commit_one(log, generation_of(2), written(log, range(2, 4), wider))
    narrower = dataclasses.replace(RELATION, columns=RELATION.columns[:1])
    commit_one(log, generation_of(3), written(log, range(4, 6), narrower))
    table = DeltaTable(str(tmp_path / "public.a~2Eb")).to_pyarrow_table()
    assert table.column_names[-1] == "more" and ids(tmp_path) == list(range(6))


def test_commits_of_several_tables_beside_each_other_all_get_through(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def commit(number: int) -> None:
        try:
            log = log_of(tmp_path)
            relation = dataclasses.replace(RELATION, relid=number, table=f"t{number}")
            files = written(log, range(3), relation)
            commit_one(log, Generation(relation, 1, BOUNDS), files)
        except BaseException as error:
            failures.append(error)

    log_of(tmp_path).lines(True)
    threads = [threading.Thread(target=commit, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert [line.table for line in log_of(tmp_path).lines(True)] == [f"public.t{i}" for i in range(1, 5)]


def test_credentials_in_storage_options_are_not_sent_to_readers(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="credentials"):
        output_of(log_of(tmp_path, AWS_SECRET_ACCESS_KEY="x"), RELATION, Lsn(99))


def test_what_a_run_that_was_taken_over_named_is_not_taken_for_another_snapshot(tmp_path: Path) -> None:
    """Both runs call theirs generation 1; the later one has looked at the table before the earlier one commits."""
    ghost, ours = log_of(tmp_path, tenure=1), log_of(tmp_path, tenure=2)
    theirs = written(ghost, range(3))
    later = Generation(RELATION, 1, dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(110)))
    files = written(ours, range(10, 12), snapshot_lsn=110)
    with pytest.raises(Superseded):
        commit_one(ghost, GENERATION, theirs)
    assert commit_one(ours, later, files) and ids(tmp_path) == [10, 11]


def test_rows_of_a_place_that_no_line_names_are_followed_by_the_next_snapshot(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    files = written(log, range(3))
    with crash_behind_the_rows():
        commit_one(log_of(tmp_path), GENERATION, files)
    later = Generation(RELATION, 1, dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(110)))
    assert not log.recover(later), "those are another snapshot's"
    assert commit_one(log, later, written(log, range(10, 12), snapshot_lsn=110))
    assert [(line.number, line.snapshot_lsn) for line in log.lines(True)] == [(1, 110)]
    assert not log.recover(GENERATION), "the later one's rows are not the earlier one's"


def test_the_version_of_a_snapshot_is_recorded_from_its_place_on_and_leaves_the_streams_properties(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path)
    written(log, range(2), snapshot_lsn=99)
    other = dataclasses.replace(RELATION, replica_identity=ReplicaIdentity.FULL)
    written(log, range(2), other, snapshot_lsn=110)
    written(log, range(2), other, snapshot_lsn=120)
    said = DeltaTable(str(tmp_path / "public.a~2Eb")).metadata().configuration
    versions = json.loads(said["xidstream.versions"])
    assert [(each["since"], each["replica_identity"], each["slot"]) for each in versions] == [
        (99, "default", "7/shop/orders"),
        (110, "full", "7/shop/orders"),
    ]
    assert said["xidstream.replica_identity"] == "default"


def test_a_run_that_wants_no_snapshot_makes_no_table_and_one_that_does_is_not_told_of_a_ghosts(
    tmp_path: Path,
) -> None:
    ghost = log_of(tmp_path, tenure=1)
    files = written(ghost, range(3))
    run = log_of(tmp_path, tenure=2)
    assert run.lines(False) == [] and not (tmp_path / "_snapshots").exists()
    assert run.lines(True) == [] and (tmp_path / "_snapshots").exists()
    crashed = log_of(tmp_path, tenure=1)
    with pytest.raises(Superseded):
        commit_one(crashed, GENERATION, files)
    assert run.lines(False) == []


def transactions_of(root: Path) -> Path:
    """Made, as the sink makes it."""
    transactions = root / "_transactions"
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    DeltaTableWriter.open_or_create(
        Location.parse(str(transactions)), "_transactions", columns, NOTHING_KNOWN
    )
    return transactions


def test_a_log_is_told_to_be_whole_up_to_where_its_snapshots_are_valid_from_and_never_falls_back(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path)
    transactions = transactions_of(tmp_path)
    for lsn in (120, 120, 110):
        log.reach(Lsn(lsn))
        table = DeltaTable(str(transactions))
        assert table.transaction_version("7/shop/orders") == 120
        assert table.version() == 1, "one commit, and no row"
    with pytest.raises(Superseded):
        later = log_of(tmp_path, tenure=2)
        later.reach(Lsn(130))
        log.reach(Lsn(140))


def test_a_snapshot_that_has_what_a_promoted_standby_lacks_ends_the_run(tmp_path: Path) -> None:
    """The stream was behind the place where the timelines part, and so nothing else told it."""
    log = log_of(tmp_path, wal_end=100)
    log.lines(True)
    assert commit_one(log, GENERATION, written(log, range(5)))
    lines = log.lines(True)
    for promoted in (
        {"timeline": 2, "history": {1: Lsn(112)}, "wal_end": 400},
        {"timeline": 2, "history": {}, "wal_end": 400},
        {"wal_end": 112},
    ):
        late = log_of(tmp_path, 2, **promoted)
        with pytest.raises(SinkDiverged, match="_snapshots"):
            late.lines(True)
    late = log_of(tmp_path, 2, timeline=2, history={1: Lsn(96)}, wal_end=400)
    with pytest.raises(SinkDiverged, match=r'public\."a\.b"'):
        output_of(late, RELATION, Lsn(100))
    assert log_of(tmp_path, 2, timeline=2, history={1: Lsn(120)}, wal_end=400).lines(True) == lines


def test_a_snapshot_of_another_history_that_stands_no_more_ends_no_run(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.lines(True)
    assert commit_one(log, GENERATION, written(log, range(5)))
    (line,) = log.lines(True)
    log.end(line, "somebody said so")
    late = log_of(tmp_path, 2, timeline=2, history={1: Lsn(112)}, wal_end=400)
    assert [each.state for each in late.lines(True)] == [GenerationState.ENDED]


def test_a_snapshot_at_a_lower_place_than_the_last_one_is_refused(tmp_path: Path) -> None:
    """It was asked for again and again, without a word."""
    log = log_of(tmp_path)
    assert commit_one(log, generation_of(5), written(log, range(5), snapshot_lsn=103))
    with pytest.raises(SinkDiverged, match="a later one"):
        commit_one(log, generation_of(-3), written(log, range(5), snapshot_lsn=95))


# -- erasures beside it -----------------------------------------------------------------------------------


def erase(root: Path, key: str, upto: int) -> None:
    location = Location.parse(str(root)).child("public.a~2Eb")
    erase_rows(location, 'public."a.b"', "7/shop/orders", parse_keys([key]), upto)


def test_a_snapshot_that_was_read_while_keys_were_erased_is_taken_again(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    files = written(log, range(5))
    erase(tmp_path, "id = 2", 150)
    with pytest.raises(SnapshotInterrupted, match="erased"):
        commit_one(log, GENERATION, files)
    assert ids(tmp_path) == [] and log.lines(True) == []
    later = dataclasses.replace(
        GENERATION, bounds=dataclasses.replace(BOUNDS, snapshot_lsn=Lsn(151), valid_from=Lsn(200))
    )
    assert commit_one(log, later, written(log, range(5), snapshot_lsn=151))
    assert ids(tmp_path) == [0, 1, 2, 3, 4]


def test_the_rows_that_an_erasure_took_between_a_snapshot_and_its_line_are_not_missed(tmp_path: Path) -> None:
    """A crash between the two commits, and then an erasure: the line says how many there were."""
    log = log_of(tmp_path)
    files = written(log, range(5))
    writer = DeltaTableWriter.open(files_root := Location.parse(str(tmp_path)).child("public.a~2Eb"), "t")
    assert writer is not None and files_root.is_local
    writer.commit(files, {"7/shop/orders/snapshot": 99}, marks={"7/shop/orders/owner": 1}, merges=False)
    erase(tmp_path, "id in (1, 2)", 150)
    assert log.recover(GENERATION)
    (line,) = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    assert line["rows"] == 5 and ids(tmp_path) == [0, 3, 4]


GROWN = dataclasses.replace(RELATION, columns=(*RELATION.columns, Column("note", 25, -1, False)))


def of_layouts(root: Path) -> list[tuple[int | None, int, list[str]]]:
    text = DeltaTable(str(root / "public.a~2Eb")).metadata().configuration["xidstream.versions"]
    return [(each.get("after"), each["since"], [*each["columns"]]) for each in json.loads(text)]


def test_columns_that_no_row_has_brought_are_the_logs_from_where_a_look_has_found_them(
    tmp_path: Path,
) -> None:
    transactions_of(tmp_path)
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(3)))
    log.reach(Lsn(120))
    log.prove(Lsn(130))
    for _ in range(2):
        log.lay_out([(GROWN, Lsn(200))])
    assert of_layouts(tmp_path) == [(None, 99, ["id", "name"]), (130, 200, ["id", "name", "note"])]
    assert LogFrames(str(tmp_path)).last_commit_lsn == 200, "the log is whole up to there"
    log.prove(Lsn(200))
    opened = LogFrames(str(tmp_path))
    assert opened.laid_out_lsn == 200
    for lsn, names in ((130, ["id", "name"]), (200, ["id", "name", "note"])):
        assert [*opened.table_at(("public", "a.b"), Lsn(lsn)).shape.columns] == names
    with pytest.raises(PreconditionMissing, match="its columns were altered somewhere after 0/82"):
        opened.table_at(("public", "a.b"), Lsn(131))


def test_where_the_ddl_is_known_columns_are_the_logs_from_there_on(tmp_path: Path) -> None:
    transactions_of(tmp_path)
    log = log_of(tmp_path)
    commit_one(log, GENERATION, written(log, range(3)))
    log.prove(Lsn(130))
    log.note_ddl([Ddl(Lsn(lsn), "ALTER TABLE", (AlteredTable(16384),), 7) for lsn in (150, 170)])
    log.lay_out([(GROWN, Lsn(160))], Witnessed(7, Lsn(125)))
    assert of_layouts(tmp_path)[1:] == [(None, 150, ["id", "name", "note"])]
    log.prove(Lsn(165))
    log.lay_out([(RELATION, Lsn(200))], Witnessed(7, Lsn(125)))
    assert of_layouts(tmp_path)[2:] == [(None, 170, ["id", "name"])]
