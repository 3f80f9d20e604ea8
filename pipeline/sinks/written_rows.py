"""Rows that are in no file of the table yet, written to Parquet files: by the driver if they are few, else by Spark.

What is in memory of one table of a batch is a batch's size at most, unless a transaction was not streamed. So much the
driver writes sooner than Spark: 100 rows in 13 ms, 10,000 in 30, 100,000 in 71 (seven columns, flushed; measured at a
load of 11 on two cores). A job on a quiet machine takes 100 ms for 100 rows, and the rows go through the JVM. More
of it, and segments that do not fit the table, are Spark's, which has more cores than the driver.

Called by the Delta sink, on the driver; safe for several tables at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.batch_parts import TableParts
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.parquet_files import REPORT_SCHEMA, WriteOutput, WrittenFile
from xidstream.pipeline.spark.executor_tasks import WriteRows, WriteSegments
from xidstream.pipeline.spark.frames import SinkBatch

DRIVER_BYTES: Final = 64 << 20
"""The Arrow memory of one table that the driver writes: a batch's own size, and a row group's."""


def write_rows(
    parts: TableParts, batch: SinkBatch, target: WriteOutput, conform: Sequence[Conform]
) -> list[WrittenFile]:
    """The files with all rows of ``parts`` above the watermark; ``conform[i]`` is for the i-th layout."""
    files = []
    if parts.memory_bytes <= DRIVER_BYTES:
        files = _write_memory(parts, batch, target, conform)
        parts = parts.without([part for version in parts.versions for part in version.memory])
    if parts.n_rows:
        files += _run_job(parts, batch, target, conform)
    return files


def _write_memory(
    parts: TableParts, batch: SinkBatch, target: WriteOutput, conform: Sequence[Conform]
) -> list[WrittenFile]:
    files = target.files(conform[0].schema)
    for version, conform_version in zip(parts.versions, conform, strict=True):
        for rows in batch.memory_batches(version):
            files.write(conform_version(target.above(rows)))
    written = files.close()
    reach("memory_written")
    return written


def _run_job(
    parts: TableParts, batch: SinkBatch, target: WriteOutput, conform: Sequence[Conform]
) -> list[WrittenFile]:
    """The files that the finished Spark job reports; what other attempts wrote is not among them."""
    frames = []
    if parts.segments():
        rows = batch.segment_rows(parts, conform)
        frames.append(batch.map_groups(WriteSegments(target, rows), len(rows.groups), REPORT_SCHEMA))
    for version, conform_version in zip(parts.versions, conform, strict=True):
        if version.memory:
            function = WriteRows(target, conform_version)
            frames.append(batch.map_memory(version, function, REPORT_SCHEMA))
    reports = reduce(lambda left, right: left.unionAll(right), frames).collect()
    return [WrittenFile(*report) for report in reports]
