"""One segment: an Arrow IPC *file*, written once, verified before it is read.

Of rows in internal layout, or of logical messages in ``rows.MESSAGES_SCHEMA``, without a commit's LSN in it yet.

The checksum is the CRC-32 of the whole file. It is computed from each piece on its way to the filesystem, so that there
is never a second copy. zlib's CRC-32 runs at 7 GB/s here, SHA-256 at 2 and Adler-32 at 4. It guards against accidents
(a torn write, a flipped bit), not against an attacker. It is written ``crc32:xxxxxxxx``, so that another algorithm can
follow without a new format.

The format is Arrow's file format (with a footer) and not its stream format: a truncated file cannot be mistaken for a
shorter one, even without the checksum. Segments are uncompressed by default: a local segment is then read in place from
the page cache, and the writer is the bottleneck (two cores, beside the walsender). ``lz4`` and ``zstd`` are for slower
storage.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pyarrow as pa

from xidstream.pipeline import rows
from xidstream.pipeline.errors import ConfigError, SegmentCorrupt, UsageError
from xidstream.pipeline.exchange import MessageFile, Segment
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.segments.storage import Storage, Write, self_contained

Compression = Literal["lz4", "zstd"]
_ALGORITHM: Final = "crc32"


def checksum_of(data: Any, start: int = 0) -> str:
    """The checksum of ``data``, which is anything with the buffer protocol."""
    return f"{_ALGORITHM}:{zlib.crc32(data, start):08x}"


def write_segment(
    storage: Storage,
    key: str,
    relation: RelationVersion,
    batches: Sequence[pa.RecordBatch],
    *,
    compression: Compression | None = None,
) -> Segment:
    """Write ``batches``, all in ``rows.internal_schema(relation)``, as one object. The caller keeps them.

    The write is atomic but not flushed (``Storage.sync`` flushes). Raises StorageFault; then there is no such object.
    Raises UsageError for a batch of another schema, before anything is written.
    """
    if compression not in (None, "lz4", "zstd"):
        raise ConfigError(f"compression of segments must be lz4, zstd or none, got {compression!r}")
    schema = rows.internal_schema(relation)
    for batch in batches:
        if not batch.schema.equals(schema):
            raise UsageError(f"segment {key!r}: a batch is not in the layout of table {relation.name}")
    n_rows, n_bytes, checksum = _write(storage, key, schema, batches, compression)
    return Segment(key, relation, n_rows, n_bytes, checksum)


def shorten_segment(storage: Storage, segment: Segment, end: int, key: str) -> Segment:
    """Write the rows of ``segment`` with ordinals below ``end``, of which there is one at least, as a segment of its
    own. Raises StorageFault and SegmentCorrupt; ``segment`` stays as it is."""
    kept = []
    for batch in SegmentReader(storage.uri)(segment):
        if batch.num_rows and rows.first_seq(batch) < end:
            kept.append(rows.up_to(batch, end))
    return write_segment(storage, key, segment.relation, kept)


def write_messages(storage: Storage, key: str, batches: Sequence[pa.RecordBatch]) -> MessageFile:
    """The same for logical messages, all in ``rows.MESSAGES_SCHEMA``."""
    return MessageFile(key, *_write(storage, key, rows.MESSAGES_SCHEMA, batches, None))


def _write(
    storage: Storage,
    key: str,
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    compression: Compression | None,
) -> tuple[int, int, str]:
    """The number of rows, the bytes and the checksum of what is written."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with storage.create(key) as write:
        sink = _Checksumming(write)
        with pa.PythonFile(sink, mode="w") as file, pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
    return sum(b.num_rows for b in batches), sink.n_bytes, f"{_ALGORITHM}:{sink.crc:08x}"


class _Checksumming:
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
    """``reader(segment)`` yields the record batches of a segment, or of a file of messages, in the order written.

    It is picklable, because it is sent to Spark's executors. It verifies length, checksum and schema before the first
    batch, and raises SegmentCorrupt. A missing object raises SegmentCorrupt too, because retrying cannot bring it back.
    Batches of a local uncompressed segment are read-only views of the mapped file. They stay valid after the object is
    deleted.
    """

    storage_uri: str = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_uri", self_contained(self.storage_uri, os.environ))

    def __call__(self, segment: Segment | MessageFile) -> Iterator[pa.RecordBatch]:
        data = _storage(self.storage_uri, os.getpid()).read_buffer(segment.key)
        _verify(segment, data)
        try:
            reader = pa.ipc.open_file(data)
            if not reader.schema.equals(segment.schema):
                whose = (
                    f"table {segment.relation.name}" if isinstance(segment, Segment) else "logical messages"
                )
                raise SegmentCorrupt(f"segment {segment.key!r} is not in the internal layout of {whose}")
            n_rows = 0
            for i in range(reader.num_record_batches):
                batch = reader.get_batch(i)
                n_rows += batch.num_rows
                yield batch
        except (pa.ArrowException, OSError) as error:
            raise SegmentCorrupt(f"segment {segment.key!r} is not an Arrow file") from error
        if n_rows != segment.n_rows:
            raise SegmentCorrupt(f"segment {segment.key!r} has {n_rows} rows, {segment.n_rows} were written")


def _verify(segment: Segment | MessageFile, data: pa.Buffer | None) -> None:
    if data is None:
        raise SegmentCorrupt(f"segment {segment.key!r} is missing")
    if segment.checksum is None:
        return
    if data.size != segment.n_bytes:
        raise SegmentCorrupt(f"segment {segment.key!r} has {data.size} bytes, {segment.n_bytes} were written")
    found = checksum_of(data)
    if found != segment.checksum:
        raise SegmentCorrupt(f"segment {segment.key!r} has checksum {found}, written with {segment.checksum}")


@functools.lru_cache(maxsize=8)
def _storage(uri: str, pid: int) -> Storage:
    """One client for each process: executors read many segments, and clients do not survive a fork."""
    del pid
    return Storage(uri)
