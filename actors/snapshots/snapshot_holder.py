"""The snapshot holder actor: keeps the lock and the snapshot of each table that is being read, and does nothing else.

Its sessions are what a snapshot lives by. So it has a process of its own: a reader, the Spark driver or the slot reader
may die, and the tables in hand lose a range at most. ``pipeline.postgres.table_holder`` keeps the sessions.
"""

from __future__ import annotations

from collections.abc import Sequence

from xidstream.actors.runtime.secrets import take_up
from xidstream.pipeline.errors import SnapshotLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import renamed_columns
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.postgres.table_snapshot import HeldSnapshot
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.tables import PublishedSource


class SnapshotHolder:
    """Calls come on several threads, for different tables."""

    def __init__(self, config: Config, secrets_path: str | None) -> None:
        config = take_up(config, secrets_path)
        names = renamed_columns(config.column_names)
        self._holder = TableHolder(login_of(config), config.publication, column_names=names)

    def hold(self, source: PublishedSource, wait_for_writers: bool, behind: Lsn) -> HeldSnapshot:
        return self._holder.hold(source, wait_for_writers=wait_for_writers, behind=behind)

    def hold_together(self, sources: Sequence[PublishedSource], behind: Lsn) -> dict[int, HeldSnapshot]:
        return self._holder.hold_together(sources, behind=behind)

    def release(self, *relids: int) -> None:
        self._holder.release(*relids)

    def confirm(self, relids: Sequence[int], valid_from: Lsn) -> dict[int, SnapshotLost]:
        return self._holder.confirm(relids, valid_from)

    def room_for(self, wanted: int) -> int:
        return self._holder.room_for(wanted)

    def waiting_for(self) -> list[str]:
        """In words: for whom tables wait."""
        return sorted({str(each) for blockers in self._holder.waiting_for().values() for each in blockers})
