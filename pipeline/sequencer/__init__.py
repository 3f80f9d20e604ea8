"""Strict commit order: what may be released, and what may be confirmed."""

from pipeline.sequencer.delivered import Delivered
from pipeline.sequencer.order import CommitOrder, EntryState
from pipeline.sequencer.prepared import FinishedPrepares, PreparedBook

__all__ = ["CommitOrder", "Delivered", "EntryState", "FinishedPrepares", "PreparedBook"]
