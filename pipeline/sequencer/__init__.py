"""Strict commit order: what may be released, what may be written to the journal, and what may be confirmed."""

from xidstream.pipeline.sequencer.delivered import Delivered
from xidstream.pipeline.sequencer.entries import Entry, EntryState
from xidstream.pipeline.sequencer.journal import DamagedFile, Journal
from xidstream.pipeline.sequencer.journal_policy import JournalPolicy
from xidstream.pipeline.sequencer.journal_retries import JournalRetries
from xidstream.pipeline.sequencer.order import CommitOrder
from xidstream.pipeline.sequencer.parking import Parking
from xidstream.pipeline.sequencer.prepared import FinishedPrepares, PreparedBook
from xidstream.pipeline.sequencer.record_pace import RecordPace

__all__ = [
    "CommitOrder",
    "DamagedFile",
    "Delivered",
    "Entry",
    "EntryState",
    "FinishedPrepares",
    "Journal",
    "JournalPolicy",
    "JournalRetries",
    "Parking",
    "PreparedBook",
    "RecordPace",
]
