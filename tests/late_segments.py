"""Transactions whose rows wait in a storage, as Parquet whose commit is bound late: what the Delta sink links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tests.spark.support import COMMIT_US, internal
from xidstream.pipeline.exchange import Segment, SegmentPart
from xidstream.pipeline.parquet import CommitStamp, unbound, write_rows
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.storage.storage import Storage


def late_segment(
    storage: Storage,
    key: str,
    version: RelationVersion,
    rows: Sequence[dict[str, Any]] | pa.RecordBatch,
    *,
    xid: int = 7,
    first_seq: int = 0,
) -> Segment:
    batch = rows if isinstance(rows, pa.RecordBatch) else internal(version, rows, first_seq)
    with storage.create(key) as write:
        file = write_rows(write, version, [unbound(batch, version, xid)])
    return Segment(key, version, file)


def late_part(segment: Segment, commit_lsn: int) -> SegmentPart:
    return SegmentPart(segment, CommitStamp(commit_lsn, COMMIT_US + commit_lsn))
