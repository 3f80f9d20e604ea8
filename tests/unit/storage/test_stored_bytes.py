"""The bytes of each stored document: what a run has left in a storage, every later one of these versions reads.

``data/documents`` has one of each kind. A change of one of these files is a new version of the format, and a line in
CHANGELOG.md.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.exchange import (
    Beginning,
    JournalFile,
    JournalSpan,
    MemoryPart,
    MessageFile,
    PrepareCover,
    PreparedTransaction,
    Sealed,
    Segment,
    SegmentPart,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.parked import BadTable, ParkedTable
from xidstream.pipeline.parquet import CommitStamp, PageOffsets, RowFile
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import Poison
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.storage.beginning_record import read_beginning, write_beginning
from xidstream.pipeline.storage.envelope import seal
from xidstream.pipeline.storage.journal_directory import (
    JournalDirectory,
    directory_from_json,
    directory_to_json,
)
from xidstream.pipeline.storage.journal_summary import (
    StoredObject,
    Summary,
    summary_from_json,
    summary_to_json,
)
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import PREPARED as MANIFEST
from xidstream.pipeline.storage.progress import read_progress, write_progress
from xidstream.pipeline.storage.resumes import read_resumes, request_resume
from xidstream.pipeline.storage.server_record import ServerRecord, read_server, write_server
from xidstream.pipeline.storage.skips import Skip, read_skips, write_skip
from xidstream.pipeline.storage.snapshot_record import (
    TakenSnapshot,
    Wishes,
    cancel,
    read_decision,
    read_delivered,
    read_taken,
    read_wishes,
    request,
    write_decision,
    write_delivered,
    write_taken,
)
from xidstream.pipeline.storage.storage import Storage

DOCUMENTS = Path(__file__).parent / "data" / "documents"
TIMES = ("written_at", "begun_at", "recorded_at", "left_out_at", "asked_at", "decided_at")
NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.timezone.utc)
LAYOUT = Layout(7_423_000_000_000_000_001, "orders", "20260101T000000-00c0ffee")
RELATION = RelationVersion(
    16_400,
    "public",
    "weird; table",
    ReplicaIdentity.DEFAULT,
    (Column("id", 23, -1, True), Column("Größe", 1700, 655_366, False)),
)
FILE = RowFile(10, 1_000, "crc32:00c0ffee", 3, ((PageOffsets(20, 9), PageOffsets(40, 30)),))
SEGMENT = Segment(LAYOUT.segment_key(Xid(700), Lsn(0x1000), 0), RELATION, FILE)
MESSAGES = MessageFile(LAYOUT.messages_key(Xid(700), Lsn(0x1000), 1), 6, 99, "crc32:0badcafe")
POISON = Poison(Lsn(0x4E00), "column note of public.t is not UTF-8")
PREPARED = PreparedTransaction(
    xid=Xid(700),
    gid="../gid",
    prepare_lsn=Lsn(0x4F00),
    prepare_end_lsn=Lsn(0x5000),
    streamed=True,
    origin="upstream",
    segments=(SEGMENT,),
    messages=(MESSAGES,),
    poison=POISON,
    bad_tables=(BadTable(16_400, "public.t", Lsn(0x4E00), "not UTF-8", 2, Xid(700)),),
)
PARKED = ParkedTable(16_400, "public.t", Lsn(0x30), Xid(7), "not UTF-8", 2, 9, Lsn(0x60), awaits_sink=True)
BOUNDS = SnapshotBounds(Lsn(0x98), Lsn(0x99), 7, 12, (8, 10), 1_700_000_000_000_000)
GENERATION = Generation(RELATION, 2, BOUNDS, ("id",))
SKIP = Skip(Xid(7), Lsn(0x40), NOON, "me", "a bad row", NOON)
FINISHED = replace(PREPARED, xid=Xid(650), prepare_end_lsn=Lsn(0x1F0))
DIRECTORY = JournalDirectory(
    (
        (
            UnitEnd(Lsn(0x1000), Lsn(0x1000), Lsn(0x1030), 1),
            Sealed(
                transactions=pa.RecordBatch.from_pylist([], schema=TRANSACTIONS_SCHEMA),
                memory=(MemoryPart(RELATION, 1, 10, Lsn(0x1000), 2),),
                segments=(SegmentPart(SEGMENT, CommitStamp(0x1000, 1_700_000_000_000_000)),),
                messages=(SpilledMessages(MESSAGES, Lsn(0x1000), Xid(700)),),
                n_rows=11,
                n_bytes=1_010,
            ),
        ),
    ),
    (StoredObject(100, 1), StoredObject(50, 2), StoredObject(70, 3)),
)
SUMMARY = Summary(
    JournalFile(
        number=3,
        epoch=LAYOUT.epoch,
        first_commit_lsn=Lsn(0x1000),
        last_commit_lsn=Lsn(0x1000),
        end_lsn=Lsn(0x1030),
        first_commit_timestamp_us=1_700_000_000_000_000,
        n_units=1,
        n_transactions=1,
        n_rows=11,
        n_bytes=1_000,
        stored_keys=(SEGMENT.key,),
        memory_bytes=10,
    ),
    220,
    StoredObject(512, 4),
)


def write_all(storage: Storage) -> None:
    write_progress(
        storage,
        LAYOUT,
        Lsn(0x200),
        [FINISHED],
        owner=4,
        cover=PrepareCover(Lsn(0x18), frozenset({Xid(7), Xid(4_000_000_000)})),
        delivered_lsn=Lsn(0x180),
        journal=[JournalSpan("e", 3, 5)],
        parked=[PARKED],
        held_lsn=Lsn(0x170),
    )
    write_server(storage, LAYOUT, ServerRecord(2, "shop", 16_384))
    write_beginning(storage, LAYOUT, Beginning(Lsn(0x10), True, ("the sink ends at 0/40",)))
    write_skip(storage, LAYOUT, SKIP)
    request_resume(storage, LAYOUT, 16_400, "public.t")
    write_decision(storage, LAYOUT, Decision(True, {16_400: "p"}))
    write_taken(storage, LAYOUT, TakenSnapshot(GENERATION, {"relid": 16_400}))
    write_delivered(storage, LAYOUT, GENERATION)
    cancel(storage, LAYOUT, 16_401, "public.u")
    request(storage, LAYOUT, 16_400, "public.t")


STORED = {
    "progress.json": LAYOUT.record_key(4),
    "server.json": LAYOUT.server_key,
    "beginning.json": LAYOUT.beginning_key,
    "skip.json": LAYOUT.skip_key(Xid(7), Lsn(0x40)),
    "resume.json": LAYOUT.resume_key(16_400),
    "decision.json": LAYOUT.snapshot_decision_key,
    "taken.json": LAYOUT.snapshot_key(16_400, "taken-2"),
    "told.json": LAYOUT.snapshot_key(16_400, "told-2"),
    "request.json": LAYOUT.snapshot_key(16_400, "request"),
    "cancelled.json": LAYOUT.snapshot_key(16_401, "cancelled"),
}
MADE: dict[str, Callable[[], bytes]] = {
    "prepared.json": lambda: MANIFEST.seal(PREPARED),
    "journal_directory.json": lambda: directory_to_json(DIRECTORY),
    "journal_summary.json": lambda: summary_to_json(SUMMARY, LAYOUT),
}


def at_noon(data: bytes) -> bytes:
    """A document as it is if it was written at noon."""
    document: dict[str, Any] = json.loads(data)
    content = {
        name: NOON.isoformat() if name in TIMES else value for name, value in document["content"].items()
    }
    return seal(document["format"], document["version"], content)


def test_each_document_is_written_byte_for_byte_as_before(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    write_all(storage)
    found = {name: at_noon(storage.read_bytes(key)) for name, key in STORED.items()}
    found |= {name: make() for name, make in MADE.items()}
    assert set(found) == {path.name for path in DOCUMENTS.iterdir()}
    for name, data in found.items():
        assert data == (DOCUMENTS / name).read_bytes(), name


@pytest.fixture
def older(tmp_path: Path) -> Storage:
    """What an earlier run has left."""
    storage = Storage(str(tmp_path))
    for name, key in STORED.items():
        storage.write_bytes(key, (DOCUMENTS / name).read_bytes())
    return storage


def test_each_document_is_read_as_it_was_meant(older: Storage) -> None:
    record = read_progress(older, LAYOUT)
    assert record is not None
    assert (record.confirmed_lsn, record.delivered_lsn, record.held_lsn) == (0x200, 0x180, 0x170)
    assert (record.epoch, record.owner, record.written_at) == (LAYOUT.epoch, 4, NOON)
    assert record.finished == ((FINISHED.xid, FINISHED.prepare_end_lsn),)
    assert record.cover == PrepareCover(Lsn(0x18), frozenset({Xid(7), Xid(4_000_000_000)}))
    assert (record.journal, record.parked) == ((JournalSpan("e", 3, 5),), (PARKED,))
    assert read_server(older, LAYOUT) == ServerRecord(2, "shop", 16_384)
    assert read_beginning(older, LAYOUT) == Beginning(Lsn(0x10), True, ("the sink ends at 0/40",))
    assert read_skips(older, LAYOUT) == (SKIP,)
    assert read_resumes(older, LAYOUT) == {16_400}
    assert read_decision(older, LAYOUT) == Decision(True, {16_400: "p"})
    assert read_taken(older, LAYOUT) == [TakenSnapshot(GENERATION, {"relid": 16_400})]
    assert read_delivered(older, LAYOUT) == [GENERATION]
    assert read_wishes(older, LAYOUT) == Wishes({16_400: "public.t"}, {16_401: "public.u"})
    assert MANIFEST.unseal((DOCUMENTS / "prepared.json").read_bytes(), "k") == PREPARED
    directory = pa.py_buffer((DOCUMENTS / "journal_directory.json").read_bytes())
    assert directory_from_json(directory, "k") == DIRECTORY
    summary = pa.py_buffer((DOCUMENTS / "journal_summary.json").read_bytes())
    assert summary_from_json(summary, LAYOUT, LAYOUT.epoch, 3, "k") == SUMMARY
