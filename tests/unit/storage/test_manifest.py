"""Prepared transactions: durable, whole or refused, and never a path made of a gid."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.storage.conftest import files_below, prepared_of, read, released
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, Unsupported
from xidstream.pipeline.exchange import MessageFile, PreparedTransaction, Segment
from xidstream.pipeline.parquet import PageOffsets, RowFile
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import rows
from xidstream.pipeline.storage.envelope import seal
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import PREPARED, delete_prepared, load_prepared, write_prepared
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.segment_file import SegmentReader, write_messages, write_segment
from xidstream.pipeline.storage.storage import Storage

HOSTILE_GIDS = ["../../etc/'\"; drop|é", "..", "/", "a\\b\n\t\x01", "x" * 199, "", "\udcff"]


def damage_of(storage: Storage, layout: Layout) -> str:
    """Of the one prepared transaction."""
    (loaded,) = load_prepared(storage, layout)
    assert loaded.damage is not None and not loaded.segments
    return loaded.damage


def in_segments(storage: Storage, layout: Layout, n_files: int = 2) -> tuple[MessageFile, ...]:
    message = {"lsn": 5, "xid": 700, "transactional": True, "prefix": "p", "content": b"c"}
    batch = pa.RecordBatch.from_pylist([message] * 3, schema=rows.MESSAGES_SCHEMA)
    keys = [layout.segment_key(Xid(700), Lsn(0x1000), 1 + i) for i in range(n_files)]
    return tuple(write_messages(storage, key, [batch]) for key in keys)


def test_messages_of_a_prepare_are_files_of_its_transaction_and_found_by_its_record(
    storage, layout, prepare
) -> None:
    files = in_segments(storage, layout)
    prepared = prepared_of(prepare().segments, messages=files)
    write_prepared(storage, layout, prepared)
    (loaded,) = load_prepared(storage, layout)
    assert loaded == prepared
    assert storage.list_keys(layout.prepared_prefix) == [layout.prepared_key(Xid(700), Lsn(0x5000))]
    for file in loaded.messages:
        (batch,) = SegmentReader(storage.uri)(file)
        assert batch.schema == rows.MESSAGES_SCHEMA and batch.num_rows == file.n_rows == 3
    write_progress(storage, layout, Lsn(0x6000), [prepared])
    assert load_prepared(storage, next_epoch(layout)) == ()
    assert storage.list_keys(layout.epochs_prefix) == []


def test_a_record_without_one_of_its_files_of_messages_is_not_whole(storage, layout, prepare) -> None:
    prepared = prepared_of(prepare().segments, messages=in_segments(storage, layout))
    write_prepared(storage, layout, prepared)
    storage.delete([prepared.messages[1].key])
    assert "missing" in damage_of(storage, layout)


def test_what_was_prepared_is_loaded_with_its_rows(storage, layout, prepare, relation, batches) -> None:
    prepared = prepare()
    write_prepared(storage, layout, prepared)
    (loaded,) = load_prepared(storage, layout)
    assert loaded == prepared
    assert read(storage, loaded.segments[0]) == released(relation, batches)


def test_prepared_transactions_are_loaded_in_the_order_of_their_prepares(storage, layout, prepare) -> None:
    for xid, end in ((5, 0x3000), (900, 0x1000), (30, 0x2000)):
        write_prepared(storage, layout, prepare(xid, end=end))
    assert [int(p.xid) for p in load_prepared(storage, layout)] == [900, 30, 5]


@pytest.mark.parametrize("gid", HOSTILE_GIDS)
def test_a_hostile_gid_is_content_and_never_part_of_a_key(storage, layout, prepare, gid) -> None:
    write_prepared(storage, layout, prepare(gid=gid))
    assert storage.list_keys(layout.prepared_prefix) == [layout.prepared_key(Xid(700), Lsn(0x5000))]
    (loaded,) = load_prepared(storage, layout)
    assert loaded.gid == gid


def test_a_reused_gid_and_a_reused_xid_are_two_transactions(storage, layout, prepare) -> None:
    write_prepared(storage, layout, prepare(gid="g", end=0x5000))
    write_prepared(storage, layout, prepare(gid="g", end=0x6000))
    assert [int(p.prepare_end_lsn) for p in load_prepared(storage, layout)] == [0x5000, 0x6000]


def next_epoch(layout: Layout, day: int = 2) -> Layout:
    return dataclasses.replace(layout, epoch=f"202601{day:02}T000000-00000000")


def test_a_replayed_prepare_replaces_the_record(storage, layout, prepare) -> None:
    write_prepared(storage, layout, prepare())
    again = prepare(in_layout=next_epoch(layout))
    write_prepared(storage, next_epoch(layout), again)
    (loaded,) = load_prepared(storage, next_epoch(layout, 3))
    assert loaded == again


# -- records of several epochs -----------------------------------------------------------------------------


def remove(storage: Storage, prepared: PreparedTransaction) -> None:
    storage.delete([s.key for s in prepared.segments])


def test_a_late_buffer_of_an_ended_epoch_does_not_replace_the_new_epochs_record(
    storage, layout, prepare
) -> None:
    """Its segments are gone by then: what it names cannot be released any more."""
    late, now = prepare(), prepare(in_layout=next_epoch(layout))
    write_prepared(storage, next_epoch(layout), now)
    write_prepared(storage, layout, late)
    remove(storage, late)
    (loaded,) = load_prepared(storage, next_epoch(layout, 3))
    assert loaded == now
    assert read(storage, loaded.segments[0]).num_rows


def test_the_next_older_complete_record_is_taken_where_the_newest_is_not_whole(
    storage, layout, prepare
) -> None:
    first, second, third = (prepare(in_layout=next_epoch(layout, day)) for day in (2, 3, 4))
    for day, record in enumerate((first, second, third), 2):
        write_prepared(storage, next_epoch(layout, day), record)
    remove(storage, third)
    key = next_epoch(layout, 3).prepared_key(Xid(700), Lsn(0x5000))
    (loaded,) = load_prepared(storage, layout)
    assert loaded == second
    storage.write_bytes(key, storage.read_bytes(key)[:-20])
    (loaded,) = load_prepared(storage, layout)
    assert loaded == first


def test_a_record_without_its_messages_is_not_whole(storage, layout, prepare) -> None:
    records = []
    for day in (2, 3):
        epoch = next_epoch(layout, day)
        records.append(
            prepared_of(prepare(in_layout=epoch).segments, messages=in_segments(storage, epoch, 1))
        )
        write_prepared(storage, epoch, records[-1])
    assert load_prepared(storage, layout)[0] == records[1]
    storage.delete([records[1].messages[0].key])
    assert load_prepared(storage, layout)[0] == records[0]


def test_a_confirmed_record_of_which_no_version_is_whole_is_corrupt(storage, layout, prepare) -> None:
    """Also without a position: nothing says then that the server sends it again."""
    prepared = prepare()
    write_prepared(storage, layout, prepared)
    remove(storage, prepared)
    assert "missing" in damage_of(storage, layout)
    write_progress(storage, layout, Lsn(0x5000))
    assert "missing" in damage_of(storage, layout)
    assert storage.list_keys(layout.prepared_prefix)


def test_an_incomplete_record_that_was_not_confirmed_is_removed(storage, layout, prepare) -> None:
    """The server sends that PREPARE again; a late buffer must not stop every further run."""
    prepared, other = prepare(), prepare(701, end=0x7000)
    write_prepared(storage, layout, prepared)
    write_prepared(storage, layout, other)
    remove(storage, prepared)
    write_progress(storage, layout, Lsn(0x4FFF))
    (loaded,) = load_prepared(storage, layout)
    assert loaded == other
    assert storage.list_keys(layout.prepared_prefix) == [layout.prepared_key(Xid(701), Lsn(0x7000))]


def test_deleting_a_record_deletes_what_every_epoch_wrote_of_it(storage, layout, prepare) -> None:
    for day in (2, 3):
        epoch = next_epoch(layout, day)
        write_prepared(
            storage,
            epoch,
            prepared_of(prepare(in_layout=epoch).segments, messages=in_segments(storage, epoch, 1)),
        )
    (loaded,) = load_prepared(storage, layout)
    delete_prepared(storage, layout, loaded)
    assert storage.list_keys(layout.prepared_prefix) == []


class Crash(Exception):
    pass


@pytest.mark.parametrize("how", ["deleted", "finished"])
@pytest.mark.parametrize("n_deletes", range(8))
def test_a_crash_between_any_two_deletes_leaves_a_whole_record_or_none(
    local: Storage, layout, batches, relation, monkeypatch: pytest.MonkeyPatch, how: str, n_deletes: int
) -> None:
    """The segments of the older epoch are gone already: its record must not be the one that is left."""
    records = []
    for day in (2, 3):
        epoch = next_epoch(layout, day)
        segment = write_segment(local, epoch.segment_key(Xid(700), Lsn(0x1000), 0), relation, 700, batches)
        records.append(prepared_of((segment,), messages=in_segments(local, epoch, 1)))
        write_prepared(local, epoch, records[-1])
    remove(local, records[0])
    write_progress(local, layout, Lsn(0x6000), [records[1]] if how == "finished" else [])
    left = n_deletes
    delete = Storage.delete

    def crashing(self: Storage, keys: Iterable[str]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        delete(self, keys)
        for manifest in local.list_keys(layout.prepared_prefix):
            if manifest.endswith(".json") and next_epoch(layout, 3).epoch in manifest:
                assert local.exists(records[1].segments[0].key) and local.exists(records[1].messages[0].key)

    monkeypatch.setattr(Storage, "delete", crashing)
    with suppress(Crash):
        if how == "deleted":
            delete_prepared(local, layout, records[1])
        else:
            load_prepared(local, next_epoch(layout, 4))
    monkeypatch.undo()
    loaded = load_prepared(local, next_epoch(layout, 5))
    assert loaded == () or (how == "deleted" and loaded[0] == records[1])
    assert bool(loaded) == any(key.endswith(".json") for key in local.list_keys(layout.prepared_prefix))
    assert n_deletes < 4 or local.list_keys(layout.prepared_prefix) == []


# -- finished ones -----------------------------------------------------------------------------------------


def test_a_crash_between_confirming_and_deleting_leaves_no_finished_record(storage, layout, prepare) -> None:
    """COMMIT PREPARED never comes again: whoever does not delete now never will."""
    records = []
    for day in (2, 3):
        epoch = next_epoch(layout, day)
        records.append(
            prepared_of(prepare(in_layout=epoch).segments, messages=in_segments(storage, epoch, 1))
        )
        write_prepared(storage, epoch, records[-1])
    other = prepare(701, end=0x7000)
    write_prepared(storage, layout, other)
    write_progress(storage, layout, Lsn(0x6000), [records[1]])
    (loaded,) = load_prepared(storage, next_epoch(layout, 4))
    assert loaded == other
    assert storage.list_keys(layout.root) == sorted(
        [
            other.segments[0].key,
            layout.prepared_key(Xid(701), Lsn(0x7000)),
            layout.record_key(1),
        ]
    )


def test_a_buffer_that_is_late_with_a_finished_transaction_brings_nothing_back(
    storage, layout, prepare
) -> None:
    prepared = prepare()
    write_progress(storage, layout, Lsn(0x6000), [prepared])
    write_progress(storage, layout, Lsn(0x8000))
    write_prepared(storage, layout, prepared)
    remove(storage, prepared)
    assert load_prepared(storage, layout) == ()
    assert storage.list_keys(layout.prepared_prefix) == []


def test_a_damaged_record_of_a_finished_transaction_goes_too(storage, layout, prepare) -> None:
    prepared = prepare()
    write_prepared(storage, layout, prepared)
    storage.write_bytes(layout.prepared_key(Xid(700), Lsn(0x5000)), b"torn")
    write_progress(storage, layout, Lsn(0x6000), [prepared])
    assert load_prepared(storage, layout) == ()
    assert storage.list_keys(layout.prepared_prefix) == []


def test_a_finished_record_that_names_anothers_segments_deletes_none_of_them(
    storage, layout, prepare
) -> None:
    foreign = prepare(in_layout=Layout(layout.system_identifier, "other", "e"))
    write_prepared(storage, layout, foreign)
    write_progress(storage, layout, Lsn(0x6000), [foreign])
    assert load_prepared(storage, layout) == ()
    assert storage.exists(foreign.segments[0].key)


def test_a_reused_xid_is_not_taken_for_the_finished_transaction(storage, layout, prepare) -> None:
    write_progress(storage, layout, Lsn(0x6000), [prepare()])
    again = prepare(end=0x9000)
    write_prepared(storage, layout, again)
    assert load_prepared(storage, layout)[0] == again


def test_a_deleted_record_is_gone_and_deleting_again_is_fine(storage, layout, prepare) -> None:
    prepared, other = prepare(), prepare(701, end=0x7000)
    for each in (prepared, other):
        write_prepared(storage, layout, each)
    for _ in range(2):
        delete_prepared(storage, layout, prepared)
    assert storage.list_keys(layout.prepared_prefix) == [layout.prepared_key(Xid(701), Lsn(0x7000))]
    assert storage.exists(prepared.segments[0].key)


def test_other_slots_are_not_seen(storage, layout, prepare) -> None:
    write_prepared(storage, layout, prepare())
    assert load_prepared(storage, Layout(layout.system_identifier, "orders2", "e")) == ()
    assert load_prepared(storage, Layout(1, layout.slot, "e")) == ()


def test_an_empty_prepare_has_a_record(storage, layout) -> None:
    prepared = PreparedTransaction(
        Xid(1),
        "g",
        Lsn(1),
        Lsn(2),
        streamed=False,
        origin="node_a",
        segments=(),
    )
    write_prepared(storage, layout, prepared)
    (loaded,) = load_prepared(storage, layout)
    assert loaded == prepared


def test_all_that_a_manifest_names_is_flushed_before_the_manifest_appears(
    local: Storage, layout, relation, batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = write_segment(local, layout.segment_key(Xid(700), Lsn(1), 0), relation, 700, batches)
    messages = in_segments(local, layout, 1)
    prepared = prepared_of((segment,), messages=messages)
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        log.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def spy_replace(source: str, target: str) -> None:
        log.append(f"-> {os.path.basename(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_prepared(local, layout, prepared)
    appeared = log.index(f"-> {os.path.basename(layout.prepared_key(Xid(700), Lsn(0x5000)))}")
    assert "0.parquet" in log[:appeared]
    assert os.path.basename(messages[0].key) in log[:appeared]
    assert any(name.endswith(".tmp") for name in log[:appeared])
    assert "prepared" in log[appeared:]


def test_a_manifest_is_not_written_where_a_segment_is_missing(
    local: Storage, layout, relation, batches
) -> None:
    segment = write_segment(local, layout.segment_key(Xid(700), Lsn(1), 0), relation, 700, batches)
    local.delete([segment.key])
    with pytest.raises(StorageFault, match=segment.key):
        write_prepared(local, layout, prepared_of((segment,)))
    assert load_prepared(local, layout) == ()


def test_a_failing_storage_leaves_no_manifest(tmp_path: Path, layout, prepare) -> None:
    prepared = prepare()
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFault):
        write_prepared(Storage(str(tmp_path / "file")), layout, prepared)
    assert "file" in files_below(tmp_path)


# -- damage ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(prepare: Callable[..., PreparedTransaction]) -> bytes:
    return PREPARED.seal(prepare())


def test_a_torn_manifest_is_refused_at_every_length(stored: bytes) -> None:
    for length in range(len(stored) - 1):
        with pytest.raises(SegmentCorrupt, match="the key"):
            PREPARED.unseal(stored[:length], "the key")


def test_an_altered_byte_of_a_manifest_is_refused_or_means_the_same(stored: bytes) -> None:
    original = PREPARED.unseal(stored, "k")
    for position in range(len(stored)):
        for bit in (0x01, 0x20, 0x80):
            altered = bytearray(stored)
            altered[position] ^= bit
            try:
                loaded = PREPARED.unseal(bytes(altered), "k")
            except (SegmentCorrupt, Unsupported):
                continue
            assert loaded == original, position


def test_a_damaged_manifest_says_that_the_server_will_not_repeat_it(storage, layout, prepare) -> None:
    write_prepared(storage, layout, prepare())
    key = layout.prepared_key(Xid(700), Lsn(0x5000))
    storage.write_bytes(key, storage.read_bytes(key)[:-20])
    assert key in damage_of(storage, layout)
    with pytest.raises(SegmentCorrupt) as caught:
        PREPARED.unseal(storage.read_bytes(key), key)
    assert "does not send a confirmed PREPARE again" in caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format":1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(SegmentCorrupt):
        PREPARED.unseal(data, "k")


@pytest.mark.parametrize("version", [PREPARED.version - 1, PREPARED.version + 1])
def test_a_manifest_of_another_version_is_refused_and_nothing_is_deleted(
    storage, layout, stored: bytes, version: int
) -> None:
    key = layout.prepared_key(Xid(700), Lsn(0x5000))
    storage.write_bytes(key, seal(PREPARED.format, version, json.loads(stored)["content"]))
    kept = storage.list_keys(layout.root)
    with pytest.raises(
        Unsupported, match=rf"version {version} of .*reads version {PREPARED.version}"
    ) as refused:
        load_prepared(storage, layout)
    assert key in refused.value.message and "another --storage" in refused.value.remedy
    assert storage.list_keys(layout.root) == kept


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("xid", -1),
        ("prepare_lsn", "nonsense"),
        ("segments", [{}]),
        ("relations", []),
    ],
)
def test_a_sealed_manifest_with_a_wrong_part_is_corrupt(stored: bytes, part: str, value: object) -> None:
    content = {**json.loads(stored)["content"], part: value}
    with pytest.raises(SegmentCorrupt):
        PREPARED.unseal(seal(PREPARED.format, PREPARED.version, content), "k")


def test_a_manifest_that_names_what_is_not_the_slots_is_refused(storage, layout, prepare) -> None:
    """Its segments are deleted one day: they must not be somebody else's."""
    foreign = prepare(in_layout=Layout(layout.system_identifier, "other", "e"))
    write_prepared(storage, layout, foreign)
    assert "other" in damage_of(storage, layout)


