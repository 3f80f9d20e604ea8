"""A batch as a sink sees it: one lazy DataFrame per table, in the contract's layout, and the parts that these are of.

A user's function gets less of it (``spark_batch``).

``SinkBatch`` turns parts into DataFrames: what is in memory through ``memory_frame`` (in production RayDP's
object-store path, given by ``actors``; that path never compares schemas, so the result's is asserted here). What is
spilled goes by Spark's own Parquet reader where the storage is a folder (``native_segments``). From an object store,
for which Spark has no client here, it goes through ``mapInArrow`` over ``spark.range``, one task for each group of
segments, which reads and checks them by pyarrow in the executor. Nothing runs until the caller acts on a DataFrame, so
a transaction of any size is a batch like another. The driver's own rows (transactions, a few messages) go the same way
as a few bytes inside the function: ``createDataFrame`` would pickle them row by row.

Of a unit with many tables the small parts share objects (``pipeline.packs``). The driver takes out what one table has
there, over all units of the batch, and stores it anew as one object, when the table's DataFrame is made.

Logical messages that are not few are in the object store or in storage, as rows are, and the driver holds their
places only. Whoever writes them on the driver (``message_batches``) has one record batch of them at a time.

Where one batch holds several layouts of a table, ``dataframe`` is their union by the rule of
``pipeline.log_tables.columns`` with widening: the columns of the first layout, then what later ones add, null where
a layout has none, then the contract's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.errors import SinkFailed, StorageFault, UsageError
from xidstream.pipeline.exchange import (
    ArrowRef,
    Batch,
    InlineMessages,
    MemoryMessages,
    MemoryPart,
    MessagePart,
    SpilledMessages,
)
from xidstream.pipeline.log_tables.batch_parts import (
    TableName,
    TableParts,
    VersionParts,
    group_by_bytes,
    tables_of,
)
from xidstream.pipeline.log_tables.columns import UNSTORED, ColumnMapping, Conform, TableColumn, map_columns
from xidstream.pipeline.packs import PackReader
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import DDL_PREFIX, labelled_table
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA
from xidstream.pipeline.spark.executor_tasks import (
    GivenRows,
    MessageRows,
    ReadSegment,
    SegmentRows,
    released_messages,
)
from xidstream.pipeline.spark.native_segments import damage, native_frames, readable_natively
from xidstream.pipeline.spark.spark_schemas import conformed, simple_types, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from xidstream.pipeline.log_tables.segment_links import SegmentStorage
    from xidstream.pipeline.spark.session import GetSession

MemoryFrame = Callable[["SparkSession", pa.Schema, Sequence[ArrowRef]], "DataFrame"]
"""``(spark, contract schema, refs) -> DataFrame`` of exactly ``spark_schema(contract schema)``, one partition
or more, rows of each ref in order. The caller keeps the refs alive while the batch is."""


PutMemory = Callable[[pa.Table], ArrowRef]
"""Stores a table for ``MemoryFrame``; the driver's process owns it."""


ReadMemory = Callable[[ArrowRef], Iterator[pa.RecordBatch]]
"""The record batches that a reference names, read in the driver's own process."""


