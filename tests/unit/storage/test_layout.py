"""Keys: what they are made of, and that they are read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.keys import Layout, SegmentName, is_transaction_folder

LAYOUT = Layout(7423, "orders", "e-1")


def test_keys_are_those_of_the_contract() -> None:
    assert (
        LAYOUT.segment_key(Xid(700), Lsn(0x16B3748), 12)
        == "7423/orders/epochs/e-1/700-00000000016B3748/12.parquet"
    )
    assert LAYOUT.prepared_key(Xid(700), Lsn(1)) == "7423/orders/prepared/700-0000000000000001.e-1.json"
    assert LAYOUT.journal_key(12) == "7423/orders/journal/0000000000000012.e-1.journal"
    assert LAYOUT.record_key(12) == "7423/orders/progress/0000000000000012.e-1.json"
    assert LAYOUT.claim_key(12) == "7423/orders/progress/0000000000000012.e-1.claim"


@given(
    st.integers(0, 2**32 - 1).map(Xid),
    st.integers(0, 2**64 - 1).map(Lsn),
    st.integers(0, 10**6),
    st.from_regex(r"[A-Za-z0-9-]{1,64}", fullmatch=True),
)
def test_every_key_is_read_back(xid: Xid, lsn: Lsn, number: int, epoch: str) -> None:
    layout = Layout(2**64 - 1, "a_0", epoch)
    key = layout.segment_key(xid, lsn, number)
    assert layout.parse_segment_key(key) == SegmentName(epoch, xid, lsn, number)
    assert is_transaction_folder(key.rpartition("/")[0])
    assert layout.parse_prepared_key(layout.prepared_key(xid, lsn)) == (xid, lsn, epoch)
    assert layout.parse_journal_key(layout.journal_key(number)) == (epoch, number)
    assert layout.parse_record_key(layout.record_key(number)) == (number, epoch, False)
    assert layout.parse_record_key(layout.claim_key(number)) == (number, epoch, True)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "7423/orders/progress.json",
        "7423/other/epochs/e-1/700-00000000016B3748/0.arrow",
        "74230/orders/epochs/e-1/700-00000000016B3748/0.arrow",
        "7423/orders/epochs/../700-00000000016B3748/0.arrow",
        "7423/orders/epochs/e-1/700-00000000016B3748/../0.arrow",
        "7423/orders/epochs/e-1/700-16B3748/0.arrow",
        "7423/orders/epochs/e-1/700-00000000016B3748/0.arrow\n",
        "7423/orders/prepared/700-0000000000000001.e-1.json",
        "/etc/passwd",
    ],
)
def test_a_foreign_key_is_no_segment_of_this_slot(key: str) -> None:
    with pytest.raises(UsageError):
        LAYOUT.parse_segment_key(key)


@pytest.mark.parametrize(
    "key",
    [
        "7423/orders/progress.json",
        "7423/other/prepared/700-0000000000000001.e-1.json",
        "7423/orders/prepared/700-0000000000000001.json",
        "7423/orders/prepared/700-0000000000000001...json",
        "7423/orders/prepared/700-0000000000000001.e-1.json\n",
        "7423/orders/prepared/../700-0000000000000001.e-1.json",
    ],
)
def test_a_foreign_key_is_no_prepared_transaction_of_this_slot(key: str) -> None:
    with pytest.raises(UsageError):
        LAYOUT.parse_prepared_key(key)


@pytest.mark.parametrize("number", [-1, 10**16])
def test_a_journal_file_whose_number_does_not_sort_is_refused(number: int) -> None:
    with pytest.raises(UsageError):
        LAYOUT.journal_key(number)


@pytest.mark.parametrize("slot", ["", "..", "a/b", "Orders", "a.b", "a" * 64, "a\n"])
def test_a_name_that_no_slot_can_have_is_refused(slot: str) -> None:
    with pytest.raises(UsageError):
        Layout(1, slot, "e")


@pytest.mark.parametrize("epoch", ["", "..", "a/b", "a.b", "a b", "a\n"])
def test_an_epoch_that_could_leave_its_folder_is_refused(epoch: str) -> None:
    with pytest.raises(UsageError):
        Layout(1, "s", epoch)


@pytest.mark.parametrize("folder", ["7423/orders/prepared", "7423/orders/epochs/e-1", "7423/orders", "x"])
def test_a_folder_of_many_writers_is_not_taken_for_a_transactions(folder: str) -> None:
    assert not is_transaction_folder(folder)
