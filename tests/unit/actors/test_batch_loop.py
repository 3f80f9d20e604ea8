"""What a loop asks before it gives a batch to a function, which has no fence of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest

from tests.spark.support import IDENTITY, Transaction, batch_of
from xidstream.actors.driver.batch_loop import BatchLoop
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import Superseded
from xidstream.pipeline.exchange import AT_ONCE, Tenure
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks import stateless
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
        SinkReport(),
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


class Pulled(BatchLoop):
    """A loop whose sequencer gives these batches, and notes what it is asked."""

    def begin(self, batches: list[Any]) -> list[tuple[str, Any]]:
        self._left = batches
        self.asked: list[tuple[str, Any]] = []
        return self.asked

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "next_batch":
            assert arguments[3] == AT_ONCE, "the sink's"
        self.asked.append((method, arguments[2] if len(arguments) > 2 else None))
        if method == "sink_opened":
            return self.tenure
        if method == "next_batch":
            return self._left.pop(0) if self._left else None
        return method == "finished"

    tenure: Tenure


def test_a_batch_is_reported_with_the_next_pull_and_not_by_a_loop_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stateless, "warm_up", lambda session: None)
    given: list[Lsn] = []
    first, second = batch(100), dataclasses.replace(batch(200), number=1)

    def loop_that_ends_at(last: int) -> Pulled:
        def take(each: Any) -> None:
            given.append(each.last_commit_lsn)
            if each.last_commit_lsn == last:
                loop.stop()

        session = LoopSession(DriverSession(lambda: cast(Any, None)))
        loop = Pulled(session, ForeachSink(take), None, str(tmp_path), IDENTITY, SinkReport())
        loop.tenure = take_over(Storage(str(tmp_path)), "a")
        return loop

    loop = loop_that_ends_at(0)
    asked = loop.begin([first, second])
    loop.run()
    pulls = [done for method, done in asked if method == "next_batch"]
    assert pulls == [None, 0, 1] and asked[-1][0] == "finished"
    assert given == [100, 200] and loop.progress.sink.n_batches == 2
    loop = loop_that_ends_at(200)
    asked = loop.begin([first, second])
    loop.run()
    assert [done for method, done in asked if method == "next_batch"] == [None, 0]
    assert loop.progress.sink.n_batches == 1, "the one in hand comes again, to another loop"
