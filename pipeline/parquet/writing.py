"""Writing one file, front to back, to anything that takes bytes: an object store needs no more.

Row groups are as large as memory allows, because each costs every reader something. What is in memory already is one
row group, unless a page could become too large: Parquet's pages have 2 GiB at most. What is read from elsewhere is
written in row groups of less.

Snappy is the cheapest that halves the bytes (zstd costs half as much again, dictionaries for all columns twice as
much). Statistics stay on for all but the two late columns, because filters skip whole files by them. Every leaf is
named to the compression, because pyarrow leaves an unnamed one uncompressed without a word.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from xidstream.pipeline.errors import Unsupported, UsageError
from xidstream.pipeline.parquet.row_file import (
    DICTIONARY_COLUMNS,
    LATE_COLUMNS,
    PLACEHOLDERS,
    VALUE_BYTES,
    PageOffsets,
    RowFile,
    encoded_crc,
    file_schema,
)
from xidstream.pipeline.schema import RelationVersion

ROW_GROUP_BYTES: Final = 512 << 20
"""The Arrow memory of a row group. It is below Parquet's 2 GiB even if one column holds nearly all of it."""

_PAGE_BYTES: Final = 1 << 20
_MOST_ROWS_BETWEEN_LOOKS: Final = 1024

SPARK_METADATA: Final = {"org.apache.spark.version": "3.5.7"}
"""Spark rebases old dates of files without this key, or refuses them. The dates here are proleptic Gregorian, as
Spark 3 writes them."""
_DICTIONARY_HEADER: Final = bytes.fromhex("15041510151015")
"""How the header of a dictionary page of 8 bytes, uncompressed, begins: type, both sizes, then the checksum."""
_MOST_HEADER_BYTES: Final = 64

Write = Callable[[Any], object]
"""Appends anything with the buffer protocol."""


def write_rows(
    write: Write,
    relation: RelationVersion,
    batches: Iterable[pa.RecordBatch],
    *,
    row_group_bytes: int = ROW_GROUP_BYTES,
) -> RowFile:
    """Write ``batches``, all in ``file_schema(relation)`` and in the order of ``_seq``, as one file.

    Raises UsageError for a batch of another schema, and what ``write`` raises.
    """
    schema = file_schema(relation)
    sink = _Sink(write)
    written: list[pq.FileMetaData] = []
    try:
        tables = _row_groups(schema, batches, row_group_bytes)
        first = next(tables, None)
        options = {**_options(relation), "write_batch_size": _rows_between_looks(first)}
        with (
            pa.PythonFile(sink, mode="w") as file,
            pq.ParquetWriter(file, schema, metadata_collector=written, **options) as writer,
        ):
            for table in itertools.chain([] if first is None else [first], tables):
                writer.write_table(table, row_group_size=table.num_rows)
            writer.add_key_value_metadata(SPARK_METADATA)
    except Exception:
        if sink.failure is not None:
            # pyarrow closes a writer that has failed, and what that raises would hide the reason.
            raise sink.failure from None
        raise
    return RowFile(
        n_rows=written[0].num_rows,
        n_bytes=sink.n_bytes,
        checksum=f"crc32:{sink.crc:08x}",
        head_crc=sink.crc if sink.head_crc is None else sink.head_crc,
        page_offsets=_offsets_of(written[0], sink.offsets),
    )


def _row_groups(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], row_group_bytes: int
) -> Iterator[pa.Table]:
    pending: list[pa.RecordBatch] = []
    pending_bytes = 0
    for batch in batches:
        if not batch.schema.equals(schema):
            raise UsageError("a batch of rows is not in the layout of the file that is written")
        if not batch.num_rows:
            continue
        n_bytes = batch.nbytes
        if pending and pending_bytes + n_bytes > row_group_bytes:
            yield pa.Table.from_batches(pending, schema)
            pending, pending_bytes = [], 0
        pending.append(batch)
        pending_bytes += n_bytes
        if pending_bytes > row_group_bytes:
            yield from halved(pa.Table.from_batches(pending, schema), row_group_bytes)
            pending, pending_bytes = [], 0
    if pending:
        yield pa.Table.from_batches(pending, schema)


