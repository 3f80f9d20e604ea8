"""Where a source table's Delta table is: ``ROOT/`` + enc(schema) + ``.`` + enc(table).

``enc`` keeps ``A-Z a-z 0-9 _ -`` and writes every other UTF-8 byte as ``~XX`` (uppercase hexadecimal). So the one ``.``
in a directory's name is always the separator, different tables never share a directory, and no name leads out of the
root. Percent-encoding was rejected: deltalake percent-decodes local paths, so such a table can be neither created nor
read. The Delta sink calls this; ``decode_table`` is for tools that list a root.

Two names of 63 bytes give up to 379 characters, and a local directory's name has at most 255 bytes. A longer name is
cut, but never inside a character, and ends with ``~~`` and a digest of the whole name. In every other name a ``~`` is
followed by a hexadecimal digit, so a cut name is never that of another table. Names are cut on object stores, too,
which have no such limit, so that a root can be copied from one to the other.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.addresses import check_address
from xidstream.pipeline.settings.local_paths import absolute

TRANSACTIONS: Final = "_transactions"
MESSAGES: Final = "_messages"
SNAPSHOTS: Final = "_snapshots"
CONSUMERS: Final = "_consumers"

MAX_DIRECTORY: Final = 255
"""The most bytes of one part of a path, on every local file system in use."""
_DIGEST: Final = 32
"""Hexadecimal digits, 128 bits: no two tables of one root have the same."""

_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPE: Final = re.compile(rb"~([0-9A-F]{2})")
_TORN: Final = re.compile(r"~[0-9A-F]?\Z")
CUT: Final = "~~"
"""In a name, and in no other place: it is cut."""
_MISREAD: Final = re.compile(r"[%\\\[\]^|]")
"""By deltalake: it decodes %, takes a backslash for a slash, and panics at the others, which is no Exception of
Python's."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
REMOTE_SCHEMES: Final = ("s3", "s3a", "gs", "abfs", "abfss")


def proven_id(application_id: str) -> str:
    """The application transaction of ``_transactions`` that tells the slot's proven LSN
    (``snapshot_log.SnapshotLog.prove``)."""
    return f"{application_id}/proven"


def layouts_id(application_id: str) -> str:
    """The application transaction of ``_transactions`` that tells the last LSN at which a look at the catalog found a
    table in another layout (``snapshot_log.SnapshotLog.lay_out``). No transaction of the log may say so."""
    return f"{application_id}/layouts"


def cut_id(application_id: str) -> str:
    """The application transaction of a table that tells up to which commit LSN its log was cut
    (``pipeline.changelog.shortening``)."""
    return f"{application_id}/cut"


def fold_id(application_id: str) -> str:
    """The application transaction of a table that tells the LSN of the rows which a cut has left in the place of what
    it removed; with more after it (``pipeline.changelog.log_fold``)."""
    return f"{cut_id(application_id)}/fold"


def cut_time_id(application_id: str) -> str:
    """The application transaction of ``_transactions`` that tells the greatest commit timestamp of what was cut, in
    microseconds since the epoch."""
    return f"{cut_id(application_id)}/time"


def encode(name: str) -> str:
    """One identifier as one part of a path; reversible, ASCII."""
    return _UNSAFE.sub(lambda m: b"~%02X" % m[0][0], name.encode()).decode("ascii")


def decode(part: str) -> str:
    """The inverse of ``encode``."""
    return _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]), part.encode("ascii")).decode()


def encode_table(schema: str, table: str) -> str:
    """The directory of a table, at most ``MAX_DIRECTORY`` ASCII characters; the same in every version."""
    return cut(f"{encode(schema)}.{encode(table)}")


def cut(whole: str) -> str:
    """A name made of encoded ones that a directory may have: itself, or the first part of it and a digest."""
    if len(whole) <= MAX_DIRECTORY:
        return whole
    room = MAX_DIRECTORY - len(CUT) - _DIGEST
    digest = hashlib.sha256(whole.encode("ascii")).hexdigest()[:_DIGEST]
    return f"{_whole_characters(whole[:room])}{CUT}{digest}"


def _whole_characters(encoded: str) -> str:
    """``encoded`` without the torn escape, or torn character, that a cut left at its end."""
    kept = _TORN.sub("", encoded)
    while True:
        try:
            for part in kept.split("."):
                decode(part)
        except UnicodeDecodeError:
            kept = kept[: kept.rindex("~")]
        else:
            return kept


def decode_table(directory: str) -> tuple[str, str]:
    """``(schema, table)`` of a directory's name. Raises ValueError if it is not one of a source table, or is cut."""
    if CUT in directory:
        raise ValueError(f"{directory!r} does not have all of its table's name")
    schema, table = directory.split(".")
    return decode(schema), decode(table)


