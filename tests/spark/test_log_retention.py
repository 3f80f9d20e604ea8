"""States and changes of a log that ``log_retention`` has cut, as Spark reads them: what the table held, or refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.unit.sinks.test_log_shortening import COMMITS, TABLE, long_log, truth
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.log_tables.locations import Location

pytestmark = pytest.mark.spark


def test_states_and_changes_above_the_cut_are_those_of_before_and_below_it_are_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = long_log(Location.parse(str(tmp_path)))
    early = made.log.as_of(spark, lsn=2_500)[TABLE]
    made.shorten("30h")
    lsns = random.Random(36)
    for lsn in [5_051, *(lsns.randint(5_052, 10_000) for _ in range(4))]:
        rows = made.log.as_of(spark, lsn=lsn)[TABLE].collect()
        assert {row["id"]: row["v"] for row in rows} == truth(lsn)
    for lsn in (5_050, lsns.randint(51, 5_049)):
        with pytest.raises(PreconditionMissing, match=r"shortened up to 0/13B0.*oldest state.*0/13BB"):
            made.log.as_of(spark, lsn=lsn)[TABLE]
    changes = made.log.changes(spark, TABLE, since=5_040).collect()
    assert sorted(row["_commit_lsn"] for row in changes) == [*COMMITS[50:]]
    net = made.log.changes(spark, TABLE, since=9_800, net=True).collect()
    assert {row["id"]: row["v"] for row in net} == {4: 9_900, 0: 10_000}
    assert made.log.transactions(spark, since=5_040).count() == 50
    assert {row["id"]: row["v"] for row in early.collect()} == truth(2_500), "opened before the cut"
