"""A base table without the rows of erased keys: its files written anew, and the manifest's older lines taken back.

The log comes first (``log_tables.erased_rows``). Then, in this order:

1. The base table gets new files for those that have such rows: an ordinary swap, at the LSN that it has. Where no file
   has one, a commit without files. Either one has Delta refuse what a refresh has in hand.
2. The manifest names the new version in place of the newest one before it. Lines of older versions go: at their LSNs
   a state is folded from the log, which does not have the rows. A line that is taken back stays for the vacuum
   (``manifest.RETIRED``), so that who has opened such a version can finish.
3. A checkpoint, so that a vacuum can remove the commits before it: they have the lowest and highest keys of files.

A refresh that began before, and has read the log as it was, commits neither a table (``refresh`` looks at the log once
more, and then step 1 stands in its way) nor the manifest (``ManifestWriter.append`` asks for the count of step 2): it
is done again. The mirror goes on, with its number.

``mirror/SLOT/erased`` of a base table is the version of the last such commit that took a row out, of the table or of a
version that the manifest names: what it names below that is to be taken back. So a crash between two steps is mended by
doing it all again. A row that is deleted in the source first is in older versions alone, after a refresh.

deltalake and pyarrow, no Spark. Called by ``pipeline.erasure``.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xidstream.pipeline.changelog.base_stores import StoredTable
from xidstream.pipeline.changelog.delta_bases import DeltaBase, DeltaBases, current
from xidstream.pipeline.changelog.manifest import ManifestWriter, base_of, read_lines
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import attempt_files, locations
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, RowsOfKeys, StoredColumn
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import NOTHING, SnapshotOutdated
from xidstream.pipeline.log_tables.table_metadata import KEY
from xidstream.pipeline.mirror.base_table import BaseTable, MirrorMarks, NewFile
from xidstream.pipeline.mirror.kept_files import LOG, files_of_versions
from xidstream.pipeline.mirror.key_ranges import RangedKey
from xidstream.pipeline.mirror.local_swap import write_file
from xidstream.pipeline.mirror.short_log import shorten_log
from xidstream.pipeline.mirror.swap import new_directory
from xidstream.pipeline.mirror.table_folder import TableFolder, log_files, remove_file
from xidstream.pipeline.pg_rules import labelled_table

ATTEMPTS: Final = 20
"""To commit beside a mirror, which commits to a table once in a refresh."""
_COMMIT: Final = re.compile(r"(\d{20})\.json")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.(.+\.)?parquet")


@dataclass(frozen=True)
class ErasedBase:
    """``n_rows`` went from ``n_files`` files. ``version``: Delta's, of the base table now."""

    n_rows: int
    n_files: int
    version: int


def base_location(root: Location, label: str) -> Location:
    name = labelled_table(label)
    assert name is not None, label
    return current(root).child(locations.encode_table(*name))


def keys_of_base(
    location: Location, label: str, keys: ErasedKeys, stored_columns: Mapping[str, Sequence[StoredColumn]]
) -> RowsOfKeys | None:
    """The keys in the types of a base table; None where there is no base table. ``stored_columns``: of the log's
    table."""
    writer = DeltaBase.open(location, label)
    return None if writer is None else keys_in(writer, keys, stored_columns)


def keys_in(
    writer: StoredTable, keys: ErasedKeys, stored_columns: Mapping[str, Sequence[StoredColumn]]
) -> RowsOfKeys:
    there = {column.name: column.type for column in writer.columns}
    mine = {
        name: [StoredColumn(name, there[name], columns[0].pg_type)]
        for name, columns in stored_columns.items()
        if name in there
    }
    # A base table has the columns of now. Keys by a column's former name are for the log.
    known = {names: values for names, values in keys.by_columns.items() if mine.keys() >= set(names)}
    return RowsOfKeys(ErasedKeys(known), mine, sorted(mine), writer.label)


def erase_base(
    root: Location,
    slot: str,
    label: str,
    keys: ErasedKeys,
    stored_columns: Mapping[str, Sequence[StoredColumn]],
    check: Callable[[], None] = lambda: None,
) -> ErasedBase | None:
    """Take the rows of ``keys`` out of the base table of ``label``, and out of what the manifest names. None where
    there is none. ``slot``: the log's application id. ``check`` raises where it is to be given up.

    Raises StorageFault, Unsupported, SinkFailed, OSError and what pyarrow and deltalake raise. It may be called again.
    """
    location = base_location(root, label)
    for _ in range(ATTEMPTS):
        writer = DeltaBase.open(location, label)
        if writer is None:
            return None
        try:
            wanted = keys_in(writer, keys, stored_columns)
            # Of versions that are named: what is in none of them is no reason to take one back.
            is_in_earlier = any(
                has_row(location, path, wanted) for path in _earlier_files(writer, root, slot)
            )
            ranged = ranged_key(writer)
            reopened = partial(DeltaBase.open, location, label)
            done = rewritten(writer, reopened, slot, wanted, ranged, check, is_in_earlier=is_in_earlier)
            reach("base_erased")
            writer = DeltaBase.open(location, label)
            assert writer is not None
            below = writer.watermark(_erased_id(slot))
            ManifestWriter(DeltaBases(root), slot).take_back(
                location.uri.rpartition("/")[2], below.__gt__, done.version
            )
            if done.n_rows or is_in_earlier:
                writer.checkpoint()
            return done
        except SnapshotOutdated:
            continue
    raise StorageFault(
        f"the base table of {label} was changed by others during {ATTEMPTS} attempts to erase from it"
    )


