"""A few tables, held at once: their snapshots, the wait for the log, and each one's read and comparison.

First all of them are held, each with its own E. Then the log is waited for once. Then each is read, let go of, and
compared. What keeps a table from being compared is its result. Only a log that stands still ends more than one table:
it has not come far enough in time, or for a minute nobody has read the slot and the log has not gone on, so that the
tables would be held for nothing.

Called by ``verifying``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.moment import (
    Moment,
    answered_up_to,
    moment_of,
    replayed_upto,
    standby_moment,
    table_at,
)
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.errors import EnvironmentFault, XidstreamError
from xidstream.pipeline.initial_copy.range_reading import RangeReader
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.postgres.table_snapshot import HeldSnapshot
from xidstream.pipeline.postgres.verified_server import VerifiedServer, is_read, mark
from xidstream.pipeline.quantities import human_s
from xidstream.pipeline.snapshot.key_filter import ranged_filter
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.spark_errors import fault_of
from xidstream.pipeline.verify.comparison import Compared, compare
from xidstream.pipeline.verify.result import DifferingRange, TableVerification, Verdict
from xidstream.pipeline.verify.settings import VerifySettings
from xidstream.pipeline.verify.source_rows import SourceRows, read_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STANDBY_ATTEMPTS: Final = 20
_POLL_S: Final = 0.5
_MARK_AFTER_S: Final = 2.0
"""A commit of somebody else's may come first."""
_LOOK_S: Final = 5.0
"""How often the server is asked whether somebody reads the slot."""
_UNREAD_S: Final = 60.0
"""A run that was restarted has its slot again by then, on a busy machine, too."""


class LogStandsStill(EnvironmentFault):
    """The log does not reach a snapshot. It ends the verification, and is the reason of all tables that are left."""


