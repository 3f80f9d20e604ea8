"""The directory of a journal file: a sealed JSON document that tells all of its units but rows and messages.

Inside of it a reference (``ArrowRef``) is the number of an object of the file. So units are ``Sealed`` here too, with
numbers for references, and with empty ``transactions`` and ``InlineMessages``: whoever loads the file fills these in
from two objects of its own, in the order of the units.

What follows from the units is not written beside them: ``journal_file`` works it out, for the writer and for readers.
``memory`` parts are lists, not objects with names, because a unit may have rows of ten thousand tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from xidstream.pipeline import rows
from xidstream.pipeline.errors import SegmentCorrupt, UsageError
from xidstream.pipeline.exchange import (
    InlineMessages,
    JournalFile,
    MemoryMessages,
    MemoryPart,
    MessagePart,
    Sealed,
    SegmentPart,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.late_binding import Commit
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.segments.envelope import seal, unseal
from xidstream.pipeline.segments.keys import Layout
from xidstream.pipeline.segments.stored_parts import (
    Relations,
    messages_from_json,
    messages_to_json,
    relations_from_json,
    segment_from_json,
    segment_to_json,
)

FORMAT: Final = "xidstream.journal"
VERSION: Final = 1
REMEDY: Final = (
    "the server does not send what is in the journal again: restore the object, or take its tables anew"
)


TRANSACTIONS: Final = 0
"""The number of the object with the units' transactions: a record batch for each unit."""
INLINE_MESSAGES: Final = 1
"""The number of the object with a record batch for each ``InlineMessages`` of the units."""
N_OWN_OBJECTS: Final = 2


class StoredObject(NamedTuple):
    """One of the file's Arrow IPC streams. They follow each other without a gap."""

    n_bytes: int
    crc32: int


@dataclass(frozen=True)
class Directory:
    units: tuple[tuple[UnitEnd, Sealed], ...]
    objects: tuple[StoredObject, ...]
    """The first two are ``TRANSACTIONS`` and ``INLINE_MESSAGES``; parts of units refer to all others."""
    first_commit_timestamp_us: int

    @property
    def objects_bytes(self) -> int:
        return sum(stored.n_bytes for stored in self.objects)


def journal_file(directory: Directory, epoch: str, number: int, file_bytes: int) -> JournalFile:
    """What others know of the file, which has ``file_bytes``."""
    ends = [end for end, _ in directory.units]
    units = [unit for _, unit in directory.units]
    commits = [end for end in ends if end.first_commit_lsn]
    segments = sum(part.segment.n_bytes for unit in units for part in unit.segments)
    messages = sum(
        part.file.n_bytes for unit in units for part in unit.messages if isinstance(part, SpilledMessages)
    )
    return JournalFile(
        number=number,
        epoch=epoch,
        first_commit_lsn=commits[0].first_commit_lsn if commits else INVALID_LSN,
        last_commit_lsn=commits[-1].last_commit_lsn if commits else INVALID_LSN,
        end_lsn=max(end.end_lsn for end in ends),
        first_commit_timestamp_us=directory.first_commit_timestamp_us,
        n_units=len(units),
        n_transactions=sum(end.n_transactions for end in ends),
        n_rows=sum(unit.n_rows for unit in units),
        n_bytes=file_bytes + segments + messages,
        stored_keys=tuple(key for unit in units for key in unit.stored_keys()),
    )


# -- written ---------------------------------------------------------------------------------------------


def directory_to_json(directory: Directory, layout: Layout, number: int) -> bytes:
    relations = Relations()
    units = [_unit_to_json(end, unit, relations) for end, unit in directory.units]
    content = {
        "system_identifier": layout.system_identifier,
        "slot": layout.slot,
        "epoch": layout.epoch,
        "number": number,
        "first_commit_timestamp_us": directory.first_commit_timestamp_us,
        "relations": relations.to_json(),
        "units": units,
        "objects": directory.objects,
    }
    return seal(FORMAT, VERSION, content)


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
                part.place,
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
        "left_out": [[int(xid), str(lsn)] for xid, lsn in unit.left_out],
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


def directory_from_json(data: pa.Buffer, layout: Layout, epoch: str, number: int, key: str) -> Directory:
    """Raises SegmentCorrupt, also for a directory of another file, and Unsupported. ``key`` is for the message only."""
    content = unseal(data.to_pybytes(), FORMAT, VERSION, key, remedy=REMEDY)
    try:
        found = tuple(content[name] for name in ("system_identifier", "slot", "epoch", "number"))
        if found != (layout.system_identifier, layout.slot, epoch, number):
            raise UsageError("its content is another file's")
        relations = relations_from_json(content["relations"])
        directory = Directory(
            units=tuple(_unit_from_json(unit, relations) for unit in content["units"]),
            objects=tuple(StoredObject(*map(_count, stored)) for stored in content["objects"]),
            first_commit_timestamp_us=_number(content["first_commit_timestamp_us"]),
        )
        for _, unit in directory.units:
            for named in unit.stored_keys():
                layout.parse_segment_key(named)
        if not directory.units:
            raise ValueError("no units")
    except UsageError as error:
        raise SegmentCorrupt(f"journal file {key!r}: {error.message}", remedy=REMEDY) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SegmentCorrupt(
            f"journal file {key!r} lacks a part or has a wrong one", remedy=REMEDY
        ) from error
    return directory


def _unit_from_json(value: dict[str, Any], relations: Sequence[RelationVersion]) -> tuple[UnitEnd, Sealed]:
    end = UnitEnd(
        Lsn.parse(value["first_commit_lsn"]),
        Lsn.parse(value["last_commit_lsn"]),
        Lsn.parse(value["end_lsn"]),
        _count(value["n_transactions"]),
    )
    unit = Sealed(
        transactions=_no_rows(rows.TRANSACTIONS_SCHEMA),
        memory=tuple(_memory_from_json(part, relations) for part in value["memory"]),
        segments=tuple(
            SegmentPart(
                segment_from_json(part, relations),
                Commit(_count(part["commit_lsn"]), _number(part["commit_timestamp_us"])),
            )
            for part in value["segments"]
        ),
        messages=tuple(_message_from_json(part) for part in value["messages"]),
        n_rows=_count(value["n_rows"]),
        n_bytes=_count(value["n_bytes"]),
        left_out=tuple((Xid(xid), Lsn.parse(lsn)) for xid, lsn in value["left_out"]),
    )
    return end, unit


def _memory_from_json(value: list[Any], relations: Sequence[RelationVersion]) -> MemoryPart:
    stored, place, relation, n_rows, n_bytes, first_commit_lsn = value
    return MemoryPart(
        relation=relations[_count(relation)],
        n_rows=_count(n_rows),
        n_bytes=_count(n_bytes),
        first_commit_lsn=_count(first_commit_lsn),
        ref=_count(stored),
        place=None if place is None else _count(place),
    )


def _message_from_json(value: dict[str, Any]) -> MessagePart:
    if value["kind"] == "inline":
        return InlineMessages(_no_rows(rows.MESSAGES_SCHEMA))
    if value["kind"] == "memory":
        return MemoryMessages(_count(value["n_bytes"]), _count(value["object"]))
    if value["kind"] != "spilled":
        raise ValueError("another kind of messages")
    return SpilledMessages(
        messages_from_json(value["file"]),
        None if value["commit_lsn"] is None else Lsn.parse(value["commit_lsn"]),
        None if value["xid"] is None else Xid(value["xid"]),
    )


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("not a number")
    return value


def _count(value: Any) -> int:
    if _number(value) < 0:
        raise ValueError("below zero")
    return int(value)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)
