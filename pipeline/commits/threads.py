"""Threads of its own for one kind of work of the commit sequencer.

Asyncio's threads are shared by all that reads, deletes and verifies, and may all be busy for long. A record, a file of
the journal and the check of a prepared transaction do not wait for them. Whoever drives the sequencer step by step, as
tests do, gives executors that work at once.

Called by ``commit_sequence``, ``confirming`` and ``journaling``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

MakeThreads = Callable[[int, str], Executor]
"""Makes an executor of so many threads, whose names begin so."""


def own_threads(n_threads: int, name: str) -> Executor:
    """Threads that start when they are needed, and end with the executor."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix=name)
