"""Which snapshots of an Iceberg table are expired.

A commit writes the table's metadata anew, and that has all snapshots in it. So a table of the sink has its commits
expire the oldest ones, some dozens at a time (``old_snapshots``). What a base table expires, its manifest says
(``base_table``). What no snapshot names then is removed elsewhere: ``upkeep``, and the mirror's vacuum.

Called by ``iceberg_table``.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from pyiceberg.table.refs import MAIN_BRANCH

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

KEPT_SNAPSHOTS: Final = 10
EXPIRES_EVERY: Final = 50
"""So many commits lie between two that expire snapshots."""
_KEEP: Final = "history.expire.min-snapshots-to-keep"
_KEEP_MS: Final = "history.expire.max-snapshot-age-ms"


def old_snapshots(metadata: TableMetadata) -> list[Snapshot]:
    """The oldest snapshots, if there are many. The table's own properties may keep more."""
    if len(metadata.snapshots) < KEPT_SNAPSHOTS + EXPIRES_EVERY:
        return []
    properties = metadata.properties
    if properties.get("gc.enabled", "true").lower() == "false":
        return []
    by_id = {each.snapshot_id: each for each in metadata.snapshots}
    kept: set[int] = set()
    for name, ref in metadata.refs.items():
        at: int | None = ref.snapshot_id
        n_left = max(KEPT_SNAPSHOTS, int(properties.get(_KEEP, 1))) if name == MAIN_BRANCH else len(by_id)
        while at in by_id and n_left > 0:
            kept.add(at)
            at, n_left = by_id[at].parent_snapshot_id, n_left - 1
    if _KEEP_MS in properties:
        now_ms = max(each.timestamp_ms for each in metadata.snapshots)
        kept |= {
            each.snapshot_id
            for each in metadata.snapshots
            if now_ms - each.timestamp_ms < int(properties[_KEEP_MS])
        }
    return [each for each in metadata.snapshots if each.snapshot_id not in kept]


def superseded(metadata: TableMetadata, before_ms: int | None) -> list[Snapshot]:
    """The snapshots that others followed before that time, by the clocks of who made them; None: all but the newest.
    Without those that tags and branches come from."""
    if metadata.properties.get("gc.enabled", "true").lower() == "false":
        return []
    by_id = {each.snapshot_id: each for each in metadata.snapshots}
    kept = {metadata.current_snapshot_id}
    for name, ref in metadata.refs.items():
        at: int | None = ref.snapshot_id
        while name != MAIN_BRANCH and at in by_id:
            kept.add(at)
            at = by_id[at].parent_snapshot_id
    in_order = sorted(metadata.snapshots, key=lambda each: each.sequence_number or 0)
    followed_ms = {each.snapshot_id: later.timestamp_ms for each, later in itertools.pairwise(in_order)}
    return [
        each
        for each in in_order
        if each.snapshot_id not in kept
        and (before_ms is None or followed_ms.get(each.snapshot_id, before_ms) < before_ms)
    ]


def line_of(metadata: TableMetadata) -> set[int]:
    """The snapshots that the main branch comes from, as far as they are there. It has to be asked before any of them is
    expired: pyiceberg takes the parent from the oldest that is left."""
    parents = {each.snapshot_id: each.parent_snapshot_id for each in metadata.snapshots}
    found: set[int] = set()
    at = metadata.current_snapshot_id
    while at is not None and at in parents:
        found.add(at)
        at = parents[at]
    return found
