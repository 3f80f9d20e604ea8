"""Waiting for what happens in other processes: a condition that is asked again, and a limit that fails the test.

And what goes on meanwhile: an action that another thread repeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def wait_until(condition: Callable[[], Any], timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.1)


@contextmanager
def meanwhile(action: Callable[[], object], every_s: float) -> Iterator[None]:
    """Repeat ``action`` on another thread, with pauses of ``every_s``, until the block ends."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
