"""How the segments of a transaction become files of a table at its COMMIT: no row is read or written again.

A segment is Parquet in the contract's layout already. What its writer did not know, the commit LSN and timestamp, is
filled in now, and the table gets a name of its own for the file (``Reach`` says how). The sink commits that name.

- Local storage, local root: the two constants are written into the segment, which is flushed. Then comes a hard link
  in the table's directory. Deleting the segment later takes away its own name only. Where the file system refuses a
  link (another file system, a limit), the file is copied; ``copy_file_range`` shares the blocks where it can.
- Both in one S3 store, or in one storage account of Azure: a copy on the server's side, with another end
  (``store_copies``). The segment stays as it is.
- Anything else: Spark reads the segment and writes the file.

What is at the name is on disk before the name is in the table's log. A fill writes the same values to the same places
whenever it is repeated, and it refuses a file that was filled with other values, so a file that a log names never
changes. A crash leaves segments that are filled, which are read as before, and names that no log has, which vacuum
removes.

Of each segment the length and the end are verified, where the footer and the constants are. A sum over the whole file
would take as long as the transaction is large. The sequencer takes it of prepared transactions, which may have waited
for a month (``SlotStorage.content_of``).

A segment may hold the constants of another commit: a run filled it, failed, and the server failed over to one where
COMMIT PREPARED stands elsewhere. Spark reads such a segment, and writes the file.

A segment that is missing raises SegmentCorrupt, as when Spark reads it. The sink asks then whether a later run, which
cleans up after this one, has taken the slot over.

Driver only, in threads: what takes the time is waiting for the disk or the store. Rejected: the same in a Spark job
(its start takes longer than all the links), renaming (storage and cleaning would have to know what is gone),
symbolic links (the segment must stay for ever).
"""

from __future__ import annotations

import abc
import enum
import errno
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from xidstream.pipeline import parquet
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault, known_reason
from xidstream.pipeline.exchange import SegmentPart
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.azure_copies import AzureCopies
from xidstream.pipeline.log_tables.batch_parts import TableParts
from xidstream.pipeline.log_tables.columns import DELTA, ColumnMapping, ColumnRules
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import WriteOutput, WrittenFile
from xidstream.pipeline.log_tables.s3_copies import S3Copies
from xidstream.pipeline.log_tables.store_copies import SMALLEST_COPY_BYTES, CopyRefused, StoreCopies
from xidstream.pipeline.parquet import CommitStamp, RowFile
from xidstream.pipeline.settings.local_paths import absolute

LINK_THREADS: Final = 8
"""They wait: for a flush, or for an answer."""

LONGEST_TAIL_BYTES: Final = 8 << 20
"""That the driver fetches from a store and sends back, for one file. A segment of several row groups (a buffer of more
than half a gigabyte, a rollback in a large segment) may have more, and is the executors' to read and write."""

_STORES: Final[tuple[type[StoreCopies], ...]] = (S3Copies, AzureCopies)

_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})
"""The file system can be written to, but gives no second name to this file."""
_NO_COPY: Final = frozenset({errno.EXDEV, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})


class Reach(enum.Enum):
    """How a segment gets into a table; the value is for people."""

    LINK = "hard links"
    COPY = "copies of files"
    SERVER_SIDE_COPY = "copies inside the object store"
    SPARK = "files that Spark writes"


class SegmentStorage(Protocol):
    """What is asked of the storage, which is ``pipeline.storage``'s. Any thread may call. Raises StorageFault."""

    @property
    def uri(self) -> str: ...

    def local_path(self, key: str) -> str | None:
        """The path of an object on a file system; None in an object store."""
        ...

    def read_buffer(self, key: str, start: int = 0) -> pa.Buffer | None:
        """From the byte ``start`` on; None where there is no such object."""
        ...


