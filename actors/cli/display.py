"""Shows a run while it works: a live picture on a terminal, or else plain lines without control characters.

Both show the same facts, from ``Supervisor.status``. An unknown number is not shown as zero. While a run starts, they
say what it waits for, and since when. A rate is that of the last ``_RATE_WINDOW_S``.

``caught up`` means that all transactions which the server has sent are in the sink, and confirmed. What is in the
journal is confirmed, and said to wait. The lag is the last
batch's: once caught up, an old one would be misleading, so it is shown only of a batch that came a moment ago.

A line of the live picture is broken between its parts and never within one, whatever the width.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from xidstream.actors.runtime.elapsed import Elapsed
from xidstream.actors.supervision.run_status import RunStatus
from xidstream.pipeline.account.model import JournalPart, OpenPart, open_words
from xidstream.pipeline.account.snapshots import SnapshotProgress
from xidstream.pipeline.events import Event
from xidstream.pipeline.quantities import counted, human_bytes, human_ms, human_s, waiting

_LIVE_LOOK_S = 0.25
_PLAIN_LOOK_S = 1.0
_PLAIN_INTERVAL_S = 5.0
_RATE_WINDOW_S = 10.0
_FRESH_S = 5.0
"""For how long after a batch its lag is of interest although nothing waits any more."""
_SHORT_LAG_MS = 5_000.0
"""Where changes come all the time something always waits: with a lag below this the run keeps up with them."""


class Rates:
    """Rates, and how old the last batch is, from the statuses that were shown. ``now_s``: a monotonic clock's."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()
        self._n_batches = 0
        self._batch_s: float | None = None
        self.is_fresh = False
        """Whether a batch was delivered a moment ago."""
        self.rows_per_s: float | None = None
        """Delivered. None: not known yet."""
        self.read_bytes_per_s: float | None = None

    def note(self, status: RunStatus, now_s: float) -> None:
        sink, reader = status.sink, status.account.reader
        n_rows, n_bytes = sink.n_rows, reader.n_bytes if reader is not None else 0
        if self._samples and (n_rows < self._samples[-1][1] or n_bytes < self._samples[-1][2]):
            self._samples.clear()  # another epoch or driver counts anew
        if sink.n_batches != self._n_batches:
            self._n_batches, self._batch_s = sink.n_batches, now_s
        self.is_fresh = self._batch_s is not None and now_s - self._batch_s < _FRESH_S
        self._samples.append((now_s, n_rows, n_bytes))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= _RATE_WINDOW_S:
            self._samples.popleft()
        first_s, first_rows, first_bytes = self._samples[0]
        if now_s > first_s:
            self.rows_per_s = (n_rows - first_rows) / (now_s - first_s)
            self.read_bytes_per_s = (n_bytes - first_bytes) / (now_s - first_s)
        else:
            self.rows_per_s = self.read_bytes_per_s = None


def parts(status: RunStatus, pace: Rates | None = None) -> list[str]:
    """The status as short phrases, the most important ones first. Without ``pace`` it is the end of a run."""
    account, sink = status.account, status.sink
    reader = account.reader
    found = [_where(status, pace)] if pace is not None else []
    if status.has_sink:
        found.append(
            f"{counted(sink.n_transactions, 'transaction')}, {counted(sink.n_rows, 'row')} delivered"
        )
    else:
        found.append("into the journal")
    if pace is not None and pace.rows_per_s and pace.rows_per_s >= 1:
        found.append(f"{pace.rows_per_s:,.0f} rows/s")
    if reader is not None:
        rate = f" ({human_bytes(pace.read_bytes_per_s)}/s)" if pace and pace.read_bytes_per_s else ""
        found.append(f"{human_bytes(reader.n_bytes)} read{rate}")
        if account.open:
            found.append(_open(account.open[0], reader.n_open, reader.n_open_rows))
        if reader.n_buffers_asked:
            found.append(f"{counted(reader.n_buffers, 'buffer')}, {reader.n_buffers_asked} more requested")
        if reader.paused_by is not None:
            found.append(f"reading paused: {human_bytes(reader.backlog_bytes)} wait for the sink")
    if account.snapshots is not None and (account.snapshots.tables or account.snapshots.n_finished):
        found.append(_snapshots(account.snapshots))
    if account.sequencer is not None:
        if account.journal is not None and account.journal.n_files:
            found.append(_journal(account.journal))
        found.append(f"confirmed {account.sequencer.confirmed_lsn}")
    return found