def test_of_several_damaged_records_the_newest_ones_reason_is_told(storage, layout, prepare) -> None:
    keys = []
    for day in (2, 3):
        epoch = next_epoch(layout, day)
        write_prepared(storage, epoch, prepare(in_layout=epoch))
        keys.append(epoch.prepared_key(Xid(700), Lsn(0x5000)))
        storage.write_bytes(keys[-1], b"torn")
    assert keys[1] in damage_of(storage, layout)


def test_a_manifest_with_a_name_that_is_none_is_refused_and_anything_else_passed_over(
    storage, layout, prepare
) -> None:
    write_prepared(storage, layout, prepare())
    storage.write_bytes(f"{layout.prepared_prefix}/notes.txt", b"a person's")
    assert len(load_prepared(storage, layout)) == 1
    assert storage.exists(f"{layout.prepared_prefix}/notes.txt")
    storage.write_bytes(f"{layout.prepared_prefix}/700.json", PREPARED.seal(prepare()))
    with pytest.raises(SegmentCorrupt, match=r"700\.json"):
        load_prepared(storage, layout)


def test_a_manifest_under_another_transactions_key_is_refused(storage, layout, prepare) -> None:
    storage.write_bytes(layout.prepared_key(Xid(9), Lsn(9)), PREPARED.seal(prepare()))
    assert "another transaction" in damage_of(storage, layout)


