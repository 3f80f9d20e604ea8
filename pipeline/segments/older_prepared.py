"""Prepared transactions that an older xidstream wrote, as what this one writes: the only place that knows their form.

Versions 1 and 2 of the manifest name segments that are Arrow IPC files in internal layout. These still hold the rows of
rolled-back subtransactions, which are listed beside them, as runs of ordinals. Version 1 also keeps the logical
messages beside the manifest, in an object without a checksum. A transaction may be prepared under one xidstream and
committed, next month, under the next one. So whoever takes the slot over converts such a record: it writes the rows
that stay, numbered without a gap, as segments of its own epoch, and the manifest of its epoch over them. The old
objects go as those of other dead epochs do.

``convert`` reads each segment once, one after the other. If it is interrupted, what it wrote belongs to a dead epoch,
and the next run begins again.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import MessageFile, PreparedTransaction, Segment
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.rows import internal_schema
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.segment_file import read_arrow_file, write_messages, write_segment
from xidstream.pipeline.segments.storage import Storage

OLDEST_VERSION: Final = 1


@dataclass(frozen=True)
class OlderSegment:
    """An Arrow IPC file. ``n_staying``: the rows that stay of it."""

    key: str
    relation: RelationVersion
    n_rows: int
    n_bytes: int
    checksum: str
    n_staying: int

    @property
    def schema(self) -> pa.Schema:
        return internal_schema(self.relation)


@dataclass(frozen=True)
class OlderRecord:
    """``prepared`` as it was written, without its segments: these still have the rows of ``first`` and ``count``.

    ``first: int64[k]``, ``count: int64[k]``: runs of ordinals, sorted and apart.
    """

    prepared: PreparedTransaction
    segments: tuple[OlderSegment, ...]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]

    @property
    def xid(self) -> Xid:
        return self.prepared.xid

    @property
    def prepare_end_lsn(self) -> Lsn:
        return self.prepared.prepare_end_lsn

    def stored_keys(self) -> list[str]:
        """As ``PreparedTransaction.stored_keys``."""
        return [segment.key for segment in self.segments] + self.prepared.stored_keys()


def is_older(content: dict[str, Any]) -> bool:
    """Whether a manifest's content is of a version before 3."""
    return "dropped" in content


def messages_of(content: dict[str, Any]) -> tuple[MessageFile, ...]:
    """Of version 1, the messages beside the manifest."""
    if content["messages_key"] is None:
        return ()
    return (MessageFile(content["messages_key"], content["n_messages"], 0, None),)


def older_record(
    content: dict[str, Any], prepared: PreparedTransaction, relations: Sequence[RelationVersion]
) -> OlderRecord:
    """``prepared`` is what all versions say, without segments. Raises KeyError, IndexError, TypeError or ValueError
    for what none says."""
    dropped = content["dropped"]
    first, count = _numbers(dropped["first"]), _numbers(dropped["count"])
    if not len(first) == len(count) == dropped["n_runs"]:
        raise ValueError("the runs of dropped rows are of unequal number")
    segments = [
        OlderSegment(
            key=s["key"],
            relation=relations[s["relation"]],
            n_rows=s["n_rows"],
            n_bytes=s["n_bytes"],
            checksum=s["checksum"],
            n_staying=s["n_released_rows"],
        )
        for s in content["segments"]
    ]
    return OlderRecord(prepared, tuple(segments), first, count)


def convert(storage: Storage, layout: Layout, older: OlderRecord) -> PreparedTransaction:
    """Write what stays as objects of ``layout.epoch``; the manifest is the caller's to write. Raises StorageFault and
    SegmentCorrupt."""
    prepared = older.prepared
    segments: list[Segment] = []
    messages: list[MessageFile] = []

    def next_key(make: Callable[[Xid, Lsn, int], str]) -> str:
        # No block of the transaction begins where its PREPARE ends: nothing else has keys of this LSN.
        number = len(segments) + len(messages)
        return make(prepared.xid, prepared.prepare_end_lsn, number)

    for older_segment in older.segments:
        found = _staying(older, read_arrow_file(storage, older_segment))
        batches = [batch for batch in found if batch.num_rows]
        if sum(batch.num_rows for batch in batches) != older_segment.n_staying:
            raise SegmentCorrupt(
                f"segment {older_segment.key!r} has not the {older_segment.n_staying} rows that its manifest counts"
            )
        if batches:
            relation = older_segment.relation
            segments.append(
                write_segment(storage, next_key(layout.segment_key), relation, prepared.xid, batches)
            )
    for file in prepared.messages:
        messages.append(
            write_messages(storage, next_key(layout.messages_key), list(read_arrow_file(storage, file)))
        )
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
