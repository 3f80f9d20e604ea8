"""Base tables as Delta tables in the folder ``current`` below the log's root: ``base_stores`` over
``delta.DeltaTableWriter``.

A version is Delta's, a watermark an application transaction, and a file's bounds are the statistics of its add action:
JSON, in which a timestamp has milliseconds, as Delta wants it. So a file's lowest is rounded down and its highest up.

Somebody may have removed a table, and the next refresh made it anew. Versions are counted from 0 again then, so the
number alone would find rows of a later moment: whoever asks for one compares its watermarks.

Called by ``log_root``, and by what knows that the log has Delta tables (``pipeline.erasure``, ``mirror.erased_base``).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as pt
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from xidstream.pipeline.changelog.base_stores import BaseVersion, BoundedFile
from xidstream.pipeline.changelog.log_table import DeltaLogTable
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.kept_tables import KeptTables
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.table_metadata import TableMetadata

CURRENT: Final = "current"
_EPOCH: Final = datetime.datetime(1970, 1, 1)


def current(root: Location) -> Location:
    return root.child(CURRENT)


class DeltaBase(DeltaTableWriter):
    """One of the tables."""

    is_as_made = True
    """What others write is Delta's to tell apart (``check_plain``), and has the table's columns."""

    def file_schema(self, fields: Sequence[pa.Field]) -> pa.Schema:
        return pa.schema(list(fields))

    def put(
        self,
        added: Sequence[BoundedFile],
        removed: Sequence[str] | None,
        marks: Mapping[str, int],
        columns: Sequence[TableColumn] | None = None,
    ) -> None:
        now_ms = int(time.time() * 1000)
        actions = [
            AddAction(file.path, file.size_bytes, {}, now_ms, True, statistics(file)) for file in added
        ]
        self.swap(actions, removed, marks, columns)


class DeltaBases:
    """The base tables below ``root``, which is the log's. ``kept``: their handles are of these."""

    bounds_any_name = False

    def __init__(self, root: Location, kept: KeptTables | None = None) -> None:
        self._current = current(root)
        self._kept = kept

    def key_of(self, schema: str, table: str) -> str:
        return locations.encode_table(schema, table)

    def open(self, key: str, label: str) -> DeltaBase | None:
        return DeltaBase.open(self._current.child(key), label, self._kept)

    def open_or_create(
        self, key: str, label: str, columns: Sequence[TableColumn], about: TableMetadata
    ) -> DeltaBase:
        return DeltaBase.open_or_create(self._current.child(key), label, columns, about, kept=self._kept)

    def at(self, key: str, version: int) -> BaseVersion | None:
        location = self._current.child(key)
        try:
            table = DeltaTable(location.uri, version=version, storage_options=location.storage_options)
        except TableNotFoundError:
            return None
        except DeltaError:
            newest = DeltaTable(location.uri, storage_options=location.storage_options)
            if newest.version() < version or not has_commit(location, version):
                return None
            raise
        return BaseVersion(
            location,
            tuple(table.file_uris()),
            table.transaction_version,
            lambda: DeltaLogTable(location, version),
        )

    def is_newest(self, key: str, version: int) -> bool:
        return not has_commit(self._current.child(key), version + 1)

    def forget(self) -> None:
        if self._kept is not None:
            self._kept.forget()


def has_commit(location: Location, version: int) -> bool:
    """Whether the log of the table at ``location`` has the commit of this version."""
    try:
        location.read(f"_delta_log/{version:020d}.json")
    except FileNotFoundError:
        return False
    return True


def statistics(file: BoundedFile) -> str:
    """The JSON of an add action."""
    stats: dict[str, Any] = {"numRecords": file.n_rows}
    if file.bounds:
        stats["minValues"] = {name: _json_low(each.low, each.type) for name, each in file.bounds.items()}
        stats["maxValues"] = {name: _json_high(each.high, each.type) for name, each in file.bounds.items()}
        stats["nullCount"] = dict.fromkeys(file.bounds, 0)
    return json.dumps(stats)


def _json_low(value: Any, type_: pa.DataType) -> Any:
    return _json(value - value % 1000 if pt.is_timestamp(type_) else value, type_)


def _json_high(value: Any, type_: pa.DataType) -> Any:
    return _json(value + -value % 1000 if pt.is_timestamp(type_) else value, type_)


def _json(value: Any, type_: pa.DataType) -> Any:
    if pt.is_date32(type_):
        return (_EPOCH + datetime.timedelta(days=value)).date().isoformat()
    if pt.is_timestamp(type_):
        text = (_EPOCH + datetime.timedelta(microseconds=value)).isoformat(timespec="milliseconds")
        return text if type_.tz is None else f"{text}Z"
    return value