class SinkBatch:
    """The argument of a sink's ``write``. Members that ``SparkBatch`` has, too, are described there."""

    def __init__(
        self,
        batch: Batch,
        session: GetSession,
        memory_frame: MemoryFrame,
        read_segment: ReadSegment,
        read_memory: ReadMemory,
        put_memory: PutMemory,
        storage: SegmentStorage | None = None,
    ) -> None:
        """``read_segment`` must pickle: the executors call it. Without ``storage`` segments can only be read."""
        self.content = batch
        self._session = session
        self._memory_frame = memory_frame
        self._read_memory = read_memory
        self._put_memory = put_memory
        self._packs = PackReader(read_memory)
        self._unpacked: list[ArrowRef] = []
        self.read_segment = read_segment
        self.storage = storage
        self._frames: dict[TableName, DataFrame] = {}

    @property
    def spark(self) -> SparkSession:
        """The session. It may have to be started first."""
        return self._session()

    @property
    def number(self) -> int:
        return self.content.number

    @property
    def first_commit_lsn(self) -> Lsn:
        return self.content.first_commit_lsn

    @property
    def last_commit_lsn(self) -> Lsn:
        return self.content.last_commit_lsn

    @cached_property
    def parts(self) -> dict[TableName, TableParts]:
        return tables_of(self.content)

    @property
    def tables(self) -> list[str]:
        return sorted(parts.label for parts in self.parts.values())

    def dataframe(self, table: str | TableName) -> DataFrame:
        name = labelled_table(table) if isinstance(table, str) else table
        parts = None if name is None else self.parts.get(name)
        if parts is None:
            raise UsageError(f"the batch has no rows of {table!r}: see batch.tables")
        if parts.name not in self._frames:
            self._frames[parts.name] = self._table_frame(parts)
        return self._frames[parts.name]

    @cached_property
    def transaction_rows(self) -> pa.Table:
        """The transactions as the driver holds them, in commit order."""
        rows = [unit.transactions for unit in self.content.units if unit.transactions.num_rows]
        return pa.Table.from_batches(rows, TRANSACTIONS_SCHEMA)

    def message_batches(
        self, take_ddl: Callable[[pa.RecordBatch], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The logical messages in stream order, in ``rows.MESSAGES_SCHEMA``, each record batch read when it is asked
        for: the driver need not hold them together. Those that tell of DDL are not among them: ``take_ddl`` gets them.
        Raises ComponentLost, StorageFault, SegmentCorrupt."""
        for batch in self._all_messages():
            is_ddl = _is_ddl(batch)
            if not pc.any(is_ddl).as_py():
                yield batch
                continue
            if take_ddl is not None:
                take_ddl(batch.filter(is_ddl))
            if (others := batch.filter(pc.invert(is_ddl))).num_rows:
                yield others

    def _all_messages(self) -> Iterator[pa.RecordBatch]:
        for part in self._message_parts():
            if isinstance(part, InlineMessages):
                yield part.rows
            elif isinstance(part, MemoryMessages):
                yield from self._read_memory(part.ref)
            else:
                yield from released_messages(part, self.read_segment)

    def _message_parts(self) -> Iterator[MessagePart]:
        for unit in self.content.units:
            yield from unit.messages

    @cached_property
    def transactions(self) -> DataFrame:
        return self._given(self.transaction_rows)

    @cached_property
    def messages(self) -> DataFrame:
        parts = list(self._message_parts())
        inline = [part.rows for part in parts if isinstance(part, InlineMessages)]
        refs = [part.ref for part in parts if isinstance(part, MemoryMessages)]
        spilled = tuple(part for part in parts if isinstance(part, SpilledMessages))
        frames = []
        if inline or not parts:
            frames.append(self._given(pa.Table.from_batches(inline, MESSAGES_SCHEMA)))
        if refs:
            frames.append(self._memory_frame(self.spark, MESSAGES_SCHEMA, refs))
        if spilled:
            groups = group_by_bytes([part.n_bytes for part in spilled], self.parallelism)
            rows = MessageRows(self.read_segment, spilled, tuple(groups))
            frames.append(self.map_groups(rows, len(groups), spark_schema(MESSAGES_SCHEMA)))
        frame = reduce(lambda left, right: left.unionAll(right), frames)
        return frame if not parts else frame.where(f"NOT (transactional AND prefix = '{DDL_PREFIX}')")

    def _given(self, rows: pa.Table) -> DataFrame:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=64 << 10)
        function = GivenRows(sink.getvalue().to_pybytes())
        return self.spark.range(0, 1, 1, 1).mapInArrow(function, spark_schema(rows.schema))

    def memory_dataframe(self, version: VersionParts) -> DataFrame:
        """What one layout has in memory, contract layout, in as many partitions as its size asks for."""
        parts = [(part.ref, part.n_bytes) for part in version.memory if part.pack_index is None]
        parts += self._unpack(
            [part for part in version.memory if part.pack_index is not None], version.schema
        )
        frame = self._memory_frame(self.spark, version.schema, [ref for ref, _ in parts])
        found, wanted = simple_types(frame.schema), simple_types(spark_schema(version.schema))
        if found != wanted:
            wrong = next(f"{f} where {w}" for f, w in zip_longest(found, wanted) if f != w)
            raise SinkFailed(f"table {version.relation.name}: the DataFrame has {wrong} is due")
        groups = group_by_bytes([n_bytes for _, n_bytes in parts], self.parallelism)
        return frame.coalesce(len(groups)) if len(groups) < len(parts) else frame

    def memory_batches(self, version: VersionParts) -> Iterator[pa.RecordBatch]:
        """The rows in this process, without Spark, part by part."""
        for part in version.memory:
            if part.pack_index is None:
                yield from self._read_memory(part.ref)
            else:
                yield from self._packs.rows([part])

    def _unpack(self, parts: Sequence[MemoryPart], schema: pa.Schema) -> list[tuple[ArrowRef, int]]:
        """Objects, and their bytes, with the rows that one layout has in packs: few, because each is a partition. They
        stay as long as this batch, because nothing runs before the DataFrame is used."""
        objects = []
        for group in group_by_bytes([part.n_bytes for part in parts], 1):
            batches = self._packs.rows([parts[i] for i in group])
            rows = pa.Table.from_batches(batches, schema).combine_chunks()
            objects.append((self._put_memory(rows), rows.nbytes))
        self._unpacked += [ref for ref, _ in objects]
        return objects

    def map_memory(self, version: VersionParts, function: Any, schema: StructType | str) -> DataFrame:
        """``mapInArrow`` over ``memory_dataframe``: the record batches have its columns' positions."""
        frame = self.memory_dataframe(version)
        if any("." in name or "`" in name for name in frame.columns):
            # PySpark 3.5 looks each column up by its unquoted name there. The contract's names stay.
            n_own = len(version.relation.columns)
            frame = frame.toDF(*[f"c{i}" for i in range(n_own)], *frame.columns[n_own:])
        return frame.mapInArrow(function, schema)

    @cached_property
    def parallelism(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)

    def segment_rows(self, parts: TableParts, conform: Sequence[Conform]) -> SegmentRows:
        """The function that reads all segments of a table; ``conform[i]`` is for its i-th layout."""
        segments = parts.segments()
        return SegmentRows(
            self.read_segment,
            tuple(part for _, part in segments),
            tuple(version for version, _ in segments),
            tuple(conform),
            tuple(group_by_bytes([part.segment.n_bytes for _, part in segments], self.parallelism)),
        )

    def map_groups(self, function: Any, n_groups: int, schema: StructType | str) -> DataFrame:
        """``mapInArrow`` with one task, one row (the number) for each group."""
        return self.spark.range(0, n_groups, 1, n_groups).mapInArrow(function, schema)

    def _table_frame(self, parts: TableParts) -> DataFrame:
        columns, mappings = union_layout(parts)
        schema = spark_schema(pa.schema([c.field for c in columns]))
        frames = []
        native = readable_natively(parts, self.storage)
        others = parts.without(native)
        if others.segments():
            rows = self.segment_rows(others, [Conform.of(columns, p.names) for p in mappings])
            frames.append(self.map_groups(rows, len(rows.groups), schema))
        for version, mapping in zip(parts.versions, mappings, strict=True):
            found = self._native(version) if native else []
            if version.memory:
                found.append(self.memory_dataframe(version))
            frames += [conformed(frame, columns, mapping, schema) for frame in found]
        return reduce(lambda left, right: left.unionAll(right), frames)

    def _native(self, version: VersionParts) -> list[DataFrame]:
        assert self.storage is not None, "nothing is readable natively without it"
        return native_frames(self.spark, version, self.storage)

    def segment_fault(self, error: BaseException) -> StorageFault | None:
        """The fault of a segment of this batch, if that is why Spark raised ``error``."""
        return damage(error, list(self.content.segment_parts()))


def _is_ddl(messages: pa.RecordBatch) -> pa.Array:
    return pc.and_(messages.column("transactional"), pc.equal(messages.column("prefix"), DDL_PREFIX))


def union_layout(parts: TableParts) -> tuple[tuple[TableColumn, ...], list[ColumnMapping]]:
    """The columns of the union of a table's layouts, and where each layout's columns go."""
    columns: tuple[TableColumn, ...] = ()
    mappings = []
    for version in parts.versions:
        mapping = map_columns(columns, pa.schema(version.relation.arrow_fields), UNSTORED)
        columns = mapping.columns
        mappings.append(mapping)
    contract = map_columns((), pa.schema(CONTRACT_FIELDS))
    return columns + contract.columns, [
        ColumnMapping(columns + contract.columns, p.additions, p.names + contract.names) for p in mappings
    ]