def _rows_between_looks(table: pa.Table | None) -> int:
    """After how many rows the writer asks whether a page is full: after fewer if they are wide, because it holds a page
    and its compressed copy. (64 rows of a megabyte took 207 MB with 1,024.)"""
    if table is None:
        return _MOST_ROWS_BETWEEN_LOOKS
    width = max(1, table.nbytes // table.num_rows)
    return int(max(1, min(_MOST_ROWS_BETWEEN_LOOKS, _PAGE_BYTES // width)))


def halved(table: pa.Table, most_bytes: int) -> Iterator[pa.Table]:
    """``table`` in chunks of at most so many bytes, or of one row: two values of a gigabyte are too much for a page."""
    if table.num_rows == 1 or table.nbytes <= most_bytes:
        yield table
        return
    middle = table.num_rows // 2
    yield from halved(table.slice(0, middle), most_bytes)
    yield from halved(table.slice(middle), most_bytes)


@functools.lru_cache(maxsize=64)
def _options(relation: RelationVersion) -> dict[str, Any]:
    leaves = [leaf for field in file_schema(relation) for leaf in _leaves(field.name, field.type)]
    return {
        "compression": {leaf: "none" if leaf in LATE_COLUMNS else "snappy" for leaf in leaves},
        "use_dictionary": list(DICTIONARY_COLUMNS),
        "write_statistics": [
            leaf for leaf in statistics_leaves(file_schema(relation)) if leaf not in LATE_COLUMNS
        ],
        "write_page_checksum": True,
        "store_schema": False,
    }


def statistics_leaves(schema: pa.Schema) -> list[str]:
    """The columns of Parquet whose statistics every reader may trust: all but floats.

    Arrow leaves NaN out of minimum and maximum, as Parquet asks. Spark takes NaN for the greatest number, as PostgreSQL
    does, and would skip a row group whose maximum is less than what a filter asks for, with its NaN.
    """
    return [
        leaf for field in schema if not _holds_floats(field.type) for leaf in _leaves(field.name, field.type)
    ]


def _holds_floats(arrow: pa.DataType) -> bool:
    return _holds_floats(arrow.value_type) if pa.types.is_list(arrow) else bool(pa.types.is_floating(arrow))


def _leaves(path: str, arrow: pa.DataType) -> Iterator[str]:
    """The columns that Parquet makes of one of Arrow."""
    if pa.types.is_map(arrow):
        yield from (f"{path}.key_value.key", f"{path}.key_value.value")
    elif pa.types.is_list(arrow):
        yield from _leaves(f"{path}.list.element", arrow.value_type)
    else:
        yield path


class _Sink:
    """The file object that Parquet's writer writes to. It sums what passes, and notes where the placeholders stand.

    The writer gives a page's header and its content one after the other, so a placeholder's header is the write
    before it. Any value may look like a placeholder: ``_offsets_of`` picks those that are.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._headers = tuple(_DICTIONARY_HEADER + encoded_crc(value) for value in PLACEHOLDERS)
        self._last = b""
        self._crc_before_last = 0
        self.n_bytes = 0
        self.crc = 0
        self.head_crc: int | None = None
        """The checksum of all before the first placeholder's checksum."""
        self.offsets: dict[int, PageOffsets] = {}
        """By the offset after the placeholder."""
        self.failure: Exception | None = None
        """The first of what is written to."""
        self.closed = False

    def write(self, data: Any) -> int:
        try:
            return self._pass_on(data)
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _pass_on(self, data: Any) -> int:
        n = memoryview(data).nbytes
        if n == VALUE_BYTES:
            self._note(bytes(data))
        self._write(data)
        self._last = bytes(data) if n <= _MOST_HEADER_BYTES else b""
        self._crc_before_last = self.crc
        self.crc = zlib.crc32(data, self.crc)
        self.n_bytes += n
        return n

    def _note(self, value: bytes) -> None:
        if value not in PLACEHOLDERS or not self._last.startswith(self._headers[PLACEHOLDERS.index(value)]):
            return
        if self.head_crc is None:
            self.head_crc = zlib.crc32(_DICTIONARY_HEADER, self._crc_before_last)
        crc = self.n_bytes - len(self._last) + len(_DICTIONARY_HEADER)
        self.offsets[self.n_bytes + VALUE_BYTES] = PageOffsets(crc, self.n_bytes)

    def tell(self) -> int:
        return self.n_bytes

    def flush(self) -> None:
        """Does nothing, because nothing is held here."""

    def close(self) -> None:
        self.closed = True


def _offsets_of(
    written: pq.FileMetaData, noted: dict[int, PageOffsets]
) -> tuple[tuple[PageOffsets, PageOffsets], ...]:
    """Where Parquet's own footer says that the late columns' dictionaries end. Raises Unsupported if no placeholder
    stands there, which a new pyarrow may bring about."""
    offsets = []
    for i in range(written.num_row_groups):
        group = written.row_group(i)
        late = [group.column(j) for j in range(group.num_columns)[-len(LATE_COLUMNS) :]]
        found = [noted[c.data_page_offset] for c in late if c.data_page_offset in noted]
        if [c.path_in_schema for c in late] != list(LATE_COLUMNS) or len(found) != len(LATE_COLUMNS):
            raise Unsupported(f"pyarrow {pa.__version__} writes Parquet in a form that cannot be filled in")
        offsets.append((found[0], found[1]))
    return tuple(offsets)
