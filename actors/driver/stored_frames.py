"""Rows in Ray's object store for a Spark session that cannot reach it: any but RayDP's.

The driver fetches the objects, and Spark's executors get them in one of two ways. A few rows travel inside the function
that yields them. More are written to the storage, as they are, and each task reads its share there. What buffers have
spilled is in the storage anyway and is read as on RayDP, so what goes through here is at most what a buffer or a batch
may hold (``buffer_memory_bytes``, ``batch_bytes``), however large a transaction is.

Measured (docs/cluster.md): a few rows take 0.1 s longer than on RayDP in either way, because Python yields them. A full
batch takes as long through the storage as on RayDP, and more than twice as long inside the function: each task gets all
of it.

Rejected: to have the buffers write everything as segments (an object for each table of each small transaction, and a
commit would wait for it); Spark's own way from Arrow in the driver (its private interface differs between versions, and
the rows of a batch would travel inside the descriptions of tasks, through the driver's JVM).

What was written belongs to one batch and is deleted when that batch is reported (``forget``). The next epoch removes
what a crash leaves.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from xidstream.actors.runtime.object_store import stream_in
from xidstream.pipeline.exchange import ArrowRef
from xidstream.pipeline.log_tables.batch_parts import group_by_bytes
from xidstream.pipeline.spark.executor_tasks import GivenRows, StoredRows
from xidstream.pipeline.spark.spark_schemas import spark_schema
from xidstream.pipeline.storage.handed_rows import HandedRows, RowsReader, write_rows
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FEW_BYTES: Final = 256 << 10
"""Up to here rows travel inside the function. PySpark broadcasts a function from 1 MiB on, which costs more."""


class StoredFrames:
    """What ``SinkBatch`` asks for, of one epoch. Threads of one batch may call it at the same time."""

    def __init__(self, storage: Storage, layout: Layout) -> None:
        self._storage = storage
        self._layout = layout
        self._read_rows = RowsReader(storage.uri)
        self._numbers = itertools.count()
        self._stored: list[str] = []
        self._lock = threading.Lock()

    def frame(self, spark: SparkSession, schema: pa.Schema, refs: Sequence[ArrowRef]) -> DataFrame:
        """A lazy DataFrame of ``schema`` over ``refs``, rows in order. Raises ComponentLost, StorageFault."""
        streams = [_stream(ref) for ref in refs]
        if sum(map(len, streams)) <= FEW_BYTES:
            return spark.range(0, 1, 1, 1).mapInArrow(
                GivenRows(_joined(streams, schema)), spark_schema(schema)
            )
        groups = group_by_bytes(
            [len(stream) for stream in streams], int(spark.sparkContext.defaultParallelism)
        )
        rows = tuple(self._store([streams[i] for i in group]) for group in groups)
        function = StoredRows(self._read_rows, rows)
        return spark.range(0, len(rows), 1, len(rows)).mapInArrow(function, spark_schema(schema))

    def read(self, ref: ArrowRef) -> Iterator[pa.RecordBatch]:
        """The record batches of one stream, in this process. Raises ComponentLost."""
        with pa.ipc.open_stream(_stream(ref)) as reader:
            yield from reader

    def put(self, table: pa.Table) -> ArrowRef:
        """A stream that the driver made itself stays with it."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    def forget(self) -> None:
        """Delete what was stored, when the batch is reported. Raises StorageFault."""
        with self._lock:
            stored, self._stored = self._stored, []
        self._storage.delete(stored)

    def _store(self, streams: Sequence[bytes]) -> HandedRows:
        with self._lock:
            key = self._layout.handed_rows_key(next(self._numbers))
            self._stored.append(key)
        return write_rows(self._storage, key, streams)


def _stream(ref: ArrowRef) -> bytes:
    return bytes(stream_in(ref))


def _joined(streams: Sequence[bytes], schema: pa.Schema) -> bytes:
    if len(streams) == 1:
        return streams[0]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for stream in streams:
            with pa.ipc.open_stream(stream) as reader:
                for batch in reader:
                    writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