def named_rows(
    root: Location,
    slot: str,
    label: str,
    keys: ErasedKeys,
    stored_columns: Mapping[str, Sequence[StoredColumn]],
) -> bool:
    """Whether the base table, or a version of it that the manifest names, has a row of the keys. The other parameters
    are those of ``erase_base``. Raises OSError and what pyarrow and deltalake raise."""
    location = base_location(root, label)
    writer = DeltaBase.open(location, label)
    if writer is None:
        return False
    wanted = keys_in(writer, keys, stored_columns)
    paths = [*writer.paths(), *_earlier_files(writer, root, slot)]
    return any(has_row(location, path, wanted) for path in dict.fromkeys(paths))


def _earlier_files(writer: DeltaBase, root: Location, slot: str) -> list[str]:
    """The files of older versions that the manifest names, without the files of the newest version; relative to the
    table."""
    location = writer.location
    directory = location.uri.rpartition("/")[2]
    lines = [line for line in read_lines(DeltaBases(root), slot) if line.directory == directory]
    versions = [line.version for line in lines if base_of(DeltaBases(root), line) is not None]
    if not versions:
        return []
    found = {path[len(location.uri) + 1 :] for path in files_of_versions(location, versions)}
    return sorted(found - set(writer.paths()))


def has_row(location: Location, path: str, keys: RowsOfKeys) -> bool:
    """Whether a file of a version has such a row, or cannot be asked: its column had another type then, and values that
    are none of the type of now."""
    try:
        with location.open(path) as source, pq.ParquetFile(source) as file:
            there = [name for name in keys.columns if name in file.schema_arrow.names]
            return any(pc.any(keys.among(rows)).as_py() for rows in file.iter_batches(columns=there))
    except FileNotFoundError:
        return False  # the vacuum has removed it: no version that has it is named any more
    except pa.ArrowInvalid:
        return True


def copies_in_base(location: Location, keys: RowsOfKeys, label: str) -> tuple[list[str], list[str]]:
    """The paths, below the table's folder, of files that its present version does not have and that have such rows; and
    of files of its Delta log that have such a key as a file's lowest or highest. Then those that no commit ever named
    and that have no such row. Raises OSError and what pyarrow raises."""
    writer = DeltaBase.open(location, label)
    if writer is None:
        return [], []
    named = set(writer.files()["path"].to_pylist())
    removed = set(writer.removed_files(0))
    found = []
    cleared = []
    for path in attempt_files.files_below(location):
        if path.endswith(".parquet") and path not in named:
            try:
                n_rows = sum(n for _, n in chunks_without(location, path, keys))
            except FileNotFoundError:
                continue  # the mirror has removed it
            except pa.ArrowInvalid:
                n_rows = 1  # it is being written: nobody can know
            if n_rows:
                found.append(path)
            elif path not in removed:
                cleared.append(path)
    return [*found, *_log_files_with(location, keys, writer.version)], cleared


def in_work_in_base(location: Location, label: str, known: Set[str]) -> list[str]:
    """Files that no commit has named, without those that are ``known``: of a refresh at work, or of one that had read
    the log before it was erased from, and that the next vacuum removes. Raises OSError."""
    writer = DeltaBase.open(location, label)
    if writer is None:
        return []
    known = known | set(writer.files()["path"].to_pylist()) | set(writer.removed_files(0))
    there = attempt_files.files_below(location)
    return [path for path in there if path.endswith(".parquet") and path not in known]


def remove_copies(root: Location, slot: str, label: str, keys: RowsOfKeys) -> None:
    """Remove what ``copies_in_base`` finds, even if somebody is reading it. Raises as that, and StorageFault."""
    location = base_location(root, label)
    writer = DeltaBase.open(location, label)
    if writer is None:
        return
    directory = location.uri.rpartition("/")[2]
    manifest = ManifestWriter(DeltaBases(root), slot)
    manifest.forget_retired(directory)
    for path in copies_in_base(location, keys, label)[0]:
        if not path.startswith(f"{LOG}/"):
            with suppress(FileNotFoundError):
                remove_file(location, path)
    named = [line.version for line in manifest.lines() if line.directory == directory]
    now_s = TableFolder.listed(location).now_s
    shorten_log(location, min([writer.version, *named]), now_s, 0.0)


def _erased_id(slot: str) -> str:
    return f"mirror/{slot}/erased"


