"""What SIGINT and SIGTERM mean to a run: the first asks it to end in order, the next one ends it at once.

Listened to from before the first check, so that the answer is the same at every moment of a start: what was started
is ended, and the status is 0. The handler itself does next to nothing, because it runs between any two bytecodes of the
main thread: it notes the request, says so with ``os.write`` (a second entry into a buffered writer raises), and
tells those who asked to be told.

``ray.init`` is the one step that is not to be interrupted. It puts up its own handler of SIGTERM, which raises
SystemExit wherever it is; half a Ray then leaves agents behind that nobody ends (seen for 40 s). ``held`` keeps that
handler away and puts the end off until Ray can be ended in order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_STDERR = 2
_TOLD = b"stopping: the batch in hand is finished first (once more to end at once)\n"


class StopRequest:
    """Made and used by the main thread; ``asked`` may be read by any."""

    def __init__(self) -> None:
        self.asked = False
        self._at_once = False
        self._held = False
        self._stops: list[Callable[[], None]] = []

    def listen(self) -> None:
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def deafen(self) -> None:
        """The run is over. What is left is Ray's own end, some two seconds: interrupted, it leaves agents behind."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def tell(self, stop: Callable[[], None]) -> None:
        """Call this at the request, or now if it was made already; perhaps twice."""
        self._stops.append(stop)
        if self.asked:
            stop()

    @contextmanager
    def held(self) -> Iterator[None]:
        """A step that starts Ray: it is not interrupted, and Ray does not take SIGTERM over."""
        import ray

        utils: Any = ray._private.utils
        rays_own = utils.set_sigterm_handler
        utils.set_sigterm_handler = lambda handler: None
        self._held = True
        try:
            yield
        finally:
            self._held = False
            utils.set_sigterm_handler = rays_own
            # Ray's C++ has put up a handler of its own by now: it passes a SIGTERM on, and three seconds later aborts.
            self.listen()
            signal.alarm(0)
        if self._at_once:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            self._at_once = True
            if not self._held:
                raise KeyboardInterrupt
            return
        self.asked = True
        with suppress(OSError):  # a terminal that is gone
            os.write(_STDERR, _TOLD)
        for stop in self._stops:
            stop()
