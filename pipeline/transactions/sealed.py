"""What a transaction that has ended is to the sequencer, beside its rows: its line, or why there is none.

Called by ``transaction``, and by the sequencer for ends that no buffer has content of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pyarrow as pa

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import Sealed, TransactionEnd, Undeliverable
from xidstream.pipeline.parked import BadTable, SkippedTransaction
from xidstream.pipeline.schema import rows


def transaction_row(
    end: TransactionEnd,
    n_rows: int,
    tables: Iterable[str],
    *,
    with_messages: bool,
    bad_tables: Iterable[BadTable] = (),
) -> pa.RecordBatch:
    """One row of ``rows.TRANSACTIONS_SCHEMA``, or none if the transaction left nothing. It tells of rows of
    ``bad_tables``, too, which are not in ``n_rows``."""
    bad = tuple(bad_tables)
    n_rows += sum(each.n_changes for each in bad)
    tables = {*tables, *(each.table for each in bad)}
    values: list[dict[str, object]] = []
    if n_rows or with_messages:
        values.append(
            {
                "xid": int(end.xid),
                "commit_lsn": int(end.commit_lsn),
                "end_lsn": int(end.end_lsn),
                "commit_timestamp": end.commit_timestamp_us,
                "gid": end.gid,
                "origin": end.origin,
                "streamed": end.streamed,
                "rows": n_rows,
                "tables": sorted(tables),
            }
        )
    return pa.RecordBatch.from_pylist(values, schema=rows.TRANSACTIONS_SCHEMA)


def empty_unit(end: TransactionEnd) -> Sealed:
    """A transaction that left no row."""
    return Sealed(transaction_row(end, 0, (), with_messages=False), (), (), (), 0, 0)


def skipped_unit(end: TransactionEnd, relids: Iterable[int] | None = None) -> Sealed:
    """A skipped transaction. ``relids``: the tables of its rows; None where they are not known."""
    known = None if relids is None else tuple(sorted(set(relids)))
    return dataclasses.replace(empty_unit(end), skipped=(SkippedTransaction(end.xid, end.commit_lsn, known),))


def undeliverable_unit(error: XidstreamError) -> Sealed:
    """A transaction that cannot be delivered."""
    none = pa.RecordBatch.from_pylist([], schema=rows.TRANSACTIONS_SCHEMA)
    return Sealed(none, (), (), (), 0, 0, undeliverable=Undeliverable(error))
