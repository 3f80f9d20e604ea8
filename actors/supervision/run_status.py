"""What a run is doing at one moment, for its display and for scripts. Asked for several times a second.

It is the run's account without what is dear: nobody walks over prepared transactions, no process and no server is
asked, and only the largest open transactions are named.
"""

from __future__ import annotations

from dataclasses import dataclass

from xidstream.pipeline.account import Account, RunPart, SinkPart
from xidstream.pipeline.exchange import Opened


@dataclass(frozen=True)
class RunStatus:
    account: Account
    opened: Opened | None = None
    """How the slot was opened. None before the reader reads."""
    has_sink: bool = True
    """Without one everything goes to the journal, and no driver delivers anything."""
    journal_from_us: int = 0
    """When the journal's first transaction committed, in microseconds since the Unix epoch; 0 where it has none."""

    @property
    def run(self) -> RunPart:
        assert self.account.run is not None, "a status is of a run"
        return self.account.run

    @property
    def sink(self) -> SinkPart:
        """What the sink has had since the driver began: nothing where no driver is there yet."""
        return self.account.sink or SinkPart()
