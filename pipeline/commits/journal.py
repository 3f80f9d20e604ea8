"""The journal's book: which files hold what is committed and not delivered, and how far the sink is in them.

The files are in commit order, and everything in them commits before what ``order`` still has. The record in the storage
names them (``spans``), so what is confirmed is the end of what sink and journal hold together. A file's units are
*released* from here like those of the order, in front of them: while they are in memory still, or after they were
loaded again. Only as much as a batch or two needs is in memory (``horizon_bytes``). A file leaves the journal when all
of its units are done. It is removed from the storage only when a record without it is durable (``take_removed``).

    file:  written -> [in memory -> unloaded ->] loading -> loaded -> delivered -> removed
                        (or, any time before that) absorbed by the file after it -> removed

The last files may be absorbed by the next one (``journal_merging``), as long as the sink has nothing of them. What they
name belongs to that one then.

A file that cannot be read is *damaged*. It keeps its place: everything before it is released, nothing after it. But if
it ends before a commit that the sink holds, the sink holds all of it, and it leaves as one that is delivered: the
storage was restored to an older state than the sink, perhaps.

An example. Three units with a commit each end at 104, 204 and 304, and the sink takes one unit a batch::

    what happens                                    confirmed    delivered    files
    the units are ready                             0            0            none
    file 0 is written, with the first two           204          0            0
    a batch with the first is done                  204          104          0
    a batch with the second is done                 204          204          none, and 0 is to be removed
    a batch with the third is done                  304          304          none

The third unit never was in the journal: the order released it, after the journal had nothing more. If the run dies
after the first batch, the next one finds file 0 in the record, loads it, and releases its second unit alone.

Plain Python for one thread, ``order``'s. ``commits.journaling`` writes, loads and removes files, and tells it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from xidstream.pipeline.commits.entries import (
    JOURNALED,
    NO_TICKET,
    Entry,
    EntryKind,
    EntryState,
    Head,
    head_of,
)
from xidstream.pipeline.commits.journal_merging import absorbed, is_small
from xidstream.pipeline.errors import ANOTHER_STORAGE, SlotLost, XidstreamError
from xidstream.pipeline.exchange import JournalFile, JournalSpan, Sealed, UnitEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn


@dataclass
class DamagedFile:
    """A file that the record names and that cannot be read. ``error`` says which LSNs are missing. All that it had lies
    before ``up_to_lsn``."""

    epoch: str
    number: int
    error: XidstreamError
    up_to_lsn: Lsn = INVALID_LSN


_NO_LSNS: Final = (INVALID_LSN, INVALID_LSN, INVALID_LSN)
_NOWHERE: Final = UnitEnd(INVALID_LSN, INVALID_LSN, INVALID_LSN, 0)


@dataclass(eq=False)
class _QueuedFile:
    """One file. ``entries``: its units, in order; None while none of them is in memory.

    ``is_loaded``: all that is to be released from it is in memory, ``memory_bytes`` of it, as buffers have put it
    where ``has_tickets``. ``file`` is None if it is damaged and does not even tell what it had.
    """

    epoch: str
    number: int
    file: JournalFile | None
    entries: list[Entry] | None = None
    is_loading: bool = False
    is_loaded: bool = False
    has_tickets: bool = False
    memory_bytes: int = 0
    error: XidstreamError | None = None
    is_apart: bool = False
    """Whether it could not be read when another file was to absorb it. Loading it tells why."""
    up_to_lsn: Lsn = INVALID_LSN
    """All that it has lies before this; 0/0 if that is not known."""
    placeholder: Entry = field(default_factory=lambda: Entry(NO_TICKET, EntryKind.UNIT, _NOWHERE))
    """Stands for units that are not in memory: it is never ready."""

    @property
    def is_delivered(self) -> bool:
        return self.entries is not None and all(e.state is EntryState.DONE for e in self.entries)

    @property
    def is_untouched(self) -> bool:
        """Whether the sink has taken nothing of it."""
        return self.entries is None or all(e.state is EntryState.READY for e in self.entries)

    def measure(self) -> None:
        self.is_loaded = True
        self.memory_bytes = sum(e.memory_bytes for e in self.entries or ())

    def unload(self) -> None:
        assert self.entries is not None
        if not any(entry.state is EntryState.READY for entry in self.entries):
            return
        self.is_loaded = False
        self.memory_bytes = 0
        for entry in self.entries:
            if entry.state is EntryState.READY:
                entry.content = None
        if all(entry.state is EntryState.READY for entry in self.entries):
            self.entries = None


class Journal:
    """``files``: what an earlier epoch left, in order; the sink has all of it up to ``delivered_lsn``."""

    def __init__(
        self,
        files: Sequence[JournalFile | DamagedFile] = (),
        delivered_lsn: Lsn = INVALID_LSN,
        *,
        horizon_bytes: int = 64 << 20,
    ) -> None:
        self._queue: deque[_QueuedFile] = deque()
        """The files, in commit order."""
        for file in files:
            if isinstance(file, DamagedFile):
                queued = _QueuedFile(
                    file.epoch, file.number, None, error=file.error, up_to_lsn=file.up_to_lsn
                )
            else:
                queued = _QueuedFile(file.epoch, file.number, file, up_to_lsn=file.end_lsn)
            self._queue.append(queued)
        self._watermark = INVALID_LSN
        """The sink holds all commits up to here."""
        self._horizon_bytes = horizon_bytes
        self._removed: list[JournalFile] = []
        """Files that have left, and that a record without them may still name."""
        self._keys = {key for file in self.files for key in file.stored_keys}
        """The keys of the segments that the files name."""
        self.delivered_lsn = delivered_lsn
        """The greatest end of what the sink holds, in the files that were and are here."""
        self.next_number = max((queued.number for queued in self._queue), default=-1) + 1
        """The number of the next file."""
        self.n_bytes = sum(file.n_bytes for file in self.files)
        """The bytes in the storage: of the files, and of the segments that they name."""
        self.version = 0
        """Changes whenever ``spans`` or ``delivered_lsn`` do."""

    # -- what it holds ---------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def files(self) -> list[JournalFile]:
        """The files that tell what they have, in order."""
        return [queued.file for queued in self._queue if queued.file is not None]

    @property
    def spans(self) -> tuple[JournalSpan, ...]:
        """The files as the record names them."""
        named = [(queued.epoch, queued.number) for queued in self._queue]
        runs = groupby(enumerate(named), key=lambda each: (each[1][0], each[1][1] - each[0]))
        spans = []
        for (epoch, _), run in runs:
            numbers = [number for _, (_, number) in run]
            spans.append(JournalSpan(epoch, numbers[0], numbers[-1]))
        return tuple(spans)

    @property
    def n_units(self) -> int:
        """The number of units that the sink does not hold."""
        return sum(_n_undelivered(queued) for queued in self._queue)

    @property
    def last_commit_lsn(self) -> Lsn:
        return max((file.last_commit_lsn for file in self.files), default=INVALID_LSN)

    def names(self, key: str) -> bool:
        """Whether a file names this object of the storage, or one that is not removed yet."""
        return key in self._keys

    @property
    def error(self) -> XidstreamError | None:
        """Why nothing more can be released: all before it is done. None as long as something may be."""
        return self._queue[0].error if self._queue else None

    def entries(self) -> Iterator[Entry]:
        """The units that are not delivered, in order; an entry that is not ready stands for what is not in memory."""
        return (entry for _, entry in self._with_files())

    def _with_files(self) -> Iterator[tuple[_QueuedFile, Entry]]:
        for queued in self._queue:
            if queued.entries is None:
                yield queued, queued.placeholder
            else:
                for entry in queued.entries:
                    is_unloaded = entry.state is EntryState.READY and entry.content is None
                    yield queued, queued.placeholder if is_unloaded else entry

    @property
    def head(self) -> Head | None:
        """The journal's first unit that is not done; None if it holds nothing. If the unit is in the storage alone, the
        message says so, and the LSNs are its file's."""
        for queued, entry in self._with_files():
            if entry.state is EntryState.DONE:
                continue
            if entry is not queued.placeholder:
                return head_of(entry)
            file = queued.file
            state = EntryState.WAITING.value if queued.is_loading else JOURNALED
            lsns = (
                (file.first_commit_lsn, file.last_commit_lsn, file.end_lsn) if file is not None else _NO_LSNS
            )
            n_transactions = 0 if file is None else file.n_transactions
            return Head(NO_TICKET, EntryKind.UNIT, state, JOURNALED, None, *lsns, n_transactions)
        return None

    @property
    def first_ticket_in_memory(self) -> int | None:
        """The least ticket of a unit that is in memory as its buffer put it there; None if there is none."""
        for queued in self._queue:
            for entry in (queued.entries or ()) if queued.has_tickets else ():
                if entry.ticket != NO_TICKET and entry.content is not None:
                    return entry.ticket
        return None

    # -- files come and go -----------------------------------------------------------------------------

    def append(self, file: JournalFile, entries: list[Entry], absorbed: Sequence[JournalFile] = ()) -> None:
        """``file`` is durable, and has ``entries``, which are the order's no more: after the units of ``absorbed``,
        for which ``still_last`` is true."""
        if absorbed:
            # Its units are others than these entries.
            queued = _QueuedFile(file.epoch, file.number, file, up_to_lsn=file.end_lsn)
        else:
            queued = _QueuedFile(
                file.epoch, file.number, file, entries, has_tickets=True, up_to_lsn=file.end_lsn
            )
            queued.measure()
        for before in absorbed:
            self._queue.pop()
            self.n_bytes -= before.n_bytes
            self._removed.append(replace(before, stored_keys=()))
        self._queue.append(queued)
        self._keys.update(file.stored_keys)
        self.n_bytes += file.n_bytes
        self.version += 1
        self.advance()
        self._shed()

    def to_absorb(self, new_bytes: int) -> tuple[JournalFile, ...]:
        """The last files, which the next one is to take in. It has ``new_bytes`` in memory."""
        files: list[JournalFile] = []
        for queued in reversed(self._queue):
            file = queued.file
            if file is None or queued.is_loading or not self._may_be_absorbed(queued) or not is_small(file):
                break
            files.append(file)
        return absorbed(files[::-1], sum(is_small(file) for file in self.files), new_bytes)

    def still_last(self, files: Sequence[JournalFile]) -> bool:
        """Whether these are the last ones, and the sink has taken nothing of them since ``to_absorb``."""
        last = list(self._queue)[len(self._queue) - len(files) :]
        return [queued.file for queued in last] == list(files) and all(map(self._may_be_absorbed, last))

    def leave_alone(self, files: Sequence[JournalFile]) -> None:
        """One of them cannot be read: nothing is to absorb them."""
        for queued in self._queue:
            queued.is_apart = queued.is_apart or queued.file in files

    def drop(self, file: JournalFile) -> None:
        """``file`` was written, and is no part of the journal: it and what it names are removed."""
        self._keys.update(file.stored_keys)
        self._removed.append(file)
        self.version += 1

    def take_removed(self) -> list[JournalFile]:
        """The files that the next record will not name any more. The caller removes them when that record is
        durable."""
        removed, self._removed = self._removed, []
        self._keys.difference_update(key for file in removed for key in file.stored_keys)
        return removed

    def to_load(self) -> JournalFile | None:
        """The file to be read next, so that a batch is always ready; None if enough is in memory."""
        ahead_bytes = 0
        for queued in self._queue:
            if queued.error is not None or queued.is_loading:
                return None
            if not queued.is_loaded:
                if ahead_bytes >= self._horizon_bytes:
                    return None
                queued.is_loading = True
                return queued.file
            # What is in segments counts, too: it is verified when it is loaded.
            ahead_bytes += max(queued.memory_bytes, 0 if queued.file is None else queued.file.n_bytes)
        return None

    def loaded(self, file: JournalFile, units: Sequence[tuple[UnitEnd, Sealed]], now_s: float) -> None:
        """The content that ``to_load`` asked for. Units that the sink holds already are not released again."""
        queued = self._of(file)
        if queued is None:
            return
        queued.is_loading = False
        if queued.entries is None:
            n_delivered = _n_delivered(units, self.delivered_lsn)
            queued.entries = [
                Entry(NO_TICKET, EntryKind.UNIT, end, EntryState.DONE)
                if i < n_delivered
                else Entry(NO_TICKET, EntryKind.UNIT, end, EntryState.READY, content, ready_s=now_s)
                for i, (end, content) in enumerate(units)
            ]
        else:
            for entry, (_, content) in zip(queued.entries, units, strict=True):
                if entry.state is EntryState.READY and entry.content is None:
                    entry.content, entry.ticket = content, NO_TICKET
        queued.measure()
        self.advance()

    def damaged(self, file: JournalFile, error: XidstreamError) -> None:
        """``file`` could not be loaded: nothing is released from there on."""
        queued = self._of(file)
        if queued is not None:
            queued.is_loading, queued.error = False, error
            self.sink_opened(self._watermark)

    def sink_opened(self, watermark: Lsn) -> None:
        """The sink holds every commit up to ``watermark``."""
        self._watermark = max(self._watermark, watermark)
        for queued in [each for each in self._queue if each.error is not None]:
            if not 0 < queued.up_to_lsn <= self._watermark:
                continue
            self._queue.remove(queued)
            if queued.file is not None:
                self._removed.append(queued.file)
                self.n_bytes -= queued.file.n_bytes
            self.version += 1
        self.advance()

    @property
    def awaits_sink(self) -> bool:
        """Whether the first file is damaged, and a sink may hold all of it."""
        return bool(self._queue) and self._queue[0].error is not None and self._queue[0].up_to_lsn > 0

    def advance(self) -> None:
        """After units were done: what is delivered leaves."""
        while self._queue and self._queue[0].is_delivered:
            queued = self._queue.popleft()
            assert queued.file is not None
            self._removed.append(queued.file)
            self.n_bytes -= queued.file.n_bytes
            self.reach(queued.file.end_lsn)
            self.version += 1
        for entry in (self._queue[0].entries or ()) if self._queue else ():
            if entry.state is not EntryState.DONE:
                break
            self.reach(entry.end_lsn)

    def reach(self, lsn: Lsn) -> None:
        """The sink holds everything up to ``lsn``."""
        if lsn > self.delivered_lsn:
            self.delivered_lsn = lsn
            self.version += 1

    # -- inside ----------------------------------------------------------------------------------------

    def _may_be_absorbed(self, queued: _QueuedFile) -> bool:
        file = queued.file
        if file is None or queued.error is not None or queued.is_apart:
            return False
        # An earlier epoch's sink may have a part of it.
        is_begun = 0 < file.first_commit_lsn < self.delivered_lsn
        return queued.is_untouched and not is_begun

    def _of(self, file: JournalFile) -> _QueuedFile | None:
        """The journal's own record of the file; None where all of it was delivered meanwhile."""
        return next((queued for queued in self._queue if queued.file is file), None)

    def _shed(self) -> None:
        """Let go of what is further from the sink than the horizon."""
        ahead_bytes = 0
        for queued in self._queue:
            if queued.is_loaded and ahead_bytes >= self._horizon_bytes:
                queued.unload()
            ahead_bytes += queued.memory_bytes


def _n_undelivered(queued: _QueuedFile) -> int:
    if queued.entries is not None:
        return sum(entry.state is not EntryState.DONE for entry in queued.entries)
    return 1 if queued.file is None else queued.file.n_units


def _n_delivered(units: Sequence[tuple[UnitEnd, Sealed]], delivered_lsn: Lsn) -> int:
    """How many of them, from the first one on, the sink holds. Messages outside of transactions have no LSN: they are
    delivered if a unit after them is."""
    n = 0
    for i, (end, _) in enumerate(units):
        if end.end_lsn and end.end_lsn <= delivered_lsn:
            n = i + 1
    return n


def lost_journal(number: int, first_lsn: Lsn, last_lsn: Lsn, error: XidstreamError) -> SlotLost:
    """The error for a file that is damaged or missing, or names what is: its commits are from ``first_lsn`` to
    ``last_lsn``."""
    return SlotLost(
        f"journal file {number} cannot be read ({error.message}): it alone had the transactions from {first_lsn} to "
        f"{last_lsn}, which the server does not send again",
        remedy=f"restore the object in the storage, and start again; where it is lost for good, {ANOTHER_STORAGE}",
    )