@dataclass(frozen=True)
class Comparing:
    """``folder``: for the rows of one table, removed after it. ``check`` may raise to end it. ``finish`` gets each
    result."""

    log: SlotLog
    spark: SparkSession
    dsn: Dsn
    server: VerifiedServer
    settings: VerifySettings
    holder: TableHolder
    reader: RangeReader
    folder: Location
    check: Callable[[], None]
    finish: Callable[[TableVerification], None]

    def group(self, group: Sequence[PublishedSource]) -> None:
        """Hold all of them, wait, and compare each. Raises LogStandsStill, with those finished that could be."""
        held: list[HeldSnapshot] = []
        try:
            for source in group:
                self.check()
                try:
                    held.append(self._hold(source))
                except XidstreamError as error:
                    self.finish(not_verified(source.name, error.message))
            if held:
                self._await(max(self._wanted_lsn(each) for each in held))
            for each in held:
                self.finish(self._compared(each))
                self.holder.release(each.source.relation.relid)
        finally:
            for each in held:
                self.holder.release(each.source.relation.relid)

    def _hold(self, source: PublishedSource) -> HeldSnapshot:
        deadline = time.monotonic() + self.settings.timeout_s

        def waiting(blockers: Sequence[object]) -> None:
            self.check()
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"it stays locked, by {'; '.join(map(str, blockers)) or 'an unknown session'}"
                )

        # What was open when the table was published is a matter of the log's snapshot, not of this one.
        return self.holder.hold(source, wait_for_writers=False, on_wait=waiting)

    def _await(self, lsn: Lsn) -> None:
        """Until the log answers at ``lsn``. Raises LogStandsStill."""
        began_s = time.monotonic()
        has_marked = False
        looked_s = read_s = 0.0
        before = None
        while (found := answered_up_to(self.log)) < lsn:
            self.check()
            waited_s = time.monotonic() - began_s
            if found != before:
                before, read_s = found, waited_s  # a sink writes what its run has read
            if waited_s >= self.settings.timeout_s:
                hint = (
                    ""
                    if self.server.can_mark
                    else "; with this server a commit of a published table has to come"
                )
                raise LogStandsStill(
                    f"the change log answers up to {found}, and the source's snapshot needs {lsn}: waited for "
                    f"{human_s(waited_s)}; is a run of slot {self._slot} up?{hint}"
                )
            if (
                not has_marked
                and self.server.can_mark
                and waited_s >= min(_MARK_AFTER_S, self.settings.timeout_s / 2)
            ):
                mark(self.dsn)
                has_marked = True
            if waited_s >= looked_s + _LOOK_S:
                looked_s = waited_s
                read_s = waited_s if is_read(self.dsn, self._slot) else read_s
                if waited_s - read_s >= _UNREAD_S:
                    raise LogStandsStill(
                        f"the change log answers up to {found}, and the source's snapshot needs {lsn}: nobody has read "
                        f"slot {self._slot} for {human_s(waited_s - read_s)}, and a run of it has to be up"
                    )
            time.sleep(_POLL_S)

    @property
    def _slot(self) -> str:
        return self.log.application_id.rpartition("/")[2]

    def _placed(self, held: HeldSnapshot) -> tuple[HeldSnapshot, Moment]:
        """When the snapshot is, in the log; another snapshot where that cannot be told."""
        name = held.source.name
        if not self.server.is_standby:
            return held, moment_of(self.log, name, held.bounds)
        for _ in range(_STANDBY_ATTEMPTS):
            moment = standby_moment(self.log, name, held.bounds)
            if moment is not None:
                return held, moment
            self.check()
            held = self._hold(held.source)
            self._await(self._wanted_lsn(held))
        raise EnvironmentFault(
            f"the standby replayed a change of it while each of {_STANDBY_ATTEMPTS} snapshots was taken"
        )

    def _compared(self, held: HeldSnapshot) -> TableVerification:
        name, began_s = held.source.name, time.monotonic()
        try:
            held, moment = self._placed(held)
            at = table_at(self.log, name, moment)
            rows = read_source(
                self.reader,
                held,
                self.folder,
                at.generation.key,
                pause_ms=self.settings.pause_ms,
                bytes_per_s=self.settings.bytes_per_s,
                check=self.check,
            )
            # The session has held the table all the time.
            relid = held.source.relation.relid
            if lost := self.holder.confirm([relid], held.bounds.valid_from):
                raise lost[relid]
            self.holder.release(relid)
            self.check()
            found = self._in_spark(rows, at)
        except LogStandsStill:
            raise
        except XidstreamError as error:
            return not_verified(name, error.message)
        finally:
            shutil.rmtree(self.folder.uri, ignore_errors=True)
        differences = found.differences
        if differences is not None:
            repairs = _repairs(held.source, at.generation.key, differences.ranges)
            differences = replace(differences, repairs=repairs)
        absent = tuple(column for column in rows.shape.columns if column not in at.shape.columns)
        return TableVerification(
            name,
            Verdict.EQUAL if found.differences is None else Verdict.DIFFERS,
            str(moment.lsn),
            len(moment.unseen_lsns),
            found.source_rows,
            found.log_rows,
            found.n_ranges,
            absent,
            elapsed_s=round(time.monotonic() - began_s, 3),
            differences=differences,
        )

    def _in_spark(self, rows: SourceRows, at: TableAt) -> Compared:
        try:
            return compare(
                rows.frame(self.spark),
                at.state(self.spark),
                rows.shape,
                source_rows=rows.n_rows,
                rows_per_range=self.settings.rows_per_range,
                n_shown=self.settings.keys,
                with_values=self.settings.show_values,
            )
        except Exception as error:
            raise fault_of(error, f"comparing table {rows.shape.table}") from error

    def _wanted_lsn(self, held: HeldSnapshot) -> Lsn:
        return replayed_upto(held.bounds) if self.server.is_standby else held.bounds.valid_from


def _repairs(
    source: PublishedSource, key: Sequence[str] | None, ranges: Sequence[DifferingRange]
) -> tuple[str, ...]:
    """``Differences.repairs``."""
    runs: list[list[DifferingRange]] = []
    for each in ranges:
        if runs and runs[-1][-1].end == each.first:
            runs[-1].append(each)
        else:
            runs.append([each])
    found = [ranged_filter(source.relation, key, run[0].columns, run[0].first, run[-1].end) for run in runs]
    return tuple(str(each) for each in found if each is not None) if None not in found else ()


def not_verified(table: str, reason: str) -> TableVerification:
    return TableVerification(table, Verdict.NOT_VERIFIED, reason=reason)
