"""What Spark's Parquet reader takes for something else: ``${…}`` in columns' names, and patterns in folders'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.change_log_maker import INT8, TEXT, LogMaker, keyed
from tests.spark.support import LocalSegments
from tests.spark.test_native_segments import COMMIT, batch_with, is_native
from tests.unit.parquet.files import batches
from xidstream import ChangeLog
from xidstream.actors.mirror import Mirror
from xidstream.pipeline.exchange import SegmentPart
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.sinks import log_sink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.parquet_frames import is_read_as_named
from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch
from xidstream.pipeline.spark.spark_schemas import quoted, spark_schema

pytestmark = pytest.mark.spark

NAMES = ("${spark.app.name}", "${user.home} x")
ODD = keyed("odd", {"id": INT8, **dict.fromkeys(NAMES, TEXT)}, "id", relid=5)
PLAIN = keyed("plain", {"id": INT8, "$dollar": TEXT, "{brace}": TEXT}, "id", relid=6)


def odd(i: int) -> dict[str, Any]:
    return {"id": i, **{name: f"{name} {i}" for name in NAMES}}


def test_a_column_whose_name_hadoop_would_replace_has_its_values_wherever_it_is_read(
    tmp_path: Path, spark: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sink, "warm_up", lambda spark: None)
    log = LogMaker(tmp_path / "delta", spark, make_batch)
    log.snapshot(ODD, [odd(1), odd(2)])
    log.snapshot(PLAIN, [{"id": 1, "$dollar": "a", "{brace}": "b"}])
    log.insert(ODD, odd(3))
    changes = ChangeLog(str(log.path))
    rows = sorted(changes.as_of(spark)["public.odd"].collect())
    assert [row.asDict() for row in rows] == [odd(1), odd(2), odd(3)]
    assert [row[NAMES[0]] for row in changes.changes(spark, "public.odd", since=log.lsn - 1).collect()] == [
        odd(3)[NAMES[0]]
    ]
    refreshed = Mirror(str(log.path)).refresh(spark)
    log.sink.close()
    assert refreshed is not None and [table.table for table in refreshed.tables] == ["public.plain"]
    assert "Spark cannot write a column with ${ in its name" in refreshed.left_out["public.odd"]

    # What a function gets: a segment, and a snapshot's files.
    segments = LocalSegments(str(tmp_path / "segments"))
    part = SegmentPart(segments.write("100/0.parquet", ODD, batches(ODD, 5)), COMMIT)
    frame = batch_with(spark, segments, part).dataframe("public.odd")
    assert not is_native(frame)
    there = batch_with(spark, segments, part, native=False).dataframe("public.odd").collect()
    assert frame.collect() == there and any(row[NAMES[0]] is not None for row in there)
    (file,) = (log.path / "public.odd").glob("snapshot-*/*.parquet")
    bounds = SnapshotBounds(Lsn(99), Lsn(120), 700, 710, (), 0)
    given = SnapshotBatch(spark, Generation(ODD, 1, bounds), [f"file://{file}"], 0).dataframe("public.odd")
    assert sorted(row[NAMES[1]] for row in given.collect()) == [odd(1)[NAMES[1]], odd(2)[NAMES[1]]]

    # The reason for all this.
    types = spark_schema(pa.schema([f for f in contract_schema(ODD) if f.name == NAMES[0]]))
    read = spark.read.schema(types).parquet(f"file://{file}").select(quoted(NAMES[0]))
    assert {row[0] for row in read.collect()} == {None}
    assert not is_read_as_named(NAMES) and is_read_as_named(["$dollar", "{brace}", "a"])


def test_a_folder_whose_name_is_a_pattern_is_that_folder_and_no_other(
    tmp_path: Path, spark: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a snapshot for a function Spark read what the pattern means, or found nothing."""
    monkeypatch.setattr(log_sink, "warm_up", lambda spark: None)
    row = {"id": 1, "$dollar": "a", "{brace}": "b"}
    for name in ("lake2", "lake*", "l {b,c}?*"):
        log = LogMaker(tmp_path / name, spark, make_batch)
        log.snapshot(PLAIN, [row])
        log.insert(PLAIN, {**row, "id": 2, "$dollar": name})
        changes = ChangeLog(str(log.path))
        assert len(changes.as_of(spark)["public.plain"].collect()) == 2
        (change,) = changes.changes(spark, "public.plain", since=log.lsn - 1).collect()
        assert change["$dollar"] == name
        assert Mirror(str(log.path)).refresh(spark) is not None
        log.insert(PLAIN, {**row, "id": 3, "$dollar": name})
        assert Mirror(str(log.path)).refresh(spark) is not None
        log.sink.close()
        segments = LocalSegments(str(tmp_path / f"segments of {name}"))
        part = SegmentPart(segments.write("100/0.parquet", PLAIN, batches(PLAIN, 5)), COMMIT)
        frame = batch_with(spark, segments, part).dataframe("public.plain")
        assert is_native(frame) and frame.count() == 5
        (file,) = (log.path / "public.plain").glob("snapshot-*/*.parquet")
        bounds = SnapshotBounds(Lsn(99), Lsn(120), 700, 710, (), 0)
        given = SnapshotBatch(spark, Generation(PLAIN, 1, bounds), [f"file://{file}"], 0)
        assert [row["id"] for row in given.dataframe("public.plain").collect()] == [1]
