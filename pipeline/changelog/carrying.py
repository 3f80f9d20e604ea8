"""The rows that a repair does not read from the source: carried over from the log, into files of the next generation.

A repair is a snapshot whose rows of a key range come from the source, and all others from the log: the state of the
generation before, at the very moment of the snapshot (``moment``), without that range. What comes out is a generation
like any other, whole and with one containment, so nothing that reads the log knows of repairs. The source is asked for
the range alone, and the lake writes the rest anew.

- Nothing is carried before the log answers at the snapshot: all commits up to there are in it, and proven.
- The generation that was to be repaired has to stand. Where DDL has ended it, its rows are not the table's.
- What is carried is what the log says, right or wrong. A wrong row outside of the range stays wrong.
- Each row is in the range by one engine's word and outside by the other's never: both have the same literals, in one
  form (``snapshot.key_filter``). A row of which that is not known is carried.
- The rows are stored as a snapshot's are: in the columns that its target names, each with a ``_seq`` of its own after
  those of the rows that were read. They are written by executors with pyarrow, so that any store and any name will do.

Rejected: a generation that holds the range alone, and refers to the one before. Each reader, and each engine that folds
in SQL (docs/snapshots.md), would have to know of parts. Deleting the range's rows in the log and appending right ones:
a log would no longer be what came, and a state before the repair would change. ``as_of`` of one LSN as the base: a
session's snapshot has none.

Spark's jobs are in a pool of their own: with its FAIR scheduler a batch does not wait for them.

``write_state`` writes all rows of a state in the same way, for a fold of the log (``folding``).

Called by the Delta sink, on any thread of the driver's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from xidstream.pipeline.changelog.log_root import DeltaRoot
from xidstream.pipeline.changelog.moment import answered_up_to, moment_of, table_at
from xidstream.pipeline.changelog.shape import as_type
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.errors import PreconditionMissing, SnapshotInterrupted
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.columns import Conform
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import REPORT_SCHEMA, WriteOutput, WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import Carrying, SnapshotOutput
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, SNAPSHOT
from xidstream.pipeline.snapshot.key_filter import EQUAL, BoundComparison
from xidstream.pipeline.spark.executor_tasks import WriteRows
from xidstream.pipeline.spark.session import UNION_PARTITIONING, GetSession
from xidstream.pipeline.spark.spark_schemas import quoted, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

POOL: Final = "xidstream-repair"
_JOB_BYTES: Final = 64 << 20
_MOST_PARTITIONS: Final = 2_000
_CONTRACT: Final = frozenset(field.name for field in CONTRACT_FIELDS)
_CONF: Final = {
    # A user's ANSI mode would end it at an older value that a column's newest type cannot hold.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # Rows may be a megabyte wide.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.sql.adaptive.enabled": "false",
    UNION_PARTITIONING: "false",
}


def carry(
    get_session: GetSession,
    root: Location,
    application_id: str,
    carrying: Carrying,
    target: SnapshotOutput,
) -> tuple[WrittenFile, ...] | None:
    """``SnapshotTables.carry``. ``application_id``: the slot's. Raises SnapshotInterrupted, too, where the log has
    other columns than the snapshot."""
    log = SlotLog(DeltaRoot(root), application_id)
    bounds, name = carrying.bounds, carrying.relation.name
    if answered_up_to(log) < bounds.valid_from:
        return None
    at = table_at(log, name, moment_of(log, name, bounds))
    if at.generation.number != carrying.number or at.generation.ended is not None:
        raise PreconditionMissing(
            f"the snapshot that was to be repaired, generation {carrying.number} of table {name}, does not stand any "
            "more"
        )
    names = [column.name for column in carrying.relation.columns]
    if missing := [name for name in names if name not in at.shape.columns]:
        raise SnapshotInterrupted(
            f"table {at.shape.table}: the log has no column {', '.join(missing)} at this snapshot"
        )
    stored = _Stored(int(bounds.snapshot_lsn), carrying.first_seq, bounds.taken_at_us, names, target.conform)
    reach("carrying_snapshot")
    files = _write(
        get_session, at, lambda rows: rows.filter(~_meets(carrying.only)), stored, target.directory
    )
    reach("snapshot_carried")
    return files


def write_state(
    get_session: GetSession, at: TableAt, conform: Conform, directory: str
) -> tuple[WrittenFile, ...]:
    """All rows of a table at ``at.lsn``, which is their ``_commit_lsn``, in new files below ``directory`` of the log's
    table. ``conform``: of the shape's columns, and the contract's behind them."""
    stored = _Stored(int(at.lsn), 0, None, list(at.shape.columns), conform)
    return _write(get_session, at, lambda rows: rows, stored, directory)


@dataclass(frozen=True)
class _Stored:
    """How rows of a table are stored: ``snapshot_lsn`` is their ``_commit_lsn``, ``names`` are the source's columns
    that ``conform`` takes, ahead of the contract's."""

    snapshot_lsn: int
    first_seq: int
    at_us: int | None
    names: list[str]
    conform: Conform