def ranged_key(writer: StoredTable, *, any_name: bool = False) -> RangedKey:
    types = {column.name: column.type for column in writer.columns}
    return RangedKey.of(json.loads(writer.property_of(KEY) or "[]"), types, any_name=any_name)


def rewritten(
    writer: StoredTable,
    reopened: Callable[[], StoredTable | None],
    slot: str,
    keys: RowsOfKeys,
    ranged: RangedKey,
    check: Callable[[], None],
    *,
    is_in_earlier: bool | None,
) -> ErasedBase:
    """Commit the base table without the rows of the keys. ``is_in_earlier``: a version that the manifest names has such
    rows, whatever the table has now; None: of which versions that is, no mark tells."""
    location, owner_id = writer.location, f"mirror/{slot}/owner"
    base = BaseTable(writer, MirrorMarks(slot, writer.watermark(owner_id)))
    if base.lsn == NOTHING:
        # A first refresh is at work.
        writer.put([], [], {owner_id: writer.watermark(owner_id)})
        return ErasedBase(0, 0, writer.version)
    schema = base.file_schema(base.fields)
    directory = new_directory()
    new: list[NewFile] = []
    removed = []
    n_rows = 0
    is_named = False
    try:
        for i, file in enumerate(base.files(ranged)):
            check()
            n_gone = sum(n for _, n in chunks_without(location, file.path, keys))
            if not n_gone:
                continue
            n_rows += n_gone
            removed.append(file)
            chunks = (in_schema(rows, schema) for rows, _ in chunks_without(location, file.path, keys))
            for path in write_file(location, f"{directory}/{i:05d}.parquet", chunks, True, schema, check):
                new.append(NewFile.written(location, path, ranged))
        location.sync_folders([file.path for file in new])
        erases = is_in_earlier is not None and (bool(removed) or is_in_earlier)
        base.replace(new, ranged, removed, base.lsn, base.snapshot_lsn, erases=erases)
        is_named = True
    finally:
        if not is_named:
            _discard(reopened(), directory)
    return ErasedBase(n_rows, len(removed), base.version)


def _discard(writer: StoredTable | None, directory: str) -> None:
    """Remove what no commit names: one whose answer was lost may."""
    if writer is not None and not any(p.startswith(directory) for p in writer.files()["path"].to_pylist()):
        attempt_files.remove(writer.location, directory)


def chunks_without(location: Location, path: str, keys: RowsOfKeys) -> Iterator[tuple[pa.Table, int]]:
    """The rows of a file without those of the keys, chunk by chunk, and how many these were."""
    with location.open(path) as file:
        for rows in pq.ParquetFile(file).iter_batches():
            goes = keys.among(rows)
            kept = rows.filter(pc.invert(goes))
            yield pa.Table.from_batches([kept]), rows.num_rows - kept.num_rows


# -- the Delta log --------------------------------------------------------------------------------------


def _log_files_with(location: Location, keys: RowsOfKeys, version: int) -> list[str]:
    """The log's files ahead of ``version`` with a key as a bound of a file."""
    found = []
    for name in sorted(log_files(location)):
        path = f"{LOG}/{name}"
        commit, checkpoint = _COMMIT.fullmatch(name), _CHECKPOINT.fullmatch(name)
        try:
            if commit and int(commit[1]) < version:
                lines = location.read(path).splitlines()
                adds = [json.loads(line)["add"] for line in lines if line.startswith(b'{"add"')]
            elif checkpoint and int(checkpoint[1]) < version:
                with location.open(path) as file:
                    added = pq.ParquetFile(file).read(["add"])["add"]
                adds = [add for add in added.to_pylist() if add]
            else:
                continue
        except FileNotFoundError:
            continue
        if any(_is_bound(keys, _bounds(add)) for add in adds):
            found.append(path)
    return found


def _bounds(add: Mapping[str, Any]) -> dict[str, set[Any]]:
    """By column, the lowest and the highest value of a file, as JSON has them."""
    stats = json.loads(add.get("stats") or "{}")
    found: dict[str, set[Any]] = {}
    for bound in ("minValues", "maxValues"):
        for column, value in (stats.get(bound) or {}).items():
            found.setdefault(column, set()).add(value)
    return found


def _is_bound(keys: RowsOfKeys, bounds: Mapping[str, set[Any]]) -> bool:
    return any(
        all(any(_in_json(value) & bounds[name] for value in values) for name, values in group)
        for group in keys.literals()
        if all(name in bounds for name, _ in group)
    )


def _in_json(value: Any) -> set[Any]:
    """The forms that a value has as a bound in a Delta log: a time is cut to milliseconds, down or up."""
    if isinstance(value, datetime.datetime):
        cut = value.replace(microsecond=value.microsecond // 1000 * 1000)
        moments = {cut, cut + datetime.timedelta(milliseconds=1)} if cut != value else {cut}
        zone = "" if value.tzinfo is None else "Z"
        return {m.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone for m in moments}
    return {value.isoformat()} if isinstance(value, datetime.date) else {value}
