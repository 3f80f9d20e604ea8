"""When a server can go on from the storage's record, and what is lost where it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from xidstream.pipeline.errors import ConnectionLost, ExitStatus, SlotLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.connection import SystemIdentity
from xidstream.pipeline.postgres.continuity import Recorded, check_continuity


def check(
    *,
    confirmed: int | None = 0x200,
    recorded: int | None = 2,
    timeline: int = 2,
    slot_exists: bool = True,
    is_standby: bool = False,
    awaits_promotion: bool = False,
    switch_points: Mapping[int, Lsn] | None = None,
) -> None:
    system = SystemIdentity("7001", timeline, Lsn(0x1000), "db", 5)
    known = Recorded(None if confirmed is None else Lsn(confirmed), recorded)
    check_continuity(
        "s",
        system,
        known,
        slot_exists=slot_exists,
        is_standby=is_standby,
        switch_points=switch_points or {},
        awaits_promotion=awaits_promotion,
    )


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"confirmed": None, "recorded": None, "slot_exists": False},  # the first run
        {"confirmed": None, "recorded": None},
        {"recorded": None},  # the record of a version that kept no timeline
        {"timeline": 3, "switch_points": {2: Lsn(0x200)}},  # a failover exactly at what was confirmed
        {"timeline": 5, "switch_points": {1: Lsn(0x10), 2: Lsn(0x300), 4: Lsn(0x400)}},
        {"is_standby": True},  # which decodes
    ],
)
def test_a_server_that_has_all_that_was_delivered_may_go_on(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ({"slot_exists": False}, "does not exist any more"),
        (
            {"timeline": 3, "switch_points": {2: Lsn(0x1FF)}},
            "left timeline 2 at 0/1FF, but 0/200 was confirmed",
        ),
        ({"timeline": 1}, "does not come after timeline 2"),
        ({"timeline": 3, "switch_points": {1: Lsn(0x300)}}, "does not come after timeline 2"),
    ],
)
def test_what_is_lost_is_said_and_ends_with_status_4(case: dict[str, Any], says: str) -> None:
    with pytest.raises(SlotLost, match=says) as caught:
        check(**case)
    assert caught.value.policy.exit_status is ExitStatus.TERMINAL
    assert "snapshot" in caught.value.remedy


def test_a_standby_without_the_slot_is_no_loss_while_the_primary_may_have_it() -> None:
    with pytest.raises(ConnectionLost, match="the primary may have it"):
        check(slot_exists=False, is_standby=True)
    check(confirmed=None, recorded=None, slot_exists=False, is_standby=True)


@pytest.mark.parametrize("record", [{}, {"timeline": 1}, {"confirmed": None, "recorded": None}])
def test_a_standbys_copy_is_waited_for_whatever_its_server_is_like(record: dict[str, Any]) -> None:
    """It was lost (status 4) where the standby had not followed a failover yet."""
    with pytest.raises(ConnectionLost, match="a standby's copy of the primary's"):
        check(is_standby=True, awaits_promotion=True, **record)
