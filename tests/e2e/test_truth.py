"""Random DDL and DML beside a run: what is read at once is what the source held, or is refused.

Longer runs, and whether every table is readable again in the end, are for ``python -m tests.truth``.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.e2e.conftest import Pipeline
from tests.truth.run import Settings, log_of, run_steps
from tests.truth.source import Truth, row_of
from tests.truth.watching import lacks_large_values, truths_at
from xidstream import ChangeStream, Mirror
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.manifest import newest, read_lines
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.ddl_trigger import prepare

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_random_ddl_and_dml_is_read_at_once_as_the_source_held_it_or_refused(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    settings = Settings(12, seed=1, refresh_every=6, stands_first=True)
    database = pipeline.database
    result = run_steps(database.connect, database.dsn(), pipeline.spark, tmp_path, settings)
    print(result)
    assert not result.verdict.differences, str(result)
    assert result.verdict.n_equal["default"] and result.verdict.n_equal["base"]


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_columns_are_the_tables_before_any_row_brings_them_and_have_their_own_types(
    pipeline: Pipeline,
) -> None:
    """`t` and the partitioned `p` are altered, and get no row. `w` has rows, and is made again with `int` for
    `float8`."""
    database, spark = pipeline.database, pipeline.spark
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, old text); INSERT INTO t VALUES (1, 'a'), (2, 'b'); "
        "CREATE TABLE p (id int PRIMARY KEY, old text) PARTITION BY RANGE (id); "
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9); INSERT INTO p VALUES (1, 'a'); "
        "CREATE TABLE w (id int PRIMARY KEY, n float8); INSERT INTO w VALUES (1, 2.5); "
        "CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root)"
    )
    query = ChangeStream(pipeline.config(snapshot="initial")).toDelta(str(pipeline.delta)).start(spark)
    try:
        log, mirror = log_of(query, str(pipeline.delta)), Mirror(str(pipeline.delta))

        def read(table: str) -> list[dict[str, Any]]:
            """At a moment after all that was done: by ``as_of``, and of the base table, which says the same."""
            behind = Lsn.parse(
                database.connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()[0]
            )
            database.execute("UPDATE w SET id = id")
            for _ in range(30):
                log.wait(behind, timeout_s=60.0)
                try:
                    state = log.as_of(spark)[table].drop("_text")
                    break
                except PreconditionMissing:
                    time.sleep(1.0)  # its new snapshot
            rows = [row.asDict() for row in state.orderBy("id").collect()]
            mirror.refresh(spark)
            line = next(
                each
                for each in newest(read_lines(DeltaBases(log.root), log.application_id))
                if each.table == table
            )
            location = log.root.child("current").child(line.directory)
            base = DeltaTable(location.uri, version=line.version).to_pyarrow_table()
            assert base.select(state.columns).sort_by("id").to_pylist() == rows
            return rows

        assert read("public.t") == [{"id": 1, "old": "a"}, {"id": 2, "old": "b"}]
        database.execute("ALTER TABLE t ADD COLUMN new int; ALTER TABLE p ADD COLUMN new int")
        assert read("public.t") == [{"id": 1, "old": "a", "new": None}, {"id": 2, "old": "b", "new": None}]
        assert read("public.p") == [{"id": 1, "old": "a", "new": None}]
        before = log.readable_lsn
        with database.connect() as session:
            prepare(session)
        database.execute("ALTER TABLE t DROP COLUMN old; ALTER TABLE p DROP COLUMN old")
        assert read("public.t") == [{"id": 1, "new": None}, {"id": 2, "new": None}]
        assert read("public.p") == [{"id": 1, "new": None}]
        assert log.as_of(spark, lsn=before)["public.t"].drop("_text").columns == ["id", "old", "new"]
        database.execute(
            "DROP TABLE w; CREATE TABLE w (id int PRIMARY KEY, n int); INSERT INTO w VALUES (1, 5), (2, 6)"
        )
        (row, _) = read("public.w")
        assert row == {"id": 1, "n": 5} and isinstance(row["n"], int)
    finally:
        query.stop()


def test_the_truth_at_an_lsn_is_one_but_where_a_commit_is_not_known_exactly() -> None:
    def truth(begin: int, end: int, n: int) -> Truth:
        return Truth(Lsn(begin), Lsn(end), {"public.k": Counter([row_of({"n": n})])}, (str(n),))

    truths = [truth(100, 110, 0), truth(120, 130, 1), truth(140, 150, 2)]
    found = {lsn: [t.story for t in truths_at(truths, Lsn(lsn))] for lsn in (90, 115, 125, 130, 139, 200)}
    assert found == {
        90: [("0",)],
        115: [("0",)],
        125: [("0",), ("1",)],
        130: [("1",)],
        139: [("1",)],
        200: [("2",)],
    }


def test_a_large_value_that_nobody_sends_is_no_difference_and_any_other_is() -> None:
    def rows(*found: dict[str, Any]) -> Counter[Any]:
        return Counter(row_of(row) for row in found)

    expected = rows({"id": 1, "t": "large"}, {"id": 2, "t": None})
    assert lacks_large_values(rows({"id": 1, "t": None}, {"id": 2, "t": None}), expected)
    assert not lacks_large_values(rows({"id": 1, "t": None}), expected)
    assert not lacks_large_values(rows({"id": 1, "t": "other"}, {"id": 2, "t": None}), expected)
    assert not lacks_large_values(rows({"id": 3, "t": None}, {"id": 2, "t": None}), expected)