def test_each_segment_keeps_its_own_table_and_the_record_all_its_numbers(relation) -> None:
    other = dataclasses.replace(relation, relid=16_401, table="other")
    tables = (relation, other, relation)
    segments = tuple(
        Segment(
            f"key-{n}",
            t,
            RowFile(10 + n, 1000 + n, f"crc32:{n}", n, ((PageOffsets(n, 9), PageOffsets(20, 30)),) * n),
        )
        for n, t in enumerate(tables)
    )
    prepared = dataclasses.replace(
        prepared_of(segments),
        messages=(MessageFile("k", 6, 99, "0"),),
        origin="upstream",
        streamed=False,
    )
    assert PREPARED.unseal(PREPARED.seal(prepared), "k") == prepared


def test_a_finished_one_that_its_former_owner_removes_at_the_same_moment_is_no_fault(
    storage, layout, prepare
) -> None:
    prepared = prepare()
    write_prepared(storage, layout, prepared)
    write_progress(storage, layout, Lsn(0x6000), [prepared])
    key = layout.prepared_key(prepared.xid, prepared.prepare_end_lsn)
    assert load_prepared(storage, next_epoch(layout), before_removing=lambda: storage.delete([key])) == ()
    assert storage.exists(prepared.segments[0].key), "it goes with its epoch"
