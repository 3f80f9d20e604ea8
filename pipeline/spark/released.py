"""What Spark's executors run to read a batch with pyarrow: spilled segments, messages, or rows given as bytes.

Each class here is a function for ``DataFrame.mapInArrow`` over ``spark.range``. The rows that come in are numbers of
groups, one for each partition, and all else that the function needs travels in its pickled fields. So it imports
pyarrow alone, and a field holds the parts of one table, not those of the batch.

Everything is streamed record batch by record batch: a task holds one at a time, however large the segment is.
``read_segment`` verifies what a file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.exchange import MessageFile, Segment, SegmentPart, SpilledMessages
from xidstream.pipeline.rows import stamp_messages
from xidstream.pipeline.spark.placement import Conform

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
            f"segment {file.key} cannot be read: {error.strerror or type(error).__name__}"
        ) from error
    except pa.ArrowInvalid as error:
        raise SegmentCorrupt(f"segment {file.key} is not a file of ours") from error


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
