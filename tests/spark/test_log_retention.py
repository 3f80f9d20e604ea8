"""States and changes of a log that ``log_retention`` has cut, as Spark reads them: what the table held, or refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.unit.sinks.test_iceberg_shortening import LAST, filled_log
from tests.unit.sinks.test_log_folds import AT, log_of_one_snapshot
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


def test_states_behind_a_fold_by_arrow_and_by_spark_are_those_of_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = log_of_one_snapshot(Location.parse(str(tmp_path)))

    def check(first: int, last: int) -> None:
        for lsn in (first, first + 200, last):
            rows = made.log.as_of(spark, lsn=lsn)[TABLE].collect()
            assert {row["id"]: row["v"] for row in rows} == truth(lsn)
        with pytest.raises(PreconditionMissing, match="shortened up to"):
            made.log.as_of(spark, lsn=first - 1)[TABLE]

    made.shorten("5h", folds=True)
    check(AT, 2_000)
    changes = made.log.changes(spark, TABLE, since=AT).collect()
    assert sorted(row["_commit_lsn"] for row in changes) == [*COMMITS[15:20]], (
        "no row of the fold is a change"
    )
    for lsn in range(2_100, 4_000, 200):
        made.commit(lsn, lsn + 100)
    made.prove(4_000)
    # Too large for Arrow, and there is a session.
    made.shorten("5h", get_session=lambda: spark)
    assert made.log.cut_lsn(TABLE) == 3_597
    check(3_597, 4_000)
    stored = spark.read.format("parquet").load(f"{tmp_path}/{TABLE}/snapshot-*-fold*")
    rows = stored.filter("_commit_lsn = 3597").collect()
    assert sorted(row["id"] for row in rows) == [0, 1, 2, 3, 4] and len({row["_seq"] for row in rows}) == 5


@pytest.mark.slow
def test_states_of_a_cut_log_in_iceberg_tables_are_those_of_before_also_where_a_column_was_renamed(
    spark: SparkSession, tmp_path: Path
) -> None:
    made = filled_log(Location.parse(str(tmp_path / "iceberg")), again=False)
    with made.loaded().update_schema() as change:
        change.rename_column("v", "called")
    early = made.log.as_of(spark, lsn=300)[TABLE]
    # Files call the column otherwise than the table does, so it is Spark's.
    made.shorten("5h", folds=True, get_session=lambda: spark)
    cut = int(made.log.cut_lsn(TABLE))
    assert cut > 1_000
    for lsn in (cut, 1_650, LAST):
        rows = made.log.as_of(spark, lsn=lsn)[TABLE].collect()
        assert {row["id"]: row["v"] for row in rows} == truth(lsn)
    with pytest.raises(PreconditionMissing, match="shortened up to"):
        made.log.as_of(spark, lsn=cut - 1)[TABLE]
    changes = made.log.changes(spark, TABLE, since=cut).collect()
    assert sorted(row["_commit_lsn"] for row in changes) == [
        lsn for lsn in range(1_100, LAST + 1, 100) if lsn > cut
    ]
    assert {row["id"]: row["v"] for row in early.collect()} == truth(300), "opened before the cut"
