"""The tables that a round's sink has written, as its judges ask for them: Delta tables, or Iceberg tables of a folder's
catalog or a REST catalog.

Two moments: ``holds`` is asked while the round goes on, at each status update that passes, and must be quick. All else
is asked when it has ended. Rows are read by deltalake and pyiceberg, and not by our own readers.

Called by ``tests.chaos`` and ``tests.feedback_spy``.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from deltalake import DeltaTable

from xidstream.pipeline.delta.stored_columns import SOURCE_KEY
from xidstream.pipeline.log_tables.locations import MESSAGES, SNAPSHOTS, TRANSACTIONS, encode_table

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

    from tests.iceberg_rest import IcebergRestServer

OWN: Final = frozenset({TRANSACTIONS, MESSAGES, SNAPSHOTS})


class Watermarks:
    """Of one table, at each moment that ``holds`` has a number for: application id → version."""

    def __init__(self, at: list[dict[str, int]]) -> None:
        self._at = at

    def __call__(self, number: int, *, last: bool) -> int:
        """``last``: of the non-transactional messages."""
        held = self._at[number] if 0 <= number < len(self._at) else {}
        return max((v for id_, v in held.items() if id_.endswith("/messages") == last), default=0)


class Lake(ABC):
    """``sink``: the run's setting. Tables are named as they are stored."""

    sink: str

    @abstractmethod
    def name_of(self, schema: str, table: str) -> str: ...

    @abstractmethod
    def tables(self) -> set[str]:
        """The source's."""

    @abstractmethod
    def rows(self, name: str) -> pa.Table | None:
        """None where there is no such table."""

    @abstractmethod
    def columns_of(self, name: str) -> dict[str, list[str]]:
        """A column of the source, in lower case, → the table's columns that may have its values."""

    @abstractmethod
    def added(self, name: str, column: str) -> list[tuple[int, int]]:
        """The least and greatest of ``column`` in the new rows of each commit, in order."""

    @abstractmethod
    def holds(self, name: str) -> int:
        """A number for what the table has now; -1 where there is none."""

    @abstractmethod
    def watermarks(self, name: str) -> Watermarks: ...

    def torn(self) -> list[str]:
        """Where one table was seen ahead of another that it may not be ahead of."""
        return []

    def n_disordered(self, name: str, column: str) -> int:
        """How many commits bring new rows at or below those of an earlier one."""
        reached = n = 0
        for least, greatest in self.added(name, column):
            n += least <= reached
            reached = max(reached, greatest)
        return n


