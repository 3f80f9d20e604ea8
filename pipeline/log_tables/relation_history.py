"""Which relation version a row of a Delta table was written under: the table's property ``xidstream.versions``.

A row says what happened, and not what names it: the key, the replica identity and PostgreSQL's types are its relation
version's. So the table records each version whose rows it has, oldest first, as a JSON array of objects:

- ``slot``: the application id of the slot that brought it, because two slots may write below one root, and what one of
  them has seen says nothing of the other's place in the order;
- ``since``: the commit LSN of the first transaction with rows of it, or the place of the snapshot that has it;
- ``after``, where the layout was changed somewhere between the two: the last LSN that is known to have had the layout
  before. What the table's columns were between ``after`` and ``since`` nobody knows. It is missing where ``since`` is
  the very change, and in what an earlier xidstream wrote;
- ``relid``; ``key``: the columns that name a row of the stream, null where only the whole row does, or nothing;
- ``replica_identity``; ``columns``: source column → its PostgreSQL ``type``, and the Delta ``column`` that takes it.
  ``shown`` is the Delta type of its own, where that column's is a wider one (an earlier column of the name had it).

A row of a slot is in the layout of the last of the slot's versions whose ``since`` is not above its ``_commit_lsn``.
The one exception is a transaction that altered the table midway. Its rows are of the versions with its LSN as
``since``, and of the one before them.

Invariants:

- ``since`` is a fact of the stream, and not of how batches are cut: a replay finds what the first pass recorded.
- A version is recorded before, or with, its first row.
- Equal neighbours of a slot are one version. So the array grows with the ALTERs of the table, and with nothing else.

A layout may have no row: ALTER TABLE … ADD COLUMN, and then nothing for a week. A look at the catalog brings it
(``SnapshotLog.lay_out``), with ``after`` as the last LSN that an earlier look has proven. What the stream brought
after that LSN gets an ``after``, too, because the change lies somewhere before its first row.

A snapshot stands at the end of the WAL while the stream may be far behind it. So a version may come to stand before one
that is recorded already. If the two are equal, the later one goes.

Rejected: the least commit LSN of the batch. A batch may hold rows from before and after an ALTER, and is cut otherwise
by each replay. Also rejected: a number of the version in each row, which the late-bound segments have no place for.

Plain values. ``delta`` and ``snapshot_log`` say what they bring, ``delta_table`` records it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from xidstream.pipeline.errors import SinkFailed
from xidstream.pipeline.log_tables.columns import TableColumn, delta_type_name, holds
from xidstream.pipeline.schema import Column, RelationVersion
from xidstream.pipeline.schema.type_names import type_name

VERSIONS: Final = "xidstream.versions"


@dataclass(frozen=True)
class VersionSince:
    """A relation version that has rows from ``since`` on. ``columns``: the table's columns for its own, in order;
    what comes after them (the contract's) does not matter. ``after``: from a look at the catalog, up to where the
    layout is known that was before; None from the stream, and where ``since`` is the very change."""

    slot: str
    since: int
    relation: RelationVersion
    columns: Sequence[TableColumn]
    after: int | None = None

    def to_json(self) -> dict[str, Any]:
        relation = self.relation
        return {
            "slot": self.slot,
            "since": self.since,
            **({} if self.after is None else {"after": self.after}),
            "relid": relation.relid,
            "key": None if relation.key is None else list(relation.key),
            "replica_identity": relation.replica_identity.name.lower(),
            "columns": {
                column.name: {"type": type_name(column), "column": target.name, **_shown(column, target)}
                for column, target in zip(relation.columns, self.columns, strict=False)
            },
        }


def _shown(column: Column, target: TableColumn) -> dict[str, str]:
    own = column.type.arrow
    if target.type == own or not holds(target.type, own) or (own == pa.int16() and target.type == pa.int32()):
        return {}  # A format may have no int2, and have an int4 in its place (``ColumnRules.stored``).
    return {"shown": delta_type_name(own)}


def recorded_with(recorded: str | None, brought: Sequence[VersionSince], label: str) -> str | None:
    """The property's value with the versions that are brought. The same string where it says all of that already.

    ``recorded``: the value that the table ``label`` has, None for none. Raises SinkFailed where it is not readable.
    """
    if not brought:
        return recorded
    try:
        entries: list[dict[str, Any]] = [] if recorded is None else list(json.loads(recorded))
        is_new = False
        for version in brought:
            is_new |= _add(entries, version.to_json())
            if version.after is not None:
                is_new |= _mark(entries, version.slot, version.after)
    except (ValueError, TypeError, KeyError):
        raise SinkFailed(
            f"Delta table {label}: the property {VERSIONS} is not as this sink writes it",
            remedy=f"put the property back as it was, or remove it: {VERSIONS} then begins again with the next row",
        ) from None
    return json.dumps(entries, ensure_ascii=False) if is_new else recorded


def _add(entries: list[dict[str, Any]], new: dict[str, Any]) -> bool:
    """Whether it was not there. ``entries`` are ordered by ``since``."""
    since = new["since"]
    ours = [entry for entry in entries if entry["slot"] == new["slot"]]
    earlier = [entry for entry in ours if entry["since"] < since]
    at_once = [entry for entry in ours if entry["since"] == since]
    if any(_without_since(entry) == _without_since(new) for entry in (*earlier[-1:], *at_once)):
        return False
    later = ours[len(earlier) + len(at_once) :]
    if later and _without_since(later[0]) == _without_since(new):
        entries[:] = [entry for entry in entries if entry is not later[0]]
        if "after" in later[0]:
            new.setdefault("after", later[0]["after"])
    entries.insert(sum(entry["since"] <= since for entry in entries), new)
    return True


def _mark(entries: list[dict[str, Any]], slot: str, after: int) -> bool:
    """Have what the stream brought after ``after`` say that its change lies somewhere before. Whether any did not."""
    ours = [entry for entry in entries if entry["slot"] == slot]
    is_new = False
    for before, entry in itertools.pairwise(ours):
        if entry["since"] > after and "after" not in entry:
            entry["after"] = max(after, before["since"])
            is_new = True
    return is_new


def _without_since(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("since", "after")}
