"""Segments as DataFrames of Spark's own Parquet reader: for storages whose files every executor can open.

A segment is Parquet in the contract's layout, but for its commit's two constants: these are literals here, so a file
need not be filled in. ``count`` of ten million rows reads the footers alone, and a filter skips what the statistics
exclude. Rows never pass through Python.

What is verified, and by whom. The driver checks length and checksum of each file's end (``parquet.verify_tail``):
the footer tells where and how everything else is stored, and its statistics decide what is skipped. Spark verifies the
sum of each page that it reads. Nobody reads a whole file to check it first: that would take as long as the transaction
is large. (The sequencer did it for a prepared transaction.) Of 150 files with one flipped bit none gave a wrong row.

Considered: constants from the files, filled in at COMMIT (writes for every handler, and a reader would have to trust
them); a map from ``_xid`` to the constants (a search for each row, where a batch has few large transactions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa

from xidstream.pipeline import parquet
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.exchange import SegmentPart
from xidstream.pipeline.log_tables.batch_parts import TableParts, VersionParts
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.spark.parquet_frames import is_read_as_named, parquet_frame
from xidstream.pipeline.spark.spark_schemas import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_FRAMES: Final = 16
"""The most frames of one table: one for each transaction and layout. More are rather many small ones, and pyarrow reads
them in fewer tasks than a union of so many would take to plan."""

_OPTIONS: Final = {
    "parquet.page.verify-checksum.enabled": "true",
    # A session may say otherwise for files of its own; here it would hide what is missing.
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}

_DAMAGE: Final = (
    "CRC checksum verification failed",
    "is not a Parquet file",
    "does not exist",
    "ParquetDecodingException",
    "ParquetRuntimeException",
)
"""The words of Parquet's reader and of Spark's for damage, beside the name of the file."""


class LocalFiles(Protocol):
    """What is asked of the storage."""

    def local_path(self, key: str) -> str | None:
        """The path of an object on a file system; None in an object store."""
        ...

    def read_buffer(self, key: str, start: int = 0) -> pa.Buffer | None:
        """From the byte ``start`` on; None where there is no such object."""
        ...


def readable_natively(parts: TableParts, files: LocalFiles | None) -> list[SegmentPart]:
    """The segments of a table that ``native_frames`` can read: all, or none."""
    segments = [part for _, part in parts.segments()]
    if files is None or not segments or files.local_path(segments[0].segment.key) is None:
        return []
    if not all(is_read_as_named(schema.names) for schema in parts.schemas):
        return []
    frames = {(version, part.commit) for version, part in parts.segments()}
    return segments if len(frames) <= MOST_FRAMES else []


def native_frames(spark: SparkSession, version: VersionParts, files: LocalFiles) -> list[DataFrame]:
    """The segments of one layout, a frame for each transaction, in exactly ``spark_schema(version.schema)``.

    Raises SegmentCorrupt for a file that is missing, or whose end is not what was written, StorageFault where it
    cannot be read. What else is wrong comes up when the frame is used: see ``damage``.
    """
    by_commit: dict[CommitStamp, list[str]] = {}
    for part in version.segments:
        by_commit.setdefault(part.commit, []).append(_checked(part, files))
    return [_frame(spark, version.schema, commit, paths) for commit, paths in by_commit.items()]


def damage(error: BaseException, segments: Sequence[SegmentPart]) -> StorageFault | None:
    """The fault that Spark's reader found in one of ``segments``, if that is why an action failed."""
    text = str(error)
    for part in segments:
        key = part.segment.key
        if key in text:
            if any(sign in text for sign in _DAMAGE):
                return SegmentCorrupt(f"segment {key!r} is damaged or missing: Spark cannot read it")
            return StorageFault(f"segment {key!r} cannot be read by Spark")
    return None


def _checked(part: SegmentPart, files: LocalFiles) -> str:
    segment = part.segment
    data = files.read_buffer(segment.key, segment.file.head_bytes)
    if data is None:
        raise SegmentCorrupt(f"segment {segment.key!r} is missing")
    parquet.verify_tail(data, segment.file, name=segment.key)
    path = files.local_path(segment.key)
    assert path is not None, "readable_natively"
    return path


def _frame(spark: SparkSession, schema: pa.Schema, commit: CommitStamp, paths: list[str]) -> DataFrame:
    from pyspark.sql import functions

    constants = {
        # An int and no more: py4j writes an Lsn as it prints.
        "_commit_lsn": functions.lit(int(commit.commit_lsn)).cast("long"),
        "_commit_timestamp": functions.timestamp_micros(
            functions.lit(commit.commit_timestamp_us).cast("long")
        ),
    }
    stored = pa.schema([field for field in schema if field.name not in constants])
    frame = parquet_frame(spark, paths, stored, _OPTIONS)

    def column(name: str) -> Column:
        return constants[name].alias(name) if name in constants else functions.col(quoted(name))

    return frame.select(*[column(name) for name in schema.names])
