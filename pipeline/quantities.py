"""Writes counts, bytes and times for people: in messages, in the display, and in what the console sink prints.

And names that others have chosen: a table may be called what makes a terminal do something, or a second line of a log.
"""

from __future__ import annotations

import re
from typing import Final

_UNSEEN: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, breaks of lines, and what turns the direction of writing."""


def visible(text: str) -> str:
    """One line: what would not be seen is written as Python writes it, such as ``\\n`` and ``\\x1b``."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def counted(n: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``: the regular plural."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def human_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_s(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 4 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, smaller, n, n_smaller in (
        ("d", "h", 86_400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= n:
            return f"{whole // n} {unit} {whole % n // n_smaller} {smaller}"
    return f"{whole} s"


def human_ms(ms: float | None) -> str:
    if ms is None:
        return "-"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def waiting(n: int, noun: str) -> str:
    """``1 transaction waits``, ``2 transactions wait``."""
    return f"{counted(n, noun)} {'waits' if n == 1 else 'wait'}"
