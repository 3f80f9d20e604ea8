"""``erased_store.ErasedStore`` of a log in Iceberg tables. It imports pyiceberg.

States that a log which is cut answers from older versions of the base table alone are not kept: ``erasing`` tells from
where on states can be read then.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.iceberg_root import IcebergRoot
from xidstream.pipeline.erasure.erased_store import Check, Found, StoredColumns
from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.iceberg.erased_table import IcebergErasedTable, copies_in_log, in_work
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.erased_rows import Erased, erase_rows
from xidstream.pipeline.mirror.erased_base import ErasedBase
from xidstream.pipeline.mirror.erased_iceberg_base import ErasedIcebergBase, keys_of
from xidstream.pipeline.pg_rules import labelled_table

if TYPE_CHECKING:
    from xidstream.pipeline.changelog.slot_log import SlotLog
    from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
    from xidstream.pipeline.log_tables.erased_keys import ErasedKeys


class IcebergStore:
    def __init__(self, log: SlotLog, label: str) -> None:
        root, name = log.stored, labelled_table(label)
        assert isinstance(root, IcebergRoot) and name is not None
        self._slot = log.application_id
        self._label = label
        self._tables = IcebergTables(root.address)
        self._key = self._tables.key_of(*name)
        self._base = ErasedIcebergBase(IcebergBases(root.address), self._slot, label)

    def _open(self) -> IcebergTableWriter | None:
        return self._tables.open(self._key, self._label)

    def _opened(self) -> IcebergErasedTable:
        found = self._open()
        if found is None:
            raise SinkFailed(f"there is no Iceberg table {self._label}")
        return IcebergErasedTable(found)

    def keep_states(self, keys: ErasedKeys, stored_columns: StoredColumns, check: Check) -> None:
        """None is kept."""

    def erase_rows(self, keys: ErasedKeys, upto: int, check: Check) -> Erased:
        return erase_rows(self._opened, self._label, self._slot, keys, upto, check)

    def erase_base(self, keys: ErasedKeys, stored_columns: StoredColumns, check: Check) -> ErasedBase | None:
        return self._base.erase(keys, stored_columns, check)

    def in_log(self, keys: ErasedKeys, upto: int, recent: Set[str] | None, *, at_once: bool) -> Found:
        return Found(*copies_in_log(self._open, keys, self._label, upto, at_once=at_once, recent=recent))

    def in_base(self, keys: ErasedKeys, stored_columns: StoredColumns, *, at_once: bool) -> Found:
        wanted = keys_of(self._base, keys, stored_columns)
        if wanted is None:
            return Found((), ())
        if at_once:
            self._base.remove_copies(wanted)
        return Found(*self._base.copies(wanted))

    def left_in_log(self, paths: list[str]) -> list[str]:
        return _left(self._open(), paths)

    def left_in_base(self, paths: list[str]) -> list[str]:
        return _left(self._base.open(), paths)

    def in_work_in_log(self, upto: int, known: Set[str]) -> list[str]:
        return in_work(self._open, upto, known)

    def in_work_in_base(self, known: Set[str]) -> list[str]:
        return self._base.in_work(known)


def _left(table: IcebergTableWriter | None, paths: list[str]) -> list[str]:
    if table is None:
        return []
    gone = set(attempt_files.missing(table.location, paths))
    return [path for path in paths if path not in gone]
