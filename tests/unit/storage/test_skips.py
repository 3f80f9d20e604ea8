"""What a person gave up: recorded, found by the next run, and kept as the record of it."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from xidstream.pipeline.errors import SegmentCorrupt, Unsupported
from xidstream.pipeline.exchange import JournalSpan
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.cleanup import holds_slot, remove_slot
from xidstream.pipeline.storage.envelope import seal
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.skips import Skip, note_skipped, pending_skips, read_skips, write_skip

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


def skip(xid: int, commit_lsn: int) -> Skip:
    return Skip(Xid(xid), Lsn(commit_lsn), NOW, "ada", "Grüße")


def test_what_was_given_up_is_found_by_another_epoch_in_the_order_of_commits(storage, layout) -> None:
    for each in (skip(900, 0x30), skip(1000, 0x20), skip(0, 0x40)):
        write_skip(storage, layout, each)
    other = Layout(layout.system_identifier, layout.slot, "next")
    assert read_skips(storage, other) == (skip(1000, 0x20), skip(900, 0x30), skip(0, 0x40))
    assert read_skips(storage, Layout(layout.system_identifier, "another", "e")) == ()


def test_a_run_asks_only_for_what_the_server_may_still_send_or_the_journal_has(storage, layout) -> None:
    for each in (skip(1, 0x1F), skip(2, 0x20), skip(3, 0x21)):
        write_skip(storage, layout, each)
    assert pending_skips(storage, layout, Lsn(0x20)) == {(2, 0x20), (3, 0x21)}
    write_progress(storage, layout, Lsn(0x20), delivered_lsn=Lsn(0x1F), journal=[JournalSpan("e", 0, 0)])
    assert pending_skips(storage, layout, Lsn(0x20)) == {(1, 0x1F), (2, 0x20), (3, 0x21)}
    write_progress(storage, layout, Lsn(0x20))
    assert pending_skips(storage, layout, Lsn(0x20)) == {(2, 0x20), (3, 0x21)}


def test_it_is_written_down_once_that_a_run_met_it(storage, layout) -> None:
    for each in (skip(1, 0x10), skip(2, 0x20)):
        write_skip(storage, layout, each)
    met_ones = [(1, 0x10, (5, 7)), (2, 0x10, None), (3, 0x30, None)]
    note_skipped(storage, layout, [SkippedTransaction(Xid(x), Lsn(lsn), of) for x, lsn, of in met_ones])
    met, other = read_skips(storage, layout)
    assert met.left_out_at is not None and dataclasses.replace(met, left_out_at=None, relids=None) == skip(
        1, 0x10
    )
    assert other == skip(2, 0x20)
    note_skipped(storage, layout, [SkippedTransaction(Xid(1), Lsn(0x10))])
    assert read_skips(storage, layout)[0] == met, "the first time counts"


def test_it_goes_with_what_is_recorded_of_the_slot(storage, layout) -> None:
    write_progress(storage, layout, Lsn(0x10))
    write_skip(storage, layout, skip(1, 0x10))
    assert remove_slot(storage, layout)[layout.skipped_prefix] == 1
    assert read_skips(storage, layout) == () and not holds_slot(storage, layout)


@pytest.mark.parametrize(
    "data", [b"{}", b"", seal("xidstream.skipped-transaction", 1, {"xid": 1}), seal("other", 1, {})]
)
def test_a_damaged_record_is_told_and_not_passed_over(storage, layout, data: bytes) -> None:
    key = layout.skip_key(Xid(1), Lsn(0x10))
    storage.write_bytes(key, data)
    with pytest.raises(SegmentCorrupt) as caught:
        read_skips(storage, layout)
    assert key in caught.value.message


def test_a_record_of_a_later_version_is_not_guessed_at(storage, layout) -> None:
    storage.write_bytes(layout.skip_key(Xid(1), Lsn(0x10)), seal("xidstream.skipped-transaction", 2, {}))
    with pytest.raises(Unsupported):
        read_skips(storage, layout)
