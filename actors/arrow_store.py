"""Arrow tables into the Ray object store, as the bytes of one IPC stream that the executors' JVMs read.

A page of memory that is touched for the first time costs here some two microseconds, more than to copy what it holds: a
stream of 7 MiB took 5.5 ms to write into new memory, and 0.9 ms into memory that was used before. A buffer gives away
its last rows when their transaction commits, and Spark waits for that. So streams are written into one piece of memory,
which ``ray.put`` would not take: it tells the JVM's bytes by their type, which is ``bytes``. The object that it makes
of them is made here, of a ``bytearray``, where Ray's own call for it is the one that is known.

Used by one buffer, from one thread. What ``put`` returns is owned by this process.

Rejected: ``io.BytesIO``, new memory each time, which moves as it grows; Arrow's own buffers, which the JVM's side
refuses; an allocator that keeps freed memory, whose process would not fall back under its limit.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa
import ray
from ray._raylet import RawSerializedObject  # type: ignore[attr-defined]

_KEPT_FROM_BYTES, _KEPT_BYTES = 256 << 10, 16 << 20
"""The sizes that are written into the memory that is kept. Larger than 16 MiB is hardly a part that a buffer gives
away; and a ``bytearray`` that is made less than half as large gives its end back."""

_resize = ctypes.pythonapi.PyByteArray_Resize
_resize.argtypes = [ctypes.py_object, ctypes.c_ssize_t]
_resize.restype = ctypes.c_int


class ArrowStore:
    def __init__(self) -> None:
        self._kept = bytearray()
        self._capacity_bytes = 0

    def put(self, table: pa.Table) -> ray.ObjectRef:
        """Store ``table`` as one uncompressed Arrow IPC stream. Raises what ``ray.put`` raises."""
        batches = [batch for batch in table.to_batches() if batch.num_rows]
        measured = pa.MockOutputStream()
        _write(measured, table.schema, batches)
        n_bytes = measured.size()
        if _KEPT_FROM_BYTES <= n_bytes <= _KEPT_BYTES:
            content, self._capacity_bytes = self._kept, max(self._capacity_bytes, n_bytes)
        else:
            content = bytearray()
        # Within what was allotted before, this touches nothing.
        _resize(content, n_bytes)
        _write(pa.FixedSizeBufferWriter(pa.py_buffer(content)), table.schema, batches)
        return _put(content)

    @property
    def kept_bytes(self) -> int:
        return self._capacity_bytes

    def give_back(self) -> None:
        """The memory that is kept, because rows need it more."""
        self._kept, self._capacity_bytes = bytearray(), 0


def _put(content: bytearray) -> ray.ObjectRef:
    """As ``ray.put(bytes(content))`` does it, without that copy where this Ray can: the call is its own, and has
    changed between releases. The bytes are copied when it returns."""
    try:
        core_worker = ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
        ref: ray.ObjectRef = core_worker.put_object(
            RawSerializedObject(content),
            pin_object=True,
            inline_small_object=True,
            _is_experimental_channel=False,
        )
    except (AttributeError, TypeError):
        return ray.put(bytes(content))
    return ref


def _write(sink: pa.NativeFile, schema: pa.Schema, batches: list[pa.RecordBatch]) -> None:
    """Without empty record batches: the JVM's reader takes one for the end of the stream (rows behind it were lost,
    silently)."""
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
