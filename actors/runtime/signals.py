"""Handles SIGINT and SIGTERM of a run. The first signal asks the run to end in order, the next one ends it at once.

The handlers are set before the first check. So the answer is the same at every moment of a start: everything that was
started is ended, and the status is 0. The handler itself does very little, because it runs between any two bytecodes
of the main thread. It notes the request, reports it with ``os.write`` (a second entry into a buffered writer raises),
and calls the functions that were registered with ``tell``.

Only ``ray.init`` must not be interrupted. It sets its own handler of SIGTERM, which raises SystemExit wherever it is.
A half-started Ray then leaves agents behind that nobody ends (seen for 40 s). ``held`` keeps that handler away and
delays the end until Ray can be ended in order.

After a second signal the threads of the run may still ask Ray, which has ended. Ray would start another one for them,
in a process that ends: RAY_ENABLE_AUTO_CONNECT keeps it from that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_STDERR = 2
STOPPING = "stopping: the batch in hand is finished first (a second signal ends the run at once)"


class StopRequest:
    """The main thread makes and uses it. Any thread may read ``asked``."""

    def __init__(self) -> None:
        self.asked = False
        self.is_quiet = False
        """Whether somebody else tells of the request: the handler can write no more than plain text."""
        self._at_once = False
        self._held = False
        self._stops: list[Callable[[], None]] = []

    def listen(self) -> None:
        """Must be called before Ray is imported, which reads the variable then."""
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def deafen(self) -> None:
        """Ignore signals, because the run is over. Ray's own end takes some two seconds, and must not be interrupted:
        it would leave agents behind."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def tell(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` when a signal asks for the end, or now if one has come already. It may be called twice."""
        self._stops.append(stop)
        if self.asked:
            stop()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run a step that starts Ray. Signals do not interrupt it, and Ray does not take over SIGTERM."""
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
            # Ray's C++ has set a handler of its own by now. It passes a SIGTERM on, and aborts three seconds later.
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
        if not self.is_quiet:
            with suppress(OSError):  # a terminal that is gone
                # On a terminal the line has the live picture and ^C already.
                before = "\n" if os.isatty(_STDERR) else ""
                os.write(_STDERR, f"{before}{STOPPING}\n".encode())
        for stop in self._stops:
            stop()
