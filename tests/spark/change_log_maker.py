"""A change log made by the real sink, beside a model of the source: what each table held at each commit.

With ``iceberg`` the same is written to Iceberg tables, too, by the other sink.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.snapshot_tables import commit_one, output_of
from tests.spark.support import IDENTITY, Transaction
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import (
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
    snapshot_rows,
)
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.sinks.log_sink import LogSink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation

BOOL, INT8, INT4, INT2, TEXT, DATE = 16, 20, 23, 21, 25, 1082
_INTEGERS = (INT2, INT4, INT8)
Row = dict[str, Any]


def keyed(name: str, columns: dict[str, int], *key: str, relid: int) -> RelationVersion:
    """A table ``public.NAME``; without a key its replica identity is FULL."""
    identity = ReplicaIdentity.DEFAULT if key else ReplicaIdentity.FULL
    described = tuple(Column(c, oid, -1, c in key or not key) for c, oid in columns.items())
    return RelationVersion(relid, "public", name, identity, described)


def key_of(relation: RelationVersion, row: Row) -> tuple[Any, ...]:
    return tuple(row[c.name] for c in relation.columns if c.is_key)


@dataclass
class LogMaker:
    """``states``: commit LSN → table → its rows, each a tuple of values, sorted by their text."""

    path: Path | str
    spark: Any
    make_batch: Any
    tables: dict[str, list[Row]] = field(default_factory=dict)
    states: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    lsn: int = 1_000
    storage_options: dict[str, str] | None = None
    iceberg: str | None = None

    def __post_init__(self) -> None:
        self.sink = DeltaSink(str(self.path), IDENTITY, self.storage_options)
        self.sinks: list[LogSink] = [self.sink]
        if self.iceberg is not None:
            from xidstream.pipeline.iceberg.catalogs import IcebergAddress
            from xidstream.pipeline.sinks.iceberg_sink import IcebergSink

            self.sinks.append(IcebergSink(IcebergAddress.parse(self.iceberg), IDENTITY, commit_every_s=0))
        for sink in self.sinks:
            sink.open(lambda: self.spark)
            sink.claim(Tenure(1, "epoch", 1, {}, Lsn(10**12)))
        self._numbers: dict[str, int] = {}

    def snapshot(self, relation: RelationVersion, rows: Sequence[Row]) -> None:
        """What the table holds now, as the first or the next generation. All transactions so far are contained."""
        snapshot_lsn, self.lsn = self.lsn + 1, self.lsn + 3
        number = self._numbers[relation.name] = self._numbers.get(relation.name, 0) + 1
        bounds = SnapshotBounds(
            Lsn(snapshot_lsn), Lsn(snapshot_lsn + 1), self.lsn * 10, self.lsn * 10, (), 1_700_000_000_000_000
        )
        columns = [pa.array([row[f.name] for row in rows], f.type) for f in relation.arrow_fields]
        text = pa.nulls(len(rows), pa.map_(pa.string(), pa.string()))
        for log in [sink.snapshot_log() for sink in self.sinks]:
            target = output_of(log, relation, bounds.snapshot_lsn)
            files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
            if rows:
                files.write(
                    target.conform(
                        snapshot_rows(
                            relation,
                            columns,
                            text,
                            snapshot_lsn=snapshot_lsn,
                            taken_at_us=bounds.taken_at_us,
                            first_seq=0,
                        )
                    )
                )
            assert commit_one(log, Generation(relation, number, bounds), files.close())
            log.prove(Lsn(self.lsn))
        self.tables[relation.name] = [dict(row) for row in rows]

    def commit(self, *changes: tuple[RelationVersion, Sequence[Row]], **more: Any) -> int:
        """Rows as ``tests.spark.support.internal`` takes them; the model is the caller's (``Changes`` keeps it)."""
        self.lsn += 10
        transaction = Transaction(self.lsn, changes, xid=self.lsn * 10, **more)
        for sink in self.sinks:
            sink.write(self.make_batch(transaction))
            sink.snapshot_log().prove(Lsn(self.lsn))
        self.states[self.lsn] = self.state()
        return self.lsn

    def state(self) -> dict[str, list[Any]]:
        return {name: as_rows(rows) for name, rows in copy.deepcopy(self.tables).items()}

    def insert(self, relation: RelationVersion, *rows: Row) -> int:
        self.tables[relation.name] += [dict(row) for row in rows]
        return self.commit((relation, [{**row, "_change": INSERT} for row in rows]))

    def truncate(self, relation: RelationVersion) -> int:
        self.tables[relation.name].clear()
        return self.commit((relation, [{"_change": TRUNCATE}]))

    def random_commit(
        self, dice: random.Random, relations: Sequence[RelationVersion], n_keys: int = 400
    ) -> int:
        """Some inserts, updates, changes of keys and deletes in some of the tables."""
        changes = []
        for relation in dice.sample(relations, dice.randint(1, len(relations))):
            rows: list[Row] = []
            for _ in range(dice.randint(1, 12)):
                rows += self._random_change(dice, relation, n_keys)
            if rows:
                changes.append((relation, rows))
        return self.commit(*changes) if changes else self.lsn

    def _random_change(self, dice: random.Random, relation: RelationVersion, n_keys: int) -> list[Row]:
        held = self.tables[relation.name]
        has_key = relation.replica_identity is ReplicaIdentity.DEFAULT
        keys = {key_of(relation, row) for row in held} if has_key else set()
        kind = dice.choice(["insert", "update", "update", "move", "delete"])
        new = {c.name: random_value(dice, c, n_keys) for c in relation.columns}
        if kind == "insert" or not held:
            if has_key and key_of(relation, new) in keys:
                return []
            held.append(new)
            return [{**new, "_change": INSERT}]
        row = dice.choice(held)
        before = dict(row)
        if kind == "delete":
            held.remove(row)
            return [{**_old(relation, before), "_change": DELETE}]
        if kind == "update" and has_key:
            row.update({c.name: new[c.name] for c in relation.columns if not c.is_key})
            return [{**row, "_change": UPDATE_POSTIMAGE}]
        if has_key and key_of(relation, new) in keys:
            return []
        row.update(new)
        return [{**_old(relation, before), "_change": UPDATE_PREIMAGE}, {**row, "_change": UPDATE_POSTIMAGE}]


def _old(relation: RelationVersion, row: Row) -> Row:
    if relation.replica_identity is ReplicaIdentity.FULL:
        return row
    return {c.name: row[c.name] for c in relation.columns if c.is_key}


def random_value(dice: random.Random, column: Column, n_keys: int) -> Any:
    number = dice.randrange(n_keys)
    return number if column.type_oid in _INTEGERS else f"{column.name} {number:04d}"


def as_rows(rows: Sequence[Row]) -> list[Any]:
    return sorted((tuple(sorted(row.items())) for row in rows), key=repr)
