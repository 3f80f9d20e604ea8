"""What Spark 4 asks of the source where the log is in Iceberg tables of an object store, without a JVM."""

from __future__ import annotations

import pickle

import pytest

from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.mirror.test_on_iceberg import A, Log
from tests.unit.mirror.test_on_iceberg import behind_glue as behind_glue

pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no Python data sources")

from xidstream.pipeline.changelog.spark_source import DefaultSource, ReadAllAvailable


def test_files_in_a_store_are_opened_as_the_catalog_says_by_processes_that_do_not_ask_it(
    behind_glue: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind_glue.snapshot(A, [{"id": 0, "name": "from before"}])
    behind_glue.insert(A, {"id": 1, "name": "x"})
    behind_glue.insert(A, {"id": 2, "name": None})
    made = DefaultSource({"path": f"iceberg:{behind_glue.iceberg}", "table": "public.a"})
    stream = made.streamReader(made.schema())
    assert stream.latestOffset(stream.initialOffset(), ReadAllAvailable()) == {"lsn": behind_glue.lsn}
    sent = pickle.dumps((stream, stream.partitions({"lsn": 0}, {"lsn": behind_glue.lsn})))
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__GLUE__ENDPOINT", "http://127.0.0.1:9")
    there, partitions = pickle.loads(sent)
    rows = [row for part in partitions for batch in there.read(part) for row in batch.to_pylist()]
    assert sorted((row["id"], row["name"]) for row in rows) == [(1, "x"), (2, None)]
