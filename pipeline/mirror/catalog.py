"""Base tables in a catalog, where engines look for tables: what is to stand there, and what has to be changed for it.

``Registration`` holds the base tables that the manifest names against the entries that the catalog has, and makes,
changes and removes what differs. A catalog is a ``Catalog``: it lists, puts and removes, and decides nothing.

- An entry is *ours* if it says that it comes from this slot (``SLOT``) and stands below this root. No other one is
  touched. Where one has the name that a base table should have, that table is refused, with the reason. An entry that
  somebody has put in the place of ours since the last listing is found by the catalog's look before it changes one.
- An entry says where the base table is, its columns, and its key. The columns are for people and their tools: engines
  read them from the Delta log. So an entry changes when a table's columns do, and most refreshes ask nothing.
- The entry of a base table that is not kept up any more (``base_table.LEFT_OUT``) says so, with the reason. It goes
  when the base table is gone or emptied.

The comment of a column is its PostgreSQL type, and whether it belongs to the key. The source's own comments
(``pg_description``) are in neither the stream nor the log, so they are not here either.

After any error everything is looked at again. So it is every ``LIST_EVERY_S``, for what others did to the catalog.

Rejected: the version of each refresh in its entry. It would be a request for each table that changed, and engines read
the newest version in any case. Rejected as well: a database for each schema. A person would have to make each of them.

Called by ``base_tables``, from one thread at a time, which need not be that of the refreshes.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import pyarrow as pa

from xidstream.pipeline.changelog.delta_bases import DeltaBase, current
from xidstream.pipeline.changelog.manifest import ManifestLine
from xidstream.pipeline.errors import Unsupported
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import NOTHING
from xidstream.pipeline.log_tables.table_metadata import KEY, PREFIX, SOURCE, TYPES
from xidstream.pipeline.mirror.base_table import LEFT_OUT, BaseFacts, MirrorMarks, facts_of
from xidstream.pipeline.pg_rules import labelled_table

SLOT: Final = f"{PREFIX}slot"
LIST_EVERY_S: Final = 600.0
_UNFIT: Final = re.compile(r"[^a-z0-9_]")
_DIGITS: Final = 8
"""So many of a digest tell names apart."""
_MOST_CHARACTERS: Final = 128
_SIMPLE: Final[Mapping[pa.DataType, str]] = {
    pa.bool_(): "boolean",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
}


@dataclass(frozen=True)
class CatalogColumn:
    """``type``: Hive's text. ``name``: the source's."""

    name: str
    type: str
    comment: str


@dataclass(frozen=True)
class CatalogTable:
    """One entry. ``uri``: where the Delta table is. ``properties``: those with ``PREFIX`` alone."""

    name: str
    uri: str
    comment: str
    columns: tuple[CatalogColumn, ...]
    properties: Mapping[str, str]

    @property
    def source(self) -> str:
        """``schema.table``; empty for an entry of others."""
        return self.properties.get(SOURCE, "")


class Catalog(Protocol):
    """Raises XidstreamErrors alone. ``str``: as the setting names it."""

    def uri_of(self, table: Location) -> str:
        """The table's folder, as the catalog's engines name it."""

    def tables(self) -> list[CatalogTable]:
        """All entries, also those that other programs made."""

    def put(self, table: CatalogTable, *, instead_of: CatalogTable | None) -> None:
        """Make the entry, or change the one of this name, which was ``instead_of``, and which is made where it is gone.
        Raises StorageFault where another's entry is there by now, and Unsupported where the catalog takes no such
        entry."""

    def remove(self, table: CatalogTable) -> None:
        """One that is gone already is no error. Raises StorageFault where another's entry is there by now."""


@dataclass(frozen=True)
class Registered:
    """What was done. ``n_tables``: of this slot, there now. ``refused``: table → why the catalog does not have it."""

    n_tables: int = 0
    n_put: int = 0
    n_removed: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)


