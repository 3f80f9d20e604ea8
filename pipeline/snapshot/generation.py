"""One generation of a table: a snapshot that was committed, and for how long it stands for the rows before the stream.

It is what a row of ``_snapshots`` says (``pipeline.spark.snapshot_log``), and what the storage keeps beside the table's
signature (``pipeline.segments.snapshot_record``). ``number`` counts the generations of a table's *name*, from 1,
because a Delta table belongs to a name. ``key``: the columns by which a row is known again, None where only the whole
row is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.relations import RelationVersion
from xidstream.pipeline.relations.relation import ReplicaIdentity
from xidstream.pipeline.snapshot.bounds import SnapshotBounds


class GenerationState(enum.Enum):
    """``state`` of a line of ``_snapshots``."""

    FINISHED = "finished"
    ENDED = "ended"


@dataclass(frozen=True)
class Generation:
    schema: str
    table: str
    relid: int
    number: int
    bounds: SnapshotBounds
    key: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """``schema.table``."""
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        bounds = self.bounds
        return {
            "schema": self.schema,
            "table": self.table,
            "relid": self.relid,
            "number": self.number,
            "place": str(bounds.place),
            "valid_from": str(bounds.valid_from),
            "xmin": bounds.xmin,
            "xmax": bounds.xmax,
            "xip": list(bounds.xip),
            "taken_at_us": bounds.taken_at_us,
            "key": None if self.key is None else list(self.key),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Generation:
        return cls(
            value["schema"],
            value["table"],
            value["relid"],
            value["number"],
            SnapshotBounds(
                Lsn.parse(value["place"]),
                Lsn.parse(value["valid_from"]),
                value["xmin"],
                value["xmax"],
                tuple(value["xip"]),
                value["taken_at_us"],
            ),
            None if value["key"] is None else tuple(value["key"]),
        )


def key_of(relation: RelationVersion) -> tuple[str, ...] | None:
    """The columns that name a row of the stream: none under FULL (whose old tuples are whole) and NOTHING."""
    if relation.replica_identity in (ReplicaIdentity.FULL, ReplicaIdentity.NOTHING):
        return None
    return tuple(column.name for column in relation.columns if column.is_key) or None
