"""One Ray with a Spark session for the whole folder; a server and a database as in tests/postgres.

The session is in the test process, as in a user's PySpark script; tests of the command line start processes of
their own, with their own Ray.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.postgres_fixtures import *  # noqa: F403
from tests.postgres_fixtures import Database
from xidstream.actors.cli.checks import create_slot_command
from xidstream.pipeline.settings.config import Config


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from xidstream.actors.driver.session import start_spark, stop_spark
    from xidstream.actors.driver.session_kind import reads_ray_objects
    from xidstream.actors.runtime.ray_cluster import connect_ray

    connect_ray(offers_metrics=True)
    session = start_spark(Config(), "xidstream-tests")
    assert reads_ray_objects(session), (
        "this process has a session already, which would be tested in place of ours"
    )
    yield session
    stop_spark()


class Pipeline:
    """A running ChangeStream for one test, with what its sink has seen."""

    def __init__(self, spark: Any, database: Database, folder: Path) -> None:
        self.spark = spark
        self.database = database
        self.folder = folder
        self.delta = folder / "delta"
        self.storage = folder / "segments"
        self.tables: dict[str, list[pa.Table]] = {}
        self.transactions: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.batches = 0
        self.lock = threading.Lock()

    def config(self, **settings: Any) -> Config:
        values: dict[str, Any] = {
            "dsn": self.database.dsn(),
            "slot": f"s_{self.database.name}"[:63],
            "publication": "p",
            "storage": str(self.storage),
            "logical_decoding_work_mem": "64kB",
            "create_slot": True,
            "buffers_max": 2,
            **settings,
        }
        return Config.of(values)

    def create_slot(self, **settings: Any) -> None:
        """As ``xidstream slot create`` does: what commits from here on is read. A run that only makes the slot would
        start three processes."""
        create_slot_command(self.config(**settings))

    def handle(self, batch: Any) -> None:
        """Collect a batch as Arrow: what a user's function would see."""
        with self.lock:
            self.batches += 1
            self.transactions += [r.asDict() for r in batch.transactions.collect()]
            self.messages += [r.asDict() for r in batch.messages.collect()]
            for table in batch.tables:
                self.tables.setdefault(table, []).append(to_arrow(batch.dataframe(table)))

    def start(self, **settings: Any) -> Any:
        from xidstream import ChangeStream

        self.query = ChangeStream(self.config(**settings)).foreachBatch(self.handle).start(self.spark)
        return self.query

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120) -> None:
        """While the started query lives; what ended it, or where it stands, is the failure's message."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.query.isActive, self.query.exception()
            assert time.monotonic() < deadline, self.query.lastProgress
            time.sleep(0.05)

    def wait_until_reading(self) -> None:
        """Until the slot is there: a transaction begun earlier would be waited for by the slot's creation."""
        self.wait_until(lambda: self.query.lastProgress["confirmedLsn"] is not None)

    def run_available(self, timeout_s: float = 120, **settings: Any) -> None:
        """Handle what is committed now, and end."""
        from xidstream import ChangeStream

        query = (
            ChangeStream(self.config(**settings))
            .foreachBatch(self.handle)
            .trigger(availableNow=True)
            .start(self.spark)
        )
        assert query.awaitTermination(timeout_s), query.lastProgress

    def rows(self, table: str) -> list[dict[str, Any]]:
        """All rows of a table seen so far, in order of release."""
        with self.lock:
            parts = list(self.tables.get(table, []))
        rows = [row for part in parts for row in part.to_pylist()]
        return sorted(rows, key=lambda r: (r["_commit_lsn"], r["_seq"]))

    def segments(self) -> list[Path]:
        return list(self.storage.rglob("*.parquet"))


def to_arrow(frame: Any) -> pa.Table:
    """Without Spark's collect of Python objects, which cannot hold every timestamp."""
    batches = frame._collect_as_arrow()
    return pa.Table.from_batches(batches) if batches else pa.table({})


@pytest.fixture
def pipeline(spark: Any, database: Database, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, database, tmp_path)


@pytest.fixture
def make_pipeline(spark: Any, tmp_path: Path) -> Callable[[Database], Pipeline]:
    return lambda database: Pipeline(spark, database, tmp_path)