class DeltaLake(Lake):
    """Delta tables below a folder. A number is a version of the table."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sink = f"delta:{root}"

    def name_of(self, schema: str, table: str) -> str:
        return encode_table(schema, table)

    def tables(self) -> set[str]:
        return {path.name for path in self._root.iterdir()} - OWN

    def rows(self, name: str) -> pa.Table | None:
        path = self._root / name
        return DeltaTable(str(path)).to_pyarrow_table() if path.exists() else None

    def columns_of(self, name: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for column in DeltaTable(str(self._root / name)).schema().fields:
            found.setdefault(str(column.metadata.get(SOURCE_KEY, column.name)).lower(), []).append(
                column.name
            )
        return found

    def added(self, name: str, column: str) -> list[tuple[int, int]]:
        """Where small files are merged, the log says that their rows are not new."""
        found = []
        for entry in self._log(name):
            actions = map(json.loads, entry.read_text().splitlines())
            new = [a["add"]["stats"] for a in actions if "add" in a and a["add"]["dataChange"]]
            stats = [json.loads(each) for each in new]
            if stats:
                least, greatest = ([s[k][column] for s in stats] for k in ("minValues", "maxValues"))
                found.append((min(least), max(greatest)))
        return found

    def holds(self, name: str) -> int:
        try:
            names = os.listdir(self._root / name / "_delta_log")
        except FileNotFoundError:
            return -1
        return max((int(n[:20]) for n in names if n.endswith(".json") and n[:20].isdigit()), default=-1)

    def watermarks(self, name: str) -> Watermarks:
        at: list[dict[str, int]] = []
        held: dict[str, int] = {}
        for entry in self._log(name):
            for action in map(json.loads, entry.read_text().splitlines()):
                if "txn" in action:
                    held = {**held, action["txn"]["appId"]: action["txn"]["version"]}
            at.append(held)
        return Watermarks(at)

    def _log(self, name: str) -> list[Path]:
        return sorted((self._root / name / "_delta_log").glob("*.json"))


class IcebergLake(Lake):
    """Iceberg tables of the namespace ``chaos`` of a folder's own catalog.

    Older metadata are removed while a round goes on. So what a table holds is read at each look, and a number is the
    look's: from the catalog's row, which is what makes a commit one.
    """

    _LOCATION: Final = (
        "SELECT metadata_location FROM iceberg_tables WHERE table_namespace = ? AND table_name = ?"
    )

    _namespace = "chaos"
    _name = "xidstream"

    def __init__(self, root: Path) -> None:
        self._file = root / "catalog.db"
        self._lock = threading.Lock()
        self._seen: dict[str, list[dict[str, int]]] = defaultdict(list)
        self._last: dict[str, str] = {}
        self.sink = f"iceberg:{root}/{self._namespace}"

    def name_of(self, schema: str, table: str) -> str:
        from xidstream.pipeline.iceberg.iceberg_tables import table_name

        return table_name(schema, table)

    def tables(self) -> set[str]:
        return {name for _, name in self._catalog().list_tables(self._namespace)} - OWN

    def rows(self, name: str) -> pa.Table | None:
        table = self._table(name)
        return None if table is None else table.scan().to_arrow()

    def columns_of(self, name: str) -> dict[str, list[str]]:
        from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
        from xidstream.pipeline.log_tables.locations import Location

        table = self._table(name)
        assert table is not None
        found: dict[str, list[str]] = {}
        for column in IcebergTableWriter(table, Location.parse(str(self._file.parent)), name).columns:
            found.setdefault(column.source.lower(), []).append(column.name)
        return found

    def added(self, name: str, column: str) -> list[tuple[int, int]]:
        """By the sequence numbers of data files, which stay as they are where manifests are merged. Merged files are
        left out: a merge takes a number after commits whose files it leaves alone."""
        from pyiceberg.conversions import from_bytes
        from pyiceberg.types import LongType

        table = self._table(name)
        snapshot = None if table is None else table.current_snapshot()
        if table is None or snapshot is None:
            return []
        field = table.schema().find_field(column).field_id
        commits: dict[int, list[int]] = defaultdict(list)
        for manifest in snapshot.manifests(table.io):
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                file = entry.data_file
                if "-merged/" in file.file_path:
                    continue
                bounds = file.lower_bounds[field], file.upper_bounds[field]
                assert entry.sequence_number is not None
                commits[entry.sequence_number] += [int(from_bytes(LongType(), bound)) for bound in bounds]
        return [(min(bounds), max(bounds)) for _, bounds in sorted(commits.items())]

    def holds(self, name: str) -> int:
        with self._lock:
            if not self._file.exists():
                return -1
            for _ in range(10):
                location = self._location(name)
                if location is None:
                    return -1
                if location != self._last.get(name):
                    try:
                        found = _watermarks_at(location)
                    except FileNotFoundError:
                        continue  # replaced since, and removed
                    self._last[name] = location
                    self._seen[name].append(found)
                return len(self._seen[name]) - 1
            raise AssertionError(f"the catalog names metadata of {name} that are not there")

    def _location(self, name: str) -> str | None:
        connection = sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=30)
        try:
            row = connection.execute(self._LOCATION, (self._namespace, name)).fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return None  # the catalog is being made
        finally:
            connection.close()
        return None if row is None else str(row[0])

    def watermarks(self, name: str) -> Watermarks:
        return Watermarks(self._seen[name])

    def _table(self, name: str) -> Table | None:
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return self._catalog().load_table((self._namespace, name))
        except NoSuchTableError:
            return None

    def _catalog(self) -> Catalog:
        from pyiceberg.catalog import load_catalog

        return load_catalog(self._name, type="sql", uri=f"sqlite:///{self._file}")


class TogetherLake(IcebergLake):
    """Iceberg tables of a namespace of a REST catalog that commits several at once, over SQLite. Each look is also one
    at all tables: none of the source's may be ahead of ``_transactions``."""

    _ALL: Final = "SELECT table_name, metadata_location FROM iceberg_tables WHERE table_namespace = ?"

    def __init__(self, server: IcebergRestServer, namespace: str) -> None:
        from tests.iceberg_rest import BEHIND

        super().__init__(server.file.parent)
        self._file, self._name, self._namespace = server.file, BEHIND, namespace
        self.sink = f"iceberg:prod/{namespace}"
        self._server = server
        self._read: dict[str, dict[str, int]] = {}
        self._torn: list[str] = []

    def holds(self, name: str) -> int:
        number = super().holds(name)
        with self._lock:
            self._look()
        return number

    def _look(self) -> None:
        with closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=30)) as connection:
            found = dict(connection.execute(self._ALL, (self._namespace,)).fetchall())
        try:
            at = {name: self._watermarks_of(location) for name, location in found.items()}
        except FileNotFoundError:
            return  # replaced since, and removed
        whole = at.get(TRANSACTIONS, {})
        for name in at.keys() - OWN:
            ahead = {
                id_: v for id_, v in at[name].items() if "/" not in id_.partition("/")[2].partition("/")[2]
            }
            self._torn += [
                f"{name} held {version} of {id_}, and {TRANSACTIONS} {whole.get(id_, 0)}"
                for id_, version in ahead.items()
                if version > whole.get(id_, 0)
            ]

    def _watermarks_of(self, location: str) -> dict[str, int]:
        if location not in self._read:
            self._read[location] = _watermarks_at(location)
        return self._read[location]

    def torn(self) -> list[str]:
        none = [] if self._server.n_transactions else ["no request had several tables"]
        return self._torn[:3] or none


def _watermarks_at(location: str) -> dict[str, int]:
    """Of the metadata of an Iceberg table."""
    prefix = "xidstream.lsn."
    properties = json.loads(Path(location.removeprefix("file://")).read_text())["properties"]
    return {k.removeprefix(prefix): int(v) for k, v in properties.items() if k.startswith(prefix)}
