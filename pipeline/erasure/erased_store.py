"""What an erasure asks of a log's format: the seam between its order (``erasing``) and the tables.

``DeltaStore`` is here; Iceberg's is in ``iceberg_store``, which imports pyiceberg. ``store_of`` chooses.

Called by ``erasing``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xidstream.pipeline.delta.erased_copies import copies_in_log, in_work, left_of
from xidstream.pipeline.delta.erased_table import erase_rows
from xidstream.pipeline.erasure.kept_states import keep_states
from xidstream.pipeline.mirror.erased_base import (
    ErasedBase,
    base_location,
    copies_in_base,
    erase_base,
    in_work_in_base,
    keys_of_base,
    remove_copies,
)

if TYPE_CHECKING:
    from xidstream.pipeline.changelog.slot_log import SlotLog
    from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, StoredColumn
    from xidstream.pipeline.log_tables.erased_rows import Erased

StoredColumns = Mapping[str, "Sequence[StoredColumn]"]
Check = Callable[[], None]


class Found(NamedTuple):
    """``copies``: files that may have such rows, below the table's folder. ``cleared``: files that the table has not
    now and that have none."""

    copies: Sequence[str]
    cleared: Sequence[str]


class ErasedStore(Protocol):
    """One table of the log and its base table. All raise StorageFault, OSError and what the format's library raises."""

    def keep_states(self, keys: ErasedKeys, stored_columns: StoredColumns, check: Check) -> None:
        """Keep the states that would go with older versions of the base table, as far as the format can."""
        ...

    def erase_rows(self, keys: ErasedKeys, upto: int, check: Check) -> Erased: ...

    def erase_base(self, keys: ErasedKeys, stored_columns: StoredColumns, check: Check) -> ErasedBase | None:
        """None where there is no base table."""
        ...

    def in_log(self, keys: ErasedKeys, upto: int, recent: Set[str] | None, *, at_once: bool) -> Found:
        """Remove what may go. ``recent``: copies that may be in use for a while yet; None: each may, where the format
        does not tell when it was replaced."""
        ...

    def in_base(self, keys: ErasedKeys, stored_columns: StoredColumns, *, at_once: bool) -> Found: ...

    def left_in_log(self, paths: list[str]) -> list[str]:
        """Which of these files are there."""
        ...

    def left_in_base(self, paths: list[str]) -> list[str]: ...

    def in_work_in_log(self, upto: int, known: Set[str]) -> list[str]:
        """Files that no commit has named, that may have rows up to the LSN, and that are not ``known``."""
        ...

    def in_work_in_base(self, known: Set[str]) -> list[str]: ...


class DeltaStore:
    def __init__(self, log: SlotLog, label: str) -> None:
        self._log = log
        self._label = label
        self._table = log.log_table(label)[1].location
        self._base = base_location(log.root, label)

    def keep_states(self, keys: ErasedKeys, stored_columns: StoredColumns, check: Check) -> None:
        keep_states(self._log, self._label, keys, stored_columns, check)

    def erase_rows(self, keys: ErasedKeys, upto: int, check: Check) -> Erased:
        return erase_rows(self._table, self._label, self._log.application_id, keys, upto, check)

    def erase_base(self, keys: ErasedKeys, stored_columns: StoredColumns, check: Check) -> ErasedBase | None:
        return erase_base(self._log.root, self._log.application_id, self._label, keys, stored_columns, check)

    def in_log(self, keys: ErasedKeys, upto: int, recent: Set[str] | None, *, at_once: bool) -> Found:
        return Found(*copies_in_log(self._table, self._label, keys, upto, at_once=at_once))

    def in_base(self, keys: ErasedKeys, stored_columns: StoredColumns, *, at_once: bool) -> Found:
        wanted = keys_of_base(self._base, self._label, keys, stored_columns)
        if wanted is None:
            return Found((), ())
        if at_once:
            remove_copies(self._log.root, self._log.application_id, self._label, wanted)
        return Found(*copies_in_base(self._base, wanted, self._label))

    def left_in_log(self, paths: list[str]) -> list[str]:
        return left_of(self._table, paths)

    def left_in_base(self, paths: list[str]) -> list[str]:
        return left_of(self._base, paths)

    def in_work_in_log(self, upto: int, known: Set[str]) -> list[str]:
        return in_work(self._table, self._label, upto, known)

    def in_work_in_base(self, known: Set[str]) -> list[str]:
        return in_work_in_base(self._base, self._label, known)


def store_of(log: SlotLog, label: str) -> ErasedStore:
    if log.stored.delta_location is not None:
        return DeltaStore(log, label)
    from xidstream.pipeline.erasure.iceberg_store import IcebergStore

    return IcebergStore(log, label)