class Registration:
    """``root``: of the log. ``clock``: seconds, monotonic."""

    def __init__(self, root: Location, catalog: Catalog, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._catalog = catalog
        self._clock = clock
        self._listed_s: float | None = None
        self._there: dict[str, CatalogTable] = {}
        self._facts: dict[str, BaseFacts] = {}
        """What was told or read of base tables, by ``schema.table``."""
        self._left_out: set[str] = set()
        """Tables of ``_facts`` that the manifest does not name. They are read again with each listing."""

    def __str__(self) -> str:
        return str(self._catalog)

    def bring(
        self,
        lines: Sequence[ManifestLine],
        known: Mapping[str, BaseFacts],
        application_id: str,
        check: Callable[[], None] = lambda: None,
    ) -> Registered:
        """Have the catalog name what ``lines``, the manifest's newest, name. ``known``: by ``schema.table``, what is
        known of base tables; others are opened, once. ``check`` raises where this is to be given up. Raises what the
        catalog and deltalake raise."""
        try:
            return self._bring(lines, known, application_id, check)
        except BaseException:
            self._listed_s = None
            self._facts.clear()
            self._left_out.clear()
            raise

    def _bring(
        self,
        lines: Sequence[ManifestLine],
        known: Mapping[str, BaseFacts],
        application_id: str,
        check: Callable[[], None],
    ) -> Registered:
        now_s = self._clock()
        if self._listed_s is None or now_s - self._listed_s >= LIST_EVERY_S:
            self._there = {table.name: table for table in self._catalog.tables()}
            self._left_out.clear()
            self._listed_s = now_s
        wanted, refused = self._wanted(lines, known, application_id, check)
        n_put, n_removed = 0, 0
        for table in wanted.values():
            if self._there.get(table.name) != table:
                check()
                try:
                    self._catalog.put(table, instead_of=self._there.get(table.name))
                except Unsupported as error:
                    refused[table.source] = error.message
                    continue
                self._there[table.name] = table
                n_put += 1
        for table in [table for table in self._there.values() if self._is_ours(table, application_id)]:
            if table.name not in wanted:
                check()
                self._catalog.remove(table)
                del self._there[table.name]
                n_removed += 1
        n_tables = sum(self._is_ours(table, application_id) for table in self._there.values())
        return Registered(n_tables, n_put, n_removed, refused)

    def _wanted(
        self,
        lines: Sequence[ManifestLine],
        known: Mapping[str, BaseFacts],
        application_id: str,
        check: Callable[[], None],
    ) -> tuple[dict[str, CatalogTable], dict[str, str]]:
        """The entries that are to stand there, by name, and which tables have none, with the reasons."""
        self._facts.update(known)
        directories = {line.table: line.directory for line in lines}
        self._left_out -= directories.keys()
        for table in self._there.values():
            # Its base table may still stand there, with its last rows.
            if self._is_ours(table, application_id) and table.source not in directories:
                if table.source not in self._left_out:
                    self._facts.pop(table.source, None)
                    self._left_out.add(table.source)
                directories[table.source] = table.uri.rpartition("/")[2]
        wanted: dict[str, CatalogTable] = {}
        refused: dict[str, str] = {}
        # Whoever has a name keeps it.
        has_name = {table.source for table in self._there.values() if self._is_ours(table, application_id)}
        for label in sorted(directories, key=lambda label: (label not in has_name, label)):
            location = current(self._root).child(directories[label])
            facts = self._facts.get(label)
            if facts is None:
                check()
                if (facts := _read(location, label, application_id)) is None:
                    continue
                self._facts[label] = facts
            table = entry_of(label, self._catalog.uri_of(location), facts, application_id)
            held = self._there.get(table.name)
            if table.name in wanted:
                refused[label] = f"{wanted[table.name].source} has its name there, {table.name}"
            elif held is not None and not self._is_ours(held, application_id):
                refused[label] = f"another table has its name there, {table.name}"
            else:
                wanted[table.name] = table
        return wanted, refused

    def _is_ours(self, table: CatalogTable, application_id: str) -> bool:
        below = self._catalog.uri_of(current(self._root))
        return table.properties.get(SLOT) == application_id and table.uri.startswith(f"{below}/")


def _read(location: Location, label: str, application_id: str) -> BaseFacts | None:
    """None where there is no base table of this slot, or none with rows of a moment any more."""
    writer = DeltaBase.open(location, label)
    if writer is None:
        return None
    marks = MirrorMarks(application_id, 0)
    if writer.watermark(marks.lsn_id) in (NOTHING, writer.watermark(marks.emptied_id)):
        return None
    return facts_of(writer)


def entry_of(label: str, uri: str, facts: BaseFacts, application_id: str) -> CatalogTable:
    """The entry of the base table of ``label``, which is at ``uri``."""
    key = json.loads(facts.properties.get(KEY, "[]"))
    types = json.loads(facts.properties.get(TYPES, "{}"))
    columns = tuple(
        CatalogColumn(
            each.name,
            hive_type(each.type),
            ", ".join([types.get(each.name, "")] * (each.name in types) + ["key"] * (each.name in key)),
        )
        for each in facts.fields
    )
    comment = f"The PostgreSQL table {label}, refreshed by xidstream."
    properties = {
        name: facts.properties[name] for name in (SOURCE, KEY, LEFT_OUT) if name in facts.properties
    }
    if (left_out := properties.get(LEFT_OUT)) is not None:
        said = json.loads(left_out)
        comment = (
            f"The PostgreSQL table {label} as of {said['lsn']}, not refreshed any more: {said['reason']}"
        )
    return CatalogTable(
        name_of(label), uri, comment, columns, {SOURCE: label, SLOT: application_id, **properties}
    )


def name_of(label: str) -> str:
    """The entry's name for ``schema.table``: ``schema_table`` in small letters, as Glue, Hive and Athena have names.
    Where that is not all of it, a digest of the label tells it from others.

    >>> name_of("public.Orders"), name_of("public.order lines")
    ('public_orders', 'public_order_lines_9b9ad1ee')
    """
    schema_and_table = labelled_table(label)
    assert schema_and_table is not None, label
    plain = "_".join(schema_and_table).lower()
    fit = _UNFIT.sub("_", plain)
    if fit == plain and len(fit) <= _MOST_CHARACTERS:
        return fit
    digest = hashlib.sha256(label.encode()).hexdigest()[:_DIGITS]
    return f"{fit[: _MOST_CHARACTERS - _DIGITS - 1]}_{digest}"


def hive_type(kind: pa.DataType) -> str:
    """Hive's type for a base table's column. Raises ValueError for a type that no base table has."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if pa.types.is_timestamp(kind):
        return "timestamp"  # Hive and Glue have one; which of Delta's two it is, the Delta log says
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return f"array<{hive_type(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{hive_type(kind.key_type)},{hive_type(kind.item_type)}>"
    raise ValueError(f"no base table has a column of Arrow's type {kind}")
