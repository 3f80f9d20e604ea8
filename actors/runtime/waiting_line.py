"""One line on standard error that counts the seconds of something slow: for a person who waits, and for nobody else.

Shown on a terminal and in a notebook, after a second, and taken away at the end. In a file there is nothing of it. Who
draws a picture of its own (``cli.display``, the demo) does not call this. Within one another the outermost is shown.

Only the standard library: it is there while the heavy modules are imported.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_EVERY_S: Final = 1.0
_shown = threading.Lock()


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """``text``: what happens, as ``starting Ray``."""
    is_seen = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    if not is_seen or not _shown.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_count, args=(text, ended), name="xidstream-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _shown.release()


def _count(text: str, ended: threading.Event) -> None:
    began_s = time.monotonic()
    line = ""
    while not ended.wait(_EVERY_S):
        line = f"{text} ({time.monotonic() - began_s:.0f} s)"
        _write(f"\r{line}")
    if line:
        _write(f"\r{' ' * len(line)}\r")


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # the terminal is gone; what it was shown for goes on
