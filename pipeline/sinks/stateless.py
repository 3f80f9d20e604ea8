"""The common part of sinks that keep nothing themselves: the console's, and a user's function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.exchange import AT_ONCE, Pace, Tenure
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.spark.session import GetSession, warm_up
from xidstream.pipeline.spark_errors import fault_of

if TYPE_CHECKING:
    from xidstream.pipeline.log_tables.batch_parts import TableName
    from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
    from xidstream.pipeline.snapshot.bounds import SnapshotBounds
    from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch


class StatelessSink:
    def open(self, session: GetSession) -> None:
        try:
            warm_up(session())
        except Exception as error:
            raise fault_of(error, "starting the sink") from error

    def watermark(self) -> Lsn:
        """It keeps nothing, and so cannot tell."""
        return INVALID_LSN

    def last_owner(self) -> int:
        return 0

    def claim(self, tenure: Tenure) -> None:
        """Nothing is held that could be anybody's."""

    def pace(self) -> Pace:
        return AT_ONCE

    def snapshot_log(self) -> SnapshotTables:
        raise Unsupported("this sink takes no snapshots of tables")

    def exclude_contained(self, contained: Mapping[TableName, SnapshotBounds]) -> None:
        """Nothing is to be done: these sinks were given no snapshot."""

    def write_snapshot(self, batch: SnapshotBatch) -> None:
        raise Unsupported("this sink takes no snapshots of tables")

    def log_part(self) -> None:
        """There is no log."""

    def close(self) -> None:
        """Nothing is held."""
