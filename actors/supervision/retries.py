"""What a run does after an error: how long it waits, what its account says, and what people are told.

``pipeline.restarts`` decides. The supervisor asks after an epoch, and ``Delivery`` after a batch loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from xidstream.actors.supervision.run_accounts import RunAccounts
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.events import of_error
from xidstream.pipeline.restarts import GIVE_UP_AFTER_S, Restarts


class Retries:
    """The retries of one run. The supervisor's thread uses it."""

    def __init__(self, accounts: RunAccounts, notify: Callable[[str], None]) -> None:
        self._accounts = accounts
        self._notify = notify
        self.restarts = Restarts()
        self.delivering_since_s: float | None = None
        """Since when there is a batch loop; None while there is none. That an epoch reads is not enough: one whose
        session never starts does not work, however long it reads."""
        self._refused: str | None = None
        """How the login failed last, so that the same failure is reported once; None after a login that did not
        fail."""

    def begin(self) -> None:
        """An epoch begins, or a batch loop of one that goes on."""
        self.delivering_since_s = None
        self.restarts.begin()

    def pause_after(self, error: XidstreamError) -> float | None:
        """The seconds until the next attempt; None to give up. The account has it."""
        now_s = time.monotonic()
        since_s = self.delivering_since_s
        pause_s = self.restarts.pause_after(error, now_s, None if since_s is None else now_s - since_s)
        self._accounts.failed(error, pause_s)
        return pause_s

    def tell(self, error: XidstreamError, pause_s: float) -> None:
        text = f"{error.message}; starting again in {pause_s:.1f} s"
        refused, self._refused = self._refused, None
        if self.restarts.is_rotation(error):
            self._refused = error.message
            if refused == error.message:
                return
            text = (
                f"{error.message}; this login has worked before, so the run tries it again for up to "
                f"{GIVE_UP_AFTER_S:.0f} s: somebody may be changing a password, a certificate or pg_hba.conf"
            )
        self._notify(of_error("restarting", text, error, pause_s=round(pause_s, 3)))
