"""Writes what waits for the sink to the journal, and reads it again when the sink comes to it.

Two loops beside the sequencer's others, on its event loop: one writes a file when ``JournalPolicy`` says that one is
due, the other loads the next one before the sink asks for it. Each works on one file at a time, in a thread, so the
release of what is in memory never waits for either. Both begin with ``begin``.

A file that is written is no part of the journal until ``CommitSequence`` has recorded it. Where the journal has many
small files, the next one is written with the content of the last of them, and takes their place. Rejected: an object
for each transaction, because a flush costs more than a small transaction; and a file that grows, because an object
store has none and a torn end would have to be told from damage.

A file that cannot be written ends nothing: delivery and records go on, as beside a full journal, and it is tried again
(``JournalRetries``). But a segment that cannot be flushed does, since nobody knows then what of it is on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import pyarrow as pa

from xidstream.pipeline.commits.changes import Changes
from xidstream.pipeline.commits.entries import Entry, EntryState
from xidstream.pipeline.commits.journal import Journal
from xidstream.pipeline.commits.journal_policy import JournalPolicy
from xidstream.pipeline.commits.journal_retries import JournalRetries
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.parking import Parking
from xidstream.pipeline.commits.slot_storage import SlotStorage, TakenOver
from xidstream.pipeline.commits.threads import MakeThreads, own_threads
from xidstream.pipeline.errors import SegmentCorrupt, SlotLost, StorageFault
from xidstream.pipeline.exchange import ArrowRef, JournalFile, Sealed
from xidstream.pipeline.settings.config import Config

FILE_BYTES: Final = 16 << 20
"""In memory, of one file's units: two flushes of a disk, some 10 ms, are little beside writing it."""
FILE_UNITS: Final = 4096
"""Large transactions have nothing in memory; their names are kept for each unit."""

_JOINED_ROWS: Final = 1000
"""The most rows of a joined unit: a batch is cut between units, and a function with small batches is to get small
ones."""

Fetch = Callable[[ArrowRef], pa.Table]
"""Gets what a buffer has put."""
Put = Callable[[pa.Table], ArrowRef]
"""Puts it where a sink gets it."""


