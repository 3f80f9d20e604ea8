"""What a table looked like when a row was written, and the Arrow type each of its columns has here."""

from xidstream.pipeline.schema.relation import (
    Column,
    RelationVersion,
    ReplicaIdentity,
    shared_columns,
)
from xidstream.pipeline.schema.types import Codec, ColumnType
from xidstream.pipeline.schema.weighted_lru import WeightedLru

__all__ = [
    "Codec",
    "Column",
    "ColumnType",
    "RelationVersion",
    "WeightedLru",
    "ReplicaIdentity",
    "shared_columns",
]
