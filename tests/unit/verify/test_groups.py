"""How many tables are held at a time."""

from __future__ import annotations

from xidstream.pipeline.schema import RelationVersion, ReplicaIdentity
from xidstream.pipeline.snapshot.tables import Leaf, PublishedSource
from xidstream.pipeline.verify.verifying import _groups

MIB = 1 << 20


def source(relid: int, n_bytes: int) -> PublishedSource:
    relation = RelationVersion(relid, "public", f"t{relid}", ReplicaIdentity.DEFAULT, ())
    return PublishedSource(relation, "", None, (Leaf(relid, "public", f"t{relid}", 1, n_bytes),))


def test_small_tables_are_held_together_up_to_eight_and_a_large_one_alone() -> None:
    sizes = [0] * 10 + [40 * MIB, 40 * MIB, 900 * MIB]
    groups = _groups([source(i, n) for i, n in enumerate(sizes)])
    assert [[each.n_bytes // MIB for each in group] for group in groups] == [[0] * 8, [0, 0, 40], [40], [900]]
    assert _groups([]) == []
