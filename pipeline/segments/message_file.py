"""Logical messages in storage: an Arrow IPC file of ``rows.MESSAGES_SCHEMA``, without a commit's LSN in it yet.

Written when an open transaction's messages are too much for its buffer, and for a prepared one. The buffer that
spilled them reads them back at the end of the transaction: while it is open they take no memory, at its COMMIT
they take their size once, as they do in the sequencer and in the driver (messages are the driver's own rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.segments.storage import Storage


def write_messages(storage: Storage, key: str, batches: Sequence[pa.RecordBatch]) -> None:
    """As ``write_segment``: whole, but not flushed. Raises StorageFault."""
    with storage.create(key) as write:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        write(sink.getvalue())


def read_messages(storage: Storage, key: str) -> list[pa.RecordBatch]:
    """Raises StorageFault where it is missing, SegmentCorrupt where it is not such a file."""
    data = storage.read_bytes(key)
    try:
        return list(pa.ipc.open_file(data).read_all().to_batches())
    except pa.ArrowException as error:
        raise SegmentCorrupt(f"{key!r} is not a whole file of messages") from error
