"""A folder of an object store, as writers and readers of Parquet files want it: by the storage's own client.

``log_tables.locations.Location`` is the same for tables, by deltalake's client and its options. What lies in the
storage is reached by its URI alone, with the credentials of segments and journal. To translate that URI into
deltalake's options was rejected: each knows options that the other does not.

It pickles, as a ``Storage`` does. So actors and Spark's executors have it from a message.

Called by ``initial_copy.staged_snapshots``, whose rows wait here for a function. A folder on a disk needs nothing of
this: there a ``Location`` writes, and Spark's own reader reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from xidstream.pipeline.storage.storage import Storage


@dataclass(frozen=True)
class StoredFolder:
    """``prefix`` is a key of the storage. Paths are relative to it."""

    storage: Storage
    prefix: str

    def create(self, path: str) -> pa.NativeFile:
        """A new object, which appears when the file is closed. Raises StorageFault; the file itself raises OSError."""
        return self.storage.stored_output(f"{self.prefix}/{path}")

    def sync(self, paths: Iterable[str]) -> None:
        """An object is durable when its file is closed."""

    def open(self, path: str) -> AbstractContextManager[pa.NativeFile]:
        """An object to read from. Raises StorageFault, for what reading in the block raises, too."""
        return self.storage.reading(f"{self.prefix}/{path}")

    def remove(self, name: str) -> None:
        """Remove the folders directly in this one whose names begin with ``name``. Raises StorageFault."""
        for folder in self.storage.list_folders(self.prefix):
            if folder.removeprefix(f"{self.prefix}/").startswith(name):
                self.storage.delete_folder(folder)
