"""The last batches of a sink, the one in its hands, and how long transactions took from COMMIT to the sink.

The batch loop notes each batch when it gets it and when it is done; that costs microseconds. Percentiles are worked out
when somebody asks. Commit times are the server's, the end is this machine's: the clocks of the two must agree.

``begin``, ``done`` and ``dropped`` are for the loop's thread. ``part`` is for any thread.
"""

from __future__ import annotations

import datetime
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.account.model import BatchInHand, BatchPart, LatencyPart

MOST_BATCHES: Final = 20
"""How many batches an account has."""
MOST_LATENCIES: Final = 10_000
MOST_LATENCIES_OF_A_BATCH: Final = 1_000
"""Transactions whose latency is kept: enough for a 99th percentile. Of a batch the last ones."""


@dataclass(frozen=True)
class _Begun:
    since_s: float
    n_transactions: int
    n_rows: int
    n_bytes: int


class BatchHistory:
    """``n_kept``: how many batches are kept. ``now_s``: a monotonic clock's; ``now_us``: microseconds since the Unix
    epoch."""

    def __init__(self, n_kept: int = MOST_BATCHES) -> None:
        self._batches: deque[BatchPart] = deque(maxlen=n_kept)
        self._n_done = 0
        self._latencies_ms: deque[npt.NDArray[np.float64]] = deque()
        self._n_latencies = 0
        self._begun: _Begun | None = None

    def begin(self, now_s: float, n_transactions: int, n_rows: int, n_bytes: int) -> None:
        """The sink gets a batch."""
        self._begun = _Begun(now_s, n_transactions, n_rows, n_bytes)

    def dropped(self) -> None:
        """The batch in hand is not done, and comes again."""
        self._begun = None

    def done(
        self, now_s: float, now_us: int, last_commit_lsn: str, committed_us: npt.NDArray[np.int64]
    ) -> None:
        """The batch in hand is durable, and reported. ``committed_us``: int64[n], when its last transactions
        committed, in microseconds since the Unix epoch."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        done_at = datetime.datetime.fromtimestamp(now_us / 1e6, datetime.timezone.utc)
        self._batches.append(
            BatchPart(
                done_at,
                round(now_s - begun.since_s, 6),
                begun.n_transactions,
                begun.n_rows,
                begun.n_bytes,
                last_commit_lsn,
                self._n_done,
                max(0.0, (now_us - int(committed_us[-1])) / 1000) if len(committed_us) else None,
            )
        )
        self._n_done += 1
        if len(committed_us):
            kept = committed_us[-MOST_LATENCIES_OF_A_BATCH:]
            self._latencies_ms.append(np.maximum(now_us - kept, 0) / 1000)
            self._n_latencies += len(kept)
            while self._n_latencies - len(self._latencies_ms[0]) >= MOST_LATENCIES:
                self._n_latencies -= len(self._latencies_ms.popleft())

    @property
    def batches(self) -> tuple[BatchPart, ...]:
        return tuple(self._batches)

    @property
    def is_in_hand(self) -> bool:
        """Whether the sink has a batch."""
        return self._begun is not None

    def in_hand(self, now_s: float) -> BatchInHand | None:
        begun = self._begun
        if begun is None:
            return None
        return BatchInHand(round(now_s - begun.since_s, 3), begun.n_transactions, begun.n_rows, begun.n_bytes)

    @property
    def latency(self) -> LatencyPart | None:
        kept = list(self._latencies_ms)
        if not kept:
            return None
        all_ms = np.concatenate(kept)
        p50, p99 = np.percentile(all_ms, (50, 99))
        return LatencyPart(round(float(p50), 3), round(float(p99), 3), len(all_ms))
