"""A table of the log without the rows of some keys up to an LSN: its files written anew, in one commit.

- ``_commit_lsn`` ranges, order and count of all other rows stay; so do watermarks, columns and properties. A file of a
  snapshot stays one by its name, and files without such a row are not touched.
- How many rows went is part of the same commit: ``erased/PLACE`` is a watermark, the number of rows that the snapshot
  at PLACE lost by erasures in all. Readers take it from what ``_snapshots`` says of its rows.
- ``erased/upto`` is one, too: the greatest LSN of an erasure. A snapshot at or below it that is not committed yet may
  have such rows, and is taken again (``snapshot_log``).
- ``erased/count`` counts these commits. A refresh of the base table that finds another number at its end than at its
  beginning has read rows that are gone, and begins anew (``pipeline.mirror.erased_base``).
- What has no file any more, a follower of the table may miss without harm, up to that LSN (``spark_source``).

A fold (``changelog.log_fold``) stands after the commits that it has the rows of. So where it lies after the LSN that
an erasure goes on with, its rows of the keys are erased all the same: nothing tells which of them came later.

**A row that changed its key.** The row under the other key is not erased, and must stay exact. An old row whose new one
is erased becomes a ``delete``. A new row whose old one is erased becomes an ``insert``. Values that the server did not
send with it (``_unchanged``) are filled in: those that the row had last under its former keys. This reads the whole
table once for each of these keys, which is dear, and rare.

The files are read and written before the commit. If somebody else has committed meanwhile, it is refused. Then only
files that are new are looked at, and the rest is committed again. What the sink, a merge or a compaction has in hand is
refused, too, and done again from the new version, so that no row comes back. That is once for each erasure and table.

What a format does otherwise stands behind ``ErasedTable``: how a file is read in the names and types that the table has
now, and how the commit is made.

Rejected: deltalake's ``delete``, whose new files have no ``_commit_lsn`` ranges of ours, which knows no watermark, and
which makes a commit for each predicate. Deletion vectors: the rows stay in the files, and the folds read files.

Plain pyarrow, in whatever process: no Spark, and no run of the slot is needed. Called by ``pipeline.erasure``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.errors import SinkFailed, StorageFault
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.columns import Conform, TableColumn
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, RowsOfKeys, rows_of_keys
from xidstream.pipeline.log_tables.erased_marks import ERASURES, UPTO, erased_id
from xidstream.pipeline.log_tables.locations import Location, fold_id
from xidstream.pipeline.log_tables.log_table import NOTHING, SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.small_files import OWN, SNAPSHOT_FILES
from xidstream.pipeline.schema.rows import (
    CHANGE_TYPES,
    DELETE,
    INSERT,
    SNAPSHOT,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
)

ATTEMPTS: Final = 50
"""To commit between two commits of the sink, which come a hundred times a second where it catches up."""
_THREADS: Final = 4
_INSERT, _PREIMAGE, _POSTIMAGE, _DELETE = (
    CHANGE_TYPES[i] for i in (INSERT, UPDATE_PREIMAGE, UPDATE_POSTIMAGE, DELETE)
)

RowPosition = tuple[int, int]
"""``_commit_lsn``, ``_seq``: they identify a row of one table."""


@dataclass(frozen=True)
class Erased:
    """What an erasure did to one table. ``n_rows`` went, from ``n_files`` files. ``n_behind`` rows of the keys lie
    after the LSN, and stay. ``n_changed``: rows of other keys that stand for themselves now."""

    n_rows: int
    n_files: int
    n_behind: int
    n_changed: int


class _Hit(NamedTuple):
    """A row with one of the keys. ``position``: None after the LSN."""

    position: RowPosition
    kind: str
    is_behind: bool


@dataclass
class _File:
    """A file of the table that was looked at. ``new``: what takes its place; None: not written yet. ``patches`` and
    ``gone`` are what it was written with."""

    hits: Sequence[_Hit]
    new: list[WrittenFile] | None = None
    directory: str = ""
    gone: frozenset[RowPosition] = frozenset()
    patches: Mapping[RowPosition, dict[str, Any]] = field(default_factory=dict)


Batches = Callable[[str, "Sequence[str] | None"], Iterator[pa.RecordBatch]]
"""The rows of a Parquet file in the table's folder, in the columns that the table has now: these, or all; without those
that the file lacks, where the format has no other type for them. Raises OSError and what pyarrow raises."""


class ErasedTable(Protocol):
    """One table of the log on one snapshot."""

    @property
    def location(self) -> Location: ...

    @property
    def columns(self) -> Sequence[TableColumn]: ...

    @property
    def properties(self) -> Mapping[str, str]: ...

    @property
    def title(self) -> str: ...

    @property
    def ranged(self) -> Collection[str]:
        """A commit states the lowest and highest value of these columns for each file."""
        ...

    def watermark(self, application_id: str) -> int: ...

    def check(self) -> None:
        """Raise Unsupported where the rows of its files are not the table's, or the files are not to be written
        anew."""
        ...

    def files(self) -> pa.Table:
        """The snapshot's files: ``path``, ``num_records``, and ``min.…`` and ``max.…`` of ``_commit_lsn``."""
        ...

    def batches(self, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read the file in batches (``Batches``)."""
        ...

    def replace(self, added: Sequence[WrittenFile], removed: Sequence[str], marks: Mapping[str, int]) -> None:
        """Put ``added`` in the place of these files, and set the watermarks. Raises SnapshotOutdated where somebody
        has committed since the snapshot."""
        ...


def erase_rows(
    open_table: Callable[[], ErasedTable],
    label: str,
    slot: str,
    keys: ErasedKeys,
    upto: int,
    check: Callable[[], None] = lambda: None,
) -> Erased:
    """Erase the rows of ``keys`` with a ``_commit_lsn`` up to ``upto`` from the table ``label``. ``slot``: the
    application id of the slot that writes the table. ``open_table`` gives the table as it is now. ``check`` raises
    where it is to be given up.

    Everything up to ``upto`` must be in the table. Raises UsageError, Unsupported, SinkFailed, StorageFault, OSError
    and what pyarrow and the format's library raise; then nothing is committed, or all of it, and it may be called
    again."""
    erasure = _Erasure(open_table, label, slot, keys, upto, check)
    try:
        for _ in range(ATTEMPTS):
            try:
                return erasure.attempt()
            except SnapshotOutdated:
                continue
    finally:
        erasure.clean()
    raise StorageFault(f"table {label} was changed by others during {ATTEMPTS} attempts to commit an erasure")


def rows_in_file(batches: Batches, path: str, keys: RowsOfKeys, upto: int) -> int:
    """How many rows of the keys up to an LSN a Parquet file in the table's folder has. Raises as ``batches``."""
    return sum(not hit.is_behind for hit in _hits(batches, path, keys, upto))


def paths_upto(paths: Iterable[str], batches: Batches, upto: int) -> list[str]:
    """The Parquet files among ``paths`` that may have rows with a ``_commit_lsn`` up to ``upto``. One that is gone has
    none, and one that cannot be read may have some. Raises OSError."""
    found = []
    for path in paths:
        try:
            if _first_lsn(batches, path) <= upto:
                found.append(path)
        except FileNotFoundError:
            continue
        except pa.ArrowException:
            found.append(path)
    return found


def _first_lsn(batches: Batches, path: str) -> int:
    """The least ``_commit_lsn`` of a Parquet file in the table's folder; 0 where it has none. Raises as ``batches``."""
    parts = [rows["_commit_lsn"] for rows in batches(path, ["_commit_lsn"]) if rows.num_columns]
    return int(pc.min(pa.chunked_array(parts, pa.int64())).as_py() or 0)


def batches_of(table: Location, path: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """``Batches`` of a table that calls its columns as all its files do."""
    with table.open(path) as source, pq.ParquetFile(source, page_checksum_verification=True) as file:
        there = set(file.schema_arrow.names)
        chosen = None if columns is None else [name for name in columns if name in there]
        yield from file.iter_batches(columns=chosen)


class _Erasure:
    def __init__(
        self,
        open_table: Callable[[], ErasedTable],
        label: str,
        slot: str,
        keys: ErasedKeys,
        upto: int,
        check: Callable[[], None],
    ) -> None:
        self._open_table = open_table
        self._label = label
        self._slot = slot
        self._keys = keys
        self._upto = upto
        self._check = check
        self._fold_lsn = NOTHING
        self._files: dict[str, _File] = {}
        self._written: set[str] = set()
        """Directories of ours that no commit names."""

    def attempt(self) -> Erased:
        writer = self._opened()
        keys = rows_of_keys(self._keys, writer.columns, writer.properties, self._label)
        self._fold_lsn = writer.watermark(fold_id(self._slot))
        listed = writer.files()
        n_rows = dict(zip(listed["path"].to_pylist(), listed["num_records"].to_pylist(), strict=True))
        self._look(writer, keys, n_rows)
        there = {path: self._files[path] for path in n_rows}
        gone = {hit.position: hit.kind for file in there.values() for hit in file.hits if not hit.is_behind}
        patches = _Partners(writer.batches, keys, listed, gone, self._label).patches()
        rewritten = self._rewritten(writer, keys, n_rows, gone, patches)
        files = [new for path in rewritten for new in self._files[path].new or ()]
        reach("erasing_rows")
        writer.replace(files, rewritten, self._marks(writer, there, set(rewritten)))
        reach("rows_erased")
        self._written -= {self._files[path].directory for path in rewritten}
        n_behind = sum(hit.is_behind for file in there.values() for hit in file.hits)
        return Erased(len(gone), len(rewritten), n_behind, len(patches))

    def clean(self) -> None:
        """Remove what was written and is not named. A commit whose answer was lost names it."""
        if not self._written:
            return
        writer = self._opened()
        named = {path.partition("/")[0] for path in writer.files()["path"].to_pylist()}
        for directory in self._written - named:
            attempt_files.remove(writer.location, directory)

    def _opened(self) -> ErasedTable:
        writer = self._open_table()
        writer.check()
        return writer

    def _look(self, writer: ErasedTable, keys: RowsOfKeys, paths: Mapping[str, int]) -> None:
        """Find the rows of files that were not looked at yet."""

        def look(path: str) -> _File:
            self._check()
            return _File(_hits(writer.batches, path, keys, self._upto, self._fold_lsn))

        new = [path for path in paths if path not in self._files]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="erasing") as threads:
            for path, file in zip(new, threads.map(look, new), strict=True):
                self._files[path] = file

    def _rewritten(
        self,
        writer: ErasedTable,
        keys: RowsOfKeys,
        n_rows: Mapping[str, int],
        gone: Mapping[RowPosition, str],
        patches: Mapping[RowPosition, tuple[str, dict[str, Any]]],
    ) -> list[str]:
        """The files to replace, each with its new ones written."""
        columns = writer.columns
        touched = []
        for path, n in n_rows.items():
            file = self._files[path]
            own = frozenset(hit.position for hit in file.hits if not hit.is_behind)
            patched = {position: values for position, (where, values) in patches.items() if where == path}
            if not own and not patched:
                continue
            touched.append(path)
            if file.new is not None and (file.gone, file.patches) == (own, patched):
                continue
            self._check()
            prefix = SNAPSHOT_FILES if path.startswith(SNAPSHOT_FILES) else OWN
            file.directory = f"{prefix}{uuid.uuid4().hex}-erased"
            self._written.add(file.directory)
            schema = pa.schema([column.field for column in columns])
            files = ParquetFiles(writer.location, file.directory, schema, "_commit_lsn", writer.ranged)
            n_read = 0
            for rows in writer.batches(path):
                n_read += rows.num_rows
                kept = Conform.of(columns, rows.schema.names)(rows)
                for chunk in _without(kept, keys, self._upto, self._fold_lsn, patched):
                    files.write(chunk)
            if n_read != n:
                raise SinkFailed(f"{writer.title}: a file has not the rows that the table says")
            file.new, file.gone, file.patches = files.close(), own, patched
        return touched

    def _marks(self, writer: ErasedTable, files: Mapping[str, _File], touched: set[str]) -> dict[str, int]:
        marks = {UPTO: max(self._upto, writer.watermark(UPTO)), ERASURES: writer.watermark(ERASURES) + 1}
        for path in touched:
            for hit in files[path].hits:
                if hit.kind == SNAPSHOT and not hit.is_behind:
                    name = erased_id(hit.position[0])
                    marks[name] = marks.get(name, writer.watermark(name)) + 1
        # Whoever has a commit with this one in hand is refused, and looks again.
        owner = f"{self._slot}/owner"
        return {**marks, owner: writer.watermark(owner)} if writer.watermark(owner) else marks


# -- rows -----------------------------------------------------------------------------------------------


def _hits(batches: Batches, path: str, keys: RowsOfKeys, upto: int, fold_lsn: int = NOTHING) -> list[_Hit]:
    found = []
    for rows in batches(path, ["_commit_lsn", "_seq", "_change_type", *keys.columns]):
        if "_commit_lsn" not in rows.schema.names:
            continue
        hit = rows.filter(keys.among(rows))
        for row in hit.select(["_commit_lsn", "_seq", "_change_type"]).to_pylist():
            position = row["_commit_lsn"], row["_seq"]
            is_folded = row["_commit_lsn"] == fold_lsn and row["_change_type"] == SNAPSHOT
            found.append(_Hit(position, row["_change_type"], row["_commit_lsn"] > upto and not is_folded))
    return found


def _without(
    rows: pa.RecordBatch,
    keys: RowsOfKeys,
    upto: int,
    fold_lsn: int,
    patches: Mapping[RowPosition, dict[str, Any]],
) -> Iterator[pa.RecordBatch]:
    """The rows that stay, in their order, with the values of ``patches`` in those that have some."""
    is_folded = pc.and_(pc.equal(rows["_commit_lsn"], fold_lsn), pc.equal(rows["_change_type"], SNAPSHOT))
    goes = pc.and_(keys.among(rows), pc.or_(pc.less_equal(rows["_commit_lsn"], upto), is_folded))
    rows = rows.filter(pc.invert(goes))
    start = 0
    for i in _indexes_in(rows, patches.keys()):
        row = rows.slice(i, 1).to_pylist()[0]
        yield rows.slice(start, i - start)
        yield pa.RecordBatch.from_pylist([{**row, **patches[row["_commit_lsn"], row["_seq"]]}], rows.schema)
        start = i + 1
    yield rows.slice(start)


def _indexes_in(rows: pa.RecordBatch, positions: Set[RowPosition]) -> list[int]:
    if not positions:
        return []
    lsns = pa.array(sorted({lsn for lsn, _ in positions}), pa.int64())
    near = np.flatnonzero(pc.is_in(rows["_commit_lsn"], value_set=lsns).to_numpy(zero_copy_only=False))
    lsn, seq = rows["_commit_lsn"], rows["_seq"]
    return [int(i) for i in near if (lsn[int(i)].as_py(), seq[int(i)].as_py()) in positions]


# -- rows of other keys ---------------------------------------------------------------------------------


class _Partners:
    """The rows that stay and whose other half goes: the old or the new row of an update that changed the key.

    ``listed``: the table's files. ``gone``: the places of the rows that go, and their ``_change_type``."""

    def __init__(
        self,
        batches: Batches,
        keys: RowsOfKeys,
        listed: pa.Table,
        gone: Mapping[RowPosition, str],
        label: str,
    ) -> None:
        self._batches = batches
        self._keys = keys
        self._listed = listed
        self._gone = gone
        self._label = label
        self._histories: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        self._preimages: dict[RowPosition, dict[str, Any] | None] = {}

    def patches(self) -> dict[RowPosition, tuple[str, dict[str, Any]]]:
        """Place → the file with the row, and the values that it gets."""
        near = {(lsn, seq + 1) for (lsn, seq), kind in self._gone.items() if kind == _PREIMAGE}
        near |= {(lsn, seq - 1) for (lsn, seq), kind in self._gone.items() if kind == _POSTIMAGE}
        found: dict[RowPosition, tuple[str, dict[str, Any]]] = {}
        for path, row in self._rows(near - self._gone.keys()):
            (lsn, seq), kind = _position_of(row), row["_change_type"]
            if kind == _POSTIMAGE and self._gone.get((lsn, seq - 1)) == _PREIMAGE:
                found[lsn, seq] = path, {"_change_type": _INSERT, **self._completed(row)}
            elif kind == _PREIMAGE and self._gone.get((lsn, seq + 1)) == _POSTIMAGE:
                found[lsn, seq] = path, {"_change_type": _DELETE}
        return found

    def _rows(self, positions: Set[RowPosition]) -> Iterator[tuple[str, dict[str, Any]]]:
        if not positions:
            return
        lsns = np.array(sorted({lsn for lsn, _ in positions}))
        bounds = (self._listed[name].to_pylist() for name in ("path", "min._commit_lsn", "max._commit_lsn"))
        for path, least, greatest in zip(*bounds, strict=True):
            if least is not None and not np.any((lsns >= least) & (lsns <= greatest)):
                continue
            for rows in self._batches(path, None):
                for i in _indexes_in(rows, positions):
                    yield path, rows.slice(i, 1).to_pylist()[0]

    def _completed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The values that the row lacks, from the erased rows of the key that it had before."""
        lacking = list(row["_unchanged"] or ())
        if not lacking:
            return {}
        completed: dict[str, Any] = {}
        texts = dict(row["_text"] or ())
        lsn, seq = _position_of(row)
        before = self._preimage_at((lsn, seq - 1))
        assert before is not None
        for name in list(lacking):
            source = self._last_with(name, before)
            if source is None:
                continue  # nobody knows it
            lacking.remove(name)
            for column in self._keys.stored_columns[name]:
                completed[column.name] = source.get(column.name)
            if name in (texts_there := dict(source["_text"] or ())):
                texts[name] = texts_there[name]
        return {**completed, "_unchanged": lacking or None, "_text": list(texts.items()) or None}

    def _last_with(self, name: str, departure: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The row that had the column's value last, when the row left the key of the old row ``departure``; None where
        the log does not have it. Where it came to that key from another one, it is looked for there."""
        while True:
            at, key = _position_of(departure), self._key_of(departure)
            earlier = [
                r for r in self._history(key) if _position_of(r) < at and r["_change_type"] != _PREIMAGE
            ]
            row: dict[str, Any] | None = earlier[-1] if earlier else None
            if row is None or row["_change_type"] == _DELETE:
                return None
            if name not in (row["_unchanged"] or ()):
                return row
            if row["_change_type"] in (_INSERT, SNAPSHOT):
                return None
            lsn, seq = _position_of(row)
            departure = self._preimage_at((lsn, seq - 1)) or row

    def _preimage_at(self, position: RowPosition) -> Mapping[str, Any] | None:
        if position not in self._preimages:
            there = (row for _, row in self._rows({position}))
            self._preimages[position] = next((r for r in there if r["_change_type"] == _PREIMAGE), None)
        return self._preimages[position]

    def _history(self, key: tuple[str, ...]) -> list[dict[str, Any]]:
        """All rows of one key, in order. The rows of erased keys are at hand; those of another key are looked for."""
        if key not in self._histories:
            names = tuple(sorted(self._keys.key))
            values = tuple(key[self._keys.key.index(name)] for name in names)
            wanted = RowsOfKeys(
                ErasedKeys({names: frozenset({values})}),
                self._keys.stored_columns,
                self._keys.key,
                self._label,
            )
            found = []
            for path in self._listed["path"].to_pylist():
                for rows in self._batches(path, None):
                    found += rows.filter(wanted.among(rows)).to_pylist()
            self._histories[key] = sorted(found, key=_position_of)
        return self._histories[key]

    def _key_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        found = []
        for name in self._keys.key:
            values = (row.get(column.name) for column in self._keys.stored_columns[name])
            value = next((value for value in values if value is not None), None)
            found.append(f"\\x{value.hex()}" if isinstance(value, bytes) else str(value))
        return tuple(found)


def _position_of(row: Mapping[str, Any]) -> RowPosition:
    return row["_commit_lsn"], row["_seq"]
