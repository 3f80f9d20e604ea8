"""The sink's ``SnapshotTables``, called from the run's process: the sink is in the process of the Spark session.

Each method is one call of the method of the same name there. What travels is the arguments, and a few lines of this
module that hold them: so this is the one place that makes such a call, and every other one is as types say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import (
    Carrying,
    GenerationLine,
    Proven,
    SnapshotOutput,
    SnapshotTables,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.snapshot.ddl import Witnessed
from xidstream.pipeline.snapshot.generation import Generation

_T = TypeVar("_T")


class OnSink(Protocol):
    """Calls ``call`` with the sink's own, in the process that has the sink. ``after_end``: also after the batch loop
    has ended. Raises ComponentLost while no loop has the sink, and what ``call`` raises."""

    def __call__(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T: ...


class SinkTables:
    """A ``SnapshotTables``. Raises ComponentLost, too."""

    def __init__(self, on_sink: OnSink) -> None:
        self._on_sink = on_sink

    def clean(self) -> None:
        self._on_sink(lambda tables: tables.clean())

    def lines(self, makes: bool) -> list[GenerationLine]:
        return self._on_sink(lambda tables: tables.lines(makes))

    def outputs(self, wanted: Sequence[tuple[RelationVersion, Lsn]]) -> list[SnapshotOutput | XidstreamError]:
        return self._on_sink(lambda tables: tables.outputs(wanted))

    def carry(self, carrying: Carrying, output: SnapshotOutput) -> tuple[WrittenFile, ...] | None:
        return self._on_sink(lambda tables: tables.carry(carrying, output))

    def commit(
        self, taken: Sequence[tuple[Generation, Sequence[WrittenFile]]]
    ) -> list[bool | XidstreamError]:
        return self._on_sink(lambda tables: tables.commit(taken))

    def recover(self, generation: Generation) -> bool:
        return self._on_sink(lambda tables: tables.recover(generation))

    def discard(self, output: SnapshotOutput) -> None:
        self._on_sink(lambda tables: tables.discard(output))

    def end(self, line: GenerationLine, reason: str, witnessed: Witnessed | None = None) -> None:
        self._on_sink(lambda tables: tables.end(line, reason, witnessed))

    def extend(self, line: GenerationLine, witnessed: Witnessed) -> None:
        """May be told after the loop's end, as ``prove``."""
        self._on_sink(lambda tables: tables.extend(line, witnessed), after_end=True)

    def lay_out(
        self, found: Sequence[tuple[RelationVersion, Lsn]], witnessed: Witnessed | None = None
    ) -> None:
        """May be told after the loop's end, as ``prove``."""
        self._on_sink(lambda tables: tables.lay_out(found, witnessed), after_end=True)

    def reach(self, lsn: Lsn) -> None:
        self._on_sink(lambda tables: tables.reach(lsn))

    def prove(self, lsn: Lsn, snapshot: str | None = None) -> Proven:
        """May be told after the loop's end: the sink refuses it from a run that was taken over."""
        return self._on_sink(lambda tables: tables.prove(lsn, snapshot), after_end=True)

    def complete(self) -> None:
        self._on_sink(lambda tables: tables.complete())
