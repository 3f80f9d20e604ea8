"""What a table looked like when a row was written, and the Arrow type each of its columns has here."""

from xidstream.pipeline.relations.relation import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.relations.types import Codec, ColumnType, column_type

__all__ = ["Codec", "Column", "ColumnType", "RelationVersion", "ReplicaIdentity", "column_type"]
