"""The fold that a cut leaves in a log: every state from there on is as before, whatever comes in between."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.unit.delta.test_small_files import s3  # noqa: F401 - a fixture
from tests.unit.mirror.bases import table_of
from tests.unit.sinks.test_log_shortening import COMMITS, SLOT, TABLE, Root, truth
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.log_fold import LogFold, fold_lsn, fold_of
from xidstream.pipeline.changelog.log_ranges import QueryTable
from xidstream.pipeline.changelog.moment import Moment, table_at
from xidstream.pipeline.delta.erased_table import erase_rows
from xidstream.pipeline.errors import ComponentLost, PreconditionMissing
from xidstream.pipeline.log_tables.erased_keys import parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.base_table import MirrorMarks
from xidstream.pipeline.mirror.refresh import Answer, TableRefresher
from xidstream.pipeline.pg import Lsn

N = 20
"""Commits of a log here, up to 2,000: twenty hours. The retention of five hours asks for what lies after 1,599."""
AT = 1_597


def log_of_one_snapshot(root: Location) -> Root:
    made = Root(root)
    made.snapshot(1, 51, 0, truth(0))
    for lsn in COMMITS[:N:2]:
        made.commit(lsn, lsn + 100)
    made.prove(100 * N)
    return made


@pytest.fixture
def made(tmp_path: Path) -> Root:
    return log_of_one_snapshot(Location.parse(str(tmp_path)))


def fold(made: Root) -> LogFold | None:
    return fold_of(made.log.log_table(TABLE)[1].watermark, SLOT)


def check(made: Root, first: int, last: int = 100 * N) -> None:
    """States from ``first`` on are the table's, and those before are refused."""
    assert made.log.oldest_lsn(TABLE) == first
    for lsn in [first, *range(first // 100 * 100 + 100, last + 1, 100)]:
        assert made.state(lsn) == truth(lsn)
    with pytest.raises(PreconditionMissing, match="shortened up to"):
        made.state(first - 1)


def directories(made: Root) -> list[str]:
    return [name for name in os.listdir(made.table.location.uri) if name.endswith("-fold")]


class Meanwhile:
    """Acts once, when a fault point is reached."""

    def __init__(self, point: str, act: Callable[[], None]) -> None:
        self.point, self.act, self.is_done = point, act, False

    def reach(self, point: str) -> None:
        if point == self.point and not self.is_done:
            self.is_done = True
            self.act()


def test_a_fold_takes_a_place_that_no_commit_and_no_snapshot_has() -> None:
    assert [fold_lsn(upto) for upto in (12, 13, 14, 16, 20, 21)] == [5, 13, 13, 13, 13, 21]


def test_a_table_with_one_snapshot_is_cut_where_the_retention_asks_and_later_again(made: Root) -> None:
    made.shorten("5h", folds=True)
    assert made.log.cut_lsn(TABLE) == AT and fold(made) == LogFold(50, AT, 5)
    # 1,500 and 1,600 are in one file, which straddles.
    assert made.lsns() == [1_500, *[AT] * 5, *COMMITS[15:N]]
    check(made, AT)
    QueryTable(made.log, TABLE, Lsn(2_000)).files(AT, 2_000)
    with pytest.raises(PreconditionMissing, match="shortened up to"):
        made.log.changes(None, TABLE, since=AT - 1)  # type: ignore[arg-type]
    made.shorten("5h", folds=True)
    assert made.log.cut_lsn(TABLE) == AT
    for lsn in COMMITS[N : N + 10 : 2]:
        made.commit(lsn, lsn + 100)
    made.prove(3_000)
    made.shorten("5h", folds=True)
    assert fold(made) == LogFold(50, 2_597, 5) and made.lsns()[:6] == [2_500, *[2_597] * 5]
    check(made, 2_597, 3_000)


def test_a_fold_follows_deletes_inserts_and_a_truncate_on_random_logs(tmp_path: Path) -> None:
    dice = random.Random(36)
    made = Root(Location.parse(str(tmp_path)))
    held: dict[int, int] = truth(0)
    made.snapshot(1, 51, 0, held)
    history: dict[int, dict[int, int]] = {51: dict(held)}
    lsn = 0
    for turn in range(4):
        for _ in range(6):
            changes: dict[int, tuple[str, int | None, int | None]] = {}
            for _ in range(3):
                lsn += 100
                key = dice.randrange(9)
                if dice.random() < 0.03:
                    held, changes[lsn] = {}, ("truncate", None, None)
                elif key in held and dice.random() < 0.6:
                    del held[key]
                    changes[lsn] = ("delete", key, None)
                else:
                    changes[lsn] = ("update_postimage" if key in held else "insert", key, lsn)
                    held = {**held, key: lsn}
                history[lsn] = dict(held)
            made.put(changes)
        made.prove(lsn)
        made.shorten("4h", folds=True)
        found = fold(made)
        assert found is not None and found.lsn == fold_lsn(lsn - 301), turn
        for each in [n for n in history if n > found.lsn]:
            assert made.state(each) == dict(sorted(history[each].items()))
        assert made.lsns().count(found.lsn) == found.n_rows


@pytest.mark.slow
def test_a_fold_is_made_on_s3_as_in_a_folder(s3: tuple[Location, Connection]) -> None:  # noqa: F811
    table, server = s3
    server.send(0)
    server.recv()
    made = log_of_one_snapshot(Location.parse(table.uri.rpartition("/")[0], table.storage_options))
    made.shorten("5h", folds=True)
    check(made, AT)


@pytest.mark.parametrize("point", ["folding_log", "log_folded", "shortening_log", "log_shortened"])
def test_a_crash_at_any_step_of_a_fold_leaves_the_log_of_before_or_the_shorter_one(
    made: Root, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with monkeypatch.context() as armed:
        armed.setattr(faultpoints, "_plan", faultpoints.FaultPlan(f"{point}:error", None))
        with pytest.raises(ComponentLost):
            made.shorten("5h", folds=True)
    if point == "log_shortened":
        check(made, AT)
    else:
        assert made.log.oldest_lsn(TABLE) == 51
        assert all(made.state(lsn) == truth(lsn) for lsn in (51, 500, 1_700))
    again = Root(made.root, tenure=2)
    again.shorten("5h", folds=True)
    check(again, AT)


def test_a_table_that_goes_on_while_it_is_folded_is_cut_all_the_same(
    made: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile = Meanwhile("log_folded", lambda: made.commit(2_100))
    with monkeypatch.context() as armed:
        armed.setattr(faultpoints, "_plan", meanwhile)
        made.shorten("5h", folds=True)
    made.prove(2_100)
    assert meanwhile.is_done
    check(made, AT, 2_100)


def test_keys_that_are_erased_while_their_table_is_folded_do_not_come_back(
    made: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def erase() -> None:
        keys = parse_keys(["id=3"])
        erase_rows(made.table.location, TABLE, SLOT, keys, 2_000)

    with monkeypatch.context() as armed:
        armed.setattr(faultpoints, "_plan", Meanwhile("log_folded", erase))
        made.shorten("5h", folds=True)
    assert made.log.cut_lsn(TABLE) == 0 and directories(made) == []
    assert 3 not in made.state(1_700)
    made.shorten("5h", folds=True)
    assert made.log.cut_lsn(TABLE) == AT and 3 not in made.state(1_700)
    erase_rows(made.table.location, TABLE, SLOT, parse_keys(["id=2"]), 2_000)
    left = {key: value for key, value in truth(1_700).items() if key not in (2, 3)}
    assert made.state(1_700) == left, "its rows of the fold are gone, and that is told"


def test_a_session_that_does_not_see_a_transaction_before_the_fold_is_refused(made: Root) -> None:
    made.shorten("5h", folds=True)
    later = table_at(made.log, TABLE, Moment(Lsn(2_000), (Lsn(1_800),)))
    assert later.fold is not None
    before = table_at(made.log, TABLE, Moment(Lsn(2_000), (Lsn(1_400),)))
    with pytest.raises(PreconditionMissing, match="shortened up to"):
        before.snapshot_files()


def test_rows_of_a_fold_that_another_tool_took_are_missed(made: Root) -> None:
    from deltalake import DeltaTable

    made.shorten("5h", folds=True)
    DeltaTable(made.table.location.uri).delete(f"_commit_lsn = {AT} and id = 1")
    with pytest.raises(PreconditionMissing, match="another tool has changed it"):
        made.state(1_700)


def test_a_mirror_builds_its_base_table_from_a_fold_and_goes_on_from_it(made: Root) -> None:
    made.shorten("5h", folds=True)

    def refresh(lsn: int) -> Answer:
        at = made.log.table_at(TABLE, Lsn(lsn))
        done = TableRefresher(
            DeltaBases(made.root), MirrorMarks(SLOT, 1), at, None, 64 << 20, lambda: None
        ).here()
        assert done is not None
        rows = table_of(made.root).to_pyarrow_table()
        held = dict(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True))
        assert held == truth(lsn)
        return done.answer

    assert refresh(1_800) is Answer.BUILD
    assert refresh(2_000) is Answer.SWAP


def test_an_erasure_that_goes_on_with_an_lsn_ahead_of_a_fold_takes_the_rows_from_the_fold_too(
    made: Root,
) -> None:
    """It was killed, the log was folded, and it is given again: the fold has rows of before its LSN."""
    made.shorten("5h", folds=True)
    done = erase_rows(made.table.location, TABLE, SLOT, parse_keys(["id = 2"]), 1_000)
    assert done.n_rows == 1 and fold(made) == LogFold(50, AT, 5)
    assert made.state(AT) == {key: value for key, value in truth(AT).items() if key != 2}
    assert made.state(1_700) == truth(1_700), "a change behind the LSN stays"
