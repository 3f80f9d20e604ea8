"""A text with the seconds since something began, for a terminal that draws it again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.text import Text


class Elapsed:
    """Drawn by rich as ``waiting for Ray (4 s)``. ``since_s`` is of ``clock``, which is monotonic."""

    def __init__(self, text: str, since_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._since_s = since_s
        self._clock = clock

    def __rich__(self) -> Text:
        return Text(f"{self._text} ({self._clock() - self._since_s:.0f} s)", style="bold")
