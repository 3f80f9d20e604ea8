"""Parquet files read in chunks of bounded size, by this process: those of the log, and those of a base table.

Texts that repeat are stored as indexes into a dictionary, and are best left so: they are read, filtered and written as
indexes, and no text is copied or compared but the dictionary's. What is a text that repeats, the base table's files
tell (``repeating_texts``): whoever wrote them tried it out. Columns of the key are not taken so, because they are
compared.

Rejected: pyarrow's dataset scanner, which reads ahead without a bound of ours.

From a store the wanted columns of one row group come at a time, in a few large requests: so the bytes of a row group
are in memory, too. A small file comes whole, and once (``SmallFilesWhole``): a log in a store has one for each batch,
and to open one for its footer and again for its rows was five requests, where this is two.

Plain pyarrow, no Spark. Called by ``local_swap``, ``tail_rows``, ``small_fold`` and ``refresh`` of this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from xidstream.pipeline.log_tables.locations import Location

THREADS: Final = max(1, min(4, os.cpu_count() or 1))
"""The threads of this process that read or write at a time: no more than there are processors, and 4 at most."""
DICTIONARY_BYTES: Final = 1 << 20
"""The bytes of a column's values in one row group: Parquet's writers give a dictionary up where it grows beyond."""
_INDEX_BYTES: Final = 3
"""The bytes of a place in such a dictionary, in Parquet, at most."""
_SMALL_BYTES: Final = 1 << 20
"""A file up to this size is read whole: its other columns take less time than another request."""
_HELD_BYTES: Final = 64 << 20
"""The most bytes of such files that are held at a time."""
_PROBE_ROWS: Final = 64
_CHUNK_BYTES: Final = 32 << 20
_CHUNK_ROWS: Final = 32 << 10


class Files(Protocol):
    """A ``Location``, or one whose small files are held."""

    @property
    def is_local(self) -> bool: ...

    def open(self, path: str) -> AbstractContextManager[Any]:
        """A file to read from. Raises OSError."""
        ...


class SmallFilesWhole:
    """The files of a table. In a store the first that are small, up to a bound in all, are read as a whole where
    they are opened first, and held as long as this is. ``sizes``: bytes by path. For any number of threads, each of
    which has files of its own until all were opened once."""

    def __init__(self, location: Location, sizes: Mapping[str, int]) -> None:
        self._location = location
        self._sizes = sizes
        self._wanted: set[str] = set()
        self._held: dict[str, pa.Buffer] = {}
        n_bytes = 0
        for path, size in sizes.items():
            if not location.is_local and size <= _SMALL_BYTES and n_bytes + size <= _HELD_BYTES:
                self._wanted.add(path)
                n_bytes += size

    @property
    def is_local(self) -> bool:
        return self._location.is_local

    def open(self, path: str) -> AbstractContextManager[Any]:
        """A file to read from. Raises OSError."""
        if path in self._wanted and path not in self._held:
            with self._location.open(path, self._sizes[path]) as source:
                self._held[path] = pa.py_buffer(source.read())
        if path in self._held:
            held: AbstractContextManager[Any] = pa.BufferReader(self._held[path])
            return held
        opened: AbstractContextManager[Any] = self._location.open(path, self._sizes.get(path))
        return opened


def footer_of(location: Files, path: str) -> pq.FileMetaData:
    """The footer of a file below ``location``. Raises OSError and what pyarrow raises."""
    with location.open(path) as source:
        return pq.read_metadata(source)


def read_chunks(
    location: Files,
    path: str,
    names: Sequence[str] | None = None,
    dictionaries: Sequence[str] = (),
    row_group: int | None = None,
) -> Iterator[pa.Table]:
    """The rows of a file below ``location``, or of one of its row groups, so many at a time that a chunk has about
    ``_CHUNK_BYTES``; all columns, or those of ``names`` that it has. The columns ``dictionaries`` that it has come as
    indexes into one.

    The footer does not say what values take that repeat in a dictionary, and are to be read without it. So the first
    rows are read for that, too.
    """
    is_stored = not location.is_local
    with location.open(path) as source:
        footer = pq.read_metadata(source)
        there = set(footer.schema.to_arrow_schema().names)
        indexes = [name for name in dictionaries if name in there]  # pyarrow takes no others
        file = pq.ParquetFile(source, metadata=footer, read_dictionary=indexes, pre_buffer=is_stored)
        columns = None if names is None else [name for name in names if name in there]
        groups = list(range(footer.num_row_groups)) if row_group is None else [row_group]
        chosen = [footer.row_group(i) for i in groups]
        n_bytes = sum(group.total_byte_size for group in chosen)
        n_rows = _CHUNK_BYTES * sum(group.num_rows for group in chosen) // max(1, n_bytes)
        if chosen and _hides_bytes(chosen[0], columns, dictionaries):
            for first in file.iter_batches(_PROBE_ROWS, row_groups=groups[:1], columns=columns):
                n_rows = min(n_rows, _CHUNK_BYTES * first.num_rows // max(1, first.nbytes))
                break
        n_rows = max(1, min(_CHUNK_ROWS, n_rows))
        for together in [[group] for group in groups] if is_stored else [groups]:
            for batch in file.iter_batches(n_rows, row_groups=together, columns=columns):
                yield pa.Table.from_batches([batch])


def repeating_texts(footers: Sequence[pq.FileMetaData], schema: pa.Schema, key: Iterable[str]) -> list[str]:
    """The columns of texts that all these files of a base table hold as indexes into dictionaries."""
    names = [field.name for field in schema if pt.is_string(field.type) and field.name not in set(key)]
    return [name for name in names if footers and all(_is_in_dictionary(f, name) for f in footers)]


def with_dictionaries(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """``schema``, where the columns ``names`` are indexes into a dictionary."""
    indexes = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(indexes) if field.name in names else field for field in schema])


def _hides_bytes(
    group: pq.RowGroupMetaData, columns: Sequence[str] | None, dictionaries: Sequence[str]
) -> bool:
    """Whether values of any length are in a dictionary, and are to be read without it."""
    for chunk in map(group.column, range(group.num_columns)):
        name = chunk.path_in_schema.partition(".")[0]
        is_read = name not in dictionaries and (columns is None or name in columns)
        if is_read and chunk.has_dictionary_page and chunk.physical_type == "BYTE_ARRAY":
            return True
    return False


def _is_in_dictionary(footer: pq.FileMetaData, name: str) -> bool:
    """Whether all of a column's chunks hold indexes into a dictionary, or hardly more. (A footer does not tell it, but
    what the chunk takes does: a writer that gave its dictionary up went on with the texts themselves.)"""
    n_chunks = 0
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema != name:
                continue
            n_chunks += 1
            most_bytes = 2 * DICTIONARY_BYTES + _INDEX_BYTES * group.num_rows
            if not chunk.has_dictionary_page or chunk.total_uncompressed_size > most_bytes:
                return False
    return n_chunks > 0
