"""Strict commit order: what may be released, and what may be confirmed."""

from pipeline.sequencer.order import CommitOrder, EntryState
from pipeline.sequencer.prepared import PreparedBook

__all__ = ["CommitOrder", "EntryState", "PreparedBook"]
