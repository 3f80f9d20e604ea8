"""The rows that a repair does not read, carried over from a log that the sink itself has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.snapshot_tables import commit_one, output_of
from tests.spark.change_log_maker import INT8, TEXT, LogMaker, as_rows, keyed
from xidstream import ChangeLog
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.log_tables.snapshot_tables import Carrying
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.snapshot.key_filter import bound, parse_key_filter

pytestmark = pytest.mark.spark

# Spark's own reader and writer take the last column's name for another one.
ORDERS = keyed("orders", {"id": INT8, "a.b`c": TEXT, "body": TEXT, "${user.dir}": TEXT}, "id", relid=1)
TAKEN_AT_US = 1_700_000_000_000_000


def row(i: int, note: str = "old") -> dict[str, Any]:
    return {"id": i, "a.b`c": note, "body": f"body {i}", "${user.dir}": f"user {i}"}


@pytest.fixture
def maker(tmp_path: Path, spark: Any, make_batch: Any) -> LogMaker:
    maker = LogMaker(tmp_path / "log", spark, make_batch)
    maker.snapshot(ORDERS, [row(i) for i in range(20)])
    return maker


def carrying(maker: LogMaker, where: str, *unseen_xids: int, number: int = 1) -> Carrying:
    """At a snapshot after all that was committed, which does not see some of it."""
    snapshot_lsn, maker.lsn = maker.lsn + 1, maker.lsn + 3
    xmax = maker.lsn * 10
    xmin = min(unseen_xids, default=xmax)
    bounds = SnapshotBounds(Lsn(snapshot_lsn), Lsn(snapshot_lsn + 1), xmin, xmax, unseen_xids, TAKEN_AT_US)
    only = bound(parse_key_filter(where), ORDERS, ORDERS.key)
    return Carrying(ORDERS, number, bounds, only, 1 << 32)


def test_the_rows_outside_of_the_range_as_the_snapshot_sees_them_are_stored_as_a_snapshots_rows(
    maker: LogMaker,
) -> None:
    log = maker.sink.snapshot_log()
    # Row 3 changes without its body being sent, row 4 comes into the range, and row 19 goes out of it.
    change = {**row(3, "new"), "body": None, "_unchanged": ["body"], "_change": UPDATE_POSTIMAGE}
    maker.commit((ORDERS, [change]))
    maker.insert(ORDERS, row(100), row(12_345))
    maker.tables["public.orders"].pop()
    unseen = maker.commit((ORDERS, [{**row(5, "unseen"), "_change": UPDATE_POSTIMAGE}])) * 10
    wanted = carrying(maker, "id between 10 and 12345", unseen)
    target = output_of(log, ORDERS, wanted.bounds.snapshot_lsn)
    assert log.carry(wanted, target) is None, "the log does not answer there yet"
    log.reach(wanted.bounds.valid_from)
    log.prove(wanted.bounds.valid_from)
    files = log.carry(wanted, target)
    assert files is not None and sum(file.n_rows for file in files) == 10
    assert all(file.path.startswith(target.directory) for file in files)
    generation = Generation(ORDERS, 2, wanted.bounds)
    assert commit_one(log, generation, files)
    stored = [
        each
        for each in DeltaTable(str(maker.path / "public.orders")).to_pyarrow_table().to_pylist()
        if each["_commit_lsn"] == wanted.bounds.snapshot_lsn
    ]
    assert {(each["_change_type"], each["_xid"], each["_unchanged"]) for each in stored} == {
        ("snapshot", None, None)
    }
    assert {int(each["_commit_timestamp"].timestamp() * 10**6) for each in stored} == {TAKEN_AT_US}
    assert len({each["_seq"] for each in stored}) == 10 and min(each["_seq"] for each in stored) >= 1 << 32

    # The next generation is what the repair read, here nothing, and what was carried, and then what it does not see.
    state = ChangeLog(str(maker.path)).as_of(maker.spark)["public.orders"]
    found = as_rows([each.asDict() for each in state.collect()])
    expected = [row(i) for i in range(10) if i not in (3, 5)] + [row(3, "new"), row(5, "unseen")]
    assert found == as_rows(expected)


def test_what_was_to_be_repaired_and_does_not_stand_any_more_is_carried_nowhere(maker: LogMaker) -> None:
    log = maker.sink.snapshot_log()
    wanted = carrying(maker, "id = 1", number=7)
    target = output_of(log, ORDERS, wanted.bounds.snapshot_lsn)
    log.reach(wanted.bounds.valid_from)
    log.prove(wanted.bounds.valid_from)
    with pytest.raises(PreconditionMissing, match=r"generation 7 of table public\.orders, does not stand"):
        log.carry(wanted, target)
    (line,) = log.lines(False)
    log.end(line, "it was altered")
    wanted = carrying(maker, "id = 1")
    log.reach(wanted.bounds.valid_from)
    log.prove(wanted.bounds.valid_from)
    with pytest.raises(PreconditionMissing, match="it was altered"):
        log.carry(wanted, target)