def _write(
    get_session: GetSession,
    at: TableAt,
    chosen: Callable[[DataFrame], DataFrame],
    stored: _Stored,
    directory: str,
) -> tuple[WrittenFile, ...]:
    """The table's rows that are ``chosen``."""
    session = get_session().newSession()
    for key, value in _CONF.items():
        session.conf.set(key, value)
    n_bytes = sum(file.n_bytes for file in at.log_table.files())
    n_partitions = min(_MOST_PARTITIONS, n_bytes // _JOB_BYTES)
    parallelism = int(session.sparkContext.defaultParallelism)
    session.conf.set("spark.sql.shuffle.partitions", str(max(parallelism, n_partitions)))
    context: Any = session.sparkContext
    pool = context.getLocalProperty("spark.scheduler.pool")
    context.setLocalProperty("spark.scheduler.pool", POOL)
    schema = stored.conform.schema
    try:
        rows = _in_columns(at, chosen(at.state(session)), stored)
        write = WriteRows(
            WriteOutput(at.log_table.location, directory, watermark=0),
            Conform(schema, tuple(range(len(schema)))),
        )
        reports = rows.mapInArrow(write, REPORT_SCHEMA).collect()
    finally:
        context.setLocalProperty("spark.scheduler.pool", pool)
    return tuple(WrittenFile(*report) for report in reports)


def _in_columns(at: TableAt, rows: DataFrame, stored: _Stored) -> DataFrame:
    """The table's rows, in the source's columns and ``_text``, in the columns of the Delta table, in their order. The
    contract's have their names, and the others names of ours: ``mapInArrow`` takes a dot in a name for a path."""
    from pyspark.sql import functions as f

    contract: dict[str, Column] = {
        "_change_type": f.lit(SNAPSHOT),
        "_commit_lsn": f.lit(stored.snapshot_lsn),
        "_commit_timestamp": f.timestamp_micros(f.lit(stored.at_us).cast("long")),
        "_seq": f.lit(stored.first_seq).cast("long") + f.monotonically_increasing_id(),
        "_text": f.col("_text"),
    }
    taken: list[tuple[Column, DataType | None]] = [
        (f.col(quoted(name)), at.shape.columns[name].type) for name in stored.names
    ]
    taken += [(contract.get(field.name, f.lit(None)), None) for field in CONTRACT_FIELDS]
    columns = []
    fields = spark_schema(stored.conform.schema).fields
    for i, (field, source) in enumerate(zip(fields, stored.conform.sources, strict=True)):
        value, held = taken[source] if source >= 0 else (f.lit(None), None)
        value = value.cast(field.dataType) if held is None else as_type(value, held, field.dataType)
        columns.append(value.alias(field.name if field.name in _CONTRACT else f"c{i}"))
    return rows.select(*columns)


# -- the range -----------------------------------------------------------------------------------------


def _meets(only: Sequence[BoundComparison]) -> Column:
    """Whether a row of a state meets all; false where that is not known."""
    from pyspark.sql import functions as f

    return f.coalesce(reduce(lambda a, b: a & b, map(_compared, only)), f.lit(False))


def _compared(each: BoundComparison) -> Column:
    """The comparison as PostgreSQL makes it. A value that Spark has no room for is null here, and has a text."""
    from pyspark.sql import functions as f

    value = f.col(quoted(each.column.name))
    literals = [_literal(each, text) for text in each.values]
    if each.operator == EQUAL:
        return f.coalesce(
            reduce(lambda a, b: a | b, [value == literal for literal in literals]), f.lit(False)
        )
    text = f.col("_text")[f.lit(each.column.name)]
    is_lowest = text.startswith("-") | text.endswith(" BC")
    outside = is_lowest if each.operator in ("<", "<=") else ~is_lowest
    compared = {
        "<": value < literals[0],
        "<=": value <= literals[0],
        ">": value > literals[0],
        ">=": value >= literals[0],
    }[each.operator]
    return f.when(value.isNull(), outside).otherwise(compared)


def _literal(each: BoundComparison, text: str) -> Column:
    from pyspark.sql import functions as f

    type_ = spark_schema(pa.schema([pa.field("value", each.column.type.arrow)])).fields[0].dataType
    return f.lit(text).cast(type_)
