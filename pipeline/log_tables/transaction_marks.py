"""How far a log is whole and how far it is proven: two marks in ``_transactions``, told when no batch tells them.

``_transactions`` has an application transaction ``<application id>``, which the batches move: all commits up to that
LSN are in the tables. In a quiet database nothing moves it, though the slot is confirmed further on: ``reach`` does.
``<application id>/proven`` is the other one (``prove``): the generations which stand are what the tables were. A reader
has both of its bounds from one version of one table.

A mark never falls. The number of the run's hold on the slot goes with every commit (``ownership``).

The sink has a handle of its own on ``_transactions``. A commit made here moves what the sink's next one states, the
number of the hold, so that one would fail, and the sink would read the table's whole log again: a checkpoint that
remembers the files of a day. So ``n_commits`` counts them, and the sink brings its handle up to date first
(``LogSink``). Example: a batch is committed as version 7, a proof as version 8. The count has risen by one, so the
sink's handle reads version 8 alone, and the next batch is version 9. A proof that comes between the two is found by
Delta, as any other writer's commit is.

Used by ``snapshot_log``, from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.commit_attempts import guarded
from xidstream.pipeline.log_tables.log_table import LogTables, LogTableWriter
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.pg import Lsn


class TransactionMarks:
    """Raises Superseded, SinkDiverged, StorageFault and SinkFailed from every method."""

    n_commits = 0
    """The commits that were made here."""

    def __init__(self, tables: LogTables, application_id: str, ownership: Ownership) -> None:
        self._tables = tables
        self._application_id = application_id
        self._proven_id = locations.proven_id(application_id)
        self._ownership = ownership
        self._lock = threading.Lock()
        self._kept: LogTableWriter | None = None
        """The table as it was last read or committed to, which is once a second. None after a failure."""

    def reach(self, lsn: Lsn, marks: Mapping[str, int] | None = None) -> None:
        """The log is whole up to ``lsn``; ``marks`` move in the same commit. A repeated call changes nothing."""
        self._move({self._application_id: int(lsn), **(marks or {})})

    def prove(self, lsn: Lsn) -> None:
        self._move({self._proven_id: int(lsn)})

    def proven(self) -> int:
        """0 before the first proof, and before the first batch."""
        table = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
        return 0 if table is None else table.watermark(self._proven_id)

    def _move(self, wanted: Mapping[str, int]) -> None:
        def move() -> None:
            with self._newest() as table:
                moved = {name: version for name, version in wanted.items() if table.watermark(name) < version}
                self._ownership.check(table)
                if moved:
                    table.commit([], moved, marks=self._ownership.marks)
                    self.n_commits += 1

        guarded(self._tables, locations.TRANSACTIONS, move)

    @contextmanager
    def _newest(self) -> Iterator[LogTableWriter]:
        """The table as it is now, for one caller at a time."""
        with self._lock:
            table, self._kept = self._kept, None
            if table is None:
                table = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
                assert table is not None, "the sink has made it"
            else:
                table.refresh()
            yield table
            self._kept = table
