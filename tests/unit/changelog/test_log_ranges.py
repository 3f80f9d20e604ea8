"""Which files have the changes between two commits, how far a batch goes, what is missing, and how values are read."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.unit.changelog.made_log import Log
from xidstream.pipeline.changelog import log_ranges
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.log_ranges import (
    Commits,
    FileRange,
    QueryTable,
    admitted,
    missing_commit,
)
from xidstream.pipeline.changelog.log_table import LogFile
from xidstream.pipeline.errors import Unsupported, UsageError
from xidstream.pipeline.pg import Lsn


def file(min_lsn: int, max_lsn: int, n_bytes: int = 100) -> LogFile:
    return LogFile(f"{min_lsn}-{max_lsn}", n_bytes, min_lsn, max_lsn)


def test_a_commit_that_lies_in_no_file_is_missing() -> None:
    files = [file(10, 20), file(30, 30), file(12, 14)]
    assert missing_commit([], files) is None
    assert missing_commit([10, 13, 20, 30], files) is None
    assert missing_commit([5, 10], files) == 5
    assert missing_commit([10, 21, 30], files) == 21
    assert missing_commit([10, 31], files) == 31
    # Up to where keys were erased it may be that a commit had rows of them alone.
    assert missing_commit([5, 10], files, 5) is None
    assert missing_commit([5, 10, 21, 30], files, 5) == 21
    assert missing_commit([10], []) == 10


def behind(*commits: int) -> Callable[[int, int | None], list[int]]:
    """The commits after the beginning of a batch, as ``admitted`` asks for them."""
    return lambda until, at_most: [lsn for lsn in commits if lsn <= until][:at_most]


@pytest.mark.parametrize(
    ("max_transactions", "max_bytes", "expected"),
    [
        (None, None, 50),
        (2, None, 20),
        (5, None, 50),
        (None, 100, 20),
        (None, 1, 20),
        (None, 299, 30),
        (None, 300, 50),
        (1, 299, 10),
        (4, 299, 30),
    ],
)
def test_a_batch_goes_as_far_as_transactions_and_bytes_allow_and_never_cuts_one(
    max_transactions: int | None, max_bytes: int | None, expected: int
) -> None:
    commits = behind(10, 20, 30, 40, 50)
    files = [file(10, 20), file(30, 30), file(40, 50)]
    assert admitted(50, commits, files, max_transactions, max_bytes) == expected


def test_files_that_overlap_still_let_a_batch_go_on() -> None:
    assert admitted(50, behind(10, 50), [file(10, 40), file(10, 50)], None, 1) == 10
    assert admitted(50, behind(), [file(10, 40), file(10, 50)], None, 1) == 50


def test_files_that_overlap_are_not_read_again_for_each_transaction() -> None:
    """As those do that a merge has ordered by a column, and those of several tables."""
    files = [file(10 + i, 90 + i) for i in range(8)]
    begun, n_batches = 9, 0
    while begun < 97:
        left = [each for each in files if each.max_lsn > begun]
        begun = admitted(97, behind(*range(begun + 1, 98)), left, None, 100)
        n_batches += 1
    assert n_batches <= len(files)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(str(tmp_path))


def test_rows_are_read_in_the_newest_layout_that_has_the_querys_columns(log: Log) -> None:
    log.commit(10, ["id", "price"], id=[1], price=pa.array([Decimal("1.50")], pa.decimal128(10, 2)))
    log.commit(
        20,
        ["id", "price=price__decimal_20_4"],
        id=[2],
        price__decimal_20_4=pa.array([Decimal("2.1234")], pa.decimal128(20, 4)),
    )
    log.commit(30, ["id", "price=price__decimal_20_4", "note"], id=[3], note=["n"])
    change_log = LogFrames(log.uri)
    first, second, third = (QueryTable(change_log, "public.t", Lsn(lsn)).schema for lsn in (10, 20, 30))
    assert log.read(0, 10) == [{"id": 1, "price": Decimal("1.50")}]
    widened = [{"id": 1, "price": Decimal("1.5000")}, {"id": 2, "price": Decimal("2.1234")}]
    assert log.read(0, 20) == widened
    assert log.read(0, 30) == [
        *({**row, "note": None} for row in widened),
        {"id": 3, "price": None, "note": "n"},
    ]
    assert log.read(10, 20, third) == [{"id": 2, "price": Decimal("2.1234"), "note": None}]

    def last_lsn(wanted: Any) -> int:
        return QueryTable(change_log, "public.t", Lsn(30), wanted).last_lsn

    assert [last_lsn(each) for each in (first, second, third)] == [19, 29, log_ranges.MAX_LSN]
    # Who chose columns is not told of those that others get.
    chosen = type(first)([field for field in second.fields if field.name in ("id", "price")])
    assert last_lsn(chosen) == log_ranges.MAX_LSN
    assert last_lsn(type(first)(first.fields[:2])) == 19
    with pytest.raises(UsageError, match="has had no layout with the columns of this query"):
        QueryTable(change_log, "public.t", Lsn(30), type(first)().add("nope", "string"))


def test_values_that_only_spark_can_cast_are_refused_and_digits_are_all_kept(log: Log) -> None:
    moments = pa.array([datetime.datetime(2026, 5, 4)], pa.timestamp("us"))
    log.commit(10, ["n", "t"], n=pa.array([Decimal("0.00000001")], pa.decimal128(12, 8)), t=moments)
    log.commit(20, ["n=n__string", "t"], n__string=["NaN"], t=moments)
    assert [row["n"] for row in log.read(0, 20)] == ["0.00000001", "NaN"]
    log.commit(30, ["n=n__string", "t=t__string"], n__string=["3"], t__string=["then"])
    with pytest.raises(
        Unsupported, match=r"column t of table public\.t has older values of type timestamp\[us\]"
    ) as e:
        log.read(0, 30)
    assert "ChangeLog.changes" in e.value.remedy
    assert log.read(20, 30) == [{"n": "3", "t": "then"}]


def test_small_files_share_a_range_and_a_large_one_is_cut(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.commit(10, ["id"], id=[1])
    table = QueryTable(LogFrames(log.uri), "public.t", Lsn(10))
    monkeypatch.setattr(log_ranges, "RANGE_BYTES", 3 << 20)
    ranges = table.ranges([file(i, i) for i in range(7)], 0, 10)
    assert [len(each.paths) for each in ranges] == [3, 3, 1]
    large: list[FileRange] = table.ranges([file(1, 1), file(2, 2, 7 << 20), file(3, 3)], 0, 10)
    assert sorted((len(each.paths), each.slice, each.n_slices) for each in large) == [
        (1, 0, 3),
        (1, 1, 3),
        (1, 2, 3),
        (2, 0, 1),
    ]


def test_commits_of_a_range_are_told_with_the_oldest_of_all(log: Log) -> None:
    for lsn in (10, 20, 30):
        log.commit(lsn, ["id"] if lsn == 10 else None, id=[lsn])
    commits = Commits(LogFrames(log.uri), 10, 30)
    assert (commits.lsns, commits.of("public.t"), commits.of("public.u"), commits.oldest) == (
        [20, 30],
        [20, 30],
        [],
        10,
    )
