"""One generation of a table: a snapshot that was committed, and for how long it stands for the rows before the stream.

It is what a row of ``_snapshots`` says (``pipeline.log_tables.snapshot_log``), and what the storage keeps beside the
table's signature (``pipeline.storage.snapshot_record``). ``number`` counts the generations of a table's *name*, from 1,
because a Delta table belongs to a name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.snapshot.bounds import SnapshotBounds


class GenerationState(enum.Enum):
    """``state`` of a line of ``_snapshots``."""

    FINISHED = "finished"
    ENDED = "ended"


@dataclass(frozen=True)
class Generation:
    """``relation``: as it was under the snapshot's lock, so with the columns that its rows have. ``primary_key``: the
    columns of the catalog's, under REPLICA IDENTITY FULL (``tables.PrimaryKey``)."""

    relation: RelationVersion
    number: int
    bounds: SnapshotBounds
    primary_key: tuple[str, ...] | None = None

    @property
    def relid(self) -> int:
        return self.relation.relid

    @property
    def name(self) -> str:
        """``schema.table``."""
        return self.relation.name

    @property
    def key(self) -> tuple[str, ...] | None:
        """The columns that name a row. Under FULL each old tuple is a whole row, so it has the primary key's, too."""
        return self.relation.key or self.primary_key

    def to_json(self) -> dict[str, Any]:
        bounds = self.bounds
        of_writers = {} if bounds.writers_upto == INVALID_LSN else {"writers_upto": str(bounds.writers_upto)}
        return {
            "relation": self.relation.to_json(),
            "number": self.number,
            "place": str(bounds.snapshot_lsn),
            "valid_from": str(bounds.valid_from),
            "xmin": bounds.xmin,
            "xmax": bounds.xmax,
            "xip": list(bounds.xip),
            "taken_at_us": bounds.taken_at_us,
            "contained_upto": str(bounds.contained_upto),
            **of_writers,
            "primary_key": None if self.primary_key is None else list(self.primary_key),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Generation:
        return cls(
            RelationVersion.from_json(value["relation"]),
            value["number"],
            SnapshotBounds(
                Lsn.parse(value["place"]),
                Lsn.parse(value["valid_from"]),
                value["xmin"],
                value["xmax"],
                tuple(value["xip"]),
                value["taken_at_us"],
                # An xidstream that did not ask for it wrote none.
                Lsn.parse(value.get("contained_upto", "0/0")),
                # Nor does one where nobody was waited for.
                Lsn.parse(value.get("writers_upto", "0/0")),
            ),
            None if value["primary_key"] is None else tuple(value["primary_key"]),
        )
