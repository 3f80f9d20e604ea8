"""``run --log-format json``: what a person would see of a run, as one JSON object a line on stderr.

``EventLines`` stands where ``Display`` stands otherwise. It has no picture and no rates: what waits at the start, that
a slot is read, what needs a look, and the end. A run that is well says nothing.

``json_log`` has the rest of this process log the same way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from xidstream.actors.cli.json_log import log_as_json
from xidstream.actors.supervision.run_status import RunStatus
from xidstream.pipeline.events import Event

log = logging.getLogger("xidstream")


class EventLines:
    """In place of ``Display``."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._waiting: dict[str, tuple[str, ...]] = {}
        self._epochs: dict[str, str] = {}

    def __enter__(self) -> EventLines:
        log_as_json()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    interval_s = 1.0
    """How often to ask for what is told: see ``Display.interval_s``."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def starting(self, what: str) -> None:
        self._tell("", Event("waiting", f"waiting for {what}", logging.INFO))

    def show(self, statuses: Mapping[str, RunStatus]) -> None:
        """Tell of slots that wait for something else than before, or are read by another epoch."""
        for slot, status in statuses.items():
            opened, run = status.opened, status.run
            if opened is not None and self._epochs.get(slot) != run.epoch:
                self._epochs[slot] = run.epoch
                self._waiting.pop(slot, None)
                lsn = str(opened.confirmed_flush_lsn)
                text = f"reading slot {slot} from {lsn}"
                self._tell(slot, Event("reading", text, logging.INFO, lsn=lsn, epoch=run.epoch))
            if run.waiting_for and self._waiting.get(slot) != run.waiting_for:
                self._waiting[slot] = run.waiting_for
                text = f"waiting for {' and '.join(run.waiting_for)}"
                self._tell(slot, Event("waiting", text, logging.INFO))

    def line(self, text: str, style: str = "") -> None:
        self.tell("", text, style, several=False)

    def tell(self, slot: str, text: str, style: str, *, several: bool) -> None:
        """A text that is no Event is a note. ``style`` and ``several`` are for terminals."""
        self._tell(slot, text if isinstance(text, Event) else Event("note", text))

    def _tell(self, slot: str, event: Event) -> None:
        log.log(event.level, Event(event.name, event, event.level, **{"slot": slot or None, **event.facts}))
