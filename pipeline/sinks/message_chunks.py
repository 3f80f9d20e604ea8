"""Logical messages for a sink of tables: in chunks that the driver can hold, and only those that ``_messages`` lacks.

A batch may bring many gigabytes of messages. The sink asks for one chunk after the other and writes it, so that it
never holds more than one. Called by ``log_sink``, on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA

MESSAGE_CHUNK_BYTES: Final = 8 << 20
"""The logical messages that the driver holds at once, besides the row group that is being written. It may hold one
message more."""


def message_chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """``batches`` (MESSAGES_SCHEMA) in the same order, with several small ones in a chunk."""
    chunk: list[pa.RecordBatch] = []
    n_bytes = 0
    for batch in batches:
        chunk.append(batch)
        n_bytes += batch.nbytes
        if n_bytes >= MESSAGE_CHUNK_BYTES:
            yield pa.Table.from_batches(chunk, MESSAGES_SCHEMA)
            chunk, n_bytes = [], 0
    if chunk:
        yield pa.Table.from_batches(chunk, MESSAGES_SCHEMA)


def new_messages(
    rows: pa.Table, watermarks: dict[str, int], transactional_id: str, other_id: str
) -> tuple[pa.Table, dict[str, int]]:
    """The ``rows`` (MESSAGES_SCHEMA) that the table does not hold yet, and the watermarks that they move.

    Each LSN comes once, also if ``rows`` repeat it. ``rows`` are copied only if some of them are dropped.
    """
    position = pc.if_else(rows["transactional"], rows["commit_lsn"], rows["lsn"])
    floor = pc.if_else(rows["transactional"], watermarks[transactional_id], watermarks[other_id])
    new, is_new = rows.append_column("position", position), pc.greater(position, floor)
    if not pc.all(is_new, min_count=0).as_py():
        new = new.filter(is_new)
    if len(pc.unique(new["lsn"])) < new.num_rows:
        seen: set[int] = set()
        kept = [not (lsn in seen or seen.add(lsn)) for lsn in new["lsn"].to_pylist()]  # type: ignore[func-returns-value]
        new = new.filter(pa.array(kept))
    versions = {}
    for application_id, transactional in ((transactional_id, True), (other_id, False)):
        highest = pc.max(new["position"].filter(pc.equal(new["transactional"], transactional))).as_py()
        if highest is not None:
            versions[application_id] = highest
    return new.drop_columns(["position"]), versions
