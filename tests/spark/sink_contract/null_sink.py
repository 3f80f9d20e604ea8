"""A sink in one file, shaped as Iceberg's tables are: data files, and numbered metadata that names all of them.

``metadata/N.json`` says what all tables are after commit N. A commit writes its data files, then N+1, which nobody else
may have written. So all tables of a batch change at once, with the watermark and the owner in the same object.
It is what docs/architecture.md shows to whoever adds a sink, and shows that nothing else is needed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.errors import StorageFault, Superseded, Unsupported, UsageError, XidstreamError
from xidstream.pipeline.exchange import AT_ONCE, Pace, SlotIdentity, Tenure
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.log_tables.attempt_files import remove
from xidstream.pipeline.log_tables.batch_parts import TableName, TableParts
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.locations import Location
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
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.settings.sink_kinds import SinkKind, Snapshots
from xidstream.pipeline.settings.sink_settings import SinkSettings
from xidstream.pipeline.sinks.sink import Sink, SinkType
from xidstream.pipeline.sinks.sink_findings import SinkCheck
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.ddl import Witnessed
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch

NULL: Final = SinkKind(
    "null",
    "tests.spark.sink_contract.null_sink:NullType",
    "URI",
    "folder",
    has_root=True,
    is_log=True,
    needs_spark=False,
    snapshots=Snapshots.BESIDE,
)


class NullType(SinkType):
    def make(self, identity: SlotIdentity, settings: SinkSettings) -> Sink:
        return NullSink(Path(self.argument))

    def check(self, storage_uri: str) -> SinkCheck:
        return lambda server: [Finding.ok("sink", f"null root {self.argument}")]

    def holds(self, application_id: str) -> tuple[int, Lsn]:
        state = newest(Path(self.argument))[1]
        return state["owner"], Lsn(state["lsn"])


def newest(root: Path) -> tuple[int, dict[str, Any]]:
    """The number of the last commit, and what it says."""
    number = max((int(path.stem) for path in root.glob("metadata/*.json")), default=0)
    if not number:
        return 0, {"lsn": 0, "owner": 0, "commits": [], "tables": {}, "lines": []}
    return number, json.loads((root / f"metadata/{number}.json").read_text())


class NullSink:
    kind = NULL

    def __init__(self, root: Path) -> None:
        self._root = root
        self._owner = 0

    def open(self, session: Any) -> None:
        (self._root / "metadata").mkdir(parents=True, exist_ok=True)

    def watermark(self) -> Lsn:
        return Lsn(newest(self._root)[1]["lsn"])

    def last_owner(self) -> int:
        return int(newest(self._root)[1]["owner"])

    def claim(self, tenure: Tenure) -> None:
        self._owner = tenure.number
        self.commit(lambda state: state.update(owner=tenure.number))

    def commit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Make ``change`` of what all tables are, or nothing of it."""
        number, state = newest(self._root)
        if state["owner"] > self._owner:
            raise Superseded(f"run {state['owner']} has the sink, this is run {self._owner}")
        path = self._root / f"metadata/{uuid.uuid4().hex}"
        change(state)
        path.write_text(json.dumps(state))
        reach("committing_table")
        try:
            os.link(path, self._root / f"metadata/{number + 1}.json")
        except FileExistsError:
            raise StorageFault(f"another commit has the number {number + 1}") from None
        finally:
            path.unlink()
        reach("table_committed")

    def write(self, batch: SinkBatch) -> None:
        watermark = self.watermark()
        files = {parts.label: self._files(parts, batch, watermark) for parts in batch.parts.values()}
        commits = [lsn for lsn in batch.transaction_rows["commit_lsn"].to_pylist() if lsn > watermark]

        def append(state: dict[str, Any]) -> None:
            for label, written in files.items():
                state["tables"].setdefault(label, []).extend(written)
            state["commits"] += commits
            state["lsn"] = max([watermark, *commits])

        self.commit(append)

    def _files(self, parts: TableParts, batch: SinkBatch, watermark: int) -> list[str]:
        """One for each layout: whoever reads them takes columns by their names."""
        written = []
        for version in parts.versions:
            found = [*batch.memory_batches(version)]
            found += [rows for segment in version.segments for rows in batch.read_segment(segment)]
            rows = pa.Table.from_batches(found, version.schema)
            written.append(f"{uuid.uuid4().hex}.parquet")
            pq.write_table(rows.filter(pc.field("_commit_lsn") > watermark), self._root / written[-1])
        return written

    def pace(self) -> Pace:
        return AT_ONCE

    def log_part(self) -> None:
        """Nothing is removed from it."""

    def snapshot_log(self) -> SnapshotTables:
        return NullTables(self, self._root)

    def write_snapshot(self, batch: SnapshotBatch) -> None:
        raise UsageError("snapshots are committed beside the batches")

    def exclude_contained(self, contained: Mapping[TableName, SnapshotBounds]) -> None:
        """A log keeps all changes."""

    def close(self) -> None:
        """Nothing is held."""


