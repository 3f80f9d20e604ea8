"""What a row took along when its key changed: the values that the stay it came from had last.

Each arrival is one row here: ``id`` (the position of its postimage, which names the stay), the stay that it departed
from, and what was known of that one's values. Where the former stay began by an arrival as well, its row is asked in
turn. All rows ask at once, and each then points as far back as the one that it asked did, so a chain of n key changes
takes ⌈log2 n⌉ rounds. Rounds run at plan time, and only if there are chains.

A *stay* is the time between a key's arrival and its departure. It is named by the position at which it began; null
means that it began in the base. One that began by an insert is no row here, nor one that arrived with all its values.
Whoever points at such a stay goes on to do so: null would mean the base, which may have a former life of the key. So
the rounds end when no row points at one that is here. They do end, in any log: each row points at an earlier position
than its own.

Each round is cut off from the plan before it (a local checkpoint): without that the plan would double each time. The
rows are those of changed keys that lack a value, no others. They live on the executors: a frame whose executors were
lost must be made again.

Called by ``last_rows`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xidstream.pipeline.changelog.internal_columns import KeyPart, key_as

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def inherited_values(
    arrivals: DataFrame, rows: DataFrame, parts: Sequence[KeyPart], toasted: Sequence[int]
) -> DataFrame:
    """One row for each of ``arrivals``: ``id``, ``h_n*`` (null: unknown), and in ``h_b*`` the key under which the base
    may have what is unknown, if ``h_from_base``: else the row came by an insert.

    ``rows``: the tail's, each with ``begin`` (place where its stay began; null in the base) and ``n*``, what its stay
    knew. Runs jobs.
    """
    from pyspark.sql import functions as f

    keys = [f"h_b{i}" for i in range(len(parts))]
    values = [f"h_n{i}" for i in toasted]
    came = arrivals.select(
        f.col("place").alias("id"), f.col("lsn").alias("a_lsn"), (f.col("seq") - 1).alias("a_seq")
    )
    left = rows.filter("kind = 'update_preimage'").select(
        f.col("lsn").alias("d_lsn"),
        f.col("seq").alias("d_seq"),
        f.col("begin").alias("parent"),
        *key_as(parts, "h_b"),
        *[f.col(f"n{i}").alias(f"h_n{i}") for i in toasted],
    )
    here = (f.col("a_lsn") == f.col("d_lsn")) & (f.col("a_seq") == f.col("d_seq"))
    known = came.join(left, here).select("id", "parent", *keys, *values).localCheckpoint()
    while True:
        earlier = known.select(*[f.col(name).alias(f"p_{name}") for name in known.columns])
        asks = f.col("parent") == f.col("p_id")
        if known.filter("parent is not null").join(earlier, asks).isEmpty():
            return known.select("id", *keys, *values, f.col("parent").isNull().alias("h_from_base"))
        found = f.col("p_id").isNotNull()
        pointer = ["parent", *keys]
        known = (
            known.join(earlier, asks, "left")
            .select(
                "id",
                *[f.when(found, f.col(f"p_{name}")).otherwise(f.col(name)).alias(name) for name in pointer],
                *[f.coalesce(name, f"p_{name}").alias(name) for name in values],
            )
            .localCheckpoint()
        )
