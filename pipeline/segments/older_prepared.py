"""Prepared transactions that an older xidstream wrote, as what this one writes: the only place that knows their form.

Versions 1 and 2 of the manifest name segments that still hold the rows of rolled-back subtransactions, and list these
rows beside them, as runs of ordinals. Version 1 also keeps the logical messages beside the manifest, in an object
without a checksum. A transaction may be prepared under one xidstream and committed, next month, under the next one. So
whoever takes the slot over converts such a record: it writes the rows that stay, numbered without a gap, as segments of
its own epoch, and the manifest of its epoch over them. The old objects go as those of other dead epochs do.

``convert`` reads each segment once, one after the other. If it is interrupted, what it wrote belongs to a dead epoch,
and the next run begins again.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import MessageFile, PreparedTransaction, Segment
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.segment_file import SegmentReader, write_messages, write_segment
from xidstream.pipeline.segments.storage import Storage

OLDEST_VERSION: Final = 1


@dataclass(frozen=True)
class OlderRecord:
    """``prepared`` as it was written: its segments still have the rows of ``first`` and ``count``.

    ``first: int64[k]``, ``count: int64[k]``: runs of ordinals, sorted and apart. ``n_staying``: the rows that stay of
    each segment.
    """

    prepared: PreparedTransaction
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    n_staying: tuple[int, ...]


def is_older(content: dict[str, Any]) -> bool:
    """Whether a manifest's content is of a version before 3."""
    return "dropped" in content


def messages_of(content: dict[str, Any]) -> tuple[MessageFile, ...]:
    """Of version 1, the messages beside the manifest."""
    if content["messages_key"] is None:
        return ()
    return (MessageFile(content["messages_key"], content["n_messages"], 0, None),)


def older_record(content: dict[str, Any], prepared: PreparedTransaction) -> OlderRecord:
    """``prepared`` is what all versions say. Raises KeyError, TypeError or ValueError for what none says."""
    dropped = content["dropped"]
    first, count = _numbers(dropped["first"]), _numbers(dropped["count"])
    if not len(first) == len(count) == dropped["n_runs"]:
        raise ValueError("the runs of dropped rows are of unequal number")
    return OlderRecord(prepared, first, count, tuple(s["n_released_rows"] for s in content["segments"]))


def convert(storage: Storage, layout: Layout, older: OlderRecord) -> PreparedTransaction:
    """Write what stays as objects of ``layout.epoch``; the manifest is the caller's to write. Raises StorageFault and
    SegmentCorrupt."""
    prepared = older.prepared
    read = SegmentReader(storage.uri)
    segments: list[Segment] = []
    messages: list[MessageFile] = []

    def next_key() -> str:
        # No block of the transaction begins where its PREPARE ends: nothing else has keys of this LSN.
        number = len(segments) + len(messages)
        return layout.segment_key(prepared.xid, prepared.prepare_end_lsn, number)

    for segment, n_staying in zip(prepared.segments, older.n_staying, strict=True):
        batches = [batch for batch in _staying(older, read(segment)) if batch.num_rows]
        if sum(batch.num_rows for batch in batches) != n_staying:
            raise SegmentCorrupt(
                f"segment {segment.key!r} has not the {n_staying} rows that its manifest counts"
            )
        if batches:
            segments.append(write_segment(storage, next_key(), segment.relation, batches))
    for file in prepared.messages:
        messages.append(write_messages(storage, next_key(), list(read(file))))
    return dataclasses.replace(prepared, segments=tuple(segments), messages=tuple(messages))


def _staying(older: OlderRecord, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Without the rows of the runs, and numbered as if these had never been."""
    behind = older.first + older.count
    n_before = np.concatenate(([0], np.cumsum(older.count)))
    for batch in batches:
        ordinals = batch.column(2).to_numpy()
        run = np.searchsorted(older.first, ordinals, side="right")
        stays = (run == 0) | (ordinals >= np.concatenate(([0], behind))[run])
        numbers = pa.array((ordinals - n_before[run])[stays])
        yield batch.filter(pa.array(stays)).set_column(2, batch.schema.field(2), numbers)


def _numbers(text: str) -> npt.NDArray[np.int64]:
    """``<i8[n]`` in base64."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<i8").astype(np.int64)
    except binascii.Error as error:
        raise ValueError("not base64") from error
