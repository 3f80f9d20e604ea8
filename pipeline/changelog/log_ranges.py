"""The changes of a table between two commits, in Arrow: which files have them, and their rows in the source's terms.

What ``ChangeLog.changes`` gives as a DataFrame, for readers without a Spark session: ``spark_source`` plans with this
in one process, and reads in many.

A query has its columns for good, and a table's layouts follow each other in the log. ``QueryTable`` takes the newest
layout that has the query's columns: these and no others, unless the query never had a whole layout. Rows from before
are read in it, as ``ChangeLog.changes`` does. What the next layout brings is not read: ``last_lsn`` is the last LSN
before it.

Deleted rows must not be passed over in silence. ``_transactions`` names the tables of each commit. So a commit that
names the table, and lies in no file of it, is missing (``missing_commit``). Of a table from which keys were erased that
is not known up to the erasure's LSN: there it may be these rows alone (``QueryTable.erased_lsn``).

A column's older values may be of another type. Where Arrow's cast is not known to be Spark's, the read is refused: the
same change never shows two values.

Called by ``spark_source``, for Delta tables and Iceberg tables alike. pyarrow; of pyspark the types alone, and no JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from xidstream.pipeline.changelog.log_table import MAX_LSN, LogFile, reading
from xidstream.pipeline.changelog.shapes import layout_lsns, shape_at
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.errors import Unsupported, UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.erased_marks import UPTO
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, SNAPSHOT
from xidstream.pipeline.spark.parquet_frames import ColumnLookup, field_indexes
from xidstream.pipeline.spark.spark_schemas import arrow_type, spark_schema

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

    from xidstream.pipeline.changelog.shape import TableShape
    from xidstream.pipeline.log_tables.batch_parts import TableName

RANGE_BYTES: Final = 16 << 20
"""The bytes of files in one range: some 600,000 rows of ten columns, a second of a core. A larger file is read in
several."""
_OPEN_BYTES: Final = 1 << 20
"""What opening a file counts as: small files share a range."""
_BATCH_ROWS: Final = 64 << 10
_LSN_ALONE: Final = pa.schema([("_commit_lsn", pa.int64())])
_CONTRACT: Final = frozenset(field.name for field in CONTRACT_FIELDS)


class ReadColumn(NamedTuple):
    """``held_in``: the table's columns that may have its values, newest first."""

    name: str
    type: pa.DataType
    held_in: tuple[str, ...]


