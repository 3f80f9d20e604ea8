"""A Spark session that a script gives to ``start``: whether our functions run in it.

RayDP's session, and that of ``xidstream.spark_session``, read rows from Ray's object store. Any other (a local one,
YARN, Kubernetes, Databricks, EMR) gets them through the storage (``stored_frames``). So its executors must have this
package and reach the storage, which a tiny job finds out before anything is read: without it the first batch would end
in an error of a Python worker.

A session without a SparkContext (Spark Connect) is refused: the loop asks the context for running tasks and cancels
jobs by their group, and Connect has neither.
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

from xidstream.actors.driver.session_kind import has_ray_executors, reads_ray_objects
from xidstream.pipeline.errors import PreconditionMissing, Unsupported, UsageError
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.spark.executor_tasks import ReadProbe
from xidstream.pipeline.spark.session import UNION_PARTITIONING, warm_up
from xidstream.pipeline.spark_errors import raised_in_executor
from xidstream.pipeline.storage.handed_rows import RowsReader, write_rows
from xidstream.pipeline.storage.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROBE = ".xidstream-check"
_RECENT = "spark.sql.streaming.numRecentProgressUpdates"


def n_recent_updates(spark: SparkSession) -> int:
    """How many progress updates a query keeps: Spark's own setting, at least 1."""
    return max(1, int(spark.conf.get(_RECENT, "100") or "100"))


def adopt_spark(spark: SparkSession) -> None:
    """Make a session that the user started fit to run our functions in its executors' Python.

    Of its settings one is changed, unless the user has set it: ``UNION_PARTITIONING``, so that the frames of a batch
    stay tasks of their own.

    Raises UsageError for what is no session, or one that has ended; Unsupported for one without a SparkContext.
    """
    context = _context(spark)
    is_here = has_ray_executors(spark) or str(context.master).startswith("local")
    if is_here and "PYSPARK_PYTHON" not in os.environ:
        # Else the executors take `python3` from the PATH, which may have none of our packages. On other machines this
        # interpreter's path means nothing: there the session's own setting counts.
        context.pythonExec = sys.executable
    # Spark before 4.1 does not know this setting, and then it cannot be modified.
    is_set = spark._jsparkSession.conf().contains(UNION_PARTITIONING)
    if spark.conf.isModifiable(UNION_PARTITIONING) and not is_set:
        spark.conf.set(UNION_PARTITIONING, "false")


def _context(spark: SparkSession) -> Any:
    try:
        context = spark.sparkContext
    except AttributeError:
        raise UsageError(
            f"start() needs a SparkSession, not a {type(spark).__name__}",
            remedy="give it a running session; xidstream.spark_session() makes one",
        ) from None
    except Exception as error:
        raise Unsupported(
            f"this session has no SparkContext ({type(error).__name__}): sessions of Spark Connect are not supported",
            remedy="start from a classic session: a driver program, or a cluster for one user",
        ) from error
    if context._jsc is None or context._jsc.sc().isStopped():
        raise UsageError(
            "the Spark session has ended", remedy="make a new one; xidstream.spark_session() does"
        )
    return context


def try_executors(spark: SparkSession, storage_uri: str) -> None:
    """Run a tiny job, where rows go through the storage: seconds, which the first batch need not take then.

    Raises PreconditionMissing where executors lack this package or do not reach the storage; StorageFault.
    """
    if reads_ray_objects(spark):
        return
    storage = Storage(storage_uri)
    key = f"{_PROBE}-{secrets.token_hex(4)}"
    probe = write_rows(storage, key, [])
    n = max(1, int(spark.sparkContext.defaultParallelism))
    function = ReadProbe(RowsReader(storage.uri), probe)
    try:
        warm_up(spark)
        spark.range(0, n, 1, n).mapInArrow(function, "id long").collect()
    except Exception as error:
        raise _missing(error, storage_uri) from error
    finally:
        storage.delete([key])


def _missing(error: Exception, storage_uri: str) -> Exception:
    ours = raised_in_executor(error)
    if ours is not None:
        return PreconditionMissing(
            f"Spark's executors do not reach the storage {redacted(storage_uri)}: {ours.message}",
            remedy="give a storage that every executor reads: an object store, or a folder that all machines share",
        )
    if "ModuleNotFoundError" in str(error) or "No module named" in str(error):
        return PreconditionMissing(
            "Spark's executors cannot import xidstream",
            remedy="install xidstream for the Python of every executor (PYSPARK_PYTHON names it), in the driver's "
            "version",
        )
    return error
