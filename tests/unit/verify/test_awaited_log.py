"""The wait for a log: it ends when the log is there, when time is up, and when nobody writes it any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
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
    ) -> None:
        self.now_s = 0.0
        self.asked: list[str] = []
        self.folder = tmp_path
        clock = SimpleNamespace(monotonic=lambda: 1000 + self.now_s, sleep=self._sleep)
        monkeypatch.setattr(comparing, "time", clock)
        monkeypatch.setattr(
            comparing, "answered_up_to", lambda log: WANTED if reached(self.now_s) else Lsn(100)
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


def test_a_run_that_does_not_come_far_enough_is_waited_for_as_long_as_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wait = Wait(monkeypatch, tmp_path, lambda s: False, lambda s: True)
    with pytest.raises(LogStandsStill, match=r"waited for 5 min 0 s; is a run of slot orders up\?"):
        wait.run()
    assert 300 <= wait.now_s < 302
