"""Which relation version holds for which row: one scope for plain transactions, one for each open stream.

The server tracks what it has told us in the same two scopes (``maybe_send_schema`` and
``cleanup_rel_sync_cache`` in ``src/backend/replication/pgoutput/pgoutput.c``):

- an R in a stream holds in that stream alone, until the stream ends;
- after a stream's commit its relations hold for plain transactions too, and no new R comes; after an abort
  they never held; after a stream prepare the server sends R again;
- a plain R that arrived later than the stream's is newer than it, whatever the stream then does.

The last point is decided by an arrival number on each R. Y messages precede the R that needs them in the
same scope, so a scope keeps the type names it has heard.

Equal content mostly has one snapshot, whichever scope it is of: a buffer that was told one of them needs no other, and
a hundred open transactions on one table are the ordinary case.

Called by the cutter for each R and Y, for each end of a stream and for each block; never for a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from xidstream.pipeline.pg import Xid
from xidstream.pipeline.protocol.messages import Relation, Type
from xidstream.pipeline.relations import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.stream.cuts import RelationSnapshot

_REMEMBERED_SNAPSHOTS: Final = 64


@dataclass
class _Scope:
    relations: dict[int, RelationVersion] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    type_names: dict[int, str] = field(default_factory=dict)
    snapshot: RelationSnapshot | None = None


class RelationBook:
    """``scope`` arguments are the stream's top-level xid, or None for plain transactions."""

    def __init__(self) -> None:
        self._plain = _Scope()
        self._streams: dict[Xid, _Scope] = {}
        self._arrivals = 0
        self._n_snapshots = 0
        self._snapshots: dict[frozenset[RelationVersion], RelationSnapshot] = {}

    def add_type(self, scope: Xid | None, message: Type) -> None:
        name = message.name if message.schema == "pg_catalog" else f"{message.schema}.{message.name}"
        self._scope(scope).type_names[message.oid] = name

    def resolve(self, scope: Xid | None, message: Relation) -> RelationVersion:
        """The version that R declares, not yet in force. Raises ColumnNameClash."""
        names = self._scope(scope).type_names
        return RelationVersion(
            relid=message.relid,
            schema=message.schema,
            table=message.table,
            replica_identity=ReplicaIdentity(message.replica_identity),
            columns=tuple(
                Column(c.name, c.type_oid, c.type_modifier, c.is_key, names.get(c.type_oid))
                for c in message.columns
            ),
        )

    def current(self, scope: Xid | None, relid: int) -> RelationVersion | None:
        return self._scope(scope).relations.get(relid)

    def declare(self, scope: Xid | None, version: RelationVersion) -> None:
        """From the next row of this scope on, ``version`` holds."""
        place = self._scope(scope)
        self._arrivals += 1
        place.arrivals[version.relid] = self._arrivals
        if place.relations.get(version.relid) != version:
            place.relations[version.relid] = version
            place.snapshot = None

    def promote(self, xid: Xid) -> None:
        """The stream committed: what it declared holds for plain transactions, unless overtaken."""
        stream = self._streams.pop(xid, None)
        if stream is None:
            return
        for relid, version in stream.relations.items():
            arrival = stream.arrivals[relid]
            if arrival <= self._plain.arrivals.get(relid, 0):
                continue
            self._plain.arrivals[relid] = arrival
            if self._plain.relations.get(relid) != version:
                self._plain.relations[relid] = version
                self._plain.snapshot = None

    def drop(self, xid: Xid) -> None:
        """The stream aborted or was prepared: nothing of it holds any more."""
        self._streams.pop(xid, None)

    def snapshot(self, scope: Xid | None) -> RelationSnapshot:
        place = self._scope(scope)
        if place.snapshot is None:
            place.snapshot = self._snapshot(place.relations)
        return place.snapshot

    def _snapshot(self, relations: dict[int, RelationVersion]) -> RelationSnapshot:
        content = frozenset(relations.values())
        known = self._snapshots.get(content)
        if known is None:
            self._n_snapshots += 1
            known = RelationSnapshot(self._n_snapshots, dict(relations))
            while len(self._snapshots) >= _REMEMBERED_SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]
            self._snapshots[content] = known
        return known

    def _scope(self, scope: Xid | None) -> _Scope:
        if scope is None:
            return self._plain
        return self._streams.setdefault(scope, _Scope())
