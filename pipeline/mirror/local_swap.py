"""The new files of a swap, written by this process: for refreshes that replace a bounded part of a table.

A touched file is read in chunks, its rows whose key has a net row are left out, and behind the others stand the net
rows of its slots. So memory depends on the size of a chunk, and not on that of a file or of the table. A few threads
each write a group of files (``pipeline.mirror.plan``). A group that is cut into several files is sorted by key in
memory, so it must be small (``fits``).

Texts that repeat pass as indexes into a dictionary (``file_chunks``), so that nobody copies a text. The chunks of a row
group then need one dictionary, which must not outgrow Parquet's page for it: what would make it too large begins a row
group of its own.

Spark does the same for larger refreshes (``pipeline.mirror.rewrite``), on all its executors. It takes a second or
more to begin, and its Parquet writer is slower, so most refreshes are done here.

Rejected: rows that are put in place instead of after, which costs a second pass and gives readers nothing, since
ranges are those of files.

Plain pyarrow, no Spark. Called by ``pipeline.mirror.swap``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.file_chunks import (
    DICTIONARY_BYTES,
    THREADS,
    footer_of,
    read_chunks,
    repeating_texts,
    with_dictionaries,
)
from xidstream.pipeline.mirror.net_rows import NetRows
from xidstream.pipeline.mirror.plan import BaseFile, FileGroup
from xidstream.pipeline.parquet import SPARK_METADATA, halved, statistics_leaves

NET_ROWS: Final = 2_000_000
NET_BYTES: Final = 256 << 20
"""The bytes of net rows, uncompressed, that are held in memory."""
REPLACED_BYTES: Final = 2 << 30
"""The bytes of files that are replaced: more is for all executors of a cluster."""
CUT_BYTES: Final = 128 << 20
"""The bytes of all groups that are sorted, in Parquet: several threads may have one each."""
_ROW_GROUP_BYTES: Final = 32 << 20
_ROW_GROUP_ROWS: Final = 256 << 10
_PAGE_BYTES: Final = 1 << 30
_LOOK_BYTES: Final = 1 << 20
_LEAST_ROWS_BETWEEN_LOOKS: Final = 1_024


def fits(groups: Iterable[FileGroup]) -> bool:
    """Whether these groups are for this process."""
    groups = list(groups)
    cut_bytes = sum(group.bytes for group in groups if group.files and group.n_files > 1)
    return sum(group.bytes for group in groups) <= REPLACED_BYTES and cut_bytes <= CUT_BYTES


@dataclass(frozen=True)
class LocalSwap:
    """``files``: the table's, in key order. ``schema``: the table's columns. ``key``: its columns, ranged ones first.
    ``check`` raises where the refresh is to be given up."""

    table: Location
    schema: pa.Schema
    files: Sequence[BaseFile]
    net: NetRows
    key: Sequence[str]
    check: Callable[[], None]

    def write(self, groups: Sequence[FileGroup], directory: str) -> list[str]:
        """The new files, on disk, as paths relative to the table. Raises OSError and what pyarrow raises."""
        starts = self.net.slots(self.files)
        n_threads = max(1, min(THREADS, len(groups)))
        is_over = threading.Event()

        def write_one(numbered: tuple[int, FileGroup]) -> list[str]:
            if is_over.is_set():
                return []
            try:
                return self._write_group(f"{directory}/{numbered[0]:05d}", numbered[1], starts)
            except BaseException:
                is_over.set()  # The other groups are of no use any more.
                raise

        with ThreadPoolExecutor(n_threads, thread_name_prefix="xidstream-mirror-write") as threads:
            found = list(threads.map(write_one, enumerate(groups)))
        paths = [path for some in found for path in some]
        self.table.sync_folders(paths)
        return paths

    def _write_group(self, stem: str, group: FileGroup, starts: Sequence[int]) -> list[str]:
        footers = [self._footer(i) for i in group.files]
        repeating = self._repeating(footers[0] if footers else self._footer(0))
        schema = with_dictionaries(self.schema, repeating_texts(footers, self.schema, self.key))
        arriving = _within_pages(self.net.arriving(starts, group.slots, schema))
        if group.n_files == 1:
            return self._write_file(f"{stem}.parquet", self._rows(group, arriving), repeating, arriving)
        rows = arriving
        if group.files:
            rows = pa.concat_tables(self._rows(group, arriving)).unify_dictionaries().combine_chunks()
            rows = rows.sort_by([(name, "ascending") for name in self.key])
        n_rows = -(-rows.num_rows // group.n_files)
        paths = []
        for i in range(group.n_files):
            part = _within_pages(rows.slice(i * n_rows, n_rows))
            paths += self._write_file(f"{stem}-{i:05d}.parquet", [part], repeating, part)
        return paths

    def _write_file(
        self, path: str, tables: Iterable[pa.Table], repeating: Sequence[str], like: pa.Table
    ) -> list[str]:
        return write_file(self.table, path, tables, repeating, like.schema, self.check)

    def _footer(self, file: int) -> pq.FileMetaData:
        return footer_of(self.table, self.files[file].path)

    def _repeating(self, footer: pq.FileMetaData) -> list[str]:
        """The columns that are written with a dictionary: those that have one in a file before, and new ones. It pays
        where values repeat, and costs much where they do not. Spark found out when it wrote the table."""
        chunks = [
            footer.row_group(0).column(i) for i in range(footer.num_columns if footer.num_row_groups else 0)
        ]
        there = {chunk.path_in_schema.partition(".")[0] for chunk in chunks}
        new = [name for name in self.schema.names if name.partition(".")[0] not in there]
        return [*new, *(chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page)]

    def _rows(self, group: FileGroup, arriving: pa.Table) -> Iterator[pa.Table]:
        texts = _indexed(arriving.schema)
        for i in group.files:
            keys = self.net.keys_near(self.files[i])
            for rows in read_chunks(self.table, self.files[i].path, dictionaries=texts):
                yield keys.without(in_schema(rows, arriving.schema))
        yield arriving


def write_file(
    table: Location,
    path: str,
    tables: Iterable[pa.Table],
    repeating: Sequence[str] | bool,
    schema: pa.Schema,
    check: Callable[[], None],
) -> list[str]:
    """A file of the table, on disk; none where there is no row. ``schema``: of ``tables``. ``repeating``: the columns
    that are written with a dictionary; True: all that it pays for, which the writer finds out. Returns its path."""
    groups = _row_groups(tables, schema, check)
    first = next(groups, None)
    if first is None:
        return []
    options: dict[str, Any] = {
        "compression": "snappy",
        "use_dictionary": repeating,
        "write_statistics": statistics_leaves(schema),
        "store_schema": False,
        "write_batch_size": _rows_between_looks(first),
    }
    with table.create(path) as sink, pq.ParquetWriter(sink, schema, **options) as writer:
        for rows in chain([first], groups):
            writer.write_table(rows, row_group_size=rows.num_rows)
        writer.add_key_value_metadata(SPARK_METADATA)
    table.sync([path])
    return [path]


def _row_groups(
    tables: Iterable[pa.Table], schema: pa.Schema, check: Callable[[], None]
) -> Iterator[pa.Table]:
    texts = _indexed(schema)
    pending: list[pa.Table] = []
    n_rows = n_bytes = 0
    held = _Dictionaries(texts)
    for rows in tables:
        check()
        if not rows.num_rows:
            continue
        if not held.take(rows):
            yield from _row_group(pending)
            pending, n_rows, n_bytes = [], 0, 0
            held = _Dictionaries(texts)
            held.take(rows)
        pending.append(rows)
        n_rows, n_bytes = n_rows + rows.num_rows, n_bytes + rows.drop_columns(texts).nbytes
        if n_rows >= _ROW_GROUP_ROWS or n_bytes >= _ROW_GROUP_BYTES:
            yield from _row_group(pending)
            pending, n_rows, n_bytes = [], 0, 0
            held = _Dictionaries(texts)
    if pending:
        yield from _row_group(pending)


def _row_group(chunks: Sequence[pa.Table]) -> Iterator[pa.Table]:
    # A second dictionary in a row group would make its writer give up the first.
    return halved(_with_used_values(pa.concat_tables(chunks).unify_dictionaries()), _PAGE_BYTES)


def _indexed(schema: pa.Schema) -> list[str]:
    """The columns that are indexes into a dictionary."""
    return [field.name for field in schema if pt.is_dictionary(field.type)]


def _within_pages(rows: pa.Table) -> pa.Table:
    """``rows`` with dictionaries of the values that they use; with the texts themselves where these outgrow a page."""
    rows = _with_used_values(rows)
    large = [
        name
        for name in _indexed(rows.schema)
        if rows.num_rows and rows[name].chunk(0).dictionary.nbytes > DICTIONARY_BYTES
    ]
    fields = [field.with_type(pa.string()) if field.name in large else field for field in rows.schema]
    return rows.cast(pa.schema(fields)) if large else rows


def _with_used_values(rows: pa.Table) -> pa.Table:
    """``rows``, whose chunks have one dictionary for each column, without the entries that no row uses."""
    for name in _indexed(rows.schema) if rows.num_rows else []:
        chunks = rows[name].chunks
        values = chunks[0].dictionary
        is_used = np.zeros(len(values), bool)
        for chunk in chunks:
            is_used[chunk.indices.drop_null().to_numpy()] = True
        used = np.flatnonzero(is_used)
        if len(used) == len(values):
            continue
        new_indexes = np.zeros(len(values), np.int32)
        new_indexes[used] = np.arange(len(used), dtype=np.int32)
        kept, new = values.take(pa.array(used)), pa.array(new_indexes)
        indexes = [
            pa.DictionaryArray.from_arrays(pc.take(new, chunk.indices), kept, safe=False) for chunk in chunks
        ]
        rows = rows.set_column(
            rows.schema.get_field_index(name), rows.schema.field(name), pa.chunked_array(indexes)
        )
    return rows


def _rows_between_looks(rows: pa.Table) -> int:
    """After how many rows the writer looks whether a page is full. Each time it also sums up a dictionary's part for
    the statistics, which takes longer than to write it: so not more often than pages need it."""
    width = max(1, rows.drop_columns(_indexed(rows.schema)).nbytes // rows.num_rows)
    return int(max(_LEAST_ROWS_BETWEEN_LOOKS, min(_ROW_GROUP_ROWS, _LOOK_BYTES // width)))


class _Dictionaries:
    """The dictionaries of the chunks of one row group, by column."""

    def __init__(self, names: Sequence[str]) -> None:
        self._last: dict[str, pa.Array | None] = dict.fromkeys(names)
        self._n_bytes = dict.fromkeys(names, 0)

    def take(self, rows: pa.Table) -> bool:
        """Whether the chunk's dictionaries fit with those before. The first chunk's always do."""
        found = {name: rows[name].chunk(0).dictionary for name in self._last}
        for name, values in found.items():
            last = self._last[name]
            if last is not None and last.equals(values):
                continue
            self._n_bytes[name] += values.nbytes
            if last is not None and self._n_bytes[name] > DICTIONARY_BYTES:
                return False
        self._last |= found
        return True