@dataclass(frozen=True)
class Location:
    """A directory in a file system or an object store, as deltalake and pyarrow both find it.

    ``uri`` is an absolute path for a local one, else a URI without a trailing slash. ``storage_options`` are
    deltalake's. They may hold secrets, so they are not in ``repr``. Files in an object store are written through
    deltalake's own file system, so that writing and committing use the same credentials; small ones in S3 by boto3,
    where that has the same (``s3_puts``).
    """

    uri: str
    storage_options: dict[str, str] | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, uri: str, storage_options: dict[str, str] | None = None) -> Location:
        """From a plain path, or a URI of ``file:``, ``s3:``, ``gs:`` or ``abfs:``. Raises ConfigError for any other."""
        check_address(uri, "the root of the Delta tables")
        match = _SCHEME.fullmatch(uri)
        if match is None:
            path = uri
        elif match[1].lower() == "file":
            parts = urlsplit(uri)
            if parts.netloc not in ("", "localhost"):
                raise ConfigError(f"a file: URI names no host, got {parts.netloc!r}")
            path = unquote(parts.path)
        elif match[1].lower() in REMOTE_SCHEMES:
            if not match[2].startswith("//") or not match[2].strip("/"):
                raise ConfigError(f"a {match[1]}: URI needs a bucket or container: {match[1]}://NAME/PATH")
            if "?" in match[2]:
                # deltalake leaves out what follows, the names of all tables among it.
                raise ConfigError(
                    "the root of Delta tables is a URI with a query", remedy="leave out ? and the rest"
                )
            return cls(f"{match[1].lower()}:{match[2].rstrip('/')}", storage_options)
        else:
            known = ", ".join(f"{s}:" for s in ("file", *REMOTE_SCHEMES))
            raise ConfigError(f"unknown scheme {match[1]!r} of a Delta root: give a path or one of {known}")
        if not path:
            raise ConfigError("the root of the Delta tables is empty")
        path = absolute(path)
        if misread := _MISREAD.search(path):
            raise ConfigError(
                f"a local root of Delta tables cannot hold {misread[0]}: deltalake takes it for another folder, or "
                "cannot read it",
                remedy="choose another name for the folder",
            )
        return cls(path, storage_options)

    @property
    def is_local(self) -> bool:
        return self.uri.startswith("/")

    def child(self, name: str) -> Location:
        return Location(f"{self.uri.rstrip('/')}/{name}", self.storage_options)

    def sync(self, paths: Iterable[str]) -> None:
        """Wait until files (relative to ``uri``), and the directory entries from ``uri`` down to them, are on disk.

        An object store needs nothing of this: it answers when an object is durable. Raises OSError.
        """
        if not self.is_local:
            return
        paths = list(paths)
        for path in paths:
            _fsync(os.path.join(self.uri, path))
        self.sync_folders(paths)

    def sync_folders(self, paths: Iterable[str]) -> None:
        """Sync the directory entries alone, of files whose content is on disk already."""
        if not self.is_local:
            return
        folders = {self.uri}
        for path in paths:
            while path := os.path.dirname(path):
                folders.add(os.path.join(self.uri, path))
        for folder in folders:
            _fsync(folder)

    def sync_parents(self) -> None:
        """Sync the entries of all directories that lead to a local ``uri``, which has just been created."""
        folder = self.uri
        while self.is_local and (parent := os.path.dirname(folder)) != folder:
            try:
                _fsync(parent)
            except PermissionError:
                return  # We may not read it, so it was there before.
            folder = parent

    def create(self, path: str) -> pa.NativeFile:
        """Create a file, and its directories. ``path`` is relative to ``uri``. Raises OSError."""
        if self.is_local:
            target = os.path.join(self.uri, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            return pa.OSFile(target, "wb")
        from xidstream.pipeline.log_tables.s3_puts import small_put

        return small_put(self.uri, path, self.storage_options, lambda: self._upload(path)) or self._upload(
            path
        )

    def _upload(self, path: str) -> pa.NativeFile:
        # Not in the module's head: a worker that writes local files need not load deltalake.
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(self.uri, self.storage_options).open_output_stream(path)

    def open(self, path: str, n_bytes: int | None = None) -> Any:
        """A file to read from, as a context. ``path`` is relative to ``uri``. ``n_bytes``: what it has, where that is
        known; else a store is asked, in a request more. Raises OSError."""
        if self.is_local:
            return pa.OSFile(os.path.join(self.uri, path))
        from deltalake.fs import DeltaStorageHandler

        known = None if n_bytes is None else {path: n_bytes}
        return DeltaStorageHandler(self.uri, self.storage_options, known).open_input_file(path)

    def read(self, path: str, n_bytes: int | None = None) -> bytes:
        """All of a file. As ``open``."""
        with self.open(path, n_bytes) as file:
            return bytes(file.read())


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
