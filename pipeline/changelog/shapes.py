"""The shape of a table at an LSN, from what its Delta table says of itself.

The property ``xidstream.versions`` has each layout of the source with the commit LSN from which its rows are in the
log, and which Delta column takes which of its columns. The shape at an LSN is the last layout at or below it. (Rows of
the snapshot are placed before it: the snapshot's layout is one of them.)

Layouts that came between the place of the snapshot that stands and its ``valid_from`` do not count. The table was
locked then, so none of them is newer than the snapshot's. But a transaction that had begun before a change of the
publication (another column list, ``publish_generated_columns``) may commit there, and its rows have the columns of
before.

Between the last look at the catalog that proves one layout and the first LSN that is known to have the next one
(``after`` and ``since`` of ``relation_history``) there is no state: it would have too many columns, or too few. Rows of
changes have a layout there, that of the stream.

A column may be held in one of a wider type, which an earlier column of its name had. A state has it in its own type.
Changes have it in the wider one, because those of the earlier column are among them.

The key is the generation's, for as long as it stands.

Called by ``table_at``, ``change_log`` and ``log_ranges``. No Spark job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from xidstream.pipeline.changelog.shape import ColumnShape, TableShape
from xidstream.pipeline.errors import PreconditionMissing, StorageFault
from xidstream.pipeline.log_tables.columns import TableColumn, shows, type_named
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.spark.spark_schemas import spark_schema

VERSIONS: Final = "xidstream.versions"
_CONTRACT: Final = frozenset(field.name for field in CONTRACT_FIELDS)


def shape_at(
    table: str,
    columns: Sequence[TableColumn],
    properties: Mapping[str, str],
    key: tuple[str, ...] | None,
    lsn: int,
    slot: str,
    bounds: SnapshotBounds | None = None,
) -> TableShape:
    """``columns``, ``properties``: of the Delta table. ``slot``: application id of the one whose layouts count.
    ``bounds``: of the snapshot that stands at ``lsn``, if one is wanted.

    Raises StorageFault where the properties are not what the sink writes, or name no such column; with ``bounds``
    PreconditionMissing where the table was altered somewhere around ``lsn``.
    """
    own = [column for column in columns if column.name not in _CONTRACT]
    try:
        versions: Sequence[dict[str, Any]] = [
            version for version in json.loads(properties[VERSIONS]) if version["slot"] == slot
        ]
        if bounds is not None:
            versions = _standing(table, versions, lsn, bounds)
        chosen = _from_versions(own, versions, lsn, is_state=bounds is not None)
    except (ValueError, TypeError, LookupError, AttributeError):
        raise StorageFault(
            f"the properties of the log's table of {table} do not say which columns it has",
            remedy=f"put {VERSIONS} back as it was",
        ) from None
    missing = [name for name in key or () if name not in chosen]
    if missing:
        raise StorageFault(f"the log's table of {table} has no column for its key {', '.join(missing)}")
    types = spark_schema(pa.schema([pa.field(name, type_) for name, (type_, _) in chosen.items()]))
    shapes = {
        name: ColumnShape(field.dataType, tuple(column.name for column in held))
        for (name, (_, held)), field in zip(chosen.items(), types.fields, strict=True)
    }
    return TableShape(table, shapes, key)


def layout_lsns(properties: Mapping[str, str], slot: str) -> list[int]:
    """From which commit LSNs on a table of ``slot`` has had another layout, in order; none where it does not say."""
    try:
        versions = json.loads(properties.get(VERSIONS, "[]"))
        return sorted({int(v["since"]) for v in versions if v.get("slot", slot) == slot})
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # ``shape_at`` says what is wrong


def _standing(
    table: str, versions: Sequence[dict[str, Any]], lsn: int, bounds: SnapshotBounds
) -> Sequence[dict[str, Any]]:
    """The layouts that count for a state of the snapshot, at which the table was locked up to ``valid_from``."""
    for version in versions:
        after, since = max(version.get("after", lsn), int(bounds.valid_from)), version["since"]
        if after < lsn < since:
            raise PreconditionMissing(
                f"table {table} is not known at {Lsn(lsn)}: its columns were altered somewhere after {Lsn(after)} and "
                f"up to {Lsn(since)}",
                remedy=f"ask for the state of {Lsn(after)} or before, or for that of {Lsn(since)} or later; with "
                "`xidstream source prepare` the place of such a change is known",
            )
    return [v for v in versions if not bounds.snapshot_lsn < v["since"] <= bounds.valid_from] or versions


def _from_versions(
    columns: Sequence[TableColumn], versions: Sequence[dict[str, Any]], lsn: int, *, is_state: bool
) -> dict[str, tuple[pa.DataType, list[TableColumn]]]:
    by_name = {column.name: column for column in columns}
    upto = [version for version in versions if version["since"] <= lsn] or versions[:1]
    found = {}
    for name, taken in upto[-1]["columns"].items():
        earlier = [v["columns"][name]["column"] for v in reversed(upto[:-1]) if name in v["columns"]]
        names = dict.fromkeys([taken["column"], *earlier])
        newest = by_name[taken["column"]]
        held = [newest, *_castable([by_name[each] for each in names if each != newest.name], newest)]
        found[name] = (type_named(taken["shown"]) if is_state and "shown" in taken else newest.type, held)
    return found


def _castable(columns: Sequence[TableColumn], newest: TableColumn) -> list[TableColumn]:
    return [column for column in columns if shows(newest.type, column.type)]
