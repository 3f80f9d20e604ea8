"""The rows of one Parquet file of a table, in Arrow, in the columns that the table has.

The file is opened here and read by ``ParquetFile``, which holds it until the last thread of Arrow is done with it.
Rejected: deltalake's ``to_pyarrow_dataset``, and any scan of a dataset over a file of Python. There a thread of Arrow
may hold the last reference to the file, and asks for the GIL to let go of it. Where the program ends just then, the
process aborts (``terminate called without an active exception``): one in four that read a small table and ended.

Called by ``pipeline.delta`` and ``pipeline.changelog``. ``in_schema`` also by whoever else brings rows into a table's
columns, ``groups_with`` by ``spark.parquet_frames``. Plain pyarrow.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from xidstream.pipeline.log_tables.locations import Location

_FORMAT: Final = ds.ParquetFileFormat()


def rows_of_file(
    location: Location,
    path: str,
    schema: pa.Schema,
    wanted: pc.Expression | None = None,
    n_bytes: int | None = None,
) -> pa.Table:
    """The rows that ``wanted`` lets through, in ``schema``, which has its columns. ``path`` is below ``location``.

    ``n_bytes``: as ``Location.open``. Null in a column that the file lacks. Row groups that have no such row by their
    own statistics are not read. Raises OSError, pa.ArrowException.
    """
    with location.open(path, n_bytes) as source:
        parquet = pq.ParquetFile(source, pre_buffer=not location.is_local, page_checksum_verification=True)
        groups = list(range(parquet.num_row_groups))
        if wanted is not None:
            groups = groups_with(wanted, parquet.metadata, schema)
        there = [name for name in schema.names if name in parquet.schema_arrow.names]
        rows = in_schema(parquet.read_row_groups(groups, there), schema)
    return rows if wanted is None else rows.filter(wanted)


def in_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """``rows`` in the columns and types of ``schema``; null what they have not."""
    there = set(rows.column_names)
    columns = [
        rows[field.name].cast(field.type)
        if field.name in there
        else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def groups_with(wanted: pc.Expression, footer: pq.FileMetaData, schema: pa.Schema) -> list[int]:
    """The row groups that may have such rows. Arrow asks the statistics of a file, so it is given the footer as one."""
    file = pa.BufferOutputStream()
    footer.write_metadata_file(file)
    fragment = _FORMAT.make_fragment(pa.BufferReader(file.getvalue()))
    return [group.id for group in fragment.subset(wanted, schema=schema).row_groups]
