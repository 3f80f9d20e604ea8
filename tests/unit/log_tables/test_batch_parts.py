"""A batch's parts by table: where each relation version first has rows."""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from xidstream.pipeline.exchange import Batch, MemoryPart, Sealed
from xidstream.pipeline.log_tables.batch_parts import TableParts, tables_of
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA

FIRST = RelationVersion(1, "public", "t", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))
KEYLESS = dataclasses.replace(FIRST, columns=(Column("a", 25, -1, False),))
SECOND = dataclasses.replace(FIRST, relid=2)
NONE = pa.RecordBatch.from_pylist([], schema=TRANSACTIONS_SCHEMA)


def parts_of(*units: list[tuple[RelationVersion, int]]) -> TableParts:
    sealed = tuple(
        Sealed(
            NONE, tuple(MemoryPart(version, 1, 10, lsn, None) for version, lsn in unit), (), (), len(unit), 0
        )
        for unit in units
    )
    (parts,) = tables_of(Batch(0, sealed, Lsn(1), Lsn(99), Lsn(99), 1, 1, 0)).values()
    return parts


def seen(parts: TableParts) -> list[tuple[int, RelationVersion]]:
    return [(appearance.commit_lsn, appearance.relation) for appearance in parts.appearances]


def test_versions_that_differ_in_their_key_alone_share_a_layout_and_appear_apart() -> None:
    parts = parts_of([(FIRST, 10)], [(FIRST, 15)], [(KEYLESS, 20)], [(KEYLESS, 25)], [(FIRST, 30)])
    assert seen(parts) == [(10, FIRST), (20, KEYLESS), (30, FIRST)]
    assert len(parts.versions) == 1 and {appearance.layout for appearance in parts.appearances} == {0}


def test_a_table_that_was_dropped_and_made_again_within_a_unit_appears_in_commit_order() -> None:
    """The parts of a unit are in the order of their relids."""
    parts = parts_of([(FIRST, 16), (SECOND, 10)], [(SECOND, 40)])
    assert seen(parts) == [(10, SECOND), (16, FIRST), (40, SECOND)]
