"""A root of Delta tables as the sink leaves it, made without Spark: one slot, one table ``public.t``."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.log_ranges import QueryTable
from xidstream.pipeline.pg import Lsn

SLOT = "7/shop/orders"


class Log:
    """A root as the sink leaves it, without Spark."""

    def __init__(self, uri: str, options: dict[str, str] | None = None) -> None:
        self.uri = uri
        self.options = options
        self.versions: list[dict[str, Any]] = []

    def commit(self, lsn: int, names: list[str] | None = None, **columns: Any) -> None:
        """``columns``: Delta's. ``names``: of the source, or source=Delta, where the layout is another than before."""
        self.write(lsn, names, **columns)
        transactions = pa.table(
            {"commit_lsn": [lsn], "tables": pa.array([["public.t"]], pa.list_(pa.string()))}
        )
        self._append(f"{self.uri}/_transactions", transactions, lsn)

    def write(self, lsn: int, names: list[str] | None = None, **columns: Any) -> None:
        """The table alone."""
        if names is not None:
            held = dict(name.split("=") if "=" in name else (name, name) for name in names)
            layout = {name: {"type": "t", "column": column} for name, column in held.items()}
            self.versions.append({"slot": SLOT, "since": lsn, "columns": layout})
        n = len(next(iter(columns.values())))
        contract = {"_change_type": ["insert"] * n, "_commit_lsn": [lsn] * n, "_seq": list(range(n))}
        table, rows = f"{self.uri}/public.t", pa.table({**columns, **contract})
        if not DeltaTable.is_deltatable(table, self.options):
            DeltaTable.create(table, rows.schema, storage_options=self.options)
        properties = {"xidstream.versions": json.dumps(self.versions)}
        made = DeltaTable(table, storage_options=self.options)
        made.alter.set_table_properties(properties, raise_if_not_exists=False)
        self._append(table, rows, lsn)

    def _append(self, table: str, rows: pa.Table, lsn: int) -> None:
        of_slot = CommitProperties(app_transactions=[Transaction(SLOT, lsn), Transaction(f"{SLOT}/owner", 1)])
        more = {"commit_properties": of_slot, "storage_options": self.options}
        write_deltalake(table, rows, mode="append", schema_mode="merge", **more)

    def read(self, since: int, until: int, wanted: Any = None) -> list[dict[str, Any]]:
        table = QueryTable(LogFrames(self.uri), "public.t", Lsn(until), wanted)
        parts = pickle.loads(pickle.dumps(table.ranges(table.files(since, until), since, until)))
        found = [row for part in parts for batch in part.batches(None) for row in batch.to_pylist()]
        own = {column.name for column in table.own_columns}
        return [{name: value for name, value in row.items() if name in own} for row in found]