def how_segments_reach(root: Location, storage_uri: str) -> Reach:
    """Tries a link where both are local, and asks no store. ``storage_uri`` is the setting."""
    if not root.is_local:
        return Reach.SERVER_SIDE_COPY if _copies_of(storage_uri, root) else Reach.SPARK
    storage = _local_path(storage_uri)
    if storage is None:
        return Reach.SPARK
    name = f".{secrets.token_hex(8)}.tmp"
    source, target = (os.path.join(_existing(folder), name) for folder in (storage, root.uri))
    if os.path.dirname(source) == os.path.dirname(target):
        return Reach.LINK  # what is not there yet will be in one folder
    try:
        with open(source, "xb"):
            return Reach.LINK if _link(source, target) else Reach.COPY
    except OSError:
        # Of folders that a run has to make first, or of a place that is wrong: another check tells that.
        devices = {os.stat(os.path.dirname(path)).st_dev for path in (source, target)}
        return Reach.LINK if len(devices) == 1 else Reach.COPY
    finally:
        for path in (source, target):
            try:
                os.unlink(path)
            except OSError:
                pass  # it was not made


def may_reach(root: Location, storage_uri: str) -> bool:
    """Whether segments may become files of the tables, as far as the two places tell; how is not tried."""
    if root.is_local:
        return _local_path(storage_uri) is not None
    return any(store.may_copy(storage_uri, root) for store in _STORES)


