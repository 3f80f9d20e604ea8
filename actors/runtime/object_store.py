"""Arrow tables into Ray's object store and back, in the one form that RayDP's executors read.

At a commit a buffer puts here the rows that the transaction still has in memory. The driver puts here what it took out
of packs (``pipeline.packs``), and the sequencer what it read from the journal. The executors' JVMs take an object for
the bytes of one Arrow IPC stream only if its Python type is ``bytes``. The caller's process owns the objects.

Rejected: writing streams into memory that is used again, through a private call of Ray's. It spared a copy of some
megabytes for each commit, and no gain could be told from the noise of a whole run.
"""

from __future__ import annotations

import pyarrow as pa
import ray

from xidstream.actors.runtime.ray_errors import unwrap


def put_arrow(table: pa.Table) -> ray.ObjectRef:
    """Store ``table`` as one uncompressed Arrow IPC stream. Raises what ``ray.put`` raises.

    Empty record batches are left out. The JVM's reader takes one for the end of the stream, and would silently lose the
    rows behind it.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches():
            if batch.num_rows:
                writer.write_batch(batch)
    return ray.put(sink.getvalue().to_pybytes())


def get_arrow(ref: ray.ObjectRef) -> pa.Table:
    """What ``put_arrow`` stored, without a copy. Raises ComponentLost where its owner has ended."""
    try:
        content = ray.get(ref)
    except Exception as error:
        raise unwrap(error, "xid buffer") from error
    with pa.ipc.open_stream(content) as reader:
        return reader.read_all()
