"""Rows of a batch on their way to a Spark that cannot reach Ray's object store: the driver writes, executors read.

One object holds Arrow IPC streams, one after the other, byte for byte as the buffers made them. It belongs to one batch
of one epoch and is needed until that batch is done: nothing about it is durable, because the slot still has its rows.
So it is not flushed, and only its length is verified. What a dead epoch leaves is removed with its segments
(``cleanup``).

Called by ``actors.driver.stored_frames``; the reader is sent to Spark's executors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.storage.segment_file import storage_of_process
from xidstream.pipeline.storage.storage import Storage, self_contained


@dataclass(frozen=True)
class HandedRows:
    """The name of one object."""

    key: str
    n_bytes: int


def write_rows(storage: Storage, key: str, streams: Iterable[bytes]) -> HandedRows:
    """Raises StorageFault; then there is no object."""
    n_bytes = 0
    with storage.create(key) as write:
        for stream in streams:
            write(stream)
            n_bytes += len(stream)
    return HandedRows(key, n_bytes)


@dataclass(frozen=True)
class RowsReader:
    """``reader(rows)`` yields the record batches of one object, in the order written. Picklable.

    Raises StorageFault, and SegmentCorrupt where the object is missing or is not what was written.
    """

    storage_uri: str = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_uri", self_contained(self.storage_uri, os.environ))

    def __call__(self, rows: HandedRows) -> Iterator[pa.RecordBatch]:
        data = storage_of_process(self.storage_uri, os.getpid()).read_buffer(rows.key)
        if data is None or data.size != rows.n_bytes:
            found = "is missing" if data is None else f"has {data.size} bytes of {rows.n_bytes}"
            raise SegmentCorrupt(f"object {rows.key!r} {found}")
        source = pa.BufferReader(data)
        while source.tell() < data.size:
            with pa.ipc.open_stream(source) as reader:
                yield from reader
