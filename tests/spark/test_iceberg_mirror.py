"""Base tables on Iceberg: what the source held at each named moment, by pyiceberg, and what ``as_of`` makes of them.

Both sinks write the same random history, and each log has a mirror. What a table held at each commit, the maker knows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.change_log_maker import INT2, INT8, TEXT, as_rows, keyed
from tests.spark.support import IDENTITY
from tests.spark.test_change_log import found
from tests.spark.test_iceberg_change_log import ORDERS, WIDER, Twins
from tests.spark.test_mirror import LOOSE, PAIRS, SMALL_FILES, WAYS, A, filled
from xidstream.actors.mirror import Mirror
from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.manifest import ManifestLine, read_lines
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.mirror.refresh import Answer

pytestmark = pytest.mark.spark

OTHER = keyed("orders", {"id": INT8, "small": INT2, "n": TEXT, "note": TEXT, "more": TEXT}, "id", relid=1)


@pytest.fixture
def twins(tmp_path: Path, spark: Any, make_batch: Any) -> Iterator[Twins]:
    made = Twins(tmp_path / "delta", spark, make_batch, iceberg=f"{tmp_path}/lake/shop")
    yield made
    made.close()


def lines_of(twins: Twins) -> list[ManifestLine]:
    return read_lines(IcebergBases(IcebergAddress.parse(str(twins.iceberg))), IDENTITY.application_id)


def base_of(twins: Twins, key: str) -> Any:
    catalog = IcebergAddress.parse(str(twins.iceberg)).open(makes=False)
    assert catalog is not None
    return catalog.load_table(f"shop_current.{key}")


def read(twins: Twins, line: ManifestLine) -> list[Any]:
    """By pyiceberg alone, as any engine would."""
    rows = base_of(twins, line.directory).scan(snapshot_id=line.version).to_arrow().to_pylist()
    return as_rows([{k: v for k, v in row.items() if k != "_text"} for row in rows])


def assert_named_moments_are_right(twins: Twins) -> None:
    for line in lines_of(twins):
        assert read(twins, line) == twins.states[line.lsn][line.table], line


@pytest.mark.slow
def test_changes_of_columns_that_need_spark_are_as_in_delta_tables(twins: Twins, spark: Any) -> None:
    """A column that was widened in place, one that the log holds in two columns, one that a user has renamed there."""
    twins.snapshot(ORDERS, [{"id": i, "small": i, "n": i, "note": str(i)} for i in range(200)])
    twins.insert(ORDERS, {"id": 1_000, "small": 1, "n": 2, "note": "x"})
    iceberg, delta = Mirror(f"iceberg:{twins.iceberg}"), Mirror(str(twins.path))

    def refresh() -> None:
        done, theirs = iceberg.refresh(spark), delta.refresh(spark)
        assert done is not None and theirs is not None and not done.left_out and done.lsn == twins.lsn

    refresh()
    twins.alter(WIDER)
    twins.insert(WIDER, {"id": 1_001, "small": 1, "n": 1 << 40, "note": "x", "more": "y"})
    refresh()
    with twins.table("public__orders").update_schema() as update:
        update.rename_column("note", "remark")
    twins.insert(WIDER, {"id": 1_002, "small": 1, "n": 3, "note": "behind it", "more": None})
    refresh()
    twins.alter(OTHER)
    for row in twins.tables["public.orders"]:
        row["n"] = str(row["n"])
    twins.insert(OTHER, {"id": 1_003, "small": 1, "n": "text", "note": "x", "more": "y"})
    refresh()
    for line in lines_of(twins)[:3]:
        assert read(twins, line) == twins.states[line.lsn][line.table], line
    for lsn in sorted({line.lsn for line in lines_of(twins)}):
        ours, theirs = (found(log.as_of(spark, lsn=lsn).with_text("public.orders")) for log in twins.logs)
        assert ours == theirs
    oldest = [log.oldest_lsn("public.orders") for log in twins.logs]
    assert oldest[0] == oldest[1]


@pytest.mark.slow
def test_refreshes_at_random_moments_name_what_the_source_held_then_whoever_writes_them(
    twins: Twins, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(39)
    twins.snapshot(A, filled(300))
    twins.snapshot(PAIRS, [{"shop": f"s{i % 7}", "number": i, "_gone": "n" * 40} for i in range(300)])
    twins.snapshot(LOOSE, [{"n": i % 5, "t": "t"} for i in range(50)])
    iceberg = Mirror(f"iceberg:{twins.iceberg}", file_bytes=2 * SMALL_FILES)
    delta = Mirror(str(twins.path), file_bytes=2 * SMALL_FILES)
    answers = set()
    for way in (WAYS[0], *WAYS):
        for _ in range(dice.randint(2, 4)):
            twins.random_commit(dice, (A, PAIRS, LOOSE))
        with monkeypatch.context() as patch:
            way(patch)
            done, theirs = iceberg.refresh(spark), delta.refresh(spark)
        assert done is not None and theirs is not None and done.lsn == twins.lsn and not done.left_out
        assert [(t.table, t.answer) for t in done.tables] == [(t.table, t.answer) for t in theirs.tables]
        answers |= {table.answer for table in done.tables}
    assert iceberg.refresh(spark) is None, "there is nothing new"
    assert_named_moments_are_right(twins)
    assert answers >= {Answer.BUILD, Answer.SWAP, Answer.REWRITE}
    for lsn in sorted({line.lsn for line in lines_of(twins)}):
        states = [log.as_of(spark, lsn=lsn) for log in twins.logs]
        for table in ("public.a", "public.pairs", "public.loose"):
            assert found(states[1].with_text(table)) == found(states[0].with_text(table))
