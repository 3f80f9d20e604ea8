"""The wait for a log: it ends when the log is there, when time is up, and when nobody writes it any more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres import verified_server
from xidstream.pipeline.postgres.admin import SlotState
from xidstream.pipeline.verify import comparing
from xidstream.pipeline.verify.comparing import Comparing, LogStandsStill
from xidstream.pipeline.verify.settings import VerifySettings

WANTED = Lsn(200)


class Wait:
    """``reached``: whether the log is there, and ``read``: whether somebody reads the slot, after so many seconds."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        reached: Callable[[float], bool],
        read: Callable[[float], bool],
        answered: Callable[[float], int] = lambda s: 100,
    ) -> None:
        self.now_s = 0.0
        self.asked: list[str] = []
        self.folder = tmp_path
        clock = SimpleNamespace(monotonic=lambda: 1000 + self.now_s, sleep=self._sleep)
        monkeypatch.setattr(comparing, "time", clock)
        monkeypatch.setattr(
            comparing,
            "answered_up_to",
            lambda log: WANTED if reached(self.now_s) else Lsn(answered(self.now_s)),
        )
        monkeypatch.setattr(comparing, "is_read", lambda dsn, slot: self._is_read(slot, read))
        monkeypatch.setattr(comparing, "mark", lambda dsn: None)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _is_read(self, slot: str, read: Callable[[float], bool]) -> bool:
        self.asked.append(slot)
        return read(self.now_s)

    def run(self) -> None:
        none = cast(Any, None)
        log = cast(Any, SimpleNamespace(application_id="7/db/orders"))
        server = cast(Any, SimpleNamespace(can_mark=True))
        folder = Location.parse(str(self.folder))
        settings = VerifySettings()
        checks = lambda: None
        Comparing(log, none, none, server, settings, none, none, folder, checks, none)._await(WANTED)


def test_a_log_that_is_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait = Wait(monkeypatch, tmp_path, lambda s: True, lambda s: False)
    wait.run()
    assert (wait.now_s, wait.asked) == (0, [])


def test_nobody_waits_for_a_log_that_no_run_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait = Wait(monkeypatch, tmp_path, lambda s: False, lambda s: False)
    with pytest.raises(LogStandsStill, match="nobody has read slot orders for 1 min 0 s"):
        wait.run()
    assert 60 <= wait.now_s < 70
    assert set(wait.asked) == {"orders"}


def test_a_run_that_comes_back_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait = Wait(monkeypatch, tmp_path, lambda s: s > 130, lambda s: s > 50 and not 70 < s < 120)
    wait.run()
    assert 130 < wait.now_s < 132


def test_a_log_that_goes_on_is_waited_for_although_nobody_reads_the_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sink writes what its run had read."""
    wait = Wait(monkeypatch, tmp_path, lambda s: s > 130, lambda s: False, lambda s: 100 + int(s / 50))
    wait.run()
    assert 130 < wait.now_s < 132


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SlotState("orders", exists=True, database="db", active=False), False),
        (SlotState("orders", exists=True, database="db", active=True), True),
        (SlotState("orders", exists=True, database="db", active=False, awaits_promotion=True), True),
        (SlotState("orders", exists=True, database="other", active=False), True),
        (SlotState("orders", exists=False), True),
    ],
    ids=["unread", "read", "a_standbys_copy", "of_another_database", "elsewhere"],
)
def test_only_a_server_that_has_the_slot_knows_that_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch, state: SlotState, expected: bool
) -> None:
    """A standby's copy of a slot that fails over is never active, however well the run at the primary is."""
    connection = SimpleNamespace(
        execute=lambda *asked: SimpleNamespace(
            fetchone=lambda: ("db",) if "current_database()" in asked[0] else None
        )
    )
    monkeypatch.setattr(verified_server, "sql_connection", lambda dsn, doing: nullcontext(connection))
    monkeypatch.setattr(verified_server, "read_slot", lambda connection, slot: state)
    assert verified_server.is_read(cast(Any, None), "orders") is expected


def test_a_run_that_does_not_come_far_enough_is_waited_for_as_long_as_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wait = Wait(monkeypatch, tmp_path, lambda s: False, lambda s: True)
    with pytest.raises(LogStandsStill, match=r"waited for 5 min 0 s; is a run of slot orders up\?"):
        wait.run()
    assert 300 <= wait.now_s < 302
