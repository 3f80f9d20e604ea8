"""What a run's account says of its change log: how far back it answers, and who holds it back.

``log_retention`` keeps what a consumer has not read (``changelog.consumers``). One that nobody advances keeps the log
for ever, and no table shows that. So the run looks, as often as it may without being felt:

- The positions of the consumers are one small Delta table, where there is one: it is read again after ``LOOK_S``.
- How far each table was cut, and what it answers, takes one look at each table. It is taken once, and again after each
  turn of the retention, which alone changes it. A mirror that removes a base table may make the oldest state of a
  table younger in between; `xidstream tables` reads it anew.
- What the consumers hold back the retention itself tells, of its last turn (``LogShortening``).

Nobody waits for a look: ``part`` has the last one, and begins the next on a thread of its own. A look that failed is
told in the part, and the figures before it stay.

An example. The retention would cut up to LSN 500. ``billing`` is at 200, and ``audit`` at 400. Of files with 100 bytes
for each 100 of LSN, ``billing`` holds 300 bytes, those after 200, and ``audit`` holds 100 of them. So the largest
figure is what all hold together, and each is what would still be held if the others went.

Rejected: to look when somebody asks, and wait. An account must answer within seconds, and a store may not. To tell it
at each turn of the retention alone: a consumer that has moved would be shown behind for an hour.

In the driver's process, no Spark. Called by ``delta_sink`` and ``iceberg_sink``.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from deltalake.exceptions import DeltaError

from xidstream.pipeline.account.model import MOST_CONSUMERS, ConsumerPart, LogPart
from xidstream.pipeline.changelog.consumers import ConsumerPosition
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.errors import Unsupported, XidstreamError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks.shortened_tables import ShortenedRoot

LOOK_S: Final = 60.0
"""A consumer is behind for minutes before anybody minds, and each look is some requests to a store."""
_FAILURES: Final = (OSError, DeltaError, XidstreamError)


@dataclass(frozen=True)
class _Reach:
    """The rest of the log that its shortening has left. ``oldest`` and ``cut`` as ``LogPart`` has them."""

    oldest: Lsn | None
    cut: Lsn | None
    n_tables: int
    n_cut_tables: int


@dataclass(frozen=True)
class _Seen:
    """One look."""

    last: Lsn
    consumers: tuple[ConsumerPosition, ...]
    reach: _Reach


class LogWatch:
    """The log of one slot. ``clock``: a monotonic one. ``part`` may be called from any thread, and so may
    ``shortened``."""

    def __init__(
        self, root: ShortenedRoot, application_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._slot = application_id
        self._clock = clock
        self._lock = threading.Lock()
        """Guards what follows."""
        self._thread: threading.Thread | None = None
        """Looks at the log, beside the batches; None before the first look."""
        self._looked_s: float | None = None
        """When the last look began, on ``clock``; None before the first."""
        self._seen: _Seen | None = None
        """The findings of the last look that succeeded; None before that."""
        self._error: str | None = None
        """Why the last look failed; None where it did not."""
        self._held: Mapping[str, int] | None = None
        """By consumer, what keeps the log from being cut, as the last shortening found it; None before that."""
        self._is_cut_anew = True
        """Whether the log was shortened since it was looked at."""

    def shortened(self, held: Mapping[str, int]) -> None:
        """The retention has had its turn. ``held``: by the name of a consumer, the bytes that it holds back."""
        with self._lock:
            self._held, self._is_cut_anew = held, True

    def part(self) -> LogPart | None:
        """The last look's findings; None before the first look has ended."""
        with self._lock:
            is_due = self._looked_s is None or self._clock() - self._looked_s >= LOOK_S
            if is_due and (self._thread is None or not self._thread.is_alive()):
                self._looked_s = self._clock()
                self._thread = threading.Thread(target=self._look, name="log-watch", daemon=True)
                self._thread.start()
            seen, held, error = self._seen, self._held, self._error
        if seen is None:
            return None if error is None else LogPart(error=error)
        return replace(_part(seen, held, datetime.datetime.now(datetime.timezone.utc)), error=error)

    def _look(self) -> None:
        with self._lock:
            before, is_cut_anew, self._is_cut_anew = self._seen, self._is_cut_anew, False
        try:
            log = SlotLog(self._root.log_root, self._slot)
            reach = _reach(log) if before is None or is_cut_anew else before.reach
            seen = _Seen(log.last_commit_lsn, tuple(self._root.positions(self._slot)), reach)
        except _FAILURES as error:
            with self._lock:
                self._is_cut_anew |= is_cut_anew
                self._error = error.message if isinstance(error, XidstreamError) else type(error).__name__
            return
        with self._lock:
            self._seen, self._error = seen, None


def _reach(log: SlotLog) -> _Reach:
    cuts: list[Lsn] = []
    oldest: list[Lsn | None] = []
    of_cut: list[Lsn | None] = []
    names = log.table_names()
    for name in names:
        try:
            cut, first = log.cut_lsn(name), log.oldest_lsn(name)
        except Unsupported:
            continue  # `xidstream tables` says why it cannot be read
        oldest.append(first)
        if cut:
            cuts.append(cut)
            of_cut.append(first)
    known = [lsn for lsn in of_cut if lsn is not None]
    first_known = [lsn for lsn in oldest if lsn is not None]
    shown = max(known, default=None) if cuts else min(first_known, default=None)
    return _Reach(shown, max(cuts, default=None), len(names), len(cuts))


def _part(seen: _Seen, held: Mapping[str, int] | None, now: datetime.datetime) -> LogPart:
    reach, last = seen.reach, seen.last
    furthest = sorted(seen.consumers, key=lambda each: (each.lsn, each.name))[:MOST_CONSUMERS]
    return LogPart(
        last_commit_lsn=str(last),
        oldest_lsn=None if reach.oldest is None else str(reach.oldest),
        cut_lsn=None if reach.cut is None else str(reach.cut),
        reach_bytes=None if reach.oldest is None else max(0, last - reach.oldest),
        n_tables=reach.n_tables,
        n_cut_tables=reach.n_cut_tables,
        consumers=tuple(
            ConsumerPart(
                each.name,
                str(each.lsn),
                max(0, last - each.lsn),
                round(each.age_s(now), 3),
                # One that came after the turn has held nothing back in it.
                None if held is None else held.get(each.name, 0),
                each.is_forgotten(last, now),
            )
            for each in furthest
        ),
        n_consumers=len(seen.consumers),
    )
