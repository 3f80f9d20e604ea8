"""What a loop asks before it gives a batch to a function, which has no fence of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import IDENTITY, Transaction, batch_of
from xidstream.actors.driver.batch_loop import BatchLoop, LoopProgress
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.errors import Superseded
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks.foreach import ForeachSink
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import claim_slot, read_progress, take_over_progress
from xidstream.pipeline.storage.storage import Storage


def test_a_loop_that_was_taken_over_from_gives_no_further_batch_to_the_function(tmp_path: Path) -> None:
    """It was stopped for a while, and another run has the slot by now: both functions went on side by side."""
    storage = Storage(str(tmp_path))
    given: list[Lsn] = []
    loop = BatchLoop(
        LoopSession(DriverSession(no_session)),
        ForeachSink(lambda batch: given.append(batch.last_commit_lsn)),
        None,
        str(tmp_path),
        IDENTITY,
        LoopProgress(),
    )
    loop.stop()  # nothing is reported to a sequencer, because there is none
    tenure = take_over(storage, "a")
    loop._take(batch(100), tenure)
    take_over(storage, "b")
    with pytest.raises(Superseded, match="epoch b's, this is epoch a"):
        loop._take(batch(200), tenure)
    assert given == [100]


def no_session() -> Any:
    raise AssertionError("the function asks for no DataFrame")


def take_over(storage: Storage, epoch: str) -> Tenure:
    layout = Layout(IDENTITY.system_identifier, IDENTITY.slot, epoch)
    owner = claim_slot(storage, layout)
    record = take_over_progress(storage, layout, read_progress(storage, layout), Lsn(0x10), owner=owner)
    return Tenure(record.owner, epoch, 1, {}, Lsn(0x1000))


def batch(lsn: int) -> Any:
    return batch_of([Transaction(lsn, messages=[(lsn - 1, "m", b"")])], None)
