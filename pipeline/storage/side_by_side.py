"""Ask a storage one question about many objects, several at a time.

An object store answers in some 10 ms, however little is asked. So what concerns thousands of objects takes minutes one
after the other, and seconds side by side. The number of threads is bounded, whatever the number of objects, and they
end with the call. Arrow's clients are safe for several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

N_THREADS: Final = 32
"""A store takes hundreds of requests a second for one prefix. 32 threads of 15 ms are 2,000 a second."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def side_by_side(ask: Callable[[_Item], _Answer], items: Sequence[_Item]) -> Iterator[_Answer]:
    """``ask`` of each item, in their order. Raises the first error of that order; what was not begun by then is not
    done."""
    if len(items) < 2:
        yield from map(ask, items)
        return
    with ThreadPoolExecutor(min(N_THREADS, len(items)), thread_name_prefix="storage") as threads:
        yield from threads.map(ask, items)
