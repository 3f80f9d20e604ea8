"""An Iceberg base table without the rows of erased keys: the order and the commits are ``erased_base``'s.

What is otherwise:

- A version is a snapshot's id, and no number rises. So the lines of the manifest that go are those whose versions have
  such a row, found in their files each time. A crash between two steps is mended by doing it all again.
- The bounds of keys stand in manifests. Those that name a file with such a row are copies, too, and those with such a
  key as a bound of a file that is gone. A commit leaves one in the newest snapshot, with the files that it has removed;
  so another commit without files follows it, which leaves that one out (``staged_commits.MergingOverwrite``). A version
  that has such a one is taken back as if it had the row: the commit that took it out has made it.
- What nothing names any more the mirror's vacuum removes (``iceberg_vacuum``), or ``remove_copies`` at once.

pyiceberg, no Spark. Called by ``pipeline.erasure``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.manifest import ManifestWriter
from xidstream.pipeline.errors import StorageFault, Unsupported
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.base_table import IcebergBase, gone_in, listed, manifests_of, named_files
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, RowsOfKeys, StoredColumn
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.mirror.erased_base import (
    ATTEMPTS,
    ErasedBase,
    chunks_without,
    has_row,
    keys_in,
    ranged_key,
    rewritten,
)
from xidstream.pipeline.pg_rules import labelled_table

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema

_DATA: Final = ".parquet"


class ErasedIcebergBase:
    """The base table of ``label`` in ``bases``. ``slot``: the log's application id."""

    def __init__(self, bases: IcebergBases, slot: str, label: str) -> None:
        name = labelled_table(label)
        assert name is not None, label
        self._bases = bases
        self._slot = slot
        self._label = label
        self._key = bases.key_of(*name)

    def open(self) -> IcebergBase | None:
        return self._bases.open(self._key, self._label)

    def erase(
        self,
        keys: ErasedKeys,
        stored_columns: Mapping[str, Sequence[StoredColumn]],
        check: Callable[[], None],
    ) -> ErasedBase | None:
        """``erased_base.erase_base``."""
        for _ in range(ATTEMPTS):
            writer = self.open()
            if writer is None:
                return None
            if not writer.is_as_made:
                raise Unsupported(
                    f"the base table of {self._label} was changed by another program, and which rows its files have "
                    "is not known until the mirror has made it anew",
                    remedy="let the mirror do that (its next refresh with something new), or drop the base table in "
                    "the catalog together with its files; then give the command again",
                )
            try:
                wanted = keys_in(writer, keys, stored_columns)
                ranged = ranged_key(writer, any_name=self._bases.bounds_any_name)
                done = rewritten(writer, self.open, self._slot, wanted, ranged, check, is_in_earlier=None)
                if done.n_rows:
                    owner_id = f"mirror/{self._slot}/owner"
                    writer.put([], [], {owner_id: writer.watermark(owner_id)})
                reach("base_erased")
                manifest = ManifestWriter(self._bases, self._slot)
                # Asked of the lines that are there then: a refresh that came before this commit may name its version
                # until the lines are taken back, and not after.
                manifest.take_back(self._key, self._has_row_in(wanted, check), writer.version)
                return done
            except SnapshotOutdated:
                continue
        raise StorageFault(
            f"the base table of {self._label} was changed by others during {ATTEMPTS} attempts to erase from it"
        )

    def _has_row_in(self, keys: RowsOfKeys, check: Callable[[], None]) -> Callable[[int], bool]:
        """Whether a version has such a row, or such a key as a bound of a file that is gone. Each file is read once."""
        known: dict[str, bool] = {}
        bounds = _Bounds(keys)

        def has_row_in(version: int) -> bool:
            base, writer = self._bases.at(self._key, version), self.open()
            snapshot = None if writer is None else writer.loaded.snapshot_by_id(version)
            if base is None or writer is None or snapshot is None:
                return False
            check()
            start = len(base.location.uri) + 1
            there = {each[start:] for each in base.files}
            for path in there:
                if path not in known:
                    known[path] = has_row(base.location, path, keys)
                if known[path]:
                    return True
            return bounds.names_one(gone_in(writer.loaded, snapshot), writer.loaded.metadata.schemas)

        return has_row_in

    def copies(self, keys: RowsOfKeys) -> tuple[list[str], list[str]]:
        """The paths, below the table's location, of files that the newest snapshot has not and that have such rows,
        and of manifests that name one of these. Then data files that the newest snapshot has not and that have none."""
        writer = self.open()
        if writer is None:
            return [], []
        newest = set(writer.files()["path"].to_pylist())
        found: list[str] = []
        cleared: list[str] = []
        for path in attempt_files.files_below(writer.location):
            if not path.endswith(_DATA) or path in newest:
                continue
            try:
                n_rows = sum(n for _, n in chunks_without(writer.location, path, keys))
            except FileNotFoundError:
                continue  # the mirror has removed it
            except pa.ArrowInvalid:
                n_rows = 1  # it is being written: nobody can know
            (found if n_rows else cleared).append(path)
        with_row, bounds = set(found), _Bounds(keys)
        metadata = writer.loaded.metadata
        manifests = [
            path
            for path, files in manifests_of(writer.loaded, metadata.snapshots)
            if not with_row.isdisjoint(files)
            or bounds.names_one({p: f for p, f in files.items() if p not in newest}, metadata.schemas)
        ]
        return [*found, *manifests], cleared

    def remove_copies(self, keys: RowsOfKeys) -> None:
        """Remove what ``copies`` finds, even if somebody is reading it, but for what a tag or a branch needs."""
        manifest = ManifestWriter(self._bases, self._slot)
        manifest.forget_retired(self._key)
        before, _ = self.copies(keys)
        for _ in range(ATTEMPTS):
            writer = self.open()
            if writer is None:
                return
            try:
                writer.expire({line.version for line in manifest.lines() if line.directory == self._key})
            except SnapshotOutdated:
                continue
            writer.remove_unreached(before)
            return
        raise StorageFault(
            f"the base table of {self._label} was changed by others during {ATTEMPTS} attempts to expire snapshots"
        )

    def in_work(self, known: Set[str]) -> list[str]:
        """``erased_base.in_work_in_base``."""
        writer = self.open()
        if writer is None:
            return []
        named = named_files(writer.loaded)
        there = attempt_files.files_below(writer.location)
        return [path for path in there if path.endswith(_DATA) and path not in known and path not in named]


