"""Shows a run while it works: a live table on a terminal, or else plain lines.

Both show the same numbers, from ``Supervisor.status``: the delivered rows and transactions, the bytes read, the
open transactions and what they hold, the bytes that wait for the sink, and the lag of the last commit. An unknown
number is not shown as zero.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from xidstream.actors.supervision.supervisor import Status
from xidstream.pipeline.quantities import human_bytes, human_ms

_PLAIN_INTERVAL_S = 5.0
_MOST_TRANSACTIONS = 6


def summary(status: Status) -> str:
    """The status in one line."""
    parts = [f"{status.driver.n_transactions:,} transactions, {status.driver.n_rows:,} rows delivered"]
    if status.reader is not None:
        open_rows = sum(rows for _, rows, _, _ in status.reader.open)
        parts.append(f"{human_bytes(status.reader.n_bytes)} read")
        parts.append(f"{len(status.reader.open)} open ({open_rows:,} rows)")
        if status.reader.n_buffers_asked:
            parts.append(f"{status.reader.n_buffers} buffers, {status.reader.n_buffers_asked} more requested")
        if status.reader.paused:
            parts.append(f"reading paused: {human_bytes(status.reader.backlog_bytes)} wait for the sink")
    if status.sequencer is not None:
        parts.append(f"confirmed {status.sequencer.confirmed_lsn}")
    if status.driver.lag_ms is not None:
        parts.append(f"lag {human_ms(status.driver.lag_ms)}")
    return " · ".join(parts)


def picture(status: Status) -> Group:
    """The live display: the summary, and a line for each open transaction."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("open transaction", "rows decoded", "in memory", "segments spilled"):
        table.add_column(name, justify="left" if name.startswith("open") else "right")
    reader = status.reader
    transactions = sorted(reader.open, key=lambda t: -t[1]) if reader is not None else []
    for xid, rows, n_bytes, segments in transactions[:_MOST_TRANSACTIONS]:
        table.add_row(f"xid {int(xid)}", f"{rows:,}", human_bytes(n_bytes), str(segments))
    if len(transactions) > _MOST_TRANSACTIONS:
        table.add_row(f"and {len(transactions) - _MOST_TRANSACTIONS} more", "", "", "")
    state = Text(summary(status), style="bold")
    return Group(state, table) if transactions else Group(state)


class Display:
    """A context manager. ``show`` shows the present status; ``line`` prints a line that stays."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live: Live | None = None
        self._last: dict[str, str] = {}
        self._next_s: dict[str, float] = {}

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
    def console(self) -> Console:
        return self._console

    def show(self, statuses: Mapping[str, Status]) -> None:
        """Show the statuses by slot. The slot's name is shown if there are several."""
        several = len(statuses) > 1
        if self._live is not None:
            parts: list[RenderableType] = []
            for slot, status in statuses.items():
                parts += [Text(f"slot {slot}", style="bold cyan")] if several else []
                parts.append(picture(status))
            self._live.update(Group(*parts))
            return
        now_s = time.monotonic()
        for slot, status in statuses.items():
            text = f"{slot}: {summary(status)}" if several else summary(status)
            if now_s >= self._next_s.get(slot, 0.0) and text != self._last.get(slot):
                self._last[slot] = text
                self._next_s[slot] = now_s + _PLAIN_INTERVAL_S
                self._console.print(text, soft_wrap=True)

    def line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)