class NullTables:
    """Its ``SnapshotTables``: rows and line are one commit."""

    def __init__(self, sink: NullSink, root: Path) -> None:
        self._sink = sink
        self._root = root

    def clean(self) -> None:
        """What no metadata names is nobody's."""

    def lines(self, makes: bool) -> list[GenerationLine]:
        lines = newest(self._root)[1]["lines"]
        found = [GenerationLine(**{**line, "state": GenerationState(line["state"])}) for line in lines]
        return sorted(found, key=lambda line: (line.table, line.number))

    def outputs(self, wanted: Sequence[tuple[RelationVersion, Lsn]]) -> list[SnapshotOutput | XidstreamError]:
        return [self._output(relation) for relation, _ in wanted]

    def _output(self, relation: RelationVersion) -> SnapshotOutput:
        mapping = map_columns((), contract_schema(relation))
        conform = Conform.of(mapping.columns, mapping.names)
        return SnapshotOutput(Location.parse(str(self._root)), uuid.uuid4().hex, conform)

    def carry(self, carrying: Carrying, output: SnapshotOutput) -> tuple[WrittenFile, ...] | None:
        raise Unsupported("nobody reads states of it")

    def commit(
        self, taken: Sequence[tuple[Generation, Sequence[WrittenFile]]]
    ) -> list[bool | XidstreamError]:
        for generation, files in taken:
            if not self.recover(generation):
                self._add(generation, files)
        return [True] * len(taken)

    def recover(self, generation: Generation) -> bool:
        return any(
            (line.table, line.number) == (generation.name, generation.number) for line in self.lines(True)
        )

    def _add(self, generation: Generation, files: Sequence[WrittenFile]) -> None:
        bounds = generation.bounds
        line = {"table": generation.name, "relid": generation.relid, "number": generation.number}
        line |= {"snapshot_lsn": int(bounds.snapshot_lsn), "valid_from": int(bounds.valid_from)}
        line |= {"state": GenerationState.FINISHED.value, "is_ours": True}

        def add(state: dict[str, Any]) -> None:
            state["tables"].setdefault(generation.name, []).extend(file.path for file in files)
            state["lines"].append(line)

        self._sink.commit(add)

    def discard(self, output: SnapshotOutput) -> None:
        assert isinstance(output.table, Location), "what outputs() named"
        remove(output.table, output.directory)

    def end(self, line: GenerationLine, reason: str, witnessed: Witnessed | None = None) -> None:
        def end(state: dict[str, Any]) -> None:
            for each in state["lines"]:
                if (each["table"], each["number"]) == (line.table, line.number):
                    each["state"] = GenerationState.ENDED.value

        self._sink.commit(end)

    def lay_out(
        self, found: Sequence[tuple[RelationVersion, Lsn]], witnessed: Witnessed | None = None
    ) -> None:
        """Nobody reads states of it yet."""

    def reach(self, lsn: Lsn) -> None:
        self._sink.commit(lambda state: state.update(lsn=max(state["lsn"], lsn)))

    def extend(self, line: GenerationLine, witnessed: Witnessed) -> None:
        """Nobody reads states of it yet."""

    def prove(self, lsn: Lsn, snapshot: str | None = None) -> Proven:
        """Nobody reads states of it yet."""
        return Proven(lsn)

    def complete(self) -> None:
        """The batches went on all the time."""
