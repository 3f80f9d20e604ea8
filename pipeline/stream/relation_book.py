"""Which relation version holds for which row: one scope for plain transactions, one for each open stream.

The server tracks what it has told us in the same two scopes (``maybe_send_schema`` and
``cleanup_rel_sync_cache`` in ``src/backend/replication/pgoutput/pgoutput.c``):

- an R in a stream holds in that stream alone, until the stream ends;
- after a stream's commit its relations hold for plain transactions too, and no new R comes; after an abort
  they never held; after a stream prepare the server sends R again;
- a plain R that arrived later than the stream's is newer than it, whatever the stream then does.

The last point is decided by an arrival number on each R. The server writes the Y messages of an R directly in front
of it (``send_relation_and_attrs``), so what a Y said is kept until the next R of its scope.

The server never takes back what it has told us, and says nothing of a DROP TABLE: within a connection every relation
that was ever declared must be kept, as the server keeps its own entry for it. So a scope keeps what R said as bytes
(some 200 for each relation, columns shared), and only the versions that blocks used last are objects. A number tells
those apart: one number never means two versions, but a version that comes back after a long time has a new one.

Rejected: to forget relations that were not used for long, because the server would not send them again; and to give
each block all that holds in its scope, because with ten thousand tables that cost more than the rows.

An open stream's scope is part of what is gathered of it (``PendingMessages.relations``), and comes with the stream's
first R or Y. So a scope ends with its transaction's record, and the book has no map by xid.

Called by the cutter for each R and Y, for each end of a stream and for each block; never for a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from xidstream.pipeline.pg import INVALID_LSN
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.pgoutput.messages import MessageType, Relation, Type
from xidstream.pipeline.pgoutput.parser import parse_relation
from xidstream.pipeline.schema import (
    Column,
    RelationVersion,
    ReplicaIdentity,
    WeightedLru,
    shared_columns,
)
from xidstream.pipeline.stream.pending import PendingMessages
from xidstream.pipeline.stream.relation_scope import RelationScope
from xidstream.pipeline.stream.stream_events import UsedRelations

REMEMBERED_COLUMNS: Final = 32 << 10
"""Versions are kept as objects up to about so many columns, of some 250 bytes each: 8 MiB."""
_SHARED_TAIL_BYTES: Final = 1 << 20
_LENGTH_BYTES: Final = 4


class RelationBook:
    """``stream`` arguments are an open stream, or None for plain transactions."""

    def __init__(
        self, remembered_columns: int = REMEMBERED_COLUMNS, column_names: ColumnNames = MappingProxyType({})
    ) -> None:
        self._column_names = column_names
        self._plain = RelationScope()
        """The scope of plain transactions."""
        self._n_scopes = 0
        """How many open streams have a scope of their own."""
        self._arrivals = 0
        """How many R messages have come: the number of the last one."""
        self._n_versions = 0
        """How many version numbers were given."""
        self._versions: WeightedLru[tuple[bytes, bytes], tuple[int, RelationVersion]] = WeightedLru(
            remembered_columns
        )
        """The versions that blocks used last, with their numbers, by head and tail."""
        self._shared_tails: dict[bytes, bytes] = {}
        """One copy of each tail, however many relations have it."""
        self._shared_tail_bytes = 0
        """The bytes of the shared tails."""

    def add_type(self, stream: PendingMessages | None, message: Type) -> None:
        name = message.name if message.schema == "pg_catalog" else f"{message.schema}.{message.name}"
        self._scope(stream).type_names[message.oid] = name

    def resolve(self, message: Relation, type_names: dict[int, str]) -> RelationVersion:
        """The version that R declares, its columns under the names that they are delivered by."""
        names = self._column_names.get((message.schema, message.table), {})
        return RelationVersion(
            relid=message.relid,
            schema=message.schema,
            table=message.table,
            replica_identity=ReplicaIdentity(message.replica_identity),
            columns=shared_columns(
                tuple(
                    Column(c.name, c.type_oid, c.type_modifier, c.is_key, type_names.get(c.type_oid)).renamed(
                        names
                    )
                    for c in message.columns
                )
            ),
        )

    def changes(self, stream: PendingMessages | None, message: Relation, body: bytes) -> bool:
        """Whether another version of the relation holds in this scope. ``body`` is R from its relid on."""
        scope = self._scope(stream)
        known = scope.heads.get(message.relid)
        if known is None:
            return False
        return (known, scope.tails[message.relid]) != _parts(message, body, scope.type_names)

    def declare(self, stream: PendingMessages | None, message: Relation, body: bytes) -> None:
        """From the next row of this scope on, what R says holds."""
        scope = self._scope(stream)
        head, tail = _parts(message, body, scope.type_names)
        if self._versions.use((head, tail)) is None:
            self._remember(head, tail, self.resolve(message, scope.type_names))
        scope.type_names.clear()
        self._arrivals += 1
        # A plain R is compared with those of open streams alone, which came after the stream began.
        if stream is not None or self._n_scopes:
            scope.arrivals[message.relid] = self._arrivals
        known = self._plain.heads.get(message.relid)
        scope.heads[message.relid] = known if known is not None and known == head else head
        scope.tails[message.relid] = self._shared(tail)

    def promote(self, stream: PendingMessages) -> None:
        """The stream committed: what it declared holds for plain transactions, unless overtaken."""
        scope, plain = self._take_scope(stream), self._plain
        if scope is not None:
            for relid, arrival in scope.arrivals.items():
                if arrival > plain.arrivals.get(relid, 0):
                    plain.heads[relid], plain.tails[relid] = scope.heads[relid], scope.tails[relid]
                    if self._n_scopes:
                        plain.arrivals[relid] = arrival
        self._forget_arrivals()

    def drop(self, stream: PendingMessages) -> None:
        """The stream aborted or was prepared: nothing of it holds any more."""
        self._take_scope(stream)
        self._forget_arrivals()

    def used(self, stream: PendingMessages | None, relids: Iterable[int]) -> UsedRelations:
        """The versions that hold in this scope for the relations of a block; those never declared are left out."""
        scope = self._plain if stream is None else stream.relations
        if scope is None:
            return UsedRelations({})
        versions = {}
        for relid in relids:
            head = scope.heads.get(relid)
            if head is not None:
                number, version = self._version(head, scope.tails[relid])
                versions[number] = version
        return UsedRelations(versions)

    def _version(self, head: bytes, tail: bytes) -> tuple[int, RelationVersion]:
        known = self._versions.use((head, tail))
        if known is None:
            n_names = int.from_bytes(tail[:_LENGTH_BYTES], "big")
            names, columns = tail[_LENGTH_BYTES:][:n_names], tail[_LENGTH_BYTES + n_names :]
            data = b"".join((bytes([MessageType.RELATION]), head, columns))
            message = parse_relation(data, in_stream=False, lsn=INVALID_LSN)
            type_names = {int(oid): name for oid, name in json.loads(names).items()} if names else {}
            known = self._remember(head, tail, self.resolve(message, type_names))
        return known

    def _remember(self, head: bytes, tail: bytes, version: RelationVersion) -> tuple[int, RelationVersion]:
        self._n_versions += 1
        numbered = self._n_versions, version
        self._versions.add((head, tail), numbered, version.weight)
        self._versions.shrink()
        return numbered

    def _shared(self, tail: bytes) -> bytes:
        """The tail as the one object of its content, for most of those that are in use."""
        shared = self._shared_tails.get(tail)
        if shared is None:
            if self._shared_tail_bytes > _SHARED_TAIL_BYTES:
                self._shared_tails.clear()
                self._shared_tail_bytes = 0
            shared = self._shared_tails[tail] = tail
            self._shared_tail_bytes += len(tail)
        return shared

    def _forget_arrivals(self) -> None:
        """Without an open stream there is nothing that a plain R could have overtaken."""
        if not self._n_scopes:
            self._plain.arrivals.clear()

    def _scope(self, stream: PendingMessages | None) -> RelationScope:
        if stream is None:
            return self._plain
        if stream.relations is None:
            stream.relations = RelationScope()
            self._n_scopes += 1
        return stream.relations

    def _take_scope(self, stream: PendingMessages) -> RelationScope | None:
        scope, stream.relations = stream.relations, None
        self._n_scopes -= scope is not None
        return scope


def _parts(message: Relation, body: bytes, type_names: dict[int, str]) -> tuple[bytes, bytes]:
    """What R and the Y in front of it said, as head and tail. Equal exactly where the versions are."""
    end = body.index(0, body.index(0, _LENGTH_BYTES) + 1) + 1
    names = {c.type_oid: type_names[c.type_oid] for c in message.columns if c.type_oid in type_names}
    written = json.dumps(names).encode() if names else b""
    return body[:end], b"".join((len(written).to_bytes(_LENGTH_BYTES, "big"), written, body[end:]))
