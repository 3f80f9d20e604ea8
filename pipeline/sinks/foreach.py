"""The foreach sink: a user's ``module:function``, called with each batch, as ``foreachBatch`` is.

At least once, in order, never torn. An exception ends the run with nothing of the batch confirmed. Its
message may quote a row, and what a run prints often ends in a log that others read and that is kept. So ours names the
type and the lines of code that it came through. The exception itself is the ``__cause__``: a script shows it whole, and
the command line shows it where that is asked for, with ``xidstream --debug``.

What is not the function's doing is mended by the supervisor: a segment that cannot be read, a JVM that is gone.
Py4J tells of the latter with the builtin ConnectionRefusedError, among others, which the function's own clients
raise as well: only what came out of Py4J's or PySpark's code counts as a lost session.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

from xidstream.pipeline.errors import ComponentLost, SinkFailed, StorageFault, UsageError, XidstreamError
from xidstream.pipeline.log_tables.batch_parts import TableName
from xidstream.pipeline.settings.sink_kinds import FOREACH
from xidstream.pipeline.sinks.stateless import StatelessSink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch
from xidstream.pipeline.spark.spark_batch import SparkBatch
from xidstream.pipeline.spark_errors import fault_of, raised_in_executor

_REMEDY: Final = (
    "correct the function, and start again: the batch was not confirmed. What the exception says is withheld, because "
    "it may quote a row; `xidstream --debug run` shows it, and in Python it is the __cause__"
)

BatchFunction = Callable[[SparkBatch], Any]
SegmentFault = Callable[[Exception], "StorageFault | None"]
"""The fault of a segment of the batch, if that is why an action failed."""


def resolve(spec: str) -> BatchFunction:
    """The function that ``module:function`` names (dots after the colon allowed). Raises UsageError.

    The working directory is looked in too, as ``python -m`` does.
    """
    module_name, colon, path = spec.partition(":")
    if not (colon and module_name and path):
        raise UsageError(f"give the function as module:function, not {spec!r}")
    directory = os.getcwd()
    if directory not in sys.path and "" not in sys.path:
        sys.path.insert(0, directory)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"module {module_name!r} of {spec!r} cannot be imported: {type(error).__name__}: {error}",
            remedy="install it where the driver runs, or start in its directory",
        ) from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise UsageError(f"module {module_name!r} has no {path!r}") from None
    if not callable(found):
        raise UsageError(f"{spec!r} is a {type(found).__name__}, not a function")
    function: BatchFunction = found
    return function


class ForeachSink(StatelessSink):
    """``function`` gets each ``SparkBatch``; ``label`` names it in errors."""

    kind = FOREACH

    def __init__(self, function: BatchFunction, label: str | None = None) -> None:
        self._function = function
        self._label = label or getattr(function, "__qualname__", type(function).__name__)
        self._contained: Mapping[TableName, SnapshotBounds] = {}

    @classmethod
    def of(cls, spec: str) -> ForeachSink:
        return cls(resolve(spec), spec)

    def __repr__(self) -> str:
        return f"ForeachSink({self._label})"

    def write(self, batch: SinkBatch) -> None:
        self._give(SparkBatch(batch, self._contained), batch.segment_fault)

    def exclude_contained(self, contained: Mapping[TableName, SnapshotBounds]) -> None:
        self._contained = contained

    def write_snapshot(self, batch: SnapshotBatch) -> None:
        """The rows that a table had before. Raises as ``write`` does."""
        self._give(batch, lambda error: None)

    def _give(self, batch: SparkBatch, segment_fault: SegmentFault) -> None:
        try:
            self._function(batch)
        except (Exception, SystemExit) as error:
            # SystemExit, too: it would end the process, and look like a crash that a restart mends.
            fault = _not_its_own(error, segment_fault, f"calling {self._label}")
            if fault is not None:
                raise fault from error
            raise SinkFailed(
                f"{self._label} raised {type(error).__name__} for the batch "
                f"{batch.first_commit_lsn}..{batch.last_commit_lsn}, at:\n{_where(error)}",
                remedy=_REMEDY,
            ) from error


def _not_its_own(error: BaseException, segment_fault: SegmentFault, doing: str) -> XidstreamError | None:
    """The fault of session or storage that made the function fail, also where it raised something else of it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        ours = cause if isinstance(cause, XidstreamError) else raised_in_executor(cause)
        if isinstance(ours, (ComponentLost, StorageFault)):
            return ours
        if isinstance(cause, Exception) and _came_through_spark(cause):
            segment = segment_fault(cause)
            if segment is not None:
                return segment
            fault = fault_of(cause, doing)
            if isinstance(fault, ComponentLost):
                return fault
        cause = cause.__cause__ or cause.__context__
    return None


def _came_through_spark(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(
        str(f.f_globals.get("__name__", "")).partition(".")[0] in ("py4j", "pyspark") for f, _ in frames
    )


def _where(error: BaseException) -> str:
    """The frames below ours, innermost last, without the exception's message."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return "".join(traceback.format_list(frames[-20:])).rstrip()
