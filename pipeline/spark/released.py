"""What Spark's executors run to read a batch: spilled segments put through ``rows.release``, messages, or given bytes.

Each class here is a function for ``DataFrame.mapInArrow`` over ``spark.range``: the rows that come in are
numbers of groups, one per partition, and what the function needs travels in its pickled fields. So it
imports pyarrow alone, and a field holds the parts of one table, not of the batch.

Everything is streamed record batch by record batch: a task holds one at a time, however large the segment.
Length and checksum are ``read_segment``'s to verify; the row counts are verified here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.exchange import MessageFile, Segment, SegmentPart, SpilledMessages
from xidstream.pipeline.rows import internal_schema, release, stamp_messages
from xidstream.pipeline.spark.placement import Conform

ReadSegment = Callable[[Segment | MessageFile], Iterator[pa.RecordBatch]]
"""Picklable; yields record batches in the file's ``schema``, raises SegmentCorrupt and StorageFault."""


def released(part: SegmentPart, read_segment: ReadSegment) -> Iterator[pa.RecordBatch]:
    """The rows of one spilled segment in contract layout. Raises SegmentCorrupt where they are not as many as were
    written, StorageFault where they cannot be read."""
    segment = part.segment
    # A transaction's stamp has one entry; only a plain block's rows index theirs.
    plain = len(part.stamp.commit_lsn) > 1
    expected = internal_schema(segment.relation)
    n_read = 0
    with _reading(segment):
        for batch in read_segment(segment):
            if not batch.schema.equals(expected):
                raise SegmentCorrupt(f"segment {segment.key} has not the columns of {segment.relation.name}")
            n_read += batch.num_rows
            if batch.num_rows:
                yield release(batch, segment.relation, part.stamp, plain=plain)
    if n_read != segment.n_rows:
        raise SegmentCorrupt(f"segment {segment.key} gave {n_read} rows where {segment.n_rows} are recorded")


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
            f"segment {file.key} cannot be read: {error.strerror or type(error).__name__}"
        ) from error
    except pa.ArrowInvalid as error:
        raise SegmentCorrupt(f"segment {file.key} is not an Arrow IPC file of ours") from error


@dataclass(frozen=True)
class SegmentRows:
    """The rows of one table's segments, conformed. ``versions[i]`` indexes ``conform`` for ``parts[i]``."""

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
    """The logical messages of a batch that are in storage; one task for each of ``groups``."""

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
    """Rows that the driver holds (transactions, a few messages): the bytes of one Arrow IPC stream."""

    stream: bytes

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            if batch.num_rows:
                with pa.ipc.open_stream(self.stream) as reader:
                    yield from reader
