"""Strict commit order: what may be released, and what may be confirmed."""

from xidstream.pipeline.sequencer.delivered import Delivered
from xidstream.pipeline.sequencer.order import CommitOrder, EntryState
from xidstream.pipeline.sequencer.prepared import FinishedPrepares, PreparedBook

__all__ = ["CommitOrder", "Delivered", "EntryState", "FinishedPrepares", "PreparedBook"]
