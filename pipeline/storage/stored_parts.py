"""How a JSON document names stored objects: a prepared transaction's manifest does, and a journal file.

Relations are written once and referred to by index: a transaction of ten thousand segments has few tables. What reads
such a document catches KeyError, IndexError, TypeError and ValueError: this module raises them for what it never wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xidstream.pipeline import parquet
from xidstream.pipeline.exchange import MessageFile, Segment
from xidstream.pipeline.parquet import RowFile
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.storage.segment_file import stored_object, verify_messages
from xidstream.pipeline.storage.storage import Storage


class Relations:
    """The relation versions of one document, numbered in the order in which they are first named."""

    def __init__(self) -> None:
        self._numbers: dict[RelationVersion, int] = {}

    def number(self, relation: RelationVersion) -> int:
        return self._numbers.setdefault(relation, len(self._numbers))

    def to_json(self) -> list[dict[str, Any]]:
        """Called when all are named."""
        return [relation.to_json() for relation in self._numbers]


def relations_from_json(value: list[dict[str, Any]]) -> list[RelationVersion]:
    return [RelationVersion.from_json(relation) for relation in value]


def segment_to_json(segment: Segment, relations: Relations) -> dict[str, Any]:
    return {
        "key": segment.key,
        "relation": relations.number(segment.relation),
        "file": segment.file.to_json(),
    }


def segment_from_json(value: dict[str, Any], relations: Sequence[RelationVersion]) -> Segment:
    return Segment(value["key"], relations[value["relation"]], RowFile.from_json(value["file"]))


def messages_to_json(file: MessageFile) -> dict[str, Any]:
    return {
        "key": file.key,
        "n_rows": int(file.n_rows),
        "n_bytes": int(file.n_bytes),
        "checksum": file.checksum,
    }


def messages_from_json(value: dict[str, Any]) -> MessageFile:
    return MessageFile(value["key"], value["n_rows"], value["n_bytes"], value["checksum"])


def verify_stored(storage: Storage, segments: Iterable[Segment], messages: Iterable[MessageFile]) -> None:
    """Read all of them, one at a time. Raises SegmentCorrupt where one is missing or altered, and StorageFault.

    Segments may be filled in, even for another commit, which no reader minds.
    """
    for segment in segments:
        parquet.verify(stored_object(storage, segment.key), segment.file, name=segment.key)
    for file in messages:
        verify_messages(file, stored_object(storage, file.key))
