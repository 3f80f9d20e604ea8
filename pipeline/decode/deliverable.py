"""The part of a plain block that can be delivered: all before its first bad transaction, except skipped ones.

A plain block holds many transactions, all of them committed. One that cannot be delivered must not hold back those
before it, and nothing after it may be released. So the block is cut off there, and the error takes its place in the
order of commits (``exchange.Undeliverable``).

Where tables are parked (``pipeline.parked``) not the block is cut off, but the table: its rows from its first bad
transaction on are left out, and the sequencer hears of it (``exchange.Sealed.bad_tables``). A table of which no row can
be delivered is always parked.

``blocks`` calls this for the rare block that has a bad value, or a skipped transaction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.decode.table_decoder import DecodedTable
from xidstream.pipeline.exchange import Undeliverable
from xidstream.pipeline.parked import BadTable, SkippedTransaction
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.poison import BadRows, Poison, notes_by_table

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
    parks: bool = False,
) -> DecodedPlainBlock:
    """``block`` with ``undeliverable`` or, where it ``parks``, ``bad_tables``; with ``skipped``; and without the rows
    that these exclude. What stands in ``transactions`` counts rows of bad tables, too.

    ``end_lsn: int64[n]`` and ``skipped: bool[n]`` are of each transaction. ``message_owner: int64[m]`` and
    ``is_transactional: bool[m]`` are of each logical message, in stream order. Its owner is the index of its
    transaction; of a message between transactions it is the one before it, or -1.
    """
    stamp = block.stamp
    n = len(stamp.xid)
    ending = [] if parks else [note for note in notes if not note.is_table]
    first = _first_bad_transaction(n, ending, skipped)
    parking = [note for note in notes if parks or note.is_table]
    bad = _bad_tables(block, parking, skipped, first)
    poison = None
    if first < n:
        xid, commit_lsn = int(stamp.xid[first]), int(stamp.commit_lsn[first])
        poison = _poison_of(ending, first).of(Xid(xid), Lsn(commit_lsn))
    keep = (np.arange(n) < first) & ~skipped
    kept_messages = np.where(is_transactional, _at(keep, message_owner), message_owner < first)
    skipped_transactions = _skipped_transactions(block, notes, np.flatnonzero(skipped[:first]))
    tables = _kept_tables(block.tables, keep, {relid: begin for relid, (begin, _) in bad.items()})
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
        skipped=skipped_transactions,
        bad_tables=tuple(table for _, table in bad.values()),
    )


def _bad_tables(
    block: DecodedPlainBlock, notes: Sequence[BadRows], skipped: npt.NDArray[np.bool_], end: int
) -> dict[int, tuple[int, BadTable]]:
    """By relid: the index of its first bad transaction, and what is left out from there on; all before ``end``."""
    found = {}
    n = len(skipped)
    rows_of = {table.relation.relid: _owner(table) for table in block.tables}
    for relid, of_table in notes_by_table(notes).items():
        first = _first_bad_transaction(n, of_table, skipped)
        if first >= end:
            continue
        keep = (np.arange(n) >= first) & (np.arange(n) < end) & ~skipped
        n_changes = int(keep[rows_of[relid]].sum()) if relid in rows_of else 0
        n_changes += sum(int(note.n_rows[keep[note.owner]].sum()) for note in of_table if note.is_table)
        poison = _poison_of(of_table, first)
        xid, commit_lsn = int(block.stamp.xid[first]), int(block.stamp.commit_lsn[first])
        table = of_table[0].table
        found[relid] = (
            first,
            BadTable(relid, table, poison.lsn, poison.what, n_changes, Xid(xid), Lsn(commit_lsn)),
        )
    return found


def _skipped_transactions(
    block: DecodedPlainBlock, notes: Sequence[BadRows], skipped: npt.NDArray[np.int64]
) -> tuple[SkippedTransaction, ...]:
    """``skipped``: the indexes of transactions, int64[k]."""
    if not len(skipped):
        return ()
    owners = [(table.relation.relid, _owner(table)) for table in block.tables]
    owners += [(note.relid, note.owner) for note in notes]
    return tuple(
        SkippedTransaction(
            Xid(int(block.stamp.xid[i])),
            Lsn(int(block.stamp.commit_lsn[i])),
            tuple(sorted({relid for relid, owner in owners if (owner == i).any()})),
        )
        for i in skipped
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


def _owner(table: DecodedTable) -> npt.NDArray[np.uint32]:
    owner: npt.NDArray[np.uint32] = table.batch.column(1).to_numpy()
    return owner


def _kept_tables(
    tables: Sequence[DecodedTable], keep: npt.NDArray[np.bool_], ends: Mapping[int, int]
) -> tuple[DecodedTable, ...]:
    """``ends``: by relid, the transaction from which on nothing of that table is kept."""
    kept = []
    for table in tables:
        owner = _owner(table)
        stays = keep[owner] & (owner < ends.get(table.relation.relid, len(keep)))
        batch = table.batch.filter(pa.array(stays))
        if batch.num_rows:
            kept.append(DecodedTable(table.relation, batch))
    return tuple(kept)
