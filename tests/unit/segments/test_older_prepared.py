"""Prepared transactions that an older xidstream left: whoever takes the slot over releases them as they were meant.

``data/prepared_v2`` is the storage that xidstream left, at the commit before version 3 of the manifest, of a streamed
transaction with two tables, four segments with rolled-back rows in three of them, and a logical message.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import PreparedTransaction, TransactionEnd
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.segments import (
    Layout,
    SegmentReader,
    Storage,
    clean_dead_epochs,
    load_prepared,
    write_progress,
)
from xidstream.pipeline.segments.envelope import seal
from xidstream.pipeline.segments.manifest import FORMAT, prepared_from_json
from xidstream.pipeline.sequencer.prepared import stamp_segments

OLD = Layout(7, "orders", "20260101T000000-00c0ffee")
NEW, NEXT = (Layout(7, "orders", f"20260{month}01T000000-00c0ffee") for month in (2, 3))
MANIFEST = OLD.prepared_key(Xid(700), Lsn(0x5004))
END = TransactionEnd(Xid(700), Lsn(0x9000), Lsn(0x9008), 0, gid="a gid")


@pytest.fixture
def left(tmp_path: Path) -> Storage:
    root = tmp_path / "storage"
    shutil.copytree(Path(__file__).parent / "data" / "prepared_v2", root)
    return Storage(str(root))


def released(storage: Storage, prepared: PreparedTransaction) -> list[tuple[int, str, str]]:
    found = []
    for part in stamp_segments(prepared, END):
        for out in SegmentReader(storage.uri)(part):
            numbers, values = out.column("_seq").to_pylist(), out.column("a").to_pylist()
            found += [(seq, part.relation.table, a) for seq, a in zip(numbers, values, strict=True)]
    return sorted(found)


def check(storage: Storage, prepared: PreparedTransaction) -> None:
    assert released(storage, prepared) == [
        (0, "t", "kept 0"),
        (1, "t", "kept 1"),
        (2, "u", "kept 2"),
        (3, "t", "kept 3"),
    ]
    (file,) = prepared.messages
    (batch,) = SegmentReader(storage.uri)(file)
    assert batch.column("content").to_pylist() == [b"content"]
    assert (prepared.gid, prepared.streamed, prepared.prepare_lsn) == ("a gid", True, 0x5000)


def keys(storage: Storage) -> list[str]:
    return storage.list_keys(OLD.root)


def test_a_record_of_version_2_is_released_without_its_rolled_back_rows(left: Storage) -> None:
    (prepared,) = load_prepared(left, NEW)
    check(left, prepared)
    named = prepared.stored_keys()
    assert len(named) == 4, "the segment without a row that stays is left out"
    clean_dead_epochs(left, NEW, set(named))
    new_manifest = NEW.prepared_key(Xid(700), Lsn(0x5004))
    assert keys(left) == sorted([*named, MANIFEST, new_manifest]), "the old objects are gone"
    (again,) = load_prepared(left, NEXT)
    assert again == prepared, "converted once"
    check(left, again)


def test_a_record_of_version_1_is_released_with_the_messages_beside_it(left: Storage) -> None:
    content = json.loads(left.read_bytes(MANIFEST))["content"]
    (message,) = content.pop("messages")
    del content["poison"]
    beside = OLD.prepared_messages_key(Xid(700), Lsn(0x5004))
    left.write_bytes(beside, left.read_bytes(message["key"]))
    left.delete([message["key"]])
    left.write_bytes(MANIFEST, seal(FORMAT, 1, content | {"messages_key": beside, "n_messages": 1}))
    (prepared,) = load_prepared(left, NEW)
    check(left, prepared)
    assert beside not in prepared.stored_keys()
    left.write_bytes(MANIFEST, seal(FORMAT, 1, content | {"messages_key": None, "n_messages": 0}))
    left.delete([NEW.prepared_key(Xid(700), Lsn(0x5004))])
    (prepared,) = load_prepared(left, NEXT)
    assert prepared.messages == ()


@pytest.mark.parametrize("n_writes", range(1, 5))
def test_a_crash_within_the_conversion_loses_nothing(
    left: Storage, monkeypatch: pytest.MonkeyPatch, n_writes: int
) -> None:
    class Crash(Exception):
        pass

    written = 0
    create = Storage.create

    def crashing(self: Storage, key: str) -> object:
        nonlocal written
        written += 1
        if written == n_writes:
            raise Crash
        return create(self, key)

    monkeypatch.setattr(Storage, "create", crashing)
    with pytest.raises(Crash):
        load_prepared(left, NEW)
    monkeypatch.undo()
    (prepared,) = load_prepared(left, NEXT)
    check(left, prepared)


def test_a_finished_record_of_an_older_xidstream_goes_with_its_segments(left: Storage) -> None:
    record = prepared_from_json(left.read_bytes(MANIFEST), MANIFEST)
    write_progress(left, NEW, Lsn(0x6000), [record.prepared])  # type: ignore[union-attr]
    assert load_prepared(left, NEW) == ()
    assert keys(left) == sorted([NEW.progress_key, NEW.record_key(1)])


def test_segments_that_lost_rows_are_not_converted(left: Storage) -> None:
    content = json.loads(left.read_bytes(MANIFEST))["content"]
    content["segments"][0]["n_released_rows"] = 3
    left.write_bytes(MANIFEST, seal(FORMAT, 2, content))
    (prepared,) = load_prepared(left, NEW)
    assert prepared.damage is not None and "has not the 3 rows" in prepared.damage


@pytest.mark.parametrize(
    "dropped", [{"n_runs": 1, "first": "", "count": ""}, {"n_runs": 0, "first": "!", "count": ""}, {}]
)
def test_a_sealed_older_manifest_with_wrong_runs_is_corrupt(left: Storage, dropped: object) -> None:
    content = json.loads(left.read_bytes(MANIFEST))["content"] | {"dropped": dropped}
    with pytest.raises(SegmentCorrupt):
        prepared_from_json(seal(FORMAT, 2, content), "k")
