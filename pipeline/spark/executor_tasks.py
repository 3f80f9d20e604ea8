"""The tasks of Spark's executors: reading a batch's rows with pyarrow, and writing them to Parquet files.

Each class here is a function for ``DataFrame.mapInArrow``, and all that it needs travels in its pickled fields. So this
module imports pyarrow alone, and a field holds the parts of one table, not those of the batch. The functions that read
are called over ``spark.range``: the rows that come in are numbers of groups, one for each partition.

==================  ================================================================
``SegmentRows``     spilled segments, in contract layout
``MessageRows``     logical messages that are in storage
``GivenRows``       rows that the driver holds, as bytes
``StoredRows``      rows that the driver has put into the storage (``actors.driver.stored_frames``)
``ReadProbe``       nothing: it shows whether an executor has this package and reaches the storage
``WriteRows``       writes the rows of a DataFrame to Parquet files of a Delta table
``WriteSegments``   reads segments and writes them, so that no row enters the JVM
==================  ================================================================

Everything is streamed record batch by record batch: a task holds one at a time, however large the segment is.
``read_segment`` verifies what a file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, known_reason
from xidstream.pipeline.exchange import MessageFile, Segment, SegmentPart, SpilledMessages
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.parquet_files import WriteOutput, report_of
from xidstream.pipeline.schema.rows import stamp_messages

ReadSegment = Callable[[SegmentPart | MessageFile], Iterator[pa.RecordBatch]]
"""Picklable; yields rows in contract layout, or logical messages as they were written. Verifies length, checksum and
number of rows; raises SegmentCorrupt and StorageFault."""


def released(part: SegmentPart, read_segment: ReadSegment) -> Iterator[pa.RecordBatch]:
    """The rows of one spilled segment in contract layout. Raises SegmentCorrupt if they are not what was written, and
    StorageFault if they cannot be read."""
    with _reading(part.segment):
        yield from read_segment(part)


def released_messages(part: SpilledMessages, read_segment: ReadSegment) -> Iterator[pa.RecordBatch]:
    """The logical messages of one file, complete. Raises what ``released`` raises."""
    n_read = 0
    with _reading(part.file):
        for batch in read_segment(part.file):
            n_read += batch.num_rows
            if part.commit_lsn is None or part.xid is None:
                yield batch
            else:
                yield stamp_messages(batch, part.commit_lsn, part.xid)
    if n_read != part.file.n_rows:
        raise SegmentCorrupt(
            f"segment {part.file.key} gave {n_read} messages where {part.file.n_rows} are recorded"
        )


@contextmanager
def _reading(file: Segment | MessageFile) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFault(
            f"segment {file.key} cannot be read: {known_reason(error) or type(error).__name__}"
        ) from error
    except pa.ArrowInvalid as error:
        raise SegmentCorrupt(f"segment {file.key} is not a file that xidstream wrote") from error


@dataclass(frozen=True)
class SegmentRows:
    """The rows of one table's segments, conformed. ``versions[i]`` is the index into ``conform`` for ``parts[i]``."""

    read_segment: ReadSegment
    parts: tuple[SegmentPart, ...]
    versions: tuple[int, ...]
    conform: tuple[Conform, ...]
    groups: tuple[tuple[int, ...], ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index in self.part_indexes(numbers):
            conform = self.conform[self.versions[index]]
            for rows in released(self.parts[index], self.read_segment):
                yield conform(rows)

    def part_indexes(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[int]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.groups[number]


@dataclass(frozen=True)
class MessageRows:
    """The logical messages of a batch that are in storage, with one task for each of ``groups``."""

    read_segment: ReadSegment
    parts: tuple[SpilledMessages, ...]
    groups: tuple[tuple[int, ...], ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                for index in self.groups[number]:
                    yield from released_messages(self.parts[index], self.read_segment)


@dataclass(frozen=True)
class GivenRows:
    """Rows that the driver holds (transactions, a few messages), as the bytes of one Arrow IPC stream."""

    stream: bytes

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            if batch.num_rows:
                with pa.ipc.open_stream(self.stream) as reader:
                    yield from reader


@dataclass(frozen=True)
class StoredRows:
    """The rows of one DataFrame. The numbers that come in are indexes into ``objects``. ``read`` must pickle."""

    read: Callable[[Any], Iterator[pa.RecordBatch]]
    objects: tuple[Any, ...]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.read(self.objects[number])


@dataclass(frozen=True)
class ReadProbe:
    """Reads one object, whatever comes in. So it shows whether an executor has this package and reaches the storage."""

    read: Callable[[Any], Iterator[pa.RecordBatch]]
    probe: Any

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for _ in self.read(self.probe):
                pass
            yield batch


@dataclass(frozen=True)
class WriteRows:
    """Writes a DataFrame's record batches (contract layout of one version)."""

    target: WriteOutput
    conform: Conform

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = self.target.files(self.conform.schema)
        for batch in batches:
            files.write(self.conform(self.target.above(batch)))
        reports = report_of(files.close())
        reach("parquet_written")
        yield reports


@dataclass(frozen=True)
class WriteSegments:
    """Reads, releases and writes segments, so that the JVM sees no row. It is called as ``SegmentRows`` is."""

    target: WriteOutput
    rows: SegmentRows

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = self.target.files(self.rows.conform[0].schema)
        for index in self.rows.part_indexes(numbers):
            conform = self.rows.conform[self.rows.versions[index]]
            for batch in released(self.rows.parts[index], self.rows.read_segment):
                files.write(conform(self.target.above(batch)))
        reports = report_of(files.close())
        reach("parquet_written")
        yield reports
