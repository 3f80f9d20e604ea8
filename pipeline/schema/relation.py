"""One version of a relation, as an R message (and the Y messages before it) declared it.

A RelationVersion is a value: two R messages with the same content give equal versions. It is built by the
reader, travels beside the blocks, names the columns of segments, and is written as JSON into manifests.

Many tables have the same columns (the partitions of one table, for example), so within a process equal columns
are one object, wherever they come from. What is pickled is what R said; the Arrow types are worked out again.

It was considered to let the raw R message travel and parse it wherever it is needed: rejected, because the type
of a domain column depends on Y messages as well.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa

from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.schema.types import ColumnType, column_type

CONTRACT_COLUMNS = (
    "_change_type",
    "_commit_lsn",
    "_commit_timestamp",
    "_xid",
    "_seq",
    "_unchanged",
    "_text",
)
"""The columns that every row has beside its table's own, in the order of the contract."""

_SHARED_LAYOUTS = 512
_MOST_SHARED_COLUMNS = 128
"""Equal columns are one object for so many layouts of so many columns at most: 20 MiB in the worst case."""


class ReplicaIdentity(enum.Enum):
    """``pg_class.relreplident``."""

    DEFAULT = "d"
    NOTHING = "n"
    FULL = "f"
    INDEX = "i"


@dataclass(frozen=True)
class Column:
    """One column of an R message.

    ``type_oid`` is the column's own type (of a domain: the domain); ``base_type_name`` is what Y said of it
    (of a domain: the qualified base type, ``pg_catalog`` written as no schema), None where no Y came. ``renamed_from``:
    its name in PostgreSQL, where the setting ``column_names`` gives it another one.
    """

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool
    base_type_name: str | None = None
    renamed_from: str | None = None

    @property
    def source_name(self) -> str:
        """In PostgreSQL."""
        return self.name if self.renamed_from is None else self.renamed_from

    def renamed(self, names: Mapping[str, str]) -> Column:
        """Under the name that ``names`` has for it, if any."""
        name = names.get(self.name, self.name)
        return self if name == self.name else replace(self, name=name, renamed_from=self.name)

    @cached_property
    def type(self) -> ColumnType:
        return column_type(self.type_oid, self.type_modifier, self.base_type_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, self.parts

    @property
    def parts(self) -> tuple[Any, ...]:
        """What makes it; what a column that has its own name does not need is left out."""
        parts = (self.name, self.type_oid, self.type_modifier, self.is_key, self.base_type_name)
        return parts if self.renamed_from is None else (*parts, self.renamed_from)


def shared_columns(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Equal columns, as the one object that this process has of them already where it has one."""
    return columns if len(columns) > _MOST_SHARED_COLUMNS else _shared_columns(columns)


@lru_cache(maxsize=_SHARED_LAYOUTS)
def _shared_columns(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    return columns


@dataclass(frozen=True)
class RelationVersion:
    """``columns`` in wire order, which is the order of every tuple decoded under this version."""

    relid: int
    schema: str
    table: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]

    @cached_property
    def clash(self) -> str | None:
        """Why no row of this version can be delivered: two names, or a name and a contract column, are equal ignoring
        case. None where all differ.

        It is no error until a transaction keeps such a row: a table may be declared in work that is rolled back.
        """
        seen: dict[str, str] = {name.lower(): name for name in CONTRACT_COLUMNS}
        for column in self.columns:
            other = seen.get(column.name.lower())
            if other is not None:
                return f"column {column.name} clashes with {other}, ignoring case"
            seen[column.name.lower()] = column.name
        return None

    def __hash__(self) -> int:
        # Versions are the keys of a transaction's rows: a hash over all columns would be paid for each block.
        return hash((self.relid, self.schema, self.table, len(self.columns)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.relid, self.schema, self.table, self.replica_identity.value, self.columns)

    @property
    def name(self) -> str:
        """``schema.table``, as users name it (``table_label``); not an SQL identifier."""
        return table_label(self.schema, self.table)

    @cached_property
    def key(self) -> tuple[str, ...] | None:
        """The columns that name a row of the stream. None under FULL, whose old tuples are whole rows, under NOTHING,
        and where there is no such column."""
        if self.replica_identity in (ReplicaIdentity.FULL, ReplicaIdentity.NOTHING):
            return None
        return tuple(column.name for column in self.columns if column.is_key) or None

    @property
    def weight(self) -> int:
        """What ``WeightedLru`` counts for it, in columns: its own, and about eight for the rest."""
        return 8 + len(self.columns)

    @cached_property
    def arrow_fields(self) -> tuple[pa.Field, ...]:
        """The table's own columns: nullable, in order."""
        return tuple(pa.field(c.name, c.type.arrow, nullable=True) for c in self.columns)

    def to_json(self) -> dict[str, Any]:
        return {
            "relid": self.relid,
            "schema": self.schema,
            "table": self.table,
            "replica_identity": self.replica_identity.value,
            "columns": [list(column.parts) for column in self.columns],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RelationVersion:
        return cls(
            relid=value["relid"],
            schema=value["schema"],
            table=value["table"],
            replica_identity=ReplicaIdentity(value["replica_identity"]),
            columns=shared_columns(tuple(Column(*c) for c in value["columns"])),
        )


def _restored(
    relid: int, schema: str, table: str, replica_identity: str, columns: tuple[Column, ...]
) -> RelationVersion:
    return RelationVersion(relid, schema, table, ReplicaIdentity(replica_identity), shared_columns(columns))
