"""What outlives its transaction: content that a repeated COMMIT PREPARED needs, and the figures of what went by."""

from __future__ import annotations

import pyarrow as pa

from xidstream.pipeline.commits.delivered import Delivered
from xidstream.pipeline.commits.prepared import FinishedPrepares
from xidstream.pipeline.exchange import PreparedTransaction, Sealed, Segment
from xidstream.pipeline.parquet import RowFile
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.schema import rows
from xidstream.pipeline.schema.relation import Column, RelationVersion, ReplicaIdentity

T = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))


def prepared(*keys: str) -> PreparedTransaction:
    segments = tuple(Segment(key, T, RowFile(1, 10, "0", 0, ())) for key in keys)
    return PreparedTransaction(Xid(700), "g", Lsn(10), Lsn(14), True, None, segments)


def sealed(*commits: tuple[int, int], n_rows: int = 0) -> Sealed:
    """Of transactions with these commit LSNs and timestamps in microseconds."""
    values = [
        {
            "xid": 1,
            "commit_lsn": lsn,
            "end_lsn": lsn + 4,
            "commit_timestamp": at_us,
            "gid": None,
            "origin": None,
            "streamed": False,
            "rows": 1,
            "tables": ["public.t"],
        }
        for lsn, at_us in commits
    ]
    return Sealed(pa.RecordBatch.from_pylist(values, schema=rows.TRANSACTIONS_SCHEMA), (), (), (), n_rows, 0)


def test_segments_of_a_commit_prepared_are_kept_until_it_is_confirmed() -> None:
    finished = FinishedPrepares()
    finished.add(5, prepared("a", "b"))
    assert finished.without_kept(["a", "other", "b"]) == ["other"]
    assert finished.due(4) == {}
    due = finished.due(5)
    assert list(due) == [5]
    # A COMMIT PREPARED that is repeated in between finds its content still.
    assert finished.without_kept(["a"]) == []
    finished.forget(due)
    assert finished.without_kept(["a"]) == ["a"]
    assert finished.due(5) == {}


def test_what_finishes_while_others_are_written_down_is_not_forgotten_with_them() -> None:
    finished = FinishedPrepares()
    finished.add(1, prepared("a"))
    due = finished.due(2)
    finished.add(2, prepared("b"))
    finished.forget(due)
    assert list(finished.due(2)) == [2]


def test_batches_are_counted_and_the_last_commit_is_that_of_the_last_transaction() -> None:
    delivered = Delivered()
    delivered.add_batch([sealed((10, 1_000), (20, 2_000), n_rows=7), sealed((30, 3_000), n_rows=1)])
    assert delivered == Delivered(8, 3, 1, Lsn(30), 3_000)


def test_a_batch_of_what_left_no_row_counts_and_moves_no_commit() -> None:
    delivered = Delivered()
    delivered.add_batch([sealed()])
    assert delivered == Delivered(n_batches=1, last_commit_lsn=INVALID_LSN)
    delivered.add_batch([sealed((10, 1_000), n_rows=1), sealed()])
    assert (delivered.n_batches, delivered.last_commit_lsn) == (2, Lsn(10))
