"""The part of a plain block that can be delivered: all before its first bad transaction, except what was given up.

A plain block holds many transactions, all of them committed. One that cannot be delivered must not hold back those
before it, and nothing behind it may be released. So the block is cut off there, and the error takes its place in the
order of commits (``exchange.Undeliverable``).

``blocks`` calls this for the rare block that has a bad value, or a transaction that was given up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.decode.table_decoder import DecodedTable
from xidstream.pipeline.exchange import Undeliverable
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.poison import BadRows, Poison, pairs_of

if TYPE_CHECKING:
    from xidstream.pipeline.decode.blocks import DecodedPlainBlock


def deliverable(
    block: DecodedPlainBlock,
    end_lsn: npt.NDArray[np.int64],
    notes: Sequence[BadRows],
    skipped: npt.NDArray[np.bool_],
    *,
    message_owner: npt.NDArray[np.int64],
    is_transactional: npt.NDArray[np.bool_],
) -> DecodedPlainBlock:
    """``block`` with ``undeliverable`` and ``left_out``, and without the rows that these exclude.

    ``end_lsn: int64[n]`` and ``skipped: bool[n]`` (given up) are of each transaction. ``message_owner: int64[m]`` and
    ``is_transactional: bool[m]`` are of each logical message, in stream order. Its owner is the index of its
    transaction; of a message between transactions it is the one before it, or -1.
    """
    stamp = block.stamp
    n = len(stamp.xid)
    first = _first_bad_transaction(n, notes, skipped)
    poison = None
    if first < n:
        xid, commit_lsn = int(stamp.xid[first]), int(stamp.commit_lsn[first])
        poison = _poison_of(notes, first).of(Xid(xid), Lsn(commit_lsn))
    keep = (np.arange(n) < first) & ~skipped
    kept_messages = np.where(is_transactional, _at(keep, message_owner), message_owner < first)
    left_out = pairs_of(stamp.xid[:first][skipped[:first]], stamp.commit_lsn[:first][skipped[:first]])
    tables = _kept_tables(block.tables, keep)
    logical = None if block.messages is None else block.messages.filter(pa.array(kept_messages))
    return dataclasses.replace(
        block,
        tables=tables,
        messages=logical if logical is not None and logical.num_rows else None,
        n_rows=sum(table.batch.num_rows for table in tables),
        transactions=block.transactions.filter(
            pa.array(np.isin(block.transactions.column("commit_lsn").to_numpy(), stamp.commit_lsn[keep]))
        ),
        undeliverable=None
        if poison is None
        else Undeliverable(
            poison,
            last_commit_lsn=Lsn(int(stamp.commit_lsn[first - 1])) if first else INVALID_LSN,
            end_lsn=Lsn(int(end_lsn[first - 1])) if first else INVALID_LSN,
            n_transactions=first,
        ),
        left_out=left_out,
    )


def _first_bad_transaction(n: int, notes: Sequence[BadRows], skipped: npt.NDArray[np.bool_]) -> int:
    """Its index; n where there is none."""
    bad = np.zeros(n, np.bool_)
    for note in notes:
        bad[note.owner] = True
    found = np.flatnonzero(bad & ~skipped)
    return int(found[0]) if len(found) else n


def _poison_of(notes: Sequence[BadRows], transaction: int) -> Poison:
    found = [
        (int(note.lsn[note.owner == transaction][0]), note) for note in notes if transaction in note.owner
    ]
    lsn, note = min(found, key=lambda each: each[0])
    return Poison(Lsn(lsn), note.what, note.error)


def _at(keep: npt.NDArray[np.bool_], owner: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """``keep`` of each owner; False for -1."""
    return np.append(keep, False)[owner]


def _kept_tables(tables: Sequence[DecodedTable], keep: npt.NDArray[np.bool_]) -> tuple[DecodedTable, ...]:
    kept = []
    for table in tables:
        batch = table.batch.filter(pa.array(keep[table.batch.column(1).to_numpy()]))
        if batch.num_rows:
            kept.append(DecodedTable(table.relation, batch))
    return tuple(kept)
