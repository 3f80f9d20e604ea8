"""How logical messages leave a buffer: by value if they are few, else by reference, or as the name of a file.

A message is as large as its writer likes, up to a gigabyte, and a transaction may hold any number of them. So they are
bounded, spilled and released like rows. A few messages go by value all the same, and the driver writes them at once. A
reference would cost an object in the store, and a fetch of it, for each block of small transactions.

Rejected: one record batch for all messages of a transaction. It cannot exist above 2 GiB, because Arrow's offsets have
31 bits, and it took its size once each in the buffer, in the sequencer and in the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import pyarrow as pa

from xidstream.pipeline.exchange import ArrowRef, InlineMessages, MemoryMessages, MessagePart
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA

INLINE_BYTES: Final = 64 << 10
"""The limit of one unit. Ray itself carries results of up to 100 kB by value; they are in the sequencer's memory."""

PART_BYTES: Final = 8 << 20
"""So much is put into the object store at once. A copy of this size exists beside what is still held."""


def message_parts(
    batches: Iterable[pa.RecordBatch], n_bytes: int, put: Callable[[pa.Table], ArrowRef]
) -> list[MessagePart]:
    """Hand over ``batches`` in their order; they are complete, and ``n_bytes`` together. Each is asked for when it is
    put, so an iterator may release what it holds one by one."""
    if n_bytes <= INLINE_BYTES:
        few = pa.Table.from_batches(batches, MESSAGES_SCHEMA).combine_chunks().to_batches()
        return [InlineMessages(batch) for batch in few]
    parts: list[MessagePart] = []
    taken: list[pa.RecordBatch] = []
    taken_bytes = 0

    def put_taken() -> None:
        parts.append(MemoryMessages(taken_bytes, put(pa.Table.from_batches(taken, MESSAGES_SCHEMA))))

    for batch in batches:
        taken.append(batch)
        taken_bytes += batch.nbytes
        if taken_bytes >= PART_BYTES:
            put_taken()
            taken, taken_bytes = [], 0
    if taken:
        put_taken()
    return parts
