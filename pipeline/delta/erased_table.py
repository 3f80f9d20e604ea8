"""A Delta table of the log, as an erasure takes it: ``log_tables.erased_rows`` over ``delta_table``.

Rejected: deltalake's ``delete``, whose new files have no ``_commit_lsn`` ranges of ours, which knows no watermark, and
which makes a commit for each predicate. Deletion vectors: the rows stay in the files, and the folds read files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.plain_files import UNMERGED
from xidstream.pipeline.errors import SinkFailed, Unsupported
from xidstream.pipeline.log_tables import erased_rows
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys
from xidstream.pipeline.log_tables.erased_rows import Erased, batches_of
from xidstream.pipeline.log_tables.locations import Location


class DeltaErasedTable(DeltaTableWriter):
    def check(self) -> None:
        self.check_plain()
        for name in UNMERGED:
            if self.properties.get(name, "").lower() == "true":
                raise Unsupported(
                    f"Delta table {self.label} has {name}: its files are not to be written anew",
                    remedy=f"set {name} to false, erase, and set it again; a change data feed may have the rows, too",
                )

    def batches(self, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        return batches_of(self.location, path, columns)


def erase_rows(
    table: Location,
    label: str,
    slot: str,
    keys: ErasedKeys,
    upto: int,
    check: Callable[[], None] = lambda: None,
) -> Erased:
    """``log_tables.erased_rows.erase_rows`` of the Delta table at ``table``."""
    return erased_rows.erase_rows(partial(_opened, table, label), label, slot, keys, upto, check)


def _opened(table: Location, label: str) -> DeltaErasedTable:
    found = DeltaErasedTable.open(table, label)
    if found is None:
        raise SinkFailed(f"there is no Delta table {label}")
    return found
