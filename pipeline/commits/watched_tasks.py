"""Tasks side by side on one event loop, of which the first error is kept.

``commits.commit_sequence`` starts one for each thing that it waits for, and some that run as long as it does. None of
them ends unseen: an error wakes everyone who waits, and everyone raises it. The event loop's thread alone uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from xidstream.pipeline.commits.changes import Changes


class WatchedTasks:
    """``translate`` gives the error to raise in place of what a task raised. ``changed`` is notified whenever a task
    has ended."""

    def __init__(self, translate: Callable[[BaseException], BaseException]) -> None:
        self.changed = Changes()
        self._translate = translate
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Awaitable[None]) -> None:
        async def watched() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                self.fail(self._translate(error))
            else:
                self.changed.notify()

        task = asyncio.ensure_future(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail(self, error: BaseException) -> None:
        """Keep the error, if it is the first one."""
        if self._failure is None:
            self._failure = error
        self.changed.notify()

    async def failed(self) -> None:
        """Waits for the first error, and raises it."""
        await self.changed.when(lambda: self._failure is not None)
        self.raise_failure()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
