"""What a table looked like when a row was written, and the Arrow type each of its columns has here."""

from xidstream.pipeline.relations.relation import Column, RelationVersion, ReplicaIdentity, shared_columns
from xidstream.pipeline.relations.remembered import Remembered
from xidstream.pipeline.relations.types import Codec, ColumnType

__all__ = [
    "Codec",
    "Column",
    "ColumnType",
    "RelationVersion",
    "Remembered",
    "ReplicaIdentity",
    "shared_columns",
]
