"""How far a log is whole and how far it is proven: two marks in ``_transactions``, told when no batch tells them.

``_transactions`` has an application transaction ``<application id>``, which the batches move: all commits up to that
LSN are in the tables. In a quiet database nothing moves it, though the slot is confirmed further on: ``reach`` does.
``<application id>/proven`` is the other one (``prove``): the generations which stand are what the tables were. A reader
has both of its bounds from one version of one table.

A mark never falls. The number of the run's hold on the slot goes with every commit (``ownership``).

Used by ``snapshot_log``, from any thread; ``prove`` by one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.commit_attempts import guarded
from xidstream.pipeline.log_tables.log_table import LogTables, LogTableWriter
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.pg import Lsn


class TransactionMarks:
    """Raises Superseded, SinkDiverged, StorageFault and SinkFailed from every method."""

    def __init__(self, tables: LogTables, application_id: str, ownership: Ownership) -> None:
        self._tables = tables
        self._application_id = application_id
        self._proven_id = locations.proven_id(application_id)
        self._ownership = ownership
        self._kept: LogTableWriter | None = None
        """The table as the last proof left it: there is one every second. But for a run that took the slot over,
        nobody else moves that mark."""

    def reach(self, lsn: Lsn, marks: Mapping[str, int] | None = None) -> None:
        """The log is whole up to ``lsn``; ``marks`` move in the same commit. What is told already is not told again."""
        wanted = {self._application_id: int(lsn), **(marks or {})}

        def move() -> None:
            writer = self._opened()
            moved = {name: version for name, version in wanted.items() if writer.watermark(name) < version}
            if moved:
                self._ownership.check(writer)
                writer.commit([], moved, marks=self._ownership.marks)

        guarded(self._tables, locations.TRANSACTIONS, move)

    def proven(self) -> int:
        """0 before the first proof, and before the first batch."""
        writer = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
        return 0 if writer is None else writer.watermark(self._proven_id)

    def prove(self, lsn: Lsn) -> None:
        def record() -> None:
            if self._kept is not None:
                self._kept.refresh()
            writer, self._kept = self._kept or self._opened(), None
            self._ownership.check(writer)
            if writer.watermark(self._proven_id) < lsn:
                writer.commit([], {self._proven_id: int(lsn)}, marks=self._ownership.marks)
            self._kept = writer

        guarded(self._tables, locations.TRANSACTIONS, record)

    def _opened(self) -> LogTableWriter:
        writer = self._tables.open(locations.TRANSACTIONS, locations.TRANSACTIONS)
        assert writer is not None, "the sink has made it"
        return writer
