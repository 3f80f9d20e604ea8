"""Looks at one slot's run as long as it lasts: tells people of stalls, and sets the metrics.

A thread gathers the account every ``LOOK_INTERVAL_S``: three calls to actors, for what they know already. The server is
asked for the slot every ``_SLOT_INTERVAL_S``, on a connection that lasts some milliseconds, and on a thread of its own:
a link that is dead may keep it for a minute, which is when people must be told. That is all that a run does when nobody
looks. It goes on while the run starts again, because a monitor must see that, too.

Stalls are told while the run reads. That it starts again, and why, is told by the supervisor.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from xidstream.actors.supervision.ray_metrics import RayMetrics, metrics_url
from xidstream.actors.supervision.run_accounts import RunAccounts
from xidstream.pipeline.account import Account, SequencerPart, SlotPart, Stall
from xidstream.pipeline.account.model import with_undelivered
from xidstream.pipeline.account.stalls import LOOK_INTERVAL_S
from xidstream.pipeline.events import Event

log = logging.getLogger(__name__)

_SLOT_INTERVAL_S: Final = 30.0
_SLOT_OLD_S: Final = 75.0
"""The server counts as one that does not answer after so long."""
_END_S: Final = 2.0
"""How long the last look may take at the end of the run."""


class RunWatch:
    """``notify`` tells people, on the watch's thread."""

    def __init__(self, accounts: RunAccounts, notify: Callable[[str], None]) -> None:
        self._accounts = accounts
        self._notify = notify
        self._metrics = RayMetrics()
        """Offers the account's numbers to Ray."""
        self._announced: set[tuple[str, str]] = set()
        """The stalls that people know of: the part, and what it waits for."""
        self._slot: tuple[SlotPart | None, str | None] = (None, None)
        """The server's last answer about the slot."""
        self._asked_s = self._answered_s = float("-inf")
        self._stop = threading.Event()
        """Set by ``close``."""
        self._thread = threading.Thread(target=self._watch, name="xidstream-watch", daemon=True)
        """Looks at the account now and then."""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_INTERVAL_S):
            try:
                self._look()
            except Exception:
                # A defect in what is only shown must not end the run. At its end Ray may be gone already.
                if not self._stop.is_set():
                    log.exception("the run cannot be watched")

    def _look(self) -> None:
        if self._accounts.metrics is None:
            self._accounts.metrics = metrics_url()
        account = self._accounts.glance()
        if account.run is not None and account.run.state == "reading":
            self._tell(account)
        is_ours = account.run is not None and account.run.system_identifier is not None
        # Before, there may be no slot yet: its creation waits for whoever writes.
        slot, error = self._slot_part(time.monotonic()) if is_ours else (None, None)
        if not self._stop.is_set():
            self._metrics.set(with_undelivered(dataclasses.replace(account, slot=slot, slot_error=error)))

    def _slot_part(self, now_s: float) -> tuple[SlotPart | None, str | None]:
        """The last answer, or why there is none. The server is asked again if it is time to."""
        is_asked = self._asked_s > self._answered_s
        if not is_asked and now_s - self._asked_s >= _SLOT_INTERVAL_S:
            self._asked_s = now_s
            threading.Thread(target=self._ask_for_slot, name="xidstream-slot", daemon=True).start()
        elif is_asked and now_s - self._asked_s >= _SLOT_OLD_S:
            return None, f"the server has not answered for {now_s - self._asked_s:.0f} s"
        return self._slot

    def _ask_for_slot(self) -> None:
        answer: tuple[SlotPart | None, str | None] = (
            None,
            "the server could not be asked for the slot: the run's log has the error",
        )
        try:
            answer = self._accounts.slot()
        except Exception:
            log.exception("the server cannot be asked for the slot")
        finally:
            self._slot, self._answered_s = answer, time.monotonic()

    def _tell(self, account: Account) -> None:
        """Tell people of stalls that begin or end."""
        now = {(stall.part, stall.waits_for): stall for stall in account.stalls}
        for part, waits_for in self._announced - now.keys():
            text = f"no longer stalled: the {part} had waited for the {waits_for}"
            self._notify(Event("stall_over", text, part=part, waits_for=waits_for))
        for pair, stall in now.items():
            if pair not in self._announced:
                self._notify(stall_event(stall, account.sequencer))
        self._announced = set(now)


def stall_event(stall: Stall, sequencer: SequencerPart | None) -> Event:
    """``sequencer``: it knows the commit that waits, where one does."""
    text = f"stalled: the {stall.part} waits for the {stall.waits_for}: {stall.text}"
    lsn = None if sequencer is None else sequencer.head_commit_lsn
    return Event("stalled", text, part=stall.part, waits_for=stall.waits_for, for_s=stall.for_s, lsn=lsn)
