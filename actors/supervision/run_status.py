"""What a run is doing at one moment, for its display and for scripts. Asked for several times a second."""

from __future__ import annotations

from dataclasses import dataclass

from xidstream.actors.driver.batch_loop import LoopProgress
from xidstream.actors.reader.slot_reader import ReaderStats
from xidstream.pipeline.account.model import is_caught_up
from xidstream.pipeline.account.snapshots import SnapshotProgress
from xidstream.pipeline.commits.sequencer_stats import SequencerStats
from xidstream.pipeline.exchange import Opened


@dataclass(frozen=True)
class Status:
    """All that a person may want to see. A part that is not there is None."""

    epoch: str
    opened: Opened | None
    reader: ReaderStats | None
    sequencer: SequencerStats | None
    driver: LoopProgress
    snapshots: SnapshotProgress | None = None
    waiting_for: tuple[str, ...] = ()
    """What an epoch that starts waits for, in words; one that reads may wait for the Spark session."""
    state: str = "starting"
    """The state as an account has it: starting, reading, restarting or ended."""
    last_error: str | None = None
    """What ended the last epoch, or batch loop, that failed."""
    has_sink: bool = True
    """Without one everything goes to the journal, and no driver delivers anything."""

    @property
    def is_caught_up(self) -> bool:
        """Whether the run is caught up, as ``pipeline.account.model.is_caught_up`` defines it."""
        opened, reader, sequencer = self.opened, self.reader, self.sequencer
        if opened is None or reader is None or sequencer is None:
            return False
        return is_caught_up(
            n_waiting=sequencer.n_waiting - (0 if self.has_sink else n_journaled(sequencer)),
            backlog_bytes=reader.backlog_bytes,
            is_paused=reader.paused,
            has_reached_target=(sequencer.delivered_lsn if self.has_sink else sequencer.confirmed_lsn)
            >= opened.target_lsn,
        )


def n_journaled(sequencer: SequencerStats | None) -> int:
    """How many of the entries that wait are in the journal. Without a sink these are through."""
    return 0 if sequencer is None or sequencer.journal is None else sequencer.journal.n_units
