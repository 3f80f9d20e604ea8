"""pyiceberg's files, such that metadata on a local disk is on disk before a catalog names it.

pyiceberg writes manifests, lists of manifests and the table's metadata to files, and then has the catalog name the
last. After a power cut the catalog's database remembers the name, and the file may be empty: then the table is gone.
So each local file is flushed when it is closed, and its folder with it. An object store answers when an object is
durable.

A commit that loses its race has written a file of metadata that nobody will name. pyiceberg removes the manifests of
such a commit, and not this file. ``written`` collects what the calling thread has written meanwhile.

pyiceberg loads the class by its name (the property ``py-io-impl``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import BinaryIO

from pyiceberg.io import InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.io.pyarrow import PyArrowFileIO

_HERE = threading.local()


@contextmanager
def written() -> Iterator[list[str]]:
    """The locations of the files that this thread begins to write in the block."""
    paths: list[str] = []
    before, _HERE.paths = getattr(_HERE, "paths", None), paths
    try:
        yield paths
    finally:
        _HERE.paths = before


class DurableFileIO(PyArrowFileIO):
    """For files of any place; only what is local is written otherwise."""

    def new_output(self, location: str) -> OutputFile:  # type: ignore[override]
        paths: list[str] | None = getattr(_HERE, "paths", None)
        if paths is not None:
            paths.append(location)
        scheme, _, path = self.parse_location(location, self.properties)
        return _LocalOutput(location, path, self) if scheme == "file" else super().new_output(location)


class _LocalOutput(OutputFile):
    def __init__(self, location: str, path: str, io: PyArrowFileIO) -> None:
        super().__init__(location)
        self._path = path
        self._io = io

    def __len__(self) -> int:
        return os.path.getsize(self._path)

    def exists(self) -> bool:
        return os.path.exists(self._path)

    def to_input_file(self) -> InputFile:
        return self._io.new_input(self._location)

    def create(self, overwrite: bool = False) -> OutputStream:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        return _FlushedStream(open(self._path, "wb" if overwrite else "xb"))

    def open(self, seekable: bool = True) -> InputStream:
        return self.to_input_file().open(seekable)


class _FlushedStream(OutputStream):
    """A file that is on disk when it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, b: bytes) -> int:
        return self._file.write(b)

    def tell(self) -> int:
        return self._file.tell()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        folder = os.open(os.path.dirname(self._file.name), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self,
        exctype: type[BaseException] | None,
        excinst: BaseException | None,
        exctb: TracebackType | None,
    ) -> None:
        self.close()
