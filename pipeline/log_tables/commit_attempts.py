"""A commit beside the sink's own: tried again when the sink came first, and failures told with the table's name.

The sink and its snapshots commit to the same tables, each on threads of its own. Who comes second finds the snapshot of
the log outdated (``log_table.SnapshotOutdated``), opens the table anew, looks again, and commits.

Used by what commits to a log's tables beside the batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables.log_table import LogTables, SnapshotOutdated
from xidstream.pipeline.spark_errors import fault_of

ATTEMPTS: Final = 8
"""How often one commit is tried. Each failure means that the sink committed first."""

_T = TypeVar("_T")


def guarded(tables: LogTables, label: str, act: Callable[[], _T]) -> _T:
    """What ``act`` returns, which opens the table that ``label`` names and commits to it. Raises Superseded,
    SinkDiverged, StorageFault and SinkFailed."""
    for _ in range(ATTEMPTS):
        try:
            return act()
        except SnapshotOutdated:
            continue
        except Exception as error:
            raise fault_of(error, f"the snapshot in {tables.title(label)}") from error
    raise StorageFault(f"{tables.title(label)} was changed by others during {ATTEMPTS} attempts to commit")
