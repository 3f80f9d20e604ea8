"""The rows of one part in memory, as whoever reads few parts has them: an object of its own, or a place in a pack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pyarrow as pa

from xidstream.pipeline.exchange import ArrowRef, MemoryPart
from xidstream.pipeline.packs import PackReader
from xidstream.pipeline.schema.rows import contract_schema


def part_rows(part: MemoryPart, read: Callable[[ArrowRef], Iterator[pa.RecordBatch]]) -> pa.Table:
    """``read`` gives the record batches of a reference, which need not be hashable here."""
    if part.pack_index is None:
        batches = read(part.ref)
    else:
        batches = PackReader(lambda _: read(part.ref)).rows([dataclasses.replace(part, ref=None)])
    return pa.Table.from_batches(batches, contract_schema(part.relation))
