"""What a look at the catalog proves, by who held a lock then and now."""

from __future__ import annotations

import random

import pytest

from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.proven import COMMIT_S, Look, Proving


def look(lsn: int, *holders: int, at_s: float = 0.0, waits_for_standby: bool = True) -> Look:
    return Look(Lsn(lsn), frozenset(holders), waits_for_standby, at_s)


def test_a_look_without_holders_proves_its_own_position() -> None:
    proving = Proving()
    assert proving.proven_lsn == 0
    assert [proving.note(look(lsn)) for lsn in (100, 200)] == [100, 200]


def test_a_look_with_a_holder_is_proven_when_he_holds_nothing_any_more() -> None:
    proving = Proving()
    assert [
        proving.note(look(100)),
        proving.note(look(200, 7)),
        proving.note(look(300, 8)),
        proving.note(look(400, 8, 9)),
        proving.note(look(500)),
    ] == [100, 100, 200, 200, 500]


def test_an_alter_that_takes_long_holds_nothing_up_unless_it_may_wait_for_a_standby() -> None:
    for waits_for_standby, proven in ((False, [0, 0, 100, 200]), (True, [0, 0, 0, 0])):
        proving = Proving()
        at_s = (0.0, COMMIT_S / 2, COMMIT_S * 1.2, COMMIT_S * 2)
        found = [
            proving.note(look(100 * (i + 1), 7, at_s=s, waits_for_standby=waits_for_standby))
            for i, s in enumerate(at_s)
        ]
        assert found == proven


@pytest.mark.parametrize("seed", range(20))
def test_no_commit_below_what_is_proven_was_hidden_from_the_looks_by_then(seed: int) -> None:
    """Transactions lock, write their COMMIT, and become visible, at random moments between the steps of looks."""
    dice = random.Random(seed)
    proving, lsn, next_xid = Proving(), 100, 1
    running: dict[int, int | None] = {}
    """xid → LSN of its COMMIT, once written. Whoever is here holds his lock, and is not seen."""

    def step() -> None:
        nonlocal lsn, next_xid
        for _ in range(dice.randint(0, 3)):
            lsn += 8
            kind = dice.choice(["begin", "commit", "end"])
            if kind == "begin":
                running[next_xid] = None
                next_xid += 1
            elif kind == "commit" and (open_ := [x for x, at in running.items() if at is None]):
                running[dice.choice(open_)] = lsn
            elif kind == "end" and (written := [x for x, at in running.items() if at is not None]):
                del running[dice.choice(written)]

    unseen: dict[int, int | None] = {}
    for _ in range(400):
        step()
        position = lsn
        step()
        holders = frozenset(running)
        step()
        unseen = dict(running)
        proven = proving.note(Look(Lsn(position), holders, waits_for_standby=True, at_s=0.0))
        hidden = [at for at in unseen.values() if at is not None and at <= proven]
        assert not hidden, f"seed {seed}: {proven} is proven, and a commit at {hidden[0]} is not seen"
    assert proving.proven_lsn > 100
