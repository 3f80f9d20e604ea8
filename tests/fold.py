"""Folds a Delta change log to a table's rows at an LSN, in plain Python: what a reader of snapshots and changes must
get.

It follows the contract alone: the rows of the generation, then every change whose transaction the snapshot does not
contain, in the order of (_commit_lsn, _seq). Values that the server did not send are the row's own former ones. An
insert that lacks a value begins a row whose value nobody knows: it is null, whatever a former row with that key had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from xidstream.pipeline.log_tables.locations import encode_table
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

Row = tuple[Any, ...]
Change = dict[str, Any]


def delta_table(root: Path | str, name: str, options: dict[str, str] | None = None) -> DeltaTable:
    """``root``: a folder, or a URI with its ``options`` (deltalake's)."""
    return DeltaTable(f"{root}/{name}", storage_options=options)


def standing_generations(
    root: Path | str, options: dict[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """By ``schema.table``: the row of ``_snapshots`` that counts now, the newest one's if that has not ended."""
    lines = delta_table(root, "_snapshots", options).to_pyarrow_table().to_pylist()
    ended = {(line["table"], line["generation"]) for line in lines if line["state"] == "ended"}
    lines.sort(key=lambda line: int(line["generation"]))
    newest = {line["table"]: line for line in lines}
    return {table: line for table, line in newest.items() if (table, line["generation"]) not in ended}


def bounds_of(generation: dict[str, Any]) -> SnapshotBounds:
    g = generation
    return SnapshotBounds(Lsn(g["place"]), Lsn(g["valid_from"]), g["xmin"], g["xmax"], tuple(g["xip"]), 0)


class Log:
    """One table's log, read once. ``generation``: its row of ``_snapshots``; ``key``: None for a table without one."""

    def __init__(
        self, root: Path | str, schema: str, table: str, options: dict[str, str] | None = None
    ) -> None:
        self.generation = standing_generations(root, options)[f"{schema}.{table}"]
        self.bounds = bounds_of(self.generation)
        self.key: list[str] | None = self.generation["key"]
        log = delta_table(root, encode_table(schema, table), options).to_pyarrow_table()
        self.columns = [name for name in log.column_names if not name.startswith("_")]
        self._log = sorted(log.to_pylist(), key=lambda row: (row["_commit_lsn"], row["_seq"]))
        self.n_snapshot_rows = sum(self._is_of_generation(row) for row in self._log)

    def _is_of_generation(self, row: dict[str, Any]) -> bool:
        return row["_change_type"] == "snapshot" and row["_commit_lsn"] == self.bounds.snapshot_lsn

    def _changes(self, upto: int) -> Iterator[dict[str, Any]]:
        for row in self._log:
            if row["_change_type"] == "snapshot" or row["_commit_lsn"] > upto:
                continue
            if not self.bounds.contains(Xid(row["_xid"]), Lsn(row["_commit_lsn"])):
                yield row

    def at(self, upto: int) -> Counter[Row]:
        """The table's rows when exactly the transactions with a commit LSN up to ``upto`` were committed."""
        before = [row for row in self._log if self._is_of_generation(row)]
        return folded(self.columns, self.key, before, self._changes(upto))


def folded(
    columns: list[str], key: list[str] | None, before: Iterable[Change], changes: Iterable[Change]
) -> Counter[Row]:
    """``before`` and then ``changes``, in this order. ``key``: None for a table without one."""
    return _keyed(columns, key, before, changes) if key else _keyless(columns, before, changes)


def _values(row: Change, columns: list[str]) -> Row:
    return tuple(row[column] for column in columns)


def _keyed(
    columns: list[str], names: list[str], before: Iterable[Change], changes: Iterable[Change]
) -> Counter[Row]:
    state: dict[Row, Change] = {}
    old: Change | None = None
    for row in before:
        key = _values(row, names)
        assert key not in state, f"{key} is twice in the snapshot"
        state[key] = row
    for row in changes:
        kind, key = row["_change_type"], _values(row, names)
        if kind == "truncate":
            state.clear()
        elif kind == "delete":
            assert state.pop(key, None) is not None, f"{key} is deleted and was not there"
        elif kind == "update_preimage":
            old = state.pop(key)
        else:
            if kind == "update_postimage":
                # Where the key stays, the server sends no old tuple.
                former = old if old is not None else state.pop(key)
                row = {**row, **{column: former[column] for column in row["_unchanged"] or ()}}
                old = None
            assert key not in state, f"{key} is inserted and was there"
            state[key] = row
    return Counter(_values(row, columns) for row in state.values())


def _keyless(columns: list[str], before: Iterable[Change], changes: Iterable[Change]) -> Counter[Row]:
    state = Counter(_values(row, columns) for row in before)
    for row in changes:
        kind, values = row["_change_type"], _values(row, columns)
        if kind == "truncate":
            state.clear()
        elif kind in ("delete", "update_preimage"):
            assert state[values] > 0, "a row is taken away that is not there"
            state[values] -= 1
        else:
            state[values] += 1
    return +state