def keys_of(
    base: ErasedIcebergBase, keys: ErasedKeys, stored_columns: Mapping[str, Sequence[StoredColumn]]
) -> RowsOfKeys | None:
    writer = base.open()
    return None if writer is None else keys_in(writer, keys, stored_columns)


class _Bounds:
    """Which files have one of the keys as their lowest or highest, where they have such of all columns of a key. Each
    file is looked at once."""

    def __init__(self, keys: RowsOfKeys) -> None:
        self._groups = keys.literals()
        self._known: dict[str, bool] = {}

    def names_one(self, files: Mapping[str, DataFile], schemas: Iterable[Schema]) -> bool:
        """Whether one of these files has. ``schemas``: the table's, of which files are."""
        new = {path: file for path, file in files.items() if path not in self._known}
        self._known |= dict.fromkeys(new, False)
        for schema in schemas if new else ():
            found = listed(new, schema).to_pydict()
            for i, path in enumerate(found["path"]):
                told = {name: values[i] for name, values in found.items() if values[i] is not None}
                self._known[path] |= any(
                    all(
                        not {told.get(f"min.{name}"), told.get(f"max.{name}")}.isdisjoint(values)
                        for name, values in group
                    )
                    for group in self._groups
                )
        return any(self._known[path] for path in files)
