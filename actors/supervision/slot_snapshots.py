"""What a slot's snapshots mean for its run: when they begin, what they may end, and when a run has nothing more to do.

They begin with the first epoch that has the slot, and go on over the epochs after it. Into Delta tables they go beside
the stream. A function gets them before the stream goes on, so for a function nothing is looked for after that. A run
with ``snapshot = "only"`` ends when all tables are taken, and the log is whole up to where their snapshots are valid
from, because only from there on the tables' state is known. One with ``available_now`` has no less to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from xidstream.actors.snapshots.coordinator import SnapshotCoordinator
from xidstream.actors.snapshots.sink_tables import SinkTables
from xidstream.actors.supervision.drivers import Driver
from xidstream.actors.supervision.epoch import Epoch
from xidstream.pipeline.account.snapshots import SnapshotProgress
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import Opened
from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.conninfo import complete
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.modes import SnapshotMode
from xidstream.pipeline.settings.sink_kinds import Snapshots
from xidstream.pipeline.snapshot.tables import Surveyed
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

_T = TypeVar("_T")


class SlotSnapshots:
    """One run's. ``config`` has its secrets; ``notify`` tells people. Without a sink no table is read."""

    def __init__(self, config: Config, notify: Callable[[str], None], *, has_sink: bool = True) -> None:
        self._config = config
        self._has_sink = has_sink
        self._notify = notify
        self._epoch: Epoch | None = None
        """The epoch that reads; None between two."""
        self._driver: Driver | None = None
        """The driver that has the sink; None while none has."""
        self._taking: SnapshotCoordinator | None = None
        """The coordinator; None while no table is to be taken."""
        self._server: Mapping[str, str] = {}
        """The server that the coordinator was begun for. Another one needs another coordinator."""
        self._owner: int | None = None
        """The last epoch's number in the storage; None: not known. Whoever had the slot since then has a higher one."""
        self._is_aimed = False
        """Whether the epoch was told where the run ends, now that the snapshots are there."""
        self._is_stream_released = False
        """Whether the sink was told, in this epoch, that all snapshots are there."""
        self._tables = SinkTables(self._on_sink)
        """The snapshots' tables, as the driver's sink has them."""

    def begin(self, epoch: Epoch, opened: Opened, driver: Driver) -> None:
        """An epoch has the slot, and its batch loop was started."""
        if self._was_anothers(opened) or opened.server != self._server:
            # What is in hand is another server's, and means nothing on any other. Or another run had the slot
            # meanwhile, and may have taken the same tables.
            self.stop()
        self._epoch, self._driver = epoch, driver
        self._is_aimed = self._is_stream_released = False
        if self._taking is None and self._takes(opened):
            self._server = opened.server
            identity = opened.identity
            dsn = complete(self._config.dsn, **opened.server)
            layout = Layout(identity.system_identifier, identity.slot, epoch.name)
            book = SnapshotBook(Storage(self._config.storage), layout, opened.snapshots)
            self._taking = SnapshotCoordinator(
                dataclasses.replace(self._config, dsn=dsn),
                book,
                self._survey,
                self._delivered,
                self._tables,
                self._notify,
                once=not self._is_beside,
            )
        elif self._taking is not None:
            self._taking.begin_epoch()

    def _was_anothers(self, opened: Opened) -> bool:
        """Whether another run may have had the slot since this run's last epoch: it left a higher number then."""
        before, found = self._owner, opened.last_owner
        self._owner = None if found is None else found + 1
        return before is not None and found is not None and found > before

    def end_epoch(self) -> None:
        self._epoch = self._driver = None

    def holds_target(self, opened: Opened) -> bool:
        """Whether the epoch's target is not known before the tables that are wanted are taken."""
        return self._takes(opened) and not (self._taking is not None and self._taking.is_complete)

    def check(self, target: Lsn | None) -> bool:
        """Whether the run has done what it was started for. Raises what ended the snapshots.

        ``target``: where a run with ``available_now`` ends at the earliest.
        """
        taking = self._taking
        if taking is None:
            return False
        if taking.failure is not None:
            raise taking.failure
        if not taking.is_complete:
            return False
        if not self._is_stream_released and not self._is_beside:
            self._let_stream_go_on()
        if not taking.is_reached:
            return False
        if target is not None and not self._is_aimed and self._epoch is not None:
            self._is_aimed = True
            self._epoch.aim(max(target, taking.valid_from.next_record.record_end))
        return self._config.snapshot == SnapshotMode.ONLY.value

    def _takes(self, opened: Opened) -> bool:
        return self._has_sink and (self._is_beside or opened.snapshots.takes_snapshots)

    @property
    def _is_beside(self) -> bool:
        return self._config.sink_kind.snapshots is Snapshots.BESIDE

    def _let_stream_go_on(self) -> None:
        try:
            self._tables.complete()
            self._is_stream_released = True
        except ComponentLost:
            pass  # the loop has only begun, or has ended: the next check tells it

    def progress(self) -> SnapshotProgress | None:
        taking = self._taking  # asked on other threads, while ``begin`` may end it
        return None if taking is None else taking.progress()

    def prove_last(self) -> None:
        """Prove the log up to its last commit, so that readers can read it there. The batch loop has ended in order,
        and the epoch's parts are still there."""
        if self._taking is not None and self._is_beside:
            self._taking.prove_last()

    def stop(self) -> None:
        if self._taking is not None:
            self._taking.stop()
            self._taking = None

    def _survey(self, known: str | None) -> Surveyed | None:
        epoch = self._epoch
        return None if epoch is None else epoch.survey(known)

    def _delivered(self) -> tuple[Lsn, Lsn] | None:
        epoch = self._epoch
        report = None if epoch is None else epoch.sequencer_report()
        return None if report is None else (report.delivered_lsn, report.last_commit_lsn)

    def _on_sink(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T:
        driver = self._driver
        if driver is None:
            raise ComponentLost("the stream is starting again")
        return driver.on_snapshots(call, after_end=after_end)
