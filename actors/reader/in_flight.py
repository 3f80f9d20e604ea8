"""The calls to buffers that have not returned, and the reader's credit that they hold.

A block counts as in flight until its buffer has decoded it and, where needed, spilled. The reader stops reading while
too much is (``pipeline.stream.read_policy``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray

from xidstream.actors.runtime.ray_errors import unwrap


class InFlight:
    """``n_bytes``: raw bytes in flight. Other threads may read it."""

    def __init__(self) -> None:
        self._calls: dict[ray.ObjectRef, int] = {}
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, result: ray.ObjectRef, n_bytes: int = 0) -> None:
        self._calls[result] = n_bytes
        self.n_bytes += n_bytes

    def collect(self, timeout_s: float) -> Iterator[Any]:
        """Results of calls that have returned, in no order; raises what a buffer raised."""
        if not self._calls:
            return
        done, _ = ray.wait(
            list(self._calls), num_returns=len(self._calls), timeout=timeout_s, fetch_local=False
        )
        for ref in done:
            self.n_bytes -= self._calls.pop(ref)
            try:
                result = ray.get(ref)
            except Exception as error:
                raise unwrap(error, "xid buffer") from error
            yield result
