"""The signal that the sequencer's loops wait for: something of the order has changed.

Many wait at a time, and most of what changes concerns one of them. A transaction changes the order some six times. So
a change wakes nobody by itself: all that is changed in one turn of the event loop is looked at once after it, and each
wait says whether it is over (``until``). Only then its task runs on, which looks again, because another one may have
been first.

Rejected: ``asyncio.Condition``. Each change woke each task, one after the other, for its lock: a tenth of what the
sequencer did at ten transactions a second.

Called by all of ``commits`` that runs on the event loop, whose thread alone uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SAME_S = 0.001


class Changes:
    def __init__(self) -> None:
        self._waits: dict[_Wait, None] = {}
        self._is_looking = False
        self._n_changes = 0

    def notify(self) -> None:
        """Something has changed. The waits are looked at when what runs now has come to its next wait."""
        self._n_changes += 1
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_looking = False
        for wait in list(self._waits):
            wait.look()

    async def until(self, due_in_s: Callable[[], float | None]) -> None:
        """Return when ``due_in_s`` says 0. It is asked at once, after each change, and after as many seconds as it
        says; None: after a change alone. Raises what it raises."""
        while due_in_s() != 0:
            wait = _Wait(asyncio.get_running_loop(), due_in_s)
            self._waits[wait] = None
            try:
                wait.look()
                await wait.over
            finally:
                del self._waits[wait]
                wait.stop_clock()

    async def when(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition`` holds. Raises what it raises."""
        await self.until(lambda: 0 if condition() else None)

    async def next(self, timeout_s: float) -> None:
        """Return after the next change, or after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline_s, before = loop.time() + timeout_s, self._n_changes

        def due_in_s() -> float:
            return max(0.0, deadline_s - loop.time()) if self._n_changes == before else 0.0

        await self.until(due_in_s)


class _Wait:
    def __init__(self, loop: asyncio.AbstractEventLoop, due_in_s: Callable[[], float | None]) -> None:
        self.over: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._due_in_s = due_in_s
        self._clock: asyncio.TimerHandle | None = None

    def look(self) -> None:
        if self.over.done():
            return
        try:
            due_in_s = self._due_in_s()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            self.over.set_exception(error)
            return
        if due_in_s == 0:
            self.over.set_result(None)
            return
        at_s = None if due_in_s is None else self._loop.time() + due_in_s
        if self._clock is not None and at_s is not None and abs(self._clock.when() - at_s) < _SAME_S:
            return  # it rings then anyway
        self.stop_clock()
        if at_s is not None:
            self._clock = self._loop.call_at(at_s, self._ring)

    def stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _ring(self) -> None:
        self._clock = None
        self.look()