def summary(status: RunStatus, pace: Rates | None = None) -> str:
    """``parts`` in one line."""
    return " · ".join(parts(status, pace))


def _where(status: RunStatus, pace: Rates) -> str:
    account, run, lag_ms = status.account, status.run, status.sink.last_lag_ms
    if run.waiting_for:
        return f"waiting for {' and '.join(run.waiting_for)}"
    n_open = 0 if account.reader is None else account.reader.n_open
    caught_up = f"caught up{open_words([each.xid for each in account.open], n_open)}"
    if lag_ms is None or (run.is_caught_up and not pace.is_fresh):
        return caught_up if run.is_caught_up else "catching up"
    if run.is_caught_up:
        where = caught_up
    else:
        where = "keeping up" if pace.is_fresh and lag_ms < _SHORT_LAG_MS else "catching up"
    return f"{where}, lag {human_ms(lag_ms)}"


def _open(largest: OpenPart, n_open: int, n_rows: int) -> str:
    of_it = f"xid {largest.xid}, {counted(largest.n_rows, 'row')}"
    if n_open == 1:
        return f"1 open: {of_it}"
    return f"{n_open} open, {counted(n_rows, 'row')}; the largest: {of_it}"


def _journal(journal: JournalPart) -> str:
    held = f"{human_bytes(journal.n_bytes)}, {waiting(journal.n_transactions, 'transaction')}"
    return f"in the journal{', which is full' if journal.is_full else ''}: {held} for the sink"


def _snapshots(progress: SnapshotProgress) -> str:
    done = f"{counted(progress.n_finished, 'snapshot')} taken"
    if not progress.tables:
        return f"{done}, {counted(progress.n_rows, 'row')}"
    read = f"{human_bytes(progress.n_bytes_read)} of {human_bytes(progress.n_bytes)} read"
    if progress.bytes_per_s:
        read += f" ({human_bytes(progress.bytes_per_s)}/s)"
    if progress.seconds_left is not None:
        read += f", {human_s(progress.seconds_left)} left"
    held = progress.held_wal_bytes
    wal = "" if held is None else f", the slot keeps {human_bytes(held)} of WAL"
    to_go = counted(len(progress.tables), "table")
    return f"{done}, {to_go} to go: {read}, {counted(progress.n_rows, 'row')}{wal}"


class Phrases:
    """Phrases in as few lines as the width allows, each whole. A longer one than a line is broken at its words."""

    def __init__(self, phrases: Iterable[str], style: str = "") -> None:
        self._phrases = tuple(phrases)
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for phrase in self._phrases:
            longer = f"{line} · {phrase}" if line else phrase
            if line and len(longer) > options.max_width:
                yield Text(line, style=self._style)
                longer = f"  {phrase}"
            line = longer
        yield Text(line, style=self._style)


