"""Figures for people of all that the sinks of one epoch have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.exchange import Sealed
from xidstream.pipeline.pg import INVALID_LSN, Lsn


@dataclass
class Delivered:
    n_rows: int = 0
    n_transactions: int = 0
    n_batches: int = 0
    last_commit_lsn: Lsn = INVALID_LSN
    last_commit_timestamp_us: int = 0

    def add_batch(self, contents: Sequence[Sealed]) -> None:
        self.n_batches += 1
        for content in contents:
            n = content.transactions.num_rows
            self.n_rows += content.n_rows
            self.n_transactions += n
            if n:
                last = content.transactions.slice(n - 1)
                self.last_commit_lsn = Lsn(last.column("commit_lsn")[0].as_py())
                self.last_commit_timestamp_us = last.column("commit_timestamp").cast(pa.int64())[0].as_py()
