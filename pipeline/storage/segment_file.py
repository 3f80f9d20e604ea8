"""Stored rows and messages: each file is written once, and verified before it is read.

Rows are Parquet whose commit is bound late (``pipeline.parquet``): the table's own file, once the transaction has
committed. Logical messages are Arrow IPC *files* in ``rows.MESSAGES_SCHEMA``, without a commit's LSN in them yet: no
table names them, and they are read once. Both formats end with a footer: a truncated file cannot be mistaken for a
shorter one, even without the checksum.

The checksum is the CRC-32 of the whole file. It is computed from each chunk on its way to the filesystem, so that there
is never a second copy. zlib's CRC-32 runs at 7 GB/s here, SHA-256 at 2 and Adler-32 at 4. It guards against accidents
(a torn write, a flipped bit), not against an attacker. It is written ``crc32:xxxxxxxx``, so that another algorithm can
follow without a new format.

A segment on a local disk is on its way there when it is closed. At COMMIT only a few bytes of it are left to flush.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from xidstream.pipeline import parquet
from xidstream.pipeline.errors import SegmentCorrupt, UsageError
from xidstream.pipeline.exchange import MessageFile, Segment, SegmentPart
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.schema import RelationVersion, rows
from xidstream.pipeline.storage.storage import Storage, Write, self_contained

_ALGORITHM: Final = "crc32"


def checksum_of(data: Any, start: int = 0) -> str:
    """The checksum of ``data``, which is anything with the buffer protocol."""
    return f"{_ALGORITHM}:{zlib.crc32(data, start):08x}"


def write_segment(
    storage: Storage, key: str, relation: RelationVersion, xid: int, batches: Sequence[pa.RecordBatch]
) -> Segment:
    """Write ``batches``, all in ``rows.internal_schema(relation)`` and in the order of their ordinals, as one object.
    The caller keeps them. ``xid`` is the top-level one.

    The write is atomic but not flushed (``Storage.sync`` flushes). Raises StorageFault; then there is no such object.
    Raises UsageError for a batch of another schema, before anything is written.
    """
    schema = rows.internal_schema(relation)
    for batch in batches:
        if not batch.schema.equals(schema):
            raise UsageError(f"segment {key!r}: a batch is not in the layout of table {relation.name}")
    reach("writing_segment")
    with storage.create(key) as write:
        unbound = (parquet.unbound(batch, relation, xid) for batch in batches)
        file = parquet.write_rows(write, relation, unbound)
    reach("segment_written")
    return Segment(key, relation, file)


def write_side_by_side(
    storage: Storage,
    xid: int,
    chunks: Sequence[tuple[str, RelationVersion, Sequence[pa.RecordBatch]]],
    n_threads: int,
) -> list[Segment]:
    """A segment of each chunk: key, relation, batches. Raises as ``write_segment``, when all have come to an end."""
    with ThreadPoolExecutor(n_threads, thread_name_prefix="segments") as threads:
        writing = [
            threads.submit(write_segment, storage, key, relation, xid, batches)
            for key, relation, batches in chunks
        ]
    return [written.result() for written in writing]


def shorten_segment(storage: Storage, segment: Segment, end: int, key: str) -> Segment:
    """Write the rows of ``segment`` with ordinals below ``end``, of which there is one at least, as a segment of its
    own. Raises StorageFault and SegmentCorrupt; ``segment`` stays as it is."""
    data = stored_object(storage, segment.key)
    with storage.create(key) as write:
        file = parquet.rewrite_head(data, segment.relation, segment.file, end, write, name=segment.key)
    return Segment(key, segment.relation, file)


def write_messages(storage: Storage, key: str, batches: Sequence[pa.RecordBatch]) -> MessageFile:
    """Write logical messages, all in ``rows.MESSAGES_SCHEMA``; otherwise as ``write_segment``."""
    with storage.create(key) as write:
        sink = Checksumming(write)
        with (
            pa.PythonFile(sink, mode="w") as file,
            pa.ipc.new_file(file, rows.MESSAGES_SCHEMA) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
    n_rows = sum(batch.num_rows for batch in batches)
    return MessageFile(key, n_rows, sink.n_bytes, f"{_ALGORITHM}:{sink.crc:08x}")


class Checksumming:
    """The file object that Arrow's writer writes to."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.n_bytes = 0
        self.crc = 0
        self.closed = False

    def write(self, data: Any) -> int:
        n = memoryview(data).nbytes
        self._write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.n_bytes += n
        return n

    def tell(self) -> int:
        return self.n_bytes

    def flush(self) -> None:
        """Does nothing, because nothing is held here."""

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class SegmentReader:
    """``reader(part)`` yields the rows of a segment in contract layout; ``reader(file)`` logical messages as written.

    It is picklable, because it is sent to Spark's executors. It verifies length and checksum before the first batch,
    and raises SegmentCorrupt. A missing object raises SegmentCorrupt too, because retrying cannot bring it back.
    """

    storage_uri: str = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_uri", self_contained(self.storage_uri, os.environ))

    def __call__(self, stored: SegmentPart | MessageFile) -> Iterator[pa.RecordBatch]:
        storage = storage_of_process(self.storage_uri, os.getpid())
        if isinstance(stored, MessageFile):
            return read_messages(storage, stored)
        return read_segment(storage, stored)


def read_segment(storage: Storage, part: SegmentPart) -> Iterator[pa.RecordBatch]:
    segment = part.segment
    data = stored_object(storage, segment.key)
    yield from parquet.read_rows(data, segment.relation, segment.file, part.commit, name=segment.key)


def read_messages(storage: Storage, file: MessageFile) -> Iterator[pa.RecordBatch]:
    """Batches of a local file are read-only views of it. They stay valid after the object is deleted."""
    data = stored_object(storage, file.key)
    verify_messages(file, data)
    n_rows = 0
    try:
        reader = pa.ipc.open_file(data)
        if not reader.schema.equals(rows.MESSAGES_SCHEMA):
            raise SegmentCorrupt(f"segment {file.key!r} has not the columns that were written")
        for i in range(reader.num_record_batches):
            batch = reader.get_batch(i)
            n_rows += batch.num_rows
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise SegmentCorrupt(f"segment {file.key!r} is not an Arrow file") from error
    if n_rows != file.n_rows:
        raise SegmentCorrupt(f"segment {file.key!r} has {n_rows} rows, {file.n_rows} were written")


def stored_object(storage: Storage, key: str) -> pa.Buffer:
    """Raises SegmentCorrupt where it is missing."""
    data = storage.read_buffer(key)
    if data is None:
        raise SegmentCorrupt(f"segment {key!r} is missing")
    return data


def verify_messages(file: MessageFile, data: pa.Buffer) -> None:
    """Raises SegmentCorrupt unless ``data`` is the file as written."""
    if data.size != file.n_bytes:
        raise SegmentCorrupt(f"segment {file.key!r} has {data.size} bytes, {file.n_bytes} were written")
    found = checksum_of(data)
    if found != file.checksum:
        raise SegmentCorrupt(f"segment {file.key!r} has checksum {found}, written with {file.checksum}")


@functools.lru_cache(maxsize=8)
def storage_of_process(uri: str, pid: int) -> Storage:
    """The process's client of the storage at ``uri``: executors read many objects, and clients do not survive a fork.
    ``pid``: of the process that asks."""
    del pid
    return Storage(uri)
