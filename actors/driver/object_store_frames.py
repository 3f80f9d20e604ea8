"""Makes a Spark DataFrame of Arrow bytes in the Ray object store. The executors' JVMs read them.

This calls RayDP's two JVM entry points directly. RayDP's Python wrapper was rejected: it fetches the first block back
to the driver to look at its type, which doubles the time of a small batch, and its schema mapping knows neither
timestamps without zone nor maps.

The JVM never compares the stream's schema with Spark's, and a difference would silently give wrong values. So the
tables that are put (``runtime.object_store``) have exactly ``rows.contract_schema`` of their relation, and the Spark
schema is derived from that same Arrow schema. The caller keeps the refs alive while the frame is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from xidstream.actors.runtime.object_store import as_object, get_arrow, put_arrow
from xidstream.pipeline.exchange import ArrowRef

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_object(ref: ArrowRef) -> Iterator[pa.RecordBatch]:
    """The record batches of one stored stream, in this process. Raises ComponentLost where its owner has ended."""
    yield from get_arrow(ref).to_batches()


def object_store_frame(spark: SparkSession, schema: pa.Schema, refs: Sequence[ray.ObjectRef]) -> DataFrame:
    """A lazy DataFrame of ``schema`` over ``refs``, one partition each."""
    from pyspark.sql import DataFrame
    from pyspark.sql.pandas.types import from_arrow_schema

    spark_schema = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    worker = ray._private.worker.global_worker.core_worker  # type: ignore[attr-defined]
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    rdd = jvm.org.apache.spark.rdd.RayDatasetRDD(
        spark._jsc,
        [ref.binary() for ref in refs],
        [worker.get_owner_address(ref) for ref in refs],
    )
    reader = jvm.org.apache.spark.sql.raydp.ObjectStoreReader
    return DataFrame(reader.RayDatasetToDataFrame(spark._jsparkSession, rdd, spark_schema.json()), spark)


class ObjectStoreFrames:
    """What ``SinkBatch`` asks for, of a RayDP session. Ray frees the objects when nobody names them any more."""

    read = staticmethod(read_object)
    put = staticmethod(put_arrow)

    def __init__(self) -> None:
        self._made: list[ray.ObjectRef] = []

    def frame(self, spark: SparkSession, schema: pa.Schema, refs: Sequence[ArrowRef]) -> DataFrame:
        """``object_store_frame``. What came by value becomes an object here, for as long as the batch."""
        objects = [as_object(ref) for ref in refs]
        self._made += objects
        return object_store_frame(spark, schema, objects)

    def forget(self) -> None:
        """The batch is reported."""
        self._made = []
