"""Parts of a query's ``lastProgress`` that Spark has no shape for: the journal and the snapshots.

The keys are in Spark's style, and docs/python.md names them.
"""

from __future__ import annotations

import datetime
from typing import Any

from xidstream.actors.supervision.run_status import RunStatus
from xidstream.pipeline.account.snapshots import SnapshotProgress


def journal_json(status: RunStatus) -> dict[str, Any] | None:
    """None where the journal holds nothing, or the sequencer has not answered."""
    journal, committed_us = status.account.journal, status.journal_from_us
    if journal is None or not journal.n_files:
        return None
    committed_at = datetime.datetime.fromtimestamp(committed_us / 1e6, datetime.timezone.utc)
    return {
        "files": journal.n_files,
        "bytes": journal.n_bytes,
        "transactions": journal.n_transactions,
        "firstCommitLsn": journal.first_commit_lsn,
        "firstCommitTimestamp": committed_at.isoformat() if committed_us else None,
        "isFull": journal.is_full,
    }


def snapshots_json(progress: SnapshotProgress) -> dict[str, Any]:
    return {
        "finished": progress.n_finished,
        "rows": progress.n_rows,
        "bytes": progress.n_bytes,
        "bytesRead": progress.n_bytes_read,
        "bytesPerS": progress.bytes_per_s,
        "secondsLeft": progress.seconds_left,
        "heldWalBytes": progress.held_wal_bytes,
        "tables": [
            {
                "table": table.table,
                "state": table.state,
                "ranges": table.n_ranges,
                "rangesRead": table.n_ranges_read,
                "rows": table.n_rows,
                "bytes": table.n_bytes,
                "bytesRead": table.n_bytes_read,
            }
            for table in progress.tables
        ],
    }
