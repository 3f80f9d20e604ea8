"""Who speaks against a first run, and what a person can do about it: the whole table of witnesses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from xidstream.pipeline.errors import ExitStatus, SlotLost
from xidstream.pipeline.exchange import Beginning
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.beginning import (
    BeginningVerdict,
    SinkHolds,
    Witnesses,
    check_sink,
    gap,
    gap_text,
    unseen,
    unseen_text,
    verdict,
)

SLOT_LSN = Lsn(0x500)
NOBODY = Witnesses(SLOT_LSN)


def judged(witnesses: Witnesses, begin_anew: int | None = None) -> BeginningVerdict:
    return verdict("s", "/mnt/xs", witnesses, None if begin_anew is None else Lsn(begin_anew))


@pytest.mark.parametrize(
    "knows",
    [
        {},  # a slot that was made by hand and never read
        {"slot_lsn": None},  # one that the run makes
        {"sink": SinkHolds(0, INVALID_LSN)},  # an empty root
        {"sink": SinkHolds(0, Lsn(0x500))},  # an older xidstream's tables, and nothing is missing
        {"two_phase_at": Lsn(0x500)},
        {"begun": Beginning(Lsn(0x500))},  # a first run that died before its record
        {"begun": Beginning(Lsn(0x500)), "n_decoded": 7, "two_phase_at": Lsn(0x400)},  # which has read
        {"begun": Beginning(Lsn(0x500)), "slot_lsn": None},  # … and its slot was dropped
    ],
)
def test_a_storage_without_a_record_is_a_beginning_where_nobody_knows_of_an_earlier_run(
    knows: dict[str, Any],
) -> None:
    assert judged(dataclasses.replace(NOBODY, **knows)) is BeginningVerdict.FIRST


@pytest.mark.parametrize(
    ("knows", "says", "anew_lsn"),
    [
        ({"n_decoded": 7}, "has decoded 7 transactions of the slot for a reader", 0x500),
        (
            {"two_phase_at": Lsn(0x4FF)},
            "decodes two-phase from 0/4FF on, and is confirmed up to 0/500",
            0x500,
        ),
        ({"begun": Beginning(Lsn(0x4FF))}, "began at 0/4FF, and the slot is confirmed up to 0/500", 0x500),
        ({"begun": Beginning(Lsn(0x4FF), is_anew=True)}, "began at 0/4FF, and the slot", 0x500),
        ({"sink": SinkHolds(3, Lsn(0x400))}, r"run 3 of the slot \(its transactions: up to 0/400\)", 0x500),
        ({"sink": SinkHolds(3, Lsn(0x600))}, "run 3 of the slot", 0x500),
        ({"sink": SinkHolds(1, INVALID_LSN)}, "none yet", 0x500),
        ({"sink": SinkHolds(0, Lsn(0x4FF))}, "up to 0/4FF", 0x500),
        ({"sink": SinkHolds(3, Lsn(0x400)), "slot_lsn": None}, "run 3 of the slot", 0x400),
        ({"sink": SinkHolds(0, Lsn(0x400)), "slot_lsn": None}, "up to 0/400", 0x400),
        ({"sink": SinkHolds(3, Lsn(0x400)), "begun": Beginning(SLOT_LSN)}, "run 3 of the slot", 0x500),
        ({"other_servers": (6001, 6002)}, r"another server \(system identifier 6001\)", 0x500),
    ],
)
def test_one_witness_of_an_earlier_run_is_enough_and_only_the_lsn_that_is_named_begins_anew(
    knows: dict[str, Any], says: str, anew_lsn: int
) -> None:
    witnesses = dataclasses.replace(NOBODY, **knows)
    for other in (None, anew_lsn - 1, anew_lsn + 1):
        with pytest.raises(SlotLost, match=f"/mnt/xs has no record of slot s, but .*{says}") as refused:
            judged(witnesses, other)
        assert refused.value.policy.exit_status is ExitStatus.TERMINAL
        assert f"`--begin-anew {Lsn(anew_lsn)}`" in refused.value.remedy
        assert "drop" not in refused.value.remedy and "remove" not in refused.value.remedy
    assert judged(witnesses, anew_lsn) is BeginningVerdict.ANEW


def test_behind_pg_upgrade_the_remedy_is_a_new_log_and_says_what_no_log_has() -> None:
    for slot_lsn, asks_for_a_slot in ((None, True), (SLOT_LSN, False)):
        with pytest.raises(SlotLost) as refused:
            judged(Witnesses(slot_lsn, other_servers=(6001,)))
        remedy = refused.value.remedy
        assert "pg_upgrade" in remedy and "another --storage and another --sink" in remedy
        assert "`--snapshot initial`" in remedy and "are in no log" in remedy
        assert ("--create-slot" in remedy) == asks_for_a_slot
    with pytest.raises(SlotLost) as refused:
        judged(dataclasses.replace(NOBODY, n_decoded=7))
    assert "pg_upgrade" not in refused.value.remedy


def test_nobody_begins_over_the_only_copy_of_something_whatever_a_person_says() -> None:
    witnesses = dataclasses.replace(
        NOBODY, n_left_behind=2, begun=Beginning(SLOT_LSN, is_anew=True), sink=SinkHolds(3, Lsn(0x400))
    )
    for begin_anew in (None, 0x500):
        with pytest.raises(SlotLost, match="2 objects of its journal and of prepared") as refused:
            judged(witnesses, begin_anew)
        assert "another --storage" in refused.value.remedy and "Nothing was deleted" in refused.value.remedy


def test_a_run_that_began_anew_and_died_before_its_record_need_not_be_told_again() -> None:
    begun = Beginning(SLOT_LSN, is_anew=True)
    everybody = Witnesses(SLOT_LSN, 7, Lsn(1), begun, 0, (6001,), SinkHolds(3, Lsn(0x400)))
    assert judged(everybody) is BeginningVerdict.ANEW


@pytest.mark.parametrize(
    ("begun", "holds", "expected"),
    [
        (None, 0x400, None),  # the record of an older xidstream
        (0x500, 0, None),  # the sink had nothing to lose
        (0x500, 0x400, (0x400, 0x500)),
        (0x500, 0x500, None),
        (0x500, 0x600, None),
    ],
)
def test_what_lies_between_the_tables_end_and_the_slots_beginning_is_a_gap(
    begun: int | None, holds: int, expected: tuple[int, int] | None
) -> None:
    lsns = gap(None if begun is None else Beginning(Lsn(begun)), SinkHolds(2, Lsn(holds)))
    assert lsns == expected
    if lsns is not None:
        assert gap_text("s", lsns).startswith("the sink's tables end at 0/400, and slot s begins at 0/500")


@pytest.mark.parametrize(
    ("begun", "owner", "delivered", "is_told"),
    [(0x100, 0, 0x200, True), (0x100, 0, 0x100, False), (0x100, 1, 0x200, False), (None, 0, 0x200, False)],
)
def test_a_sink_that_comes_later_lacks_what_another_one_was_given(
    begun: int | None, owner: int, delivered: int, is_told: bool
) -> None:
    """A function had the slot first, and then Delta tables."""
    beginning = None if begun is None else Beginning(Lsn(begun))
    lsns = unseen(beginning, SinkHolds(owner, INVALID_LSN), Lsn(delivered))
    assert lsns == ((begun, delivered) if is_told else None)
    if lsns is not None:
        assert "from 0/100 up to 0/200" in unseen_text("s", lsns)


@pytest.mark.parametrize(("holds", "says"), [(0, "holds nothing of it"), (0x3FF, "ends at 0/3FF")])
def test_a_sink_that_has_less_than_one_had_is_not_written_to_unless_a_person_says_so(
    holds: int, says: str
) -> None:
    sink = SinkHolds(2, Lsn(holds))
    with pytest.raises(SlotLost, match=f"up to the commit at 0/400 .*{says}") as refused:
        check_sink("s", Lsn(0x400), sink, Beginning(Lsn(0x100)), Lsn(0x3FF))
    assert "`--begin-anew 0/400`" in refused.value.remedy
    assert check_sink("s", Lsn(0x400), sink, None, Lsn(0x400)) is BeginningVerdict.ANEW
    assert check_sink("s", Lsn(0x400), sink, Beginning(Lsn(0x400), is_anew=True), None) is None, "it is noted"
    with pytest.raises(SlotLost):
        check_sink("s", Lsn(0x401), sink, Beginning(Lsn(0x400), is_anew=True), None)


@pytest.mark.parametrize("held", [0, 0x3FF, 0x400])
def test_a_sink_that_has_all_that_one_had_or_more_is_written_to(held: int) -> None:
    assert check_sink("s", Lsn(held), SinkHolds(2, Lsn(0x400)), None, None) is None