def policy_of(config: Config, *, has_sink: bool) -> JournalPolicy:
    """The settings' policy. At backlog_bytes the reader stops: the journal begins before that, whatever is set."""
    after_bytes = min(config.journal_after_bytes, config.backlog_bytes // 2)
    most_rows = min(_JOINED_ROWS, config.batch_rows)
    return JournalPolicy(after_bytes, config.journal_after_s, config.journal_max_bytes, has_sink, most_rows)


def order_of(config: Config, taken_over: TakenOver, *, has_sink: bool) -> CommitOrder:
    """The order of an epoch that begins, with the journal that was taken over. Without a sink nothing of the journal
    stays in memory."""
    horizon_bytes = config.batch_bytes if has_sink else 0
    return CommitOrder(
        batch_rows=config.batch_rows,
        batch_bytes=config.batch_bytes,
        journal=Journal(taken_over.journal, taken_over.delivered_lsn, horizon_bytes=horizon_bytes),
        confirmed_lsn=taken_over.confirmed_lsn,
        parking=Parking(taken_over.parked, taken_over.confirmed_lsn),
    )


class Journaling:
    """``changed``: what the sequencer's loops wait for. It is notified of every change, also of changes made here."""

    def __init__(
        self,
        order: CommitOrder,
        storage: SlotStorage,
        policy: JournalPolicy,
        fetch: Fetch,
        put: Put,
        changed: Changes,
        threads: MakeThreads = own_threads,
    ) -> None:
        self._order = order
        self._storage = storage
        self._policy = policy
        self._fetch = fetch
        self._put = put
        self._changed = changed
        self._writing: list[Sealed] = []
        """The contents of the file that is being written."""
        self._is_ending = self._is_withheld = False
        """Whether the run stops, so that all that is ready is written; whether nothing more may be written."""
        self._is_released = False
        """Whether a sink has come: before it nothing is loaded."""
        self._next_number = order.journal.next_number
        """The number of the next file."""
        self._last_file_s: float | None = None
        """When the last file was written, on the monotonic clock; None before the first."""
        self._retries = JournalRetries()
        """When a file that could not be written is tried again."""
        self._writer = threads(1, "journal")
        """The thread that writes files."""

    def begin(self, spawn: Callable[[Awaitable[None]], None]) -> None:
        spawn(self._load_forever())
        if self._policy.max_bytes:
            spawn(self._write_forever())

    @property
    def is_full(self) -> bool:
        return bool(self._order.journal) and self._policy.is_full(self._order.journal.n_bytes)

    @property
    def error(self) -> StorageFault | None:
        """Why it cannot be written; None where it can."""
        return self._retries.error

    @property
    def failing_s(self) -> float | None:
        """For how long it could not be written; None where it can be."""
        return self._retries.failing_s(time.monotonic())

    @property
    def is_idle(self) -> bool:
        """Whether a run that is ending has nothing left to write."""
        return not self._writing and self._due_in_s() != 0

    def end(self) -> None:
        """Write all that is ready, because no sink will take it in this run."""
        self._is_ending = True
        self._retries.hasten()

    def withhold(self) -> None:
        """Write nothing more, because stored rows cannot be read: what is not confirmed comes from the slot again."""
        self._is_withheld = True

    def release(self) -> None:
        """There is a sink: load what it will ask for."""
        self._is_released = True

    def in_use(self, keys: Iterable[str]) -> set[str]:
        """The keys among ``keys`` that a file of the journal names, or will name when the current file is written."""
        writing = {key for content in self._writing for key in content.stored_keys()}
        return {key for key in keys if key in writing or self._order.journal.names(key)}

    # -- inside ----------------------------------------------------------------------------------------

    def _due_in_s(self) -> float | None:
        if self._is_withheld:
            return None
        order, now_s = self._order, time.monotonic()
        due_in_s = self._policy.due_in_s(
            now_s,
            order.oldest_ready_s,
            order.waiting_bytes,
            order.unconfirmed_wal_bytes,
            order.journal.n_bytes,
            is_ending=self._is_ending,
            last_file_s=self._last_file_s,
        )
        return None if due_in_s is None else max(due_in_s, self._retries.wait_s(now_s))

    async def _write_forever(self) -> None:
        while True:
            await self._changed.until(self._due_in_s)
            self._last_file_s = time.monotonic()
            entries = self._order.to_write(FILE_BYTES, FILE_UNITS)
            units = [(entry.end, entry.content) for entry in entries if entry.content is not None]
            self._writing = [content for _, content in units]
            absorbed = self._order.journal.to_absorb(sum(entry.memory_bytes for entry in entries))
            number, self._next_number = self._next_number, self._next_number + 1
            try:
                file = await asyncio.get_running_loop().run_in_executor(
                    self._writer,
                    self._storage.write_journal,
                    number,
                    units,
                    self._fetch,
                    absorbed,
                    self._policy.most_rows,
                )
            except SegmentCorrupt:
                if not absorbed:
                    raise
                # Whoever comes to it tells. All else is confirmed until then.
                self._order.journal.leave_alone(absorbed)
                self._leave(number, entries)
                continue
            if self._is_withheld:
                self._writing = []
                return  # No record names the file, and the next epoch removes it.
            if isinstance(file, JournalFile):
                self._retries.worked()
                if not self._order.written(file, entries, absorbed):
                    self._leave(number, entries, is_there=True)
            else:
                self._retries.failed(file, time.monotonic())
                self._leave(number, entries)
            self._writing = []
            self._changed.notify()

    def _leave(self, number: int, entries: Sequence[Entry], *, is_there: bool = False) -> None:
        """They are in no file that counts. ``is_there``: whether there is one. It goes, and so does what was kept for
        it while the sink took it."""
        self._order.not_written()
        gone = [
            key
            for entry, content in zip(entries, self._writing, strict=True)
            if entry.state is EntryState.DONE
            for key in content.stored_keys()
        ]
        self._writing = []
        if gone or is_there:
            self._order.journal.drop(self._storage.left_file(number, gone))

    async def _to_load(self) -> JournalFile:
        found: list[JournalFile] = []

        def is_found() -> bool:
            # It says so once: from then on the file counts as in hand.
            if not found and self._is_released and (file := self._order.journal.to_load()) is not None:
                found.append(file)
            return bool(found)

        await self._changed.when(is_found)
        return found[0]

    async def _load_forever(self) -> None:
        journal = self._order.journal
        while True:
            file = await self._to_load()
            try:
                units = await asyncio.to_thread(self._storage.load_journal, file, self._put)
            except SlotLost as error:
                journal.damaged(file, error)
            else:
                journal.loaded(file, units, time.monotonic())
            self._changed.notify()
