"""Whose rows an open transaction has, and where a rollback cuts them.

The rows of a transaction are numbered from 0, without a gap, in the order of the stream. A rolled-back subtransaction
takes a *suffix* of them: between its begin and its end the server sends no row of anybody else but its own
subtransactions, and these are rolled back with it, whether they had been released or not. So a rollback is one number:
how many rows stay. The rows that follow are numbered from there, and a row's number is its ``_seq`` from the moment
when it is decoded.

Kept are the runs of equal subxid, by their first row. Their memory is that of the subtransactions that stay: what a
rollback takes is forgotten. It is 12 bytes a run, and the buffer's memory counts it.

The suffix is a rule that PostgreSQL 16 and 18 were seen to keep, and that follows from how they decode. It is checked
all the same, because a server that broke it would have us take rows that it keeps. For that all the runs that stay are
compared with the xids that go. Xids only grow, so most blocks are told by their range.

An example. 740 inserts 3 rows, sets a savepoint (subxid 741), inserts 2 rows, sets a savepoint inside of it (742), and
inserts 1 row. Then it rolls back to the first savepoint::

    the stream            runs (subxid from row)            n_rows
    6 rows                740 from 0, 741 from 3, 742 from 5    6
    741 and 742 abort     740 from 0                            3
    4 rows of 743         740 from 0, 743 from 3                7

``rows_after_abort`` of 741 and 742 is 3, and the first row of 743 is number 3, too. An abort of 741 without
742 would be refused: row 5 came after the rows of 741, and would stay.

Rejected: a set of the rolled-back subxids that filters the rows at the end. Then no row's number is known before the
commit, whoever reads a segment has to filter it, and the set grows with each savepoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.errors import IllegalTransition

Subxids = npt.NDArray[np.uint32]

_OBJECT_BYTES: Final = 400
"""The bytes that the runs of one block take besides their numbers."""


@dataclass(frozen=True)
class _Runs:
    """The runs of subxids in one block. ``subxid: uint32[k]``, ``first: int64[k]`` (numbers of rows); k is not 0."""

    subxid: Subxids
    first: npt.NDArray[np.int64]
    lowest: int
    highest: int

    @classmethod
    def of(cls, subxid: Subxids, first: npt.NDArray[np.int64]) -> _Runs:
        return cls(subxid, first, int(subxid.min()), int(subxid.max()))

    @property
    def n_bytes(self) -> int:
        return self.subxid.nbytes + self.first.nbytes + _OBJECT_BYTES


class Survivors:
    def __init__(self) -> None:
        self.n_rows = 0
        """How many rows there are: the number of the next row."""
        self.n_bytes = 0
        """The bytes that the runs take in memory."""
        self._blocks: list[_Runs] = []
        """The runs of each block that began one, in the order of the rows."""

    def add(self, subxid: Subxids, first: npt.NDArray[np.int64], n_rows: int) -> None:
        """The runs of ``n_rows`` more rows, in the order of their numbers."""
        if self._blocks and len(subxid) and subxid[0] == self._blocks[-1].subxid[-1]:
            subxid, first = subxid[1:], first[1:]
        if len(subxid):
            self._append(_Runs.of(subxid, first))
        self.n_rows += n_rows

    def _append(self, runs: _Runs) -> None:
        self._blocks.append(runs)
        self.n_bytes += runs.n_bytes

    def _pop(self) -> _Runs:
        self.n_bytes -= self._blocks[-1].n_bytes
        return self._blocks.pop()

    def rows_after_abort(self, aborted: Subxids) -> int:
        """How many rows stay when those of ``aborted`` (not empty) go. Raises IllegalTransition."""
        n_rows = self.n_rows
        lowest, highest = int(aborted.min()), int(aborted.max())
        is_behind = True
        for runs in reversed(self._blocks):
            if runs.highest < lowest or highest < runs.lowest:
                is_behind = False
                continue
            gone = np.isin(runs.subxid, aborted)
            n_staying = 0 if gone.all() else int(np.flatnonzero(~gone)[-1]) + 1
            n_looked_at = n_staying if is_behind else len(gone)
            if gone[:n_looked_at].any():
                subxid = runs.subxid[np.flatnonzero(gone)[0]]
                raise IllegalTransition(
                    f"rows behind those of subtransaction {subxid} are not rolled back with it"
                )
            if is_behind and n_staying < len(gone):
                n_rows = int(runs.first[n_staying])
            is_behind = is_behind and n_staying == 0
        return n_rows

    def truncate(self, n_rows: int) -> None:
        """Forget all rows from number ``n_rows`` on."""
        while self._blocks and self._blocks[-1].first[0] >= n_rows:
            self._pop()
        if self._blocks:
            last = self._blocks[-1]
            n_runs = int(np.searchsorted(last.first, n_rows))
            if n_runs < len(last.first):
                self._pop()
                # Copies: a view would keep what was taken.
                self._append(_Runs.of(last.subxid[:n_runs].copy(), last.first[:n_runs].copy()))
        self.n_rows = n_rows
