"""What the recorded journal of a slot has at one moment, read from its storage by whoever judges a run from outside."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.exchange import InlineMessages, JournalFile, MemoryMessages, Sealed
from xidstream.pipeline.spark.executor_tasks import released_messages
from xidstream.pipeline.storage.journal_file import load_journal_units, read_journal_file
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.segment_file import SegmentReader
from xidstream.pipeline.storage.storage import Storage

_LOOKS = 100


class _Ref:
    """What the reader of a journal file puts: told apart by identity."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table


@dataclass(frozen=True)
class Journaled:
    """``first_lsn`` is of the first commit, ``end_lsn`` the end of the last one; 0 without any. ``messages`` are the
    LSNs of messages outside of transactions."""

    first_lsn: int = 0
    end_lsn: int = 0
    messages: frozenset[int] = frozenset()

    def has(self, commit_lsn: int, end_lsn: int) -> bool:
        return self.first_lsn <= commit_lsn and end_lsn <= self.end_lsn


@dataclass
class JournalContents:
    storage: Storage
    layout: Layout
    _known: dict[tuple[str, int], tuple[JournalFile, frozenset[int]]] = field(default_factory=dict)

    def look(self) -> Journaled:
        for _ in range(_LOOKS):
            try:
                return self._look()
            except SegmentCorrupt:
                pass  # a file was delivered and removed between two looks: the record does not name it any more
        return self._look()

    def _look(self) -> Journaled:
        record = read_progress(self.storage, self.layout)
        if record is None or not record.journal:
            return Journaled()
        names = [(s.epoch, number) for s in record.journal for number in range(s.first, s.last + 1)]
        files = [self._file(*name) for name in names]
        commits = [int(file.first_commit_lsn) for file, _ in files if file.n_transactions]
        return Journaled(
            min(commits, default=0),
            max(int(file.end_lsn) for file, _ in files),
            frozenset().union(*(messages for _, messages in files)),
        )

    def _file(self, epoch: str, number: int) -> tuple[JournalFile, frozenset[int]]:
        found = self._known.get((epoch, number))
        if found is None:
            file = read_journal_file(self.storage, self.layout, epoch, number)
            units = load_journal_units(self.storage, self.layout, file, _Ref)
            found = file, frozenset(lsn for _, unit in units for lsn in self._outside(unit))
            self._known[epoch, number] = found
        return found

    def _outside(self, unit: Sealed) -> list[int]:
        lsns = []
        for part in unit.messages:
            if isinstance(part, InlineMessages):
                batches = [part.rows]
            elif isinstance(part, MemoryMessages):
                batches = part.ref.table.to_batches()
            else:
                batches = list(released_messages(part, SegmentReader(self.storage.uri)))
            for batch in batches:
                lsns += [row["lsn"] for row in batch.to_pylist() if not row["transactional"]]
        return lsns
