"""One account of a run: what a person, a page or a monitor may know of it at one moment.

``model`` has its parts as frozen dataclasses, ``codec`` turns it into JSON and back, and docs/status.md lists the
fields. ``window`` and ``batches`` make rates, durations and latencies of what flows by. ``stalls`` says which part
waits for what. Nothing here asks anybody: actors gather the parts (``actors.supervision.run_accounts``), and this
package decides what they mean.

No part holds a row's value or a secret. Names of tables, gids of prepared transactions and texts of errors are there,
as they are in the server's own views.
"""

from __future__ import annotations

from xidstream.pipeline.account.batches import BatchHistory
from xidstream.pipeline.account.model import (
    MOST_CONSUMERS,
    MOST_OPEN,
    MOST_PREPARED,
    MOST_TABLES,
    VERSION,
    Account,
    BatchInHand,
    BatchPart,
    ConsumerPart,
    JournalPart,
    LatencyPart,
    LogPart,
    OpenPart,
    ParkedPart,
    PreparedPart,
    ProcessPart,
    ReaderPart,
    RestartPart,
    RunPart,
    SequencerPart,
    SinkPart,
    SlotPart,
    Stall,
    StoredPart,
)
from xidstream.pipeline.account.stalls import StallWatch
from xidstream.pipeline.account.window import Window

__all__ = [
    "Account",
    "BatchHistory",
    "BatchInHand",
    "BatchPart",
    "ConsumerPart",
    "JournalPart",
    "LatencyPart",
    "LogPart",
    "MOST_CONSUMERS",
    "MOST_OPEN",
    "MOST_PREPARED",
    "MOST_TABLES",
    "OpenPart",
    "ParkedPart",
    "PreparedPart",
    "ProcessPart",
    "ReaderPart",
    "RestartPart",
    "RunPart",
    "SequencerPart",
    "SinkPart",
    "SlotPart",
    "Stall",
    "StallWatch",
    "StoredPart",
    "VERSION",
    "Window",
]
