"""Storage: spilled rows, prepared transactions and the confirmed position, through ``pyarrow.fs`` alone.

Everything that outlives a process is here, and nothing else is stored anywhere::

    <system identifier>/<slot>/
        epochs/<epoch>/<xid>-<first LSN>/<number>.parquet   spilled rows of one transaction
        epochs/<epoch>/<xid>-<first LSN>/<number>.arrow     its logical messages
        prepared/<xid>-<prepare end LSN>.<epoch>.json       a prepared transaction
        journal/<number>.<epoch>.journal                    committed transactions that the sink does not hold yet
        progress/<owner>.<epoch>.json                       the confirmed LSN, by whom; what is finished up to it
        progress/<owner>.<epoch>.claim                      that an epoch takes the slot over; empty
        server.json                                         the server's timeline
        beginning.json                                      where the storage began with the slot

Invariants:

- An object is there whole or not at all, and never changes after that, but for two things. An owner's record of
  progress, ``server.json`` and ``beginning.json`` are replaced whole. Rows may be filled in at COMMIT
  (``pipeline.late_binding``), which changes a few bytes once. What is read is compared with the length and checksum
  taken while it was written.
- What may be confirmed because of an object (a prepared transaction or a journal file with all it names, the
  position) is on disk, not only in a cache, when the call that wrote it returns. Segments of open transactions are
  not: the slot has them still.
- Every failure is a StorageFault that names the object; a damaged object is a SegmentCorrupt.
- Keys are made of numbers and of names that PostgreSQL and we restrict; a gid or a table's name is content.

Callers: buffers write, Spark's executors read, the sequencer keeps ``prepared`` and ``progress`` and deletes.
Considered and rejected: Arrow IPC for rows (a tenth of the CPU to write and three times the bytes; Spark wrote every
row again after COMMIT), one object per batch (object stores charge for requests), a database (one more thing to run,
and to lose).
"""

from xidstream.pipeline.segments.beginning_record import (
    count_left_behind,
    read_beginning,
    write_beginning,
)
from xidstream.pipeline.segments.cleanup import clean_dead_epochs, holds_slot, remove_slot
from xidstream.pipeline.segments.handed_rows import HandedRows, RowsReader, write_rows
from xidstream.pipeline.segments.journal_file import (
    StoredRows,
    flush_segments,
    load_journal_units,
    read_journal_file,
    read_journal_files,
    stored_journal_units,
    verify_journal_file,
    write_journal_file,
)
from xidstream.pipeline.segments.journal_joining import JoinedRows, joined
from xidstream.pipeline.segments.keys import Layout, SegmentName
from xidstream.pipeline.segments.manifest import (
    delete_prepared,
    load_prepared,
    verify_prepared,
    write_prepared,
)
from xidstream.pipeline.segments.progress import (
    ProgressRecord,
    check_owner,
    claim_slot,
    journaled_lsn,
    last_owner,
    read_progress,
    take_over_progress,
    write_progress,
)
from xidstream.pipeline.segments.resumes import forget_resumes, read_resumes, request_resume
from xidstream.pipeline.segments.segment_file import (
    SegmentReader,
    shorten_segment,
    write_messages,
    write_segment,
    write_side_by_side,
)
from xidstream.pipeline.segments.server_record import other_servers, read_timeline, write_timeline
from xidstream.pipeline.segments.skips import (
    Skip,
    given_up,
    note_left_out,
    read_skips,
    rows_left_out,
    write_skip,
)
from xidstream.pipeline.segments.storage import Storage, is_out_of_space
from xidstream.pipeline.segments.stored_journal import (
    JournalFinding,
    NamedFile,
    StoredJournal,
    findings,
    slots_servers,
    stored_journal,
)

__all__ = [
    "HandedRows",
    "JoinedRows",
    "JournalFinding",
    "Layout",
    "NamedFile",
    "ProgressRecord",
    "RowsReader",
    "SegmentName",
    "SegmentReader",
    "Skip",
    "Storage",
    "StoredJournal",
    "StoredRows",
    "check_owner",
    "claim_slot",
    "clean_dead_epochs",
    "count_left_behind",
    "delete_prepared",
    "findings",
    "flush_segments",
    "forget_resumes",
    "given_up",
    "holds_slot",
    "is_out_of_space",
    "joined",
    "last_owner",
    "load_journal_units",
    "load_prepared",
    "note_left_out",
    "rows_left_out",
    "other_servers",
    "read_beginning",
    "read_journal_file",
    "read_journal_files",
    "read_progress",
    "read_resumes",
    "read_skips",
    "read_timeline",
    "journaled_lsn",
    "remove_slot",
    "request_resume",
    "shorten_segment",
    "slots_servers",
    "stored_journal",
    "stored_journal_units",
    "take_over_progress",
    "verify_journal_file",
    "verify_prepared",
    "write_beginning",
    "write_journal_file",
    "write_messages",
    "write_prepared",
    "write_progress",
    "write_rows",
    "write_segment",
    "write_side_by_side",
    "write_skip",
    "write_timeline",
]