@dataclass(frozen=True)
class FileRange:
    """The changes after ``since`` up to ``until`` in files of one table, and of one file's row groups every
    ``n_slices``-th, from ``slice`` on. ``paths`` are below ``uri``. It pickles, and holds no credentials."""

    table: str
    uri: str
    paths: tuple[str, ...]
    columns: tuple[ReadColumn, ...]
    since: int
    until: int
    slice: int = 0
    n_slices: int = 1
    lookups: Mapping[str, ColumnLookup] | None = None
    """How files may call each column of the table. None where all of them call it as the table does."""
    catalog_options: Mapping[str, str] | None = None
    """What a catalog tells of the store. Credentials are not among it: ``iceberg.catalogs`` refuses them."""

    def batches(self, storage_options: dict[str, str] | None) -> Iterator[pa.RecordBatch]:
        """The rows, in ``columns``. ``storage_options``: the query's. Raises Unsupported for values that only Spark can
        cast, StorageFault."""
        import pyarrow.parquet as pq

        options = storage_options if self.catalog_options is None else dict(self.catalog_options)
        location = Location(self.uri, options)
        held = ["_commit_lsn", "_change_type", *(n for c in self.columns for n in c.held_in)]
        names = list(dict.fromkeys(held))
        lookups = None if self.lookups is None else [self.lookups[name] for name in names]
        for path in self.paths:
            with reading(f"a file of table {self.table} in the change log"), location.open(path) as file:
                # What is asked for ahead in a store is what a range has: RANGE_BYTES, or a row group.
                parquet = pq.ParquetFile(file, pre_buffer=not location.is_local)
                there = parquet.schema_arrow
                indexes = field_indexes(there, names, lookups)
                called = {there.names[i]: name for i, name in zip(indexes, names, strict=True) if i >= 0}
                for rows in parquet.iter_batches(
                    _BATCH_ROWS, self._groups(parquet.metadata), columns=list(called)
                ):
                    yield from self._of_range(rows.rename_columns([called[n] for n in rows.schema.names]))

    def _groups(self, footer: pq.FileMetaData) -> list[int]:
        """The row groups of this slice that may have changes of the range."""
        from xidstream.pipeline.log_tables.file_rows import groups_with  # it loads pandas

        own = range(self.slice, footer.num_row_groups, self.n_slices)
        if self.lookups is not None:  # statistics go by the file's names
            return list(own)
        lsn = pc.field("_commit_lsn")
        within = (lsn > self.since) & (lsn <= self.until)
        return [i for i in groups_with(within, footer, _LSN_ALONE) if i in own]

    def _of_range(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        lsn, kind = rows["_commit_lsn"], rows["_change_type"]
        inside = pc.and_(pc.greater(lsn, self.since), pc.less_equal(lsn, self.until))
        inside = pc.and_(inside, pc.not_equal(kind, SNAPSHOT))
        if not pc.all(inside).as_py():  # else the rows would be copied for nothing
            rows = rows.filter(inside)
        if rows.num_rows:
            arrays = [_values(rows, column, self.table) for column in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, [column.name for column in self.columns])


class QueryTable:
    """One table at one moment, as a query reads it. ``wanted``: the query's columns, or None for all of the layout at
    ``lsn``, with the contract's behind them.

    Raises UsageError where no layout of the table has the columns, and what ``SlotLog`` raises.
    """

    def __init__(self, log: SlotLog, table: str | TableName, lsn: Lsn, wanted: StructType | None = None):
        self.name, self._table = log.log_table(table)
        self._has_catalog = log.stored.delta_location is None
        self._lsns = layout_lsns(self._table.properties, log.application_id)
        self._slot = log.application_id
        self.cut = self._table.watermark(locations.cut_id(self._slot)) or 0
        """Up to this LSN changes are gone from the log (``shortening``)."""
        self.last_lsn = MAX_LSN
        if wanted is None:
            self.columns = self._all_columns(self._shape(lsn))
        else:
            self.columns = self._fitting(wanted)

    @property
    def erased_lsn(self) -> int:
        """Up to where keys were erased from the table; 0 if none ever were."""
        return self._table.watermark(UPTO) or 0

    @property
    def own_columns(self) -> tuple[ReadColumn, ...]:
        """Without the contract's."""
        return tuple(column for column in self.columns if column.name not in _CONTRACT)

    @property
    def schema(self) -> StructType:
        """Spark's, of ``columns``."""
        return spark_schema(pa.schema([pa.field(c.name, c.type) for c in self.columns]))

    def files(self, since: int, until: int) -> list[LogFile]:
        """The files that may have changes after ``since`` up to ``until``, the oldest first."""
        found = self._table.files(since + 1, until)
        return sorted(found, key=lambda file: (file.min_lsn, file.max_lsn, file.path))

    def ranges(self, files: Sequence[LogFile], since: int, until: int) -> list[FileRange]:
        """``files`` in ranges of about ``RANGE_BYTES``."""
        location, found_lookups = self._table.location, self._table.column_lookups(files)
        names = self._table.schema.names
        lookups = None if found_lookups is None else dict(zip(names, found_lookups, strict=True))

        def made(paths: Sequence[str], number: int = 0, of: int = 1) -> FileRange:
            return FileRange(
                self.name,
                location.uri,
                tuple(paths),
                self.columns,
                since,
                until,
                number,
                of,
                lookups,
                location.storage_options if self._has_catalog else None,
            )

        found: list[FileRange] = []
        paths: list[str] = []
        n_bytes = 0
        for file in files:
            if file.n_bytes > RANGE_BYTES:
                n_slices = -(-file.n_bytes // RANGE_BYTES)
                found += [made([file.path], i, n_slices) for i in range(n_slices)]
                continue
            cost = max(file.n_bytes, _OPEN_BYTES)
            if paths and n_bytes + cost > RANGE_BYTES:
                found.append(made(paths))
                paths, n_bytes = [], 0
            paths.append(file.path)
            n_bytes += cost
        return [*found, made(paths)] if paths else found

    def _shape(self, lsn: int) -> TableShape:
        return shape_at(self.name, self._table.columns, self._table.properties, None, lsn, self._slot)

    def _all_columns(self, shape: TableShape) -> tuple[ReadColumn, ...]:
        own = [ReadColumn(n, arrow_type(c.type), c.held_in) for n, c in shape.columns.items()]
        contract = spark_schema(pa.schema(CONTRACT_FIELDS)).fields
        return (*own, *(ReadColumn(f.name, arrow_type(f.dataType), (f.name,)) for f in contract))

    def _fitting(self, wanted: StructType) -> tuple[ReadColumn, ...]:
        asked = [(field.name, arrow_type(field.dataType)) for field in wanted.fields]
        layouts = [self._all_columns(self._shape(lsn)) for lsn in self._lsns or [MAX_LSN]]
        # Who reads a whole layout is told of the next one. Who chose columns is told when one of them is not there.
        whole = [layout for layout in layouts if [(c.name, c.type) for c in layout] == asked]
        for i, layout in reversed(list(enumerate(layouts))):
            known = {column.name: column for column in layout}
            if layout in whole or (not whole and all(n in known and known[n].type == t for n, t in asked)):
                if i + 1 < len(self._lsns):
                    self.last_lsn = self._lsns[i + 1] - 1
                return tuple(known[name] for name, _ in asked)
        raise UsageError(
            f"table {self.name} has had no layout with the columns of this query: {wanted.simpleString()}",
            remedy="make the DataFrame anew; a schema of your own names columns of the table, in its types",
        )


class Commits:
    """What ``_transactions`` says of the commits after ``since`` up to ``until``: ``lsns``, in order, and ``oldest``,
    the first LSN of all that there is; None where there is none. ``cut``: up to here some are gone."""

    def __init__(self, log: SlotLog, since: int, until: int) -> None:
        table = log.transactions_table()
        rows = table.between(since, until, ["tables"])
        self.lsns: list[int] = rows["commit_lsn"].to_pylist()
        self._tables: list[list[str]] = rows["tables"].to_pylist()
        self.oldest = table.oldest_lsn
        self.cut = table.watermark(locations.cut_id(log.application_id))

    def of(self, table: str) -> list[int]:
        """The commits with rows of a table."""
        return [lsn for lsn, tables in zip(self.lsns, self._tables, strict=True) if table in (tables or ())]


def missing_commit(lsns: Sequence[int], files: Sequence[LogFile], erased_lsn: int = 0) -> int | None:
    """The first of the commits ``lsns``, which have rows of a table, that lies in none of its ``files``, after
    ``erased_lsn``."""
    spans = sorted((file.min_lsn, file.max_lsn) for file in files)
    reach = begun = 0
    for lsn in lsns:
        while begun < len(spans) and spans[begun][0] <= lsn:
            reach = max(reach, spans[begun][1])
            begun += 1
        if reach < lsn and lsn > erased_lsn:
            return lsn
    return None


def admitted(
    newest: int,
    lsns: Callable[[int, int | None], Sequence[int]],
    files: Sequence[LogFile],
    max_transactions: int | None,
    max_bytes: int | None,
) -> int:
    """The LSN up to which the next batch reads. ``lsns``: the commits after its beginning up to an LSN, in order, and
    of more than a number the first ones; it is not asked for those after the batch, but for one. ``files``: those with
    the rows up to ``newest``, the oldest first.

    At least one transaction is admitted, and the first file as a whole: to cut it would be to read it twice. So are
    files beside it, of other tables or in the order of a layout, as far as its LSNs go: however many overlap, a batch
    gets one file further.
    """
    upto = newest
    n_bytes = 0
    for i, file in enumerate(files):
        n_bytes += file.n_bytes
        if max_bytes is not None and i and n_bytes > max_bytes:
            upto = min(newest, max(file.min_lsn - 1, files[0].max_lsn))
            break
    found = lsns(upto, None if max_transactions is None else max_transactions + 1)
    if max_transactions is not None and len(found) > max_transactions:
        return found[max_transactions - 1]
    if upto == newest:
        return newest
    found = found or lsns(newest, 1)
    return found[-1] if found else newest


def _values(rows: pa.RecordBatch, column: ReadColumn, table: str) -> pa.Array:
    there = [i for name in column.held_in if (i := rows.schema.get_field_index(name)) >= 0]
    held = [_cast(rows.column(i), column, table) for i in there]
    if not held:
        return pa.nulls(rows.num_rows, column.type)
    return held[0] if len(held) == 1 else pc.coalesce(*held)


def _cast(values: pa.Array, column: ReadColumn, table: str) -> pa.Array:
    if values.null_count == len(values):
        return pa.nulls(len(values), column.type)
    try:
        found = _as_type(values, column.type)
    except pa.ArrowInvalid:
        found = None
    if found is None:
        raise Unsupported(
            f"column {column.name} of table {table} has older values of type {values.type}, which only Spark can cast "
            f"to {column.type}",
            remedy="read these commits with ChangeLog.changes, or begin after them with the option since",
        )
    return found


def _as_type(values: pa.Array, wanted: pa.DataType) -> pa.Array | None:
    """The values as ``shape.as_type`` has them in Spark; None where Arrow's cast may differ. Raises ArrowInvalid for a
    value that ``wanted`` does not hold."""
    if values.type == wanted:
        return values
    if pt.is_decimal(values.type) and wanted == pa.string():
        # PostgreSQL writes all digits, and Arrow an exponent.
        return pa.array([None if v is None else format(v, "f") for v in values.to_pylist()], wanted)
    return values.cast(wanted) if _casts_alike(values.type, wanted) else None


def _casts_alike(held: pa.DataType, wanted: pa.DataType) -> bool:
    if held == wanted:
        return True
    if pt.is_list(held) and pt.is_list(wanted):
        return _casts_alike(held.value_type, wanted.value_type)
    if wanted == pa.string():
        return bool(pt.is_integer(held) or pt.is_boolean(held) or pt.is_date(held))
    return _is_number(held) and _is_number(wanted)


def _is_number(type_: pa.DataType) -> bool:
    return bool(pt.is_integer(type_) or pt.is_floating(type_) or pt.is_decimal(type_))
