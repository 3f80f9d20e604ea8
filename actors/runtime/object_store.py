"""Arrow tables into Ray's object store and back, in the one form that RayDP's executors read.

At a commit a buffer puts here the rows that the transaction still has in memory. A few of them it does not put: the
stream itself stands in the place of the reference, and travels with what names it (``hold_arrow``). An object, however
small, costs its owner, whoever borrows it and the raylet a millisecond of CPU time and some 15 KB, and these rows less.
Who needs an object of it makes one (``as_object``): executors, which read no other.

The driver puts here what it took out of packs (``pipeline.packs``), and the sequencer what it read from the journal.
The executors' JVMs take an object for the bytes of one Arrow IPC stream only if its Python type is ``bytes``. The
caller's process owns the objects.

Rejected: writing streams into memory that is used again, through a private call of Ray's. It spared a copy of some
megabytes for each commit, and no gain could be told from the noise of a whole run.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import ray

from xidstream.actors.runtime.ray_errors import unwrap

HELD_BYTES: Final = 8 << 10
"""The most bytes of a stream that is no object. A unit has sixteen of them at most (``packs.FEW_TABLES``)."""


def put_arrow(table: pa.Table) -> ray.ObjectRef:
    """Store ``table`` as one uncompressed Arrow IPC stream. Raises what ``ray.put`` raises.

    Empty record batches are left out. The JVM's reader takes one for the end of the stream, and would silently lose the
    rows after it.
    """
    return ray.put(_stream_of(table))


def hold_arrow(table: pa.Table) -> ray.ObjectRef | bytes:
    """Like ``put_arrow``. What is small stays a stream, and is returned."""
    stream = _stream_of(table)
    return stream if len(stream) <= HELD_BYTES else ray.put(stream)


def get_arrow(ref: ray.ObjectRef | bytes) -> pa.Table:
    """The object that ``put_arrow`` or ``hold_arrow`` stored, without a copy. Raises ComponentLost where
    its owner has ended."""
    with pa.ipc.open_stream(stream_in(ref)) as reader:
        return reader.read_all()


def stream_in(ref: ray.ObjectRef | bytes) -> Any:
    """The bytes of the stream that is stored. Raises as ``get_arrow``."""
    if isinstance(ref, bytes):
        return ref
    try:
        return ray.get(ref)
    except Exception as error:
        raise unwrap(error, "xid buffer") from error


def as_object(ref: ray.ObjectRef | bytes) -> ray.ObjectRef:
    """An object with the stream, which this process owns if it is not one yet."""
    return ray.put(ref) if isinstance(ref, bytes) else ref


def _stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches():
            if batch.num_rows:
                writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream
