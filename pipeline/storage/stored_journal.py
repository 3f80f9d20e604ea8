"""A slot's journal as the storage alone tells it: which files the record names, what is in them, and what is wrong.

For people, beside a run or where nothing runs: nothing is changed, and nobody is asked but the storage. A run delivers
and deletes meanwhile. So a file that cannot be read is looked up in the record once more, and is no finding if the
record does not name it any more. A file that the record did not name yet when it was read is not looked at.

What is looked at is what ``SlotStorage`` refuses when it takes the journal over, so a journal without a finding is one
that a run delivers. The record's spans say which files follow each other without a gap: LSNs cannot, because most of
the WAL between two commits is of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from xidstream.pipeline.errors import ANOTHER_STORAGE, SegmentCorrupt, Unsupported
from xidstream.pipeline.exchange import JournalFile
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.cleanup import holds_slot
from xidstream.pipeline.storage.journal_file import read_journal_file, verify_journal_file
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import ProgressRecord, read_progress
from xidstream.pipeline.storage.side_by_side import side_by_side
from xidstream.pipeline.storage.storage import Storage

_LOST: Final = (
    "restore the object, from a backup or an older version of it, and start again; if it is lost for good, "
    f"{ANOTHER_STORAGE}"
)
_STRANGE: Final = (
    "restore the objects below the slot's folder together, from one moment; or report this as a defect"
)


@dataclass(frozen=True)
class JournalFinding:
    """A fault of an object. It concerns what committed after ``after_lsn`` and up to ``to_lsn``."""

    key: str
    after_lsn: Lsn
    to_lsn: Lsn
    statement: str
    remedy: str


@dataclass(frozen=True)
class NamedFile:
    """A file that the record names. ``file`` is None where it cannot be read, and ``damage`` says why."""

    epoch: str
    number: int
    key: str
    file: JournalFile | None
    damage: str | None = None


@dataclass(frozen=True)
class StoredJournal:
    """``files`` are in commit order. ``unnamed``: keys that the record does not name: they are no part of it."""

    record: ProgressRecord
    files: tuple[NamedFile, ...]
    unnamed: tuple[str, ...]

    @property
    def readable(self) -> tuple[JournalFile, ...]:
        return tuple(named.file for named in self.files if named.file is not None)


def slots_servers(storage: Storage, slot: str) -> list[int]:
    """System identifiers of the servers of which the storage has a record of such a slot, or what only a record could
    tell. Raises StorageFault."""
    layouts = [Layout(int(folder), slot, "look") for folder in storage.list_folders() if folder.isdecimal()]
    return [layout.system_identifier for layout in layouts if holds_slot(storage, layout)]


def stored_journal(storage: Storage, layout: Layout, *, verify: bool) -> StoredJournal | None:
    """``verify``: read all of each file, and of the segments that it names; else its summary alone. None where there
    is no record. Raises SegmentCorrupt for a damaged record, StorageFault."""
    # The record comes second: a file that is written in between is either named by it, or not listed.
    stored = storage.list_keys(layout.journal_prefix)
    record = read_progress(storage, layout)
    if record is None:
        return None
    names = [(epoch, number, _key(layout, epoch, number)) for epoch, number in _named(record)]
    read = verify_journal_file if verify else read_journal_file

    def look(name: tuple[str, int, str]) -> NamedFile:
        epoch, number, key = name
        try:
            return NamedFile(epoch, number, key, read(storage, layout, epoch, number))
        except (SegmentCorrupt, Unsupported) as error:
            return NamedFile(epoch, number, key, None, error.message)

    if verify:
        found = [look(name) for name in names]
    else:
        found = list(side_by_side(look, names))
    if any(named.damage is not None for named in found):
        found = _still_named(storage, layout, found)
    all_names = {key for _, _, key in names}
    return StoredJournal(record, tuple(found), tuple(key for key in stored if key not in all_names))


def _still_named(storage: Storage, layout: Layout, found: Sequence[NamedFile]) -> list[NamedFile]:
    """Without damaged files that a run has delivered, and deleted, meanwhile."""
    record = read_progress(storage, layout)
    names = set() if record is None else set(_named(record))
    return [named for named in found if named.damage is None or (named.epoch, named.number) in names]


def findings(journal: StoredJournal) -> Iterator[JournalFinding]:
    """The faults, in the order of the files; nothing if the journal is whole."""
    yield from _of_record(journal.record)
    record, before_lsn = journal.record, journal.record.delivered_lsn
    last_commit_lsn = Lsn(0)
    for i, named in enumerate(journal.files):
        file = named.file
        if file is None:
            assert named.damage is not None
            to_lsn = _first_behind(journal, i)
            yield JournalFinding(named.key, before_lsn, to_lsn, named.damage, _LOST)
            continue
        for statement in _misplaced(file, record, last_commit_lsn):
            yield JournalFinding(named.key, before_lsn, file.end_lsn, statement, _STRANGE)
        last_commit_lsn = max(last_commit_lsn, file.last_commit_lsn)
        before_lsn = max(before_lsn, last_commit_lsn)


def _of_record(record: ProgressRecord) -> Iterator[JournalFinding]:
    def finding(statement: str) -> JournalFinding:
        return JournalFinding(record.key, record.delivered_lsn, record.confirmed_lsn, statement, _STRANGE)

    if record.delivered_lsn > record.confirmed_lsn:
        yield finding("the record has more delivered than confirmed")
    if not record.journal and record.delivered_lsn < record.confirmed_lsn:
        yield finding(
            "the record names no file of the journal, and the sink does not have all that is confirmed"
        )
    numbers = [number for _, number in _named(record)]
    if any(number >= after for number, after in pairwise(numbers)):
        yield finding("the numbers of the files that the record names do not rise")


def _misplaced(file: JournalFile, record: ProgressRecord, last_commit_lsn: Lsn) -> Iterator[str]:
    """``last_commit_lsn``: of the files before it. Messages outside of transactions have no LSN here."""
    if file.first_commit_lsn and file.first_commit_lsn <= last_commit_lsn:
        yield f"its first commit is at {file.first_commit_lsn}, and a file before it ends with {last_commit_lsn}"
    if file.end_lsn > record.confirmed_lsn:
        yield f"it ends at {file.end_lsn}, and only what comes before {record.confirmed_lsn} is confirmed"
    if 0 < file.end_lsn < record.delivered_lsn:
        yield f"it ends at {file.end_lsn}, and the sink has everything up to {record.delivered_lsn}"


def _first_behind(journal: StoredJournal, i: int) -> Lsn:
    """Up to where the commits may lie of a file that does not tell."""
    behind = (named.file for named in journal.files[i + 1 :])
    commits = (file.first_commit_lsn for file in behind if file is not None and file.first_commit_lsn)
    first = next(commits, None)
    return journal.record.confirmed_lsn if first is None else first.before


def _named(record: ProgressRecord) -> Iterator[tuple[str, int]]:
    """Epoch and number of each file, in commit order."""
    for span in record.journal:
        for number in range(span.first, span.last + 1):
            yield span.epoch, number


def _key(layout: Layout, epoch: str, number: int) -> str:
    return dataclasses.replace(layout, epoch=epoch).journal_key(number)
