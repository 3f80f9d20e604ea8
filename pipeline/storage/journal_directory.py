"""The directory of a journal file: a JSON document that tells all of its units but rows and messages.

Inside of it a reference (``ArrowRef``) is the number of an object of the file. So units are ``Sealed`` here too, with
numbers for references, and with empty ``transactions`` and ``InlineMessages``: whoever loads the file fills these in
from two objects of its own, in the order of the units.

``memory`` parts are lists, not objects with names, because a unit may have rows of ten thousand tables.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.exchange import (
    InlineMessages,
    MemoryMessages,
    MemoryPart,
    MessagePart,
    Sealed,
    SegmentPart,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion, rows
from xidstream.pipeline.storage.envelope import a_count, a_number
from xidstream.pipeline.storage.journal_summary import StoredObject, lacking
from xidstream.pipeline.storage.stored_parts import (
    Relations,
    messages_from_json,
    messages_to_json,
    relations_from_json,
    segment_from_json,
    segment_to_json,
)

TRANSACTIONS: Final = 0
"""The number of the object with the units' transactions: a record batch for each unit."""
INLINE_MESSAGES: Final = 1
"""The number of the object with a record batch for each ``InlineMessages`` of the units."""
N_OWN_OBJECTS: Final = 2


@dataclass(frozen=True)
class JournalDirectory:
    units: tuple[tuple[UnitEnd, Sealed], ...]
    objects: tuple[StoredObject, ...]
    """The first two are ``TRANSACTIONS`` and ``INLINE_MESSAGES``; parts of units refer to all others."""

    @property
    def objects_bytes(self) -> int:
        return sum(stored.n_bytes for stored in self.objects)


# -- written ---------------------------------------------------------------------------------------------


def directory_to_json(directory: JournalDirectory) -> bytes:
    relations = Relations()
    units = [_unit_to_json(end, unit, relations) for end, unit in directory.units]
    content = {"relations": relations.to_json(), "units": units, "objects": directory.objects}
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def _unit_to_json(end: UnitEnd, unit: Sealed, relations: Relations) -> dict[str, Any]:
    return {
        "first_commit_lsn": str(end.first_commit_lsn),
        "last_commit_lsn": str(end.last_commit_lsn),
        "end_lsn": str(end.end_lsn),
        "n_transactions": int(end.n_transactions),
        "n_rows": int(unit.n_rows),
        "n_bytes": int(unit.n_bytes),
        "memory": [
            [
                int(part.ref),
                part.pack_index,
                relations.number(part.relation),
                int(part.n_rows),
                int(part.n_bytes),
                int(part.first_commit_lsn),
            ]
            for part in unit.memory
        ],
        "segments": [
            {
                **segment_to_json(part.segment, relations),
                "commit_lsn": int(part.commit.commit_lsn),
                "commit_timestamp_us": int(part.commit.commit_timestamp_us),
            }
            for part in unit.segments
        ],
        "messages": [_message_to_json(part) for part in unit.messages],
        "left_out": [[int(xid), str(lsn), relids] for xid, lsn, relids in unit.skipped],
    }


def _message_to_json(part: MessagePart) -> dict[str, Any]:
    if isinstance(part, InlineMessages):
        return {"kind": "inline"}
    if isinstance(part, MemoryMessages):
        return {"kind": "memory", "object": int(part.ref), "n_bytes": int(part.n_bytes)}
    return {
        "kind": "spilled",
        "file": messages_to_json(part.file),
        "commit_lsn": None if part.commit_lsn is None else str(part.commit_lsn),
        "xid": None if part.xid is None else int(part.xid),
    }


# -- read ------------------------------------------------------------------------------------------------


def directory_from_json(data: pa.Buffer, key: str) -> JournalDirectory:
    """``data`` is what was written. Raises SegmentCorrupt where that makes no sense, with the file's ``key``."""
    try:
        content = json.loads(data.to_pybytes())
        relations = relations_from_json(content["relations"])
        return JournalDirectory(
            units=tuple(_unit_from_json(unit, relations) for unit in content["units"]),
            objects=tuple(StoredObject(*map(a_count, stored)) for stored in content["objects"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, UsageError) as error:
        raise lacking(key) from error


def _unit_from_json(value: dict[str, Any], relations: Sequence[RelationVersion]) -> tuple[UnitEnd, Sealed]:
    end = UnitEnd(
        Lsn.parse(value["first_commit_lsn"]),
        Lsn.parse(value["last_commit_lsn"]),
        Lsn.parse(value["end_lsn"]),
        a_count(value["n_transactions"]),
    )
    unit = Sealed(
        transactions=_no_rows(rows.TRANSACTIONS_SCHEMA),
        memory=tuple(_memory_from_json(part, relations) for part in value["memory"]),
        segments=tuple(
            SegmentPart(
                segment_from_json(part, relations),
                CommitStamp(a_count(part["commit_lsn"]), a_number(part["commit_timestamp_us"])),
            )
            for part in value["segments"]
        ),
        messages=tuple(_message_from_json(part) for part in value["messages"]),
        n_rows=a_count(value["n_rows"]),
        n_bytes=a_count(value["n_bytes"]),
        skipped=tuple(map(_left_out_from_json, value["left_out"])),
    )
    return end, unit


def _left_out_from_json(value: list[Any]) -> SkippedTransaction:
    xid, lsn, *more = value  # an earlier xidstream did not know the tables
    (relids,) = more or (None,)
    known = None if relids is None else tuple(map(a_count, relids))
    return SkippedTransaction(Xid(xid), Lsn.parse(lsn), known)


def _memory_from_json(value: list[Any], relations: Sequence[RelationVersion]) -> MemoryPart:
    stored, pack_index, relation, n_rows, n_bytes, first_commit_lsn = value
    return MemoryPart(
        relation=relations[a_count(relation)],
        n_rows=a_count(n_rows),
        n_bytes=a_count(n_bytes),
        first_commit_lsn=a_count(first_commit_lsn),
        ref=a_count(stored),
        pack_index=None if pack_index is None else a_count(pack_index),
    )


def _message_from_json(value: dict[str, Any]) -> MessagePart:
    if value["kind"] == "inline":
        return InlineMessages(_no_rows(rows.MESSAGES_SCHEMA))
    if value["kind"] == "memory":
        return MemoryMessages(a_count(value["n_bytes"]), a_count(value["object"]))
    if value["kind"] != "spilled":
        raise ValueError("another kind of messages")
    return SpilledMessages(
        messages_from_json(value["file"]),
        None if value["commit_lsn"] is None else Lsn.parse(value["commit_lsn"]),
        None if value["xid"] is None else Xid(value["xid"]),
    )


@functools.cache
def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)
