"""Which transactions of the log a session's snapshot does not see, though they committed before it was taken."""

from __future__ import annotations

from xidstream.pipeline.changelog.moment import unseen
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

EPOCH = 1 << 32


def bounds(xmin: int, xmax: int, *xip: int) -> SnapshotBounds:
    return SnapshotBounds(Lsn(1_000), Lsn(2_000), xmin, xmax, xip, 0)


def test_a_commit_that_is_not_visible_yet_is_left_out_and_those_around_it_are_not() -> None:
    taken = bounds(100, 110, 100, 105)
    commits = [(99, 1_100), (105, 1_200), (107, 1_300), (110, 1_400), (100, 2_008)]
    # 110 began after the snapshot, and committed before E was read; 100 committed after E.
    assert unseen(commits, taken) == (1_200, 1_400)


def test_an_xid_that_came_again_means_its_newest_transaction() -> None:
    taken = bounds(EPOCH + 7, EPOCH + 9, EPOCH + 7)
    assert unseen([(7, 40), (7, 1_500), (8, 1_600)], taken) == (1_500,)


def test_nothing_is_left_out_where_all_that_committed_is_visible() -> None:
    assert unseen([(99, 1_100), (100, 2_008), (101, 1_999)], bounds(100, 102, 100)) == ()
