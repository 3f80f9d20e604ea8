"""``SnapshotBounds.contains`` as an expression of Spark: rows of the stream that a table's snapshot has already.

A function gets a table's snapshot first and then the changes after it. The stream begins earlier than the snapshot was
taken, so it repeats what the snapshot contains. A fold of Delta tables leaves that out by itself; for a function it is
left out here. Tests hold this expression against the rule in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xidstream.pipeline.snapshot.bounds import SnapshotBounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_EPOCH = 1 << 32
_HALF = 1 << 31


def without_contained(frame: DataFrame, bounds: SnapshotBounds) -> DataFrame:
    """The rows of ``frame`` (contract layout) whose transactions the snapshot does not contain."""
    from pyspark.sql import functions as f

    near = f.col("_xid") + f.lit(bounds.xmax - bounds.xmax % _EPOCH)
    wide = (
        f.when(near - f.lit(bounds.xmax) > _HALF, near - f.lit(_EPOCH))
        .when(f.lit(bounds.xmax) - near > _HALF, near + f.lit(_EPOCH))
        .otherwise(near)
    )
    lsn = f.col("_commit_lsn")
    contained = (lsn <= f.lit(int(bounds.valid_from))) & (wide < f.lit(bounds.xmax))
    if bounds.xip:
        contained &= ~wide.isin(list(bounds.xip))
    return frame.filter((lsn > f.lit(int(bounds.whole_upto))) & ~contained)
