"""The loop that repeats refreshes: it ends when it is told to, whatever it is at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.waiting import wait_until
from xidstream.actors.mirror import MirrorLoop
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.mirror.vacuum import Vacuumed


def no_session() -> Any:
    raise AssertionError("nothing is large")


SESSION = LoopSession(DriverSession(no_session), "mirror")


class LongVacuum:
    """Base tables whose vacuum goes on until it is given up."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    def refresh(self, session: Any, is_cancelled: Callable[[], bool]) -> None:
        return None

    def vacuum(self, retention_s: float, is_cancelled: Callable[[], bool]) -> Vacuumed:
        self.has_begun.set()
        while not is_cancelled():
            time.sleep(0.01)
        raise ComponentLost("given up")


def test_a_loop_that_is_stopped_in_a_vacuum_gives_it_up_and_ends_without_a_failure() -> None:
    tables: Any = LongVacuum()
    told: list[str] = []
    loop = MirrorLoop(tables, SESSION, every_s=60, vacuum_s=3_600, tell=told.append)
    thread = threading.Thread(target=loop.run_quietly, daemon=True)
    thread.start()
    assert tables.has_begun.wait(60)
    loop.stop()
    thread.join(60)
    assert not thread.is_alive() and loop.failure is None
    assert told == ["base tables: nothing new"]


class Counted:
    """Base tables that always have something new."""

    def __init__(self) -> None:
        self.n_refreshes = 0
        self.n_vacuums = 0

    def refresh(self, session: Any, is_cancelled: Callable[[], bool]) -> None:
        self.n_refreshes += 1

    def vacuum(self, retention_s: float, is_cancelled: Callable[[], bool]) -> Vacuumed:
        self.n_vacuums += 1
        return Vacuumed()


@pytest.mark.parametrize(("vacuum_s", "n_vacuums"), [(86_400.0, 1), (None, 0)])
def test_vacuum_comes_with_the_first_refresh_and_not_with_each_one(
    vacuum_s: float | None, n_vacuums: int
) -> None:
    tables: Any = Counted()
    loop = MirrorLoop(tables, SESSION, every_s=0.01, vacuum_s=vacuum_s)
    thread = threading.Thread(target=loop.run_quietly, daemon=True)
    thread.start()
    wait_until(lambda: tables.n_refreshes >= 20)
    loop.stop()
    thread.join(60)
    assert loop.failure is None and tables.n_vacuums == n_vacuums
