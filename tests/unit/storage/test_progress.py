"""The confirmed LSN: durable, and it never goes back."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tests.unit.storage.conftest import prepared_of
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, Superseded, Unsupported, UsageError
from xidstream.pipeline.exchange import PrepareCover
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.cleanup import holds_slot
from xidstream.pipeline.storage.envelope import seal
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import (
    PROGRESS,
    REMEMBERED_FINISHED,
    claim_slot,
    last_owner,
    read_progress,
    take_over_progress,
    write_progress,
)
from xidstream.pipeline.storage.storage import Storage


def test_there_is_no_record_before_the_first(storage, layout) -> None:
    assert read_progress(storage, layout) is None


def test_the_last_record_is_read_by_the_next_epoch(storage, layout) -> None:
    write_progress(storage, layout, Lsn(0x10))
    written = write_progress(storage, layout, Lsn(0x1_0000_0000))
    read = read_progress(storage, Layout(layout.system_identifier, layout.slot, "next"))
    assert read == written
    assert read.confirmed_lsn == Lsn(0x1_0000_0000)
    assert read.epoch == layout.epoch
    assert read.written_at.utcoffset() == datetime.timedelta(0)


def test_it_never_goes_back(storage, layout) -> None:
    written = write_progress(storage, layout, Lsn(0x20))
    with pytest.raises(UsageError, match=r"0/20.*0/1F"):
        write_progress(storage, layout, Lsn(0x1F))
    assert read_progress(storage, layout) == written
    assert write_progress(storage, layout, Lsn(0x20)).confirmed_lsn == Lsn(0x20)


def test_slots_have_records_of_their_own(storage, layout) -> None:
    write_progress(storage, layout, Lsn(0x20))
    other = Layout(layout.system_identifier, "other", layout.epoch)
    assert read_progress(storage, other) is None
    write_progress(storage, other, Lsn(0x1))
    assert read_progress(storage, layout).confirmed_lsn == Lsn(0x20)


def test_a_damaged_record_is_not_taken_for_none(storage, layout) -> None:
    write_progress(storage, layout, Lsn(0x20))
    key = layout.record_key(1)
    whole = storage.read_bytes(key)
    for damaged in (b"", whole[:-9], whole.replace(b"0/20", b"0/30")):
        storage.write_bytes(key, damaged)
        with pytest.raises(SegmentCorrupt, match=key):
            read_progress(storage, layout)
        with pytest.raises(SegmentCorrupt):
            write_progress(storage, layout, Lsn(0x30))


def test_the_record_is_that_of_the_last_owner_and_earlier_ones_go_when_it_is_taken_over(
    storage, layout
) -> None:
    first, second = (Layout(layout.system_identifier, layout.slot, epoch) for epoch in ("first", "second"))
    taken = take_over_progress(storage, first, None, Lsn(0x10), owner=claim_slot(storage, first))
    assert read_progress(storage, second) == taken and taken.owner == 1
    taken = take_over_progress(storage, second, taken, Lsn(0x10), owner=claim_slot(storage, second))
    assert storage.list_keys(layout.progress_prefix) == [second.record_key(2)]
    # The first one had looked whose the slot is before that, and writes now.
    storage.write_bytes(
        first.record_key(1), sealed(PROGRESS.version, confirmed_lsn="0/40", epoch="first", owner=1)
    )
    assert read_progress(storage, first) == taken


def test_a_claim_is_a_higher_number_than_all_and_no_record(storage, layout) -> None:
    first, second, third = (
        Layout(layout.system_identifier, layout.slot, e) for e in ("first", "second", "third")
    )
    owner = claim_slot(storage, first)
    assert read_progress(storage, layout) is None and not holds_slot(storage, layout)
    taken = take_over_progress(storage, first, None, Lsn(0x10), owner=owner)
    assert (last_owner(storage, layout), storage.list_keys(layout.progress_prefix)) == (1, [taken.key])
    assert claim_slot(storage, second, seen=1) == 2
    assert read_progress(storage, layout) == taken, "its holder has recorded nothing"
    with pytest.raises(Superseded, match="second"):
        write_progress(storage, first, Lsn(0x20), owner=1)
    assert read_progress(storage, layout).confirmed_lsn == 0x20, "second reads it before it records"
    with pytest.raises(Superseded, match="second"):
        claim_slot(storage, third, seen=1)
    assert storage.list_keys(layout.progress_prefix) == [taken.key, second.claim_key(2)]
    assert claim_slot(storage, third, seen=2, above=41) == 42
    assert storage.list_keys(layout.progress_prefix) == [taken.key, third.claim_key(42)]


def sealed(version: object, **more: object) -> bytes:
    content = {
        "confirmed_lsn": "0/20",
        "epoch": "e",
        "written_at": "2026-01-01T00:00:00+00:00",
        "finished": [],
        "cover": None,
        "owner": 1,
        "delivered_lsn": "0/20",
        "journal": [],
    }
    return seal(PROGRESS.format, version, {**content, **more})


def test_a_storage_that_cannot_be_read_is_not_taken_for_empty(tmp_path: Path, layout) -> None:
    (tmp_path / "file").write_text("x")
    storage = Storage(str(tmp_path / "file"))
    with pytest.raises(StorageFault):
        read_progress(storage, layout)
    with pytest.raises(StorageFault):
        write_progress(storage, layout, Lsn(1))


def test_finished_prepared_transactions_are_told_with_the_position_and_remembered(storage, layout) -> None:
    first, second = prepared_of((), xid=7, end=0x110), prepared_of((), xid=4_000_000_000, end=0x118)
    write_progress(storage, layout, Lsn(0x120), [first])
    assert read_progress(storage, layout).finished == ((Xid(7), Lsn(0x110)),)
    written = write_progress(storage, layout, Lsn(0x130), [second, first])
    assert written.finished == ((Xid(4_000_000_000), Lsn(0x118)), (Xid(7), Lsn(0x110)))
    write_progress(storage, layout, Lsn(0x140))
    assert read_progress(storage, layout).finished == written.finished


def test_the_list_of_finished_ones_is_bounded_but_holds_all_of_one_write(local, layout) -> None:
    many = [prepared_of((), xid=n, end=0x1000 + n) for n in range(REMEMBERED_FINISHED + 50)]
    assert len(write_progress(local, layout, Lsn(0x2000), many).finished) == len(many)
    last = prepared_of((), xid=9_999, end=0x2100)
    finished = write_progress(local, layout, Lsn(0x3000), [last]).finished
    assert len(finished) == REMEMBERED_FINISHED
    assert finished[-1] == (Xid(9_999), Lsn(0x2100))
    assert finished[0] == (Xid(51), Lsn(0x1000 + 51))


def test_what_the_first_record_covers_is_kept_by_all_that_follow(storage, layout) -> None:
    cover = PrepareCover(Lsn(0x18), frozenset({Xid(7), Xid(4_000_000_000)}))
    write_progress(storage, layout, Lsn(0x20), cover=cover)
    write_progress(storage, layout, Lsn(0x30), [prepared_of((), xid=7)])
    write_progress(storage, layout, Lsn(0x40), cover=PrepareCover(Lsn(0x40)))
    assert read_progress(storage, layout).cover == cover


@pytest.mark.parametrize("version", [0, PROGRESS.version - 1, PROGRESS.version + 1, None, "1"])
def test_a_record_of_another_version_is_refused_and_stays(storage, layout, version) -> None:
    """Up to version 5 there was one object for all owners."""
    older = isinstance(version, int) and version < PROGRESS.version
    key = layout.progress_key if older else layout.record_key(1)
    storage.write_bytes(key, sealed(version))
    for use in (read_progress, lambda *where: write_progress(*where, Lsn(0x30))):
        with pytest.raises(
            Unsupported, match=rf"version {version!r} of .*reads version {PROGRESS.version}"
        ) as refused:
            use(storage, layout)
        assert key in refused.value.message and "another --storage" in refused.value.remedy
    assert storage.list_keys(layout.root) == [key]


@pytest.mark.parametrize("finished", [[1], [[1]], [["x", "0/1"]], [[1, "nonsense"]], [[-1, "0/1"]], None])
def test_a_sealed_record_with_a_wrong_list_is_corrupt(local, layout, finished) -> None:
    local.write_bytes(layout.record_key(1), sealed(PROGRESS.version, finished=finished))
    with pytest.raises(SegmentCorrupt):
        read_progress(local, layout)
