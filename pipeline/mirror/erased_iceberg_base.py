"""An Iceberg base table without the rows of erased keys: the order and the commits are ``erased_base``'s.

What is otherwise:

- A version is a snapshot's id, and no number rises. So the lines of the manifest that go are those whose versions have
  such a row, found in their files each time. A crash between two steps is mended by doing it all again.
- The bounds of keys stand in manifests. Those that name a file with such a row are copies, too. A commit leaves one in
  the newest snapshot, with the files that it has removed; so another commit without files follows it, which leaves
  that one out (``staged_commits.MergingOverwrite``).
- What nothing names any more the mirror's vacuum removes (``iceberg_vacuum``), or ``remove_copies`` at once.

pyiceberg, no Spark. Called by ``pipeline.erasure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final

import pyarrow as pa

from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
from xidstream.pipeline.changelog.manifest import ManifestWriter, base_of, read_lines
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.iceberg.base_table import IcebergBase, manifests_of, named_files
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, HeldIn, RowsOfKeys
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.mirror.erased_base import (
    ATTEMPTS,
    ErasedBase,
    has_row,
    keys_in,
    pieces_without,
    ranged_key,
    rewritten,
)
from xidstream.pipeline.pg_rules import labelled_table

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
        self, keys: ErasedKeys, held: Mapping[str, Sequence[HeldIn]], check: Callable[[], None]
    ) -> ErasedBase | None:
        """``erased_base.erase_base``."""
        for _ in range(ATTEMPTS):
            writer = self.open()
            if writer is None:
                return None
            try:
                wanted = keys_in(writer, keys, held)
                gone = self._versions_with(wanted, check)
                ranged = ranged_key(writer, any_name=self._bases.bounds_any_name)
                done = rewritten(writer, self.open, self._slot, wanted, ranged, check, is_in_earlier=None)
                if done.n_rows:
                    owner_id = f"mirror/{self._slot}/owner"
                    writer.put([], [], {owner_id: writer.watermark(owner_id)})
                reach("base_erased")
                manifest = ManifestWriter(self._bases, self._slot)
                manifest.take_back(self._key, gone.__contains__, writer.version)
                return done
            except SnapshotOutdated:
                continue
        raise StorageFault(
            f"the base table of {self._label} was changed by others during {ATTEMPTS} attempts to erase from it"
        )

    def _versions_with(self, keys: RowsOfKeys, check: Callable[[], None]) -> set[int]:
        """The versions that the manifest names and that have such a row."""
        known: dict[str, bool] = {}
        found = set()
        for line in read_lines(self._bases, self._slot):
            base = base_of(self._bases, line) if line.directory == self._key else None
            if base is None:
                continue
            check()
            start = len(base.at.location.uri) + 1
            for path in (each[start:] for each in base.at.files):
                if path not in known:
                    known[path] = has_row(base.at.location, path, keys)
                if known[path]:
                    found.add(line.version)
        return found

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
                n_rows = sum(n for _, n in pieces_without(writer.location, path, keys))
            except FileNotFoundError:
                continue  # the mirror has removed it
            except pa.ArrowInvalid:
                n_rows = 1  # it is being written: nobody can know
            (found if n_rows else cleared).append(path)
        return [*found, *manifests_of(writer.loaded, set(found))], cleared

    def remove_copies(self, keys: RowsOfKeys) -> None:
        """Remove what ``copies`` finds, also from under whoever reads it, but for what a tag or a branch needs."""
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
    base: ErasedIcebergBase, keys: ErasedKeys, held: Mapping[str, Sequence[HeldIn]]
) -> RowsOfKeys | None:
    writer = base.open()
    return None if writer is None else keys_in(writer, keys, held)