def picture(status: RunStatus, pace: Rates) -> Group:
    """The live display: the phrases, and a line for each of the largest open transactions."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("open transaction", "rows decoded", "in memory", "segments spilled"):
        table.add_column(name, justify="left" if name.startswith("open") else "right")
    account = status.account
    for each in account.open:
        memory = human_bytes(each.n_bytes_in_memory)
        table.add_row(f"xid {each.xid}", f"{each.n_rows:,}", memory, str(each.n_segments))
    n_more = 0 if account.reader is None else account.reader.n_open - len(account.open)
    if n_more > 0:
        table.add_row(f"and {n_more} more", "", "", "")
    state = Phrases(parts(status, pace), "bold")
    return Group(state, table) if account.open else Group(state)


class Display:
    """A context manager. ``show`` shows the present status; ``line`` prints a line that stays.

    ``clock`` is monotonic, in seconds. ``began_s``: of it, when the run began; None: now.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        began_s: float | None = None,
    ) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False)
        """Where everything is printed."""
        self._clock = clock
        self._began_s = clock() if began_s is None else began_s
        """When the run began, on ``clock``."""
        self._live: Live | None = None
        """The lines that are drawn anew; None where the stream is no terminal."""
        self._paces: dict[str, Rates] = {}
        """The rates of each slot, from one look to the next."""
        self._waiting: dict[str, tuple[str, ...]] = {}
        """By slot: what it was last said to wait for."""
        self._open_s: dict[str, float] = {}
        """By slot: when it was last seen reading, on ``clock``."""
        self._last: dict[str, str] = {}
        """By slot: the last plain line."""
        self._next_s: dict[str, float] = {}
        """By slot: when another plain line may come, on ``clock``."""

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    @property
    def interval_s(self) -> float:
        """How often to ask for what is shown. A person at a terminal sees it move; else it costs the actors CPU."""
        return _PLAIN_LOOK_S if self._live is None else _LIVE_LOOK_S

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def show(self, statuses: Mapping[str, RunStatus]) -> None:
        """Show the statuses by slot. The slot's name is shown if there are several."""
        now_s = self._clock()
        several = len(statuses) > 1
        shown: list[RenderableType] = []
        for slot, status in statuses.items():
            shown += [Text(f"slot {slot}", style="bold cyan")] if several else []
            if status.opened is None:
                shown.append(self._starting(slot, status.run.waiting_for, several=several))
                continue
            if self._live is None and self._waiting.pop(slot, None) is not None:
                self.line(f"{now_s - self._open_s.get(slot, self._began_s):.0f} s: reading slot {slot}")
            self._open_s[slot] = now_s
            pace = self._paces.setdefault(slot, Rates())
            pace.note(status, now_s)
            if self._live is not None:
                shown.append(picture(status, pace))
            else:
                self._plain(slot, summary(status, pace), several=several, now_s=now_s)
        if self._live is not None:
            self._live.update(Group(*shown))

    def starting(self, what: str) -> None:
        """Say what the run waits for before there is a status."""
        shown = self._starting("", (what,), several=False)
        if self._live is not None:
            self._live.update(shown)

    def line(self, text: str, style: str = "") -> None:
        # A terminal's line is broken between words; a file's reader breaks lines itself.
        self._console.print(Text(text, style=style), soft_wrap=self._live is None)

    def tell(self, slot: str, text: str, style: str, *, several: bool) -> None:
        """A line about one slot of the run, with its name if there are several. Of an error also the remedy."""
        if isinstance(text, Event) and text.level >= logging.ERROR and "remedy" in text.facts:
            text = f"{text}\n  remedy: {text.facts['remedy']}"
        self.line(f"{slot}: {text}" if several else text, style)

    def _starting(self, slot: str, waiting_for: tuple[str, ...], *, several: bool) -> RenderableType:
        """What is waited for, and since when: the beginning of the run, or the end of the last epoch. Where there is no
        terminal, a line for each change."""
        since_s = self._open_s.get(slot, self._began_s)
        text = f"waiting for {' and '.join(waiting_for)}" if waiting_for else "starting"
        if self._live is None and waiting_for and self._waiting.get(slot) != waiting_for:
            self._waiting[slot] = waiting_for
            self.line(f"{f'{slot}: ' if several else ''}{self._clock() - since_s:.0f} s: {text}")
        return Elapsed(text, since_s, self._clock)

    def _plain(self, slot: str, text: str, *, several: bool, now_s: float) -> None:
        text = f"{slot}: {text}" if several else text
        if now_s >= self._next_s.get(slot, 0.0) and text != self._last.get(slot):
            self._last[slot] = text
            self._next_s[slot] = now_s + _PLAIN_INTERVAL_S
            self.line(text)
