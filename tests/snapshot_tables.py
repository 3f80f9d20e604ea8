"""``SnapshotTables`` for one table: what stands in a list of one is returned, or raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput, SnapshotTables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.snapshot.generation import Generation

_T = TypeVar("_T")


def output_of(tables: SnapshotTables, relation: RelationVersion, snapshot_lsn: Lsn) -> SnapshotOutput:
    return _only(tables.outputs([(relation, snapshot_lsn)]))


def commit_one(tables: SnapshotTables, generation: Generation, files: Sequence[WrittenFile]) -> bool:
    return _only(tables.commit([(generation, files)]))


def _only(found: Sequence[_T | XidstreamError]) -> _T:
    (one,) = found
    if isinstance(one, XidstreamError):
        raise one
    return one
