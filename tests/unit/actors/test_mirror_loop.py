"""The loop that repeats refreshes: it ends when it is told to, whatever it is at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from xidstream.actors.mirror import MirrorLoop
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.mirror.vacuum import Vacuumed

SPARK: Any = SimpleNamespace(
    sparkContext=SimpleNamespace(setJobGroup=lambda *args, **more: None, cancelJobGroup=lambda group: None)
)


class LongVacuum:
    """Base tables whose vacuum goes on until it is given up."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    def refresh(self, spark: Any, is_given_up: Callable[[], bool]) -> None:
        return None

    def vacuum(self, retention_s: float, is_given_up: Callable[[], bool]) -> Vacuumed:
        self.has_begun.set()
        while not is_given_up():
            time.sleep(0.01)
        raise ComponentLost("given up")


def test_a_loop_that_is_stopped_in_a_vacuum_gives_it_up_and_ends_without_a_failure() -> None:
    tables: Any = LongVacuum()
    told: list[str] = []
    loop = MirrorLoop(tables, SPARK, every_s=60, vacuum_s=3_600, tell=told.append)
    thread = threading.Thread(target=loop.run_quietly, daemon=True)
    thread.start()
    assert tables.has_begun.wait(60)
    loop.stop()
    thread.join(60)
    assert not thread.is_alive() and loop.failure is None
    assert told == ["base tables: nothing new"]
