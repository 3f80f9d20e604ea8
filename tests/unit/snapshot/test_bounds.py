"""Which transactions a snapshot contains: by xid and commit LSN, over the wrap-around of the wire's xid."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.snapshot.bounds import Checkpoint, SnapshotBounds

EPOCH = 1 << 32


def bounds(
    xmin: int, xmax: int, *xip: int, snapshot_lsn: int = 999, valid_from: int = 2000
) -> SnapshotBounds:
    return SnapshotBounds(Lsn(snapshot_lsn), Lsn(valid_from), xmin, xmax, xip, taken_at_us=0)


@pytest.mark.parametrize(
    ("xid", "commit_lsn", "contained"),
    [
        (90, 500, True),
        (100, 500, False),  # in the WAL, and not yet visible: synchronous replication
        (101, 500, True),
        (101, 1500, True),  # between B and E, and already seen
        (104, 1500, False),  # open when the snapshot was taken, committed before E was read
        (110, 1500, False),  # begun after it
        (101, 2000, True),
        (101, 2001, False),  # after E, whatever its xid
        (90, 2001, False),
    ],
)
def test_a_transaction_is_contained_if_it_had_ended_and_was_seen(
    xid: int, commit_lsn: int, contained: bool
) -> None:
    assert bounds(100, 110, 100, 104).contains(Xid(xid), Lsn(commit_lsn)) is contained


def test_xids_of_the_former_epoch_are_older_than_an_xmax_of_the_next() -> None:
    around = bounds(EPOCH - 10, EPOCH + 5, EPOCH - 3, EPOCH + 2)
    assert around.contains(Xid(EPOCH - 4), Lsn(1))
    assert not around.contains(Xid(EPOCH - 3), Lsn(1))
    assert around.contains(Xid(3), Lsn(1))
    assert not around.contains(Xid(2), Lsn(1))
    assert not around.contains(Xid(5), Lsn(1))


def test_xids_of_the_next_epoch_are_newer_than_an_xmax_of_this_one() -> None:
    before = bounds(EPOCH - 10, EPOCH - 3)
    assert before.contains(Xid(EPOCH - 4), Lsn(1))
    assert not before.contains(Xid(EPOCH - 3), Lsn(1))
    assert not before.contains(Xid(3), Lsn(1))


@given(
    xmax=st.integers(min_value=1 << 31, max_value=5 * EPOCH),
    distance=st.integers(min_value=-(1 << 31) + 1, max_value=(1 << 31) - 1),
)
def test_every_xid_that_can_be_in_use_gets_its_64_bits_back(xmax: int, distance: int) -> None:
    wide = xmax + distance
    assert bounds(xmax, xmax).widened(Xid(wide % EPOCH)) == wide


def test_what_committed_up_to_a_known_lsn_is_contained_however_many_xids_ago() -> None:
    newest = 3 * EPOCH + 17
    of_old = Xid((newest - (1 << 31) - 5) % EPOCH)
    unknown = bounds(newest, newest)
    assert not unknown.contains(of_old, Lsn(500)), "its xid is taken for one that is to come"
    known = unknown.knowing(None, Lsn(500))
    assert known.contains(of_old, Lsn(500)) and not known.contains(of_old, Lsn(501))
    assert known.contains(Xid(16), Lsn(501)) and not known.contains(Xid(18), Lsn(501))


def test_what_the_writers_of_a_table_tell_counts_for_its_changes_and_no_later_snapshot_takes_it_over() -> (
    None
):
    waited = dataclasses.replace(bounds(100, 110, 104), writers_upto=Lsn(900))
    assert waited.contains(Xid(104), Lsn(900)) and not waited.contains(Xid(104), Lsn(901))
    assert (waited.whole_upto, waited.contained_upto) == (900, 0)
    assert bounds(100, 110).knowing(None, waited.contained_upto).whole_upto == 0


@pytest.mark.parametrize(
    ("next_xid", "earlier", "upto"),
    [(100, 0, 799), (101, 0, 0), (101, 300, 300), (100, 300, 799), (90, 900, 900)],
)
def test_a_checkpoint_counts_behind_which_every_open_transaction_began(
    next_xid: int, earlier: int, upto: int
) -> None:
    known = bounds(100, 110, 104).knowing(Checkpoint(Lsn(800), next_xid), Lsn(earlier))
    assert known == dataclasses.replace(bounds(100, 110, 104), contained_upto=Lsn(upto))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: dataclasses.replace(bounds(100, 110), contained_upto=Lsn(2001)),
        lambda: bounds(100, 99),
        lambda: bounds(100, 110, 99),
        lambda: bounds(100, 110, 110),
        lambda: bounds(100, 110, snapshot_lsn=2000, valid_from=2000),
    ],
)
def test_what_is_no_snapshot_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        wrong()


def _snapshot(xmax: int, xids: set[int]) -> SnapshotBounds:
    """``xmax`` is one above the last id that had ended."""
    xip = sorted(xid for xid in xids if xid < xmax - 1)
    return bounds(min([*xip, xmax]), xmax, *xip)


SNAPSHOTS = st.builds(_snapshot, st.integers(101, 108), st.sets(st.integers(100, 107)))


@given(SNAPSHOTS, SNAPSHOTS)
def test_a_snapshot_sees_all_of_another_if_no_transaction_is_in_the_other_alone(
    one: SnapshotBounds, other: SnapshotBounds
) -> None:
    alone = [x for x in range(95, 112) if other.contains(Xid(x), Lsn(1)) and not one.contains(Xid(x), Lsn(1))]
    assert one.sees_all_of(other) == (not alone)
