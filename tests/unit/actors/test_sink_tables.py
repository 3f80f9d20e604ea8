"""A snapshot's calls reach the sink in another process, and only while there is one that a loop has claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from tests.snapshot_tables import commit_one, output_of
from tests.spark.support import IDENTITY
from tests.unit.log_tables.test_snapshot_log import GENERATION, RELATION, written
from tests.unit.sinks.test_parked_tables import sink_of
from xidstream.actors.driver.batch_loop import BatchLoop
from xidstream.actors.snapshots.sink_tables import SinkTables
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.generation import GenerationState

NO_SESSION: Any = None


def test_every_call_and_its_answer_travel_to_the_process_that_has_the_sink(tmp_path: Path) -> None:
    log = sink_of(tmp_path, 1).snapshot_log()

    def sent(call: Callable[..., Any], *, after_end: bool = False) -> Any:
        return cloudpickle.loads(cloudpickle.dumps(cloudpickle.loads(cloudpickle.dumps(call))(log)))

    tables = SinkTables(sent)
    tables.clean()
    assert output_of(tables, RELATION, Lsn(99)).table == output_of(log, RELATION, Lsn(99)).table
    assert not tables.recover(GENERATION) and commit_one(tables, GENERATION, written(log, range(3)))
    (again,) = tables.outputs([(RELATION, Lsn(99))])
    assert isinstance(again, SnapshotOutput) and again.table == output_of(log, RELATION, Lsn(99)).table
    assert tables.commit([(GENERATION, [])]) == [True]
    tables.reach(Lsn(120))
    tables.prove(Lsn(120))
    (line,) = tables.lines(True)
    tables.end(line, "the table was rewritten")
    tables.complete()
    assert [each.state for each in log.lines(False)] == [GenerationState.ENDED]


def test_a_loop_without_a_sink_that_it_claimed_is_asked_again_later_and_after_its_end_proves_only(
    tmp_path: Path,
) -> None:
    sink = sink_of(tmp_path, 1)
    loop = BatchLoop(NO_SESSION, sink, None, str(tmp_path / "storage"), IDENTITY, SinkReport())
    tables = SinkTables(loop.on_snapshots)
    for call in (lambda: tables.lines(False), lambda: tables.prove(Lsn(50))):
        with pytest.raises(ComponentLost):
            call()
    loop._is_claimed = loop._has_claimed = True
    assert tables.lines(False) == []
    loop.stop()
    with pytest.raises(ComponentLost):
        tables.lines(False)
    tables.prove(Lsn(50))
