"""The loop that repeats refreshes: it ends when it is told to, whatever it is at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.waiting import wait_until
from xidstream.actors.mirror import MirrorLoop, versions_note
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.mirror.vacuum import Vacuumed
from xidstream.pipeline.settings.config import Config


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


@pytest.mark.parametrize(
    ("settings", "every_s", "says"),
    [
        ({}, 5.0, "up to 17,280 snapshots"),
        ({"mirror_retention": "1h"}, 5.0, None),
        ({}, 60.0, None),
        ({}, None, None),
        ({"mirror_vacuum": False}, 60.0, "all its snapshots"),
        ({"sink": "delta:/data/lake"}, 5.0, None),
    ],
)
def test_a_mirror_says_where_each_commit_would_write_thousands_of_snapshots_anew(
    settings: dict[str, Any], every_s: float | None, says: str | None
) -> None:
    note = versions_note(Config.of({"sink": "iceberg:/data/lake/shop", **settings}), every_s)
    assert (note is None) if says is None else (note is not None and says in note)
