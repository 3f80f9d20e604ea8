"""Reading a file by pyarrow: checked as a whole before the first row, then streamed.

What the slots hold does not matter (``checking``), because no row gets its constants from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.parquet.checking import verify
from xidstream.pipeline.parquet.row_file import (
    CHANGE_TYPE,
    LATE_COLUMNS,
    CommitStamp,
    RowFile,
    change_type_codes,
    change_types_of,
    file_schema,
)
from xidstream.pipeline.parquet.writing import Write, write_rows
from xidstream.pipeline.schema import RelationVersion, rows

BATCH_ROWS: Final = 64 << 10
_BATCH_BYTES: Final = 32 << 20
_REWRITTEN_GROUP_BYTES: Final = 96 << 20
"""The bytes of Arrow memory that rewriting holds. A segment of the default ``buffer_memory_bytes`` is one row group
again: with more of them a copy inside an object store needs all after the first, and not a few kilobytes."""


def read_rows(
    data: pa.Buffer, relation: RelationVersion, file: RowFile, commit: CommitStamp, *, name: str
) -> Iterator[pa.RecordBatch]:
    """All rows in contract layout, with the constants of ``commit``, in record batches of bounded size.

    Raises SegmentCorrupt: before the first batch if the file is not what was written, after the last if rows are
    missing.
    """
    schema = rows.contract_schema(relation)
    lsn, timestamp = (schema.get_field_index(column) for column in LATE_COLUMNS)
    early = [field for field in schema if field.name not in LATE_COLUMNS]
    for batch in _read(data, relation, file, name):
        columns = _typed(batch.columns, early)
        n = batch.num_rows
        columns.insert(lsn, rows.constant(commit.commit_lsn, n, pa.int64()))
        us = rows.constant(commit.commit_timestamp_us, n, pa.int64())
        columns.insert(timestamp, us.view(schema.field(timestamp).type))
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def rewrite_head(
    data: pa.Buffer, relation: RelationVersion, file: RowFile, end_seq: int, write: Write, *, name: str
) -> RowFile:
    """Write the rows whose ``_seq`` is below ``end_seq`` as a file of their own. Raises SegmentCorrupt."""
    return write_rows(
        write,
        relation,
        _head(_read(data, relation, file, name), file_schema(relation), end_seq),
        row_group_bytes=_REWRITTEN_GROUP_BYTES,
    )


def _head(batches: Iterator[pa.RecordBatch], schema: pa.Schema, end_seq: int) -> Iterator[pa.RecordBatch]:
    seq, change_type = schema.get_field_index("_seq"), schema.get_field_index("_change_type")
    for batch in batches:
        n_kept = int(np.searchsorted(batch.column(seq).to_numpy(), end_seq))
        kept = batch.slice(0, n_kept)
        columns = kept.columns
        columns[change_type] = change_types_of(change_type_codes(columns[change_type]))
        yield pa.RecordBatch.from_arrays(_typed(columns, schema), schema=schema)
        if n_kept < batch.num_rows:
            return


def _read(data: pa.Buffer, relation: RelationVersion, file: RowFile, name: str) -> Iterator[pa.RecordBatch]:
    """The file's columns as Parquet has them, verified."""
    verify(data, file, name=name)
    types = [CHANGE_TYPE.value_type if t == CHANGE_TYPE else t for t in file_schema(relation).types]
    n_read = 0
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data))
        for group in range(parquet.num_row_groups):
            size = _batch_rows(parquet.metadata.row_group(group))
            for batch in parquet.iter_batches(size, row_groups=[group], use_threads=False):
                if batch.schema.types != types:
                    raise ValueError("other columns")
                n_read += batch.num_rows
                yield batch
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SegmentCorrupt(f"segment {name!r} is not a Parquet file of {relation.name}") from error
    if n_read != file.n_rows:
        raise SegmentCorrupt(f"segment {name!r} has {n_read} rows, {file.n_rows} were written")


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    """So many that a batch is of moderate size, if all rows are about as wide."""
    width = max(1, group.total_byte_size // max(1, group.num_rows))
    return int(max(1, min(BATCH_ROWS, _BATCH_BYTES // width)))


def _typed(columns: list[pa.Array], fields: Iterable[pa.Field]) -> list[pa.Array]:
    """The columns in the types of the fields, as many as there are fields. Parquet knows other names than Arrow for
    what is inside of lists and maps."""
    return [
        column.cast(field.type) if pa.types.is_nested(field.type) else column
        for column, field in zip(columns, fields, strict=False)
    ]
