"""The rows of one part in memory, as whoever reads few parts has them: an object of its own, or a place in a pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from xidstream.pipeline.exchange import ArrowRef, MemoryPart
from xidstream.pipeline.packs import Packs
from xidstream.pipeline.rows import contract_schema


def part_rows(part: MemoryPart, read: Callable[[ArrowRef], Iterator[pa.RecordBatch]]) -> pa.Table:
    """``read`` gives the record batches of a reference."""
    batches = read(part.ref) if part.place is None else Packs(read).rows([part])
    return pa.Table.from_batches(batches, contract_schema(part.relation))