class SegmentLinks:
    """Into the tables of one sink, which are all in one place. Any thread may call ``give``, for a table of its own;
    ``close`` ends the threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._way: _Way | None = None
        self._is_refused = False

    def give(
        self,
        parts: TableParts,
        mappings: Sequence[ColumnMapping],
        target: WriteOutput,
        storage: SegmentStorage | None,
        rules: ColumnRules = DELTA,
    ) -> tuple[list[WrittenFile], TableParts]:
        """Name each segment that is a file of ``target``'s table as it is; the names are durable. Returns these files,
        and the parts that are to be written. Segments at or below the watermark are neither.

        ``mappings``: of each layout in ``parts``. ``rules``: of the table's format.
        Raises SegmentCorrupt, StorageFault; nothing runs on after that.
        """
        way = self._way_from(storage, target.table)
        if way is None:
            return [], parts
        fitting = [
            part
            for version, mapping in zip(parts.versions, mappings, strict=True)
            if mapping.is_verbatim(version.schema, rules)
            for part in version.segments
            if way.takes(part)
        ]
        new = [part for part in fitting if part.commit.commit_lsn > target.watermark]
        try:
            given = way.give(new, target)
        except (CopyRefused, parquet.FillRefused, parquet.FilledOtherwise) as refused:
            warnings.warn(
                f"segments cannot become files of the tables ({refused}): Spark writes the files",
                RuntimeWarning,
                stacklevel=2,
            )
            if not isinstance(refused, parquet.FilledOtherwise):  # which says nothing of other segments
                self._is_refused = True
            return [], parts
        return given, parts.without(fitting)

    def close(self) -> None:
        with self._lock:
            way, self._way = self._way, None
        if way is not None:
            way.close()

    def _way_from(self, storage: SegmentStorage | None, table: Location) -> _Way | None:
        if storage is None or self._is_refused:
            return None
        with self._lock:
            if self._way is None:
                if table.is_local and _local_path(storage.uri) is not None:
                    self._way = _LocalLinks(storage)
                elif copies := _copies_of(storage.uri, table):
                    self._way = _ServerSideCopies(storage, copies(storage.uri, table))
            return self._way


class _Way(abc.ABC):
    """What is the same wherever the files are."""

    def __init__(self, storage: SegmentStorage) -> None:
        self._storage = storage
        self._threads = ThreadPoolExecutor(LINK_THREADS, thread_name_prefix="segment-links")

    def give(self, parts: Sequence[SegmentPart], target: WriteOutput) -> list[WrittenFile]:
        if not parts:
            return []
        files = [
            WrittenFile(
                f"{target.job}-segments/part-{i:05d}.parquet", part.segment.n_bytes, part.n_rows, lsn, lsn
            )
            for i, part in enumerate(parts)
            for lsn in [part.commit.commit_lsn]
        ]
        futures = [
            self._threads.submit(self._give_one, part, target.table, file.path)
            for part, file in zip(parts, files, strict=True)
        ]
        # All come to their end before the first failure is raised: none is left running behind the caller.
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()
        try:
            target.table.sync_folders([file.path for file in files])
        except OSError as error:
            raise _unnamed(files[0].path, error) from error
        return files

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def takes(self, part: SegmentPart) -> bool:
        return True

    def _give_one(self, part: SegmentPart, table: Location, path: str) -> None:
        self._bind(part.segment.key, part.segment.file, part.commit, table, path)
        reach("segment_linked")

    @abc.abstractmethod
    def _bind(self, key: str, file: RowFile, commit: CommitStamp, table: Location, path: str) -> None:
        """Give the table the file with its constants as ``path``. It is on disk, but for its name."""


class _LocalLinks(_Way):
    def _bind(self, key: str, file: RowFile, commit: CommitStamp, table: Location, path: str) -> None:
        source = self._storage.local_path(key)
        assert source is not None
        # Without its end nobody could ever read the file again, and the table with it.
        parquet.verify_tail(self._read(key, file.head_bytes), file, name=key)
        parquet.fill(source, file, commit, name=key)
        reach("segment_filled")
        target = os.path.join(table.uri, path)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.utime(source)  # an old file that no log names yet would be vacuum's
            if not _link(source, target):
                _copy(source, target)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not os.path.exists(source):
                raise SegmentCorrupt(f"segment {key!r} is missing") from error
            raise _unnamed(path, error) from error

    def _read(self, key: str, start: int) -> pa.Buffer:
        data = self._storage.read_buffer(key, start)
        if data is None:
            raise SegmentCorrupt(f"segment {key!r} is missing")
        return data


class _ServerSideCopies(_Way):
    def __init__(self, storage: SegmentStorage, copies: StoreCopies) -> None:
        super().__init__(storage)
        self._copies = copies

    def takes(self, part: SegmentPart) -> bool:
        return part.segment.file.tail_bytes <= LONGEST_TAIL_BYTES

    def _bind(self, key: str, file: RowFile, commit: CommitStamp, table: Location, path: str) -> None:
        is_copied = file.head_bytes >= SMALLEST_COPY_BYTES
        start = file.head_bytes if is_copied else 0
        stored = self._copies.read(key, start)
        head = stored[: file.head_bytes - start]
        tail = parquet.bound_tail(stored[len(head) :], file, commit, name=key)
        reach("segment_filled")
        if is_copied:
            self._copies.copy(key, start, tail, table.child(path))
        else:
            self._copies.put(key, head + tail, table.child(path))


def _copies_of(storage_uri: str, root: Location) -> type[StoreCopies] | None:
    return next((store for store in _STORES if store.can_copy(storage_uri, root)), None)


def _unnamed(path: str, error: OSError) -> StorageFault:
    return StorageFault(
        f"Parquet file {path} cannot be linked: {known_reason(error) or type(error).__name__}"
    )


def _link(source: str, target: str) -> bool:
    """Whether the file system gave the name. Raises OSError for what a copy would meet as well."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _copy(source: str, target: str) -> None:
    """A flushed copy. Raises OSError."""
    with open(source, "rb") as file, open(target, "wb") as copy:
        if not _copied_by_kernel(file.fileno(), copy.fileno()):
            shutil.copyfileobj(file, copy, 1 << 20)
        copy.flush()
        os.fsync(copy.fileno())


def _copied_by_kernel(source: int, target: int) -> bool:
    """False where the file systems cannot do it; then nothing was written."""
    n_left = os.fstat(source).st_size
    offset = 0
    while n_left:
        try:
            n = os.copy_file_range(source, target, n_left, offset, offset)
        except OSError as error:
            if offset or error.errno not in _NO_COPY:
                raise
            return False
        if not n and not offset:
            return False  # so some file systems say that they cannot
        if not n:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        n_left -= n
        offset += n
    return True


def _local_path(storage_uri: str) -> str | None:
    scheme, colon, _ = storage_uri.partition(":")
    if not colon or "/" in scheme:
        return absolute(storage_uri)
    return unquote(urlsplit(storage_uri).path) if scheme.lower() == "file" else None


def _existing(folder: str) -> str:
    """``folder``, or the nearest one above it that is there."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
