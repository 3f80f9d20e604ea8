"""What is left of a journal's unit without its skipped transactions.

``xidstream slot skip`` names a transaction that the sink cannot take. One that waits in the journal is confirmed: the
server does not send it again, and the buffers, which drop skipped transactions, never see it. So it is dropped when its
file is loaded. The file stays as it is. Each epoch reads the skips when it begins.

Rejected: to write the file anew without it. It would be a second way to write a file, for what happens once a year.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.exchange import (
    ArrowRef,
    InlineMessages,
    MemoryMessages,
    MessagePart,
    Sealed,
)
from xidstream.pipeline.packs import PackReader, PartsBuilder
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import Skips, skipped_among

_Numbers = npt.NDArray[np.int64]
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


def has_skipped(unit: Sealed, skips: Skips) -> bool:
    return bool(skips) and bool(skipped_among(skips, *_commits(unit)).any())


def without_skipped(
    unit: Sealed,
    skips: Skips,
    table_of: Callable[[ArrowRef], pa.Table],
    put: Callable[[pa.Table], ArrowRef],
) -> Sealed:
    """``unit`` without rows, messages and lines of these transactions; ``put`` makes the references of what is left.

    ``table_of`` gives the content of its own references. Raises what ``put`` raises.
    """
    xid, commit_lsn = _commits(unit)
    gone = skipped_among(skips, xid, commit_lsn)
    lsns = set(commit_lsn[gone].tolist())
    relids: dict[int, set[int]] = {lsn: set() for lsn in lsns}
    for segment in unit.segments:
        if segment.commit.commit_lsn in lsns:
            relids[segment.commit.commit_lsn].add(segment.relation.relid)

    # Each part is an object of its own: parts of one table stay in their order.
    parts = PartsBuilder(put, n_tables=1)
    packs = PackReader(lambda ref: iter(table_of(ref).to_batches()))
    for part in unit.memory:
        rows = table_of(part.ref) if part.pack_index is None else pa.Table.from_batches(packs.rows([part]))
        for lsn in lsns.intersection(pc.unique(rows.column("_commit_lsn")).to_pylist()):
            relids[lsn].add(part.relation.relid)
        parts.add(part.relation, _left(rows, "_commit_lsn", lsns))

    def message(part: MessagePart) -> MessagePart | None:
        if isinstance(part, InlineMessages):
            batch = _left(part.rows, "commit_lsn", lsns)
            return InlineMessages(batch) if batch.num_rows else None
        if isinstance(part, MemoryMessages):
            table = _left(table_of(part.ref), "commit_lsn", lsns)
            return MemoryMessages(table.nbytes, put(table)) if table.num_rows else None
        return None if part.commit_lsn in lsns else part

    memory = parts.finish()
    segments = tuple(part for part in unit.segments if part.commit.commit_lsn not in lsns)
    messages = tuple(left for left in map(message, unit.messages) if left is not None)
    return dataclasses.replace(
        unit,
        transactions=unit.transactions.filter(pa.array(~gone)),
        memory=memory,
        segments=segments,
        messages=messages,
        n_rows=sum(part.n_rows for part in memory) + sum(part.n_rows for part in segments),
        n_bytes=sum(part.n_bytes for part in (*memory, *messages))
        + sum(part.segment.n_bytes for part in segments),
        skipped=(
            *unit.skipped,
            *(
                SkippedTransaction(Xid(x), Lsn(lsn), tuple(sorted(relids[lsn])))
                for x, lsn in zip(xid[gone].tolist(), commit_lsn[gone].tolist(), strict=True)
            ),
        ),
    )


def _commits(unit: Sealed) -> tuple[_Numbers, _Numbers]:
    """Xids and commit LSNs: int64[n_transactions]."""
    xid, commit_lsn = (unit.transactions.column(name).cast(pa.int64()) for name in ("xid", "commit_lsn"))
    return xid.to_numpy(), commit_lsn.to_numpy()


def _left(rows: _Rows, column: str, lsns: set[int]) -> _Rows:
    """Rows of other commits. What is outside of transactions has no commit, and stays."""
    is_gone = pc.is_in(rows.column(column), value_set=pa.array(sorted(lsns), pa.int64()))
    return rows.filter(pc.invert(is_gone))
