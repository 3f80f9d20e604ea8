"""What others know of a journal file without reading it: a short, sealed JSON document at its end.

A run that takes over a slot reads this of each file of the journal, and there may be thousands. So it stands beside the
directory, though all of it follows from the units: ``of_units`` works it out when the file is written, and again when
the units are loaded, and the two are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import (
    JournalFile,
    MemoryMessages,
    MemoryPart,
    Sealed,
    SpilledMessages,
    UnitEnd,
)
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.storage.envelope import Document, a_count, a_number
from xidstream.pipeline.storage.keys import Layout

REMEDY: Final = (
    "the server does not send what is in the journal again: restore the object, or take new snapshots of "
    "its tables"
)


class StoredObject(NamedTuple):
    """A part of the file. They follow each other without a gap."""

    n_bytes: int
    crc32: int


@dataclass(frozen=True)
class Summary:
    file: JournalFile
    """``n_bytes`` is of the objects that it names alone: a document cannot tell its own file's."""
    objects_bytes: int
    directory: StoredObject


def of_units(
    units: Sequence[tuple[UnitEnd, Sealed]], epoch: str, number: int, first_commit_timestamp_us: int
) -> JournalFile:
    """``n_bytes`` as in ``Summary``. Of what is in memory only the parts' own words matter."""
    ends, contents = [end for end, _ in units], [unit for _, unit in units]
    commits = [end for end in ends if end.first_commit_lsn]
    segments = sum(part.segment.n_bytes for unit in contents for part in unit.segments)
    messages = sum(
        part.n_bytes for unit in contents for part in unit.messages if isinstance(part, SpilledMessages)
    )
    return JournalFile(
        number=number,
        epoch=epoch,
        first_commit_lsn=commits[0].first_commit_lsn if commits else INVALID_LSN,
        last_commit_lsn=commits[-1].last_commit_lsn if commits else INVALID_LSN,
        end_lsn=max(end.end_lsn for end in ends),
        first_commit_timestamp_us=first_commit_timestamp_us,
        n_units=len(units),
        n_transactions=sum(end.n_transactions for end in ends),
        n_rows=sum(unit.n_rows for unit in contents),
        n_bytes=segments + messages,
        stored_keys=tuple(key for unit in contents for key in unit.stored_keys()),
        memory_bytes=sum(
            part.n_bytes
            for unit in contents
            for part in (*unit.memory, *unit.messages)
            if isinstance(part, (MemoryPart, MemoryMessages))
        ),
    )


def with_its_bytes(file: JournalFile, file_bytes: int) -> JournalFile:
    return dataclasses.replace(file, n_bytes=file_bytes + file.n_bytes, file_bytes=file_bytes)


def _to_json(value: tuple[Layout, Summary]) -> dict[str, Any]:
    layout, summary = value
    file = summary.file
    return {
        "system_identifier": layout.system_identifier,
        "slot": layout.slot,
        "epoch": file.epoch,
        "number": file.number,
        "first_commit_lsn": str(file.first_commit_lsn),
        "last_commit_lsn": str(file.last_commit_lsn),
        "end_lsn": str(file.end_lsn),
        "first_commit_timestamp_us": file.first_commit_timestamp_us,
        "n_units": file.n_units,
        "n_transactions": file.n_transactions,
        "n_rows": file.n_rows,
        "n_stored_bytes": file.n_bytes,
        "stored_keys": file.stored_keys,
        "memory_bytes": file.memory_bytes,
        "objects_bytes": summary.objects_bytes,
        "directory": summary.directory,
    }


def _from_json(content: dict[str, Any]) -> tuple[Layout, Summary]:
    layout = Layout(a_count(content["system_identifier"]), content["slot"], content["epoch"])
    for named in content["stored_keys"]:
        layout.parse_segment_key(named)
    file = JournalFile(
        number=a_count(content["number"]),
        epoch=layout.epoch,
        first_commit_lsn=Lsn.parse(content["first_commit_lsn"]),
        last_commit_lsn=Lsn.parse(content["last_commit_lsn"]),
        end_lsn=Lsn.parse(content["end_lsn"]),
        first_commit_timestamp_us=a_number(content["first_commit_timestamp_us"]),
        n_units=a_count(content["n_units"]),
        n_transactions=a_count(content["n_transactions"]),
        n_rows=a_count(content["n_rows"]),
        n_bytes=a_count(content["n_stored_bytes"]),
        stored_keys=tuple(content["stored_keys"]),
        memory_bytes=a_count(content["memory_bytes"]),
    )
    return layout, Summary(
        file, a_count(content["objects_bytes"]), StoredObject(*map(a_count, content["directory"]))
    )


_SUMMARY: Final = Document("xidstream.journal", 2, REMEDY, _to_json, _from_json)


def summary_to_json(summary: Summary, layout: Layout) -> bytes:
    return _SUMMARY.seal((layout, summary))


def summary_from_json(data: pa.Buffer, layout: Layout, epoch: str, number: int, key: str) -> Summary:
    """Raises SegmentCorrupt, also for another file's, and Unsupported. ``key`` is for the message only."""
    found, summary = _SUMMARY.unseal(data.to_pybytes(), key)
    if (found, summary.file.number) != (dataclasses.replace(layout, epoch=epoch), number):
        raise SegmentCorrupt(f"journal file {key!r}: its content is another file's", remedy=REMEDY)
    return summary


def lacking(key: str) -> SegmentCorrupt:
    return SegmentCorrupt(f"journal file {key!r} lacks a part or has a wrong one", remedy=REMEDY)
