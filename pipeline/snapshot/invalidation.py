"""What ends a generation of a table: from then on its snapshot and the stream together are not the table any more.

Two surveys of the catalog are compared, the one at the snapshot and a new one. The stream says some of it itself
(another relation version); this is for what it does not say: rows that change, come or go without a message.

What came and went between two surveys leaves no value that differs. It leaves catalog rows that somebody wrote
(``postgres.catalog_witnesses``): a row with another xmin, and with the same harmless values, ends the generation. For
that the last survey counts, not the one at the snapshot: a GRANT today and a REVOKE tomorrow are two harmless changes.
So the record of a generation is written anew where its witnesses changed (``renewed``).

- ADD COLUMN with a default gives older rows a value, by ``atthasmissing`` or by writing the table anew.
- ALTER TYPE that writes the table anew changes values. One that does not leaves them as they are.
- ALTER TYPE … RENAME VALUE of an enum, and another attribute of a composite type, change the text of older rows.
- ALTER COLUMN … SET EXPRESSION of a generated column (17) computes its values anew.
- A column that is published now, or is not any more, though it was there all the time: a generated one that became a
  plain one (DROP EXPRESSION), or ``publish_generated_columns``.
- A column that was renamed, or dropped and added again, stands in the snapshot's rows under a name that means another.
- ATTACH and DETACH (or DROP of a partition) bring and take rows. A partition that was made as one was empty then.
- Under ``publish_via_partition_root`` a TRUNCATE of one partition is not in the stream. The catalog shows no more than
  that the partition has a new file, which it has after VACUUM FULL, too. That ends the generation as well: a snapshot
  too many is better than rows too many.
- Another row filter or column list, an operation that is left out, or a time without being published: changes are
  missing.
- Another identity: rows of the snapshot cannot be found by it.
- Under REPLICA IDENTITY FULL, the primary key that named the rows: it was dropped, or made again, so that two rows may
  have had one key. (A table that has no key gets along with one: whole rows still name themselves.)

What does not end it, but is another layout (``is_laid_out``), which the log has to be told: ADD COLUMN without a
default, DROP COLUMN, and ALTER TYPE that keeps all values. The stream says it with the table's next row, and that may
be a week later.

What does not end it: TRUNCATE (the stream has it), ANALYZE, indexes, and a publication that publishes the table as
well.

What may end it: rows in a new file. TRUNCATE, VACUUM FULL and CLUSTER are harmless. SET UNLOGGED, a load and SET LOGGED
leave another file, too, and the rows of the load are in no stream. Where every ALTER TABLE leaves a message
(``postgres.ddl_trigger``), a file without one is harmless. Elsewhere the TOAST table tells: ALTER TABLE makes another
one (``finish_heap_swap`` in ``src/backend/commands/cluster.c``), and the harmless ones keep it. A table
of short columns has none, and a new file ends its generation: a snapshot too many is better than wrong rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.schema import Column
from xidstream.pipeline.schema.type_names import type_name
from xidstream.pipeline.snapshot.tables import PublishedSource

_SAME_TEXT: Final = frozenset({"text", "character varying"})
"""Types between which ALTER TYPE keeps both the stored values and their text."""


def signature_of(source: PublishedSource) -> dict[str, Any]:
    """What ``reason_it_ended`` needs of a table as it was at its snapshot. JSON-able."""
    relation = source.relation
    return {
        "relid": relation.relid,
        "table": relation.name,
        "published_as": source.published_as,
        "row_filter": source.row_filter,
        "change_filters": list(source.change_filters),
        "left_out": list(source.unpublished_operations),
        "replica_identity": relation.replica_identity.value,
        "columns": _layout_of(source),
        **_files_of(source),
        "expressions": [list(each) for each in source.expressions],
        "primary_key": None if source.primary_key is None else source.primary_key.constraint,
        "type_parts": [list(part) for part in source.type_parts],
        "unpublished": list(source.unpublished),
        "witnesses": _witnesses_of(source),
    }


def renewed(then: Mapping[str, Any], now: PublishedSource) -> dict[str, Any] | None:
    """The signature of a generation that stands, with the witnesses and files of ``now``; None where they are the
    same."""
    found = {"witnesses": _witnesses_of(now), **_files_of(now)}
    return None if all(then.get(name) == value for name, value in found.items()) else {**then, **found}


def is_laid_out(then: Mapping[str, Any], now: PublishedSource) -> bool:
    """Whether the log has been told of the columns of ``now``."""
    return bool(then.get("layout", then["columns"]) == _layout_of(now))


def laid_out(then: Mapping[str, Any], now: PublishedSource) -> dict[str, Any]:
    """The signature of a generation that stands, when the log has been told of the columns of ``now``."""
    return {**then, "layout": _layout_of(now)}


def _layout_of(source: PublishedSource) -> list[list[Any]]:
    return [
        [attnum, c.name, c.type_oid, c.type_modifier, c.is_key, c.base_type_name]
        for attnum, c in zip(source.attnums, source.relation.columns, strict=True)
    ]


def _files_of(source: PublishedSource) -> dict[str, list[list[int]]]:
    return {
        "leaves": [[leaf.relid, leaf.file_node] for leaf in source.leaves],
        "toasts": [[leaf.relid, leaf.toast] for leaf in source.leaves],
    }


def _witnesses_of(source: PublishedSource) -> dict[str, list[Any]]:
    return {witness.row: [witness.xmin, witness.harmless] for witness in source.witnesses}


def reason_it_ended(
    then: Mapping[str, Any], now: PublishedSource | None, *, is_witnessed: bool = True
) -> str | None:
    """Why a snapshot with the signature ``then`` does not stand any more, as a clause for people; None if it does.

    ``now``: the published table of this name, None if there is none. ``is_witnessed``: whether rows in a new file are
    harmless, because every ALTER TABLE since ``then`` has left a message, or because the snapshot has yet to be read.
    """
    if now is None:
        return "the table is not published any more"
    if now.relation.relid != then["relid"]:
        return "the table was dropped and created again"
    if now.relation.name != then["table"]:
        return f"the table was renamed to {now.relation.name}"
    return (
        _publication(then, now)
        or _leaves(then, now)
        or (None if is_witnessed else _rewritten(then, now))
        or _columns(then, now)
        or _identity(then, now)
        or _witnesses(then, now)
    )


def _publication(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    if then["row_filter"] != now.row_filter or then["change_filters"] != list(now.change_filters):
        return "the row filter of its publication changed"
    before, after = json.loads(then["published_as"]), json.loads(now.published_as)
    if set(before).isdisjoint(after):
        return "it was dropped from its publication and added again, perhaps with another column list"
    if "truncate" in then["left_out"] and _is_rewritten(then, now):
        return "it was truncated or rewritten, and its publications leave out truncate"
    newly = [name for name in now.unpublished_operations if name not in then["left_out"]]
    if newly:
        return f"its publications leave out {', '.join(newly)}"
    return None


def _is_rewritten(then: Mapping[str, Any], now: PublishedSource) -> bool:
    files = dict(then["leaves"])
    return any(files.get(leaf.relid, leaf.file_node) != leaf.file_node for leaf in now.leaves)


def _leaves(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    files = dict(then["leaves"])
    leaves = {leaf.relid: leaf for leaf in now.leaves}
    if files.keys() - leaves.keys():
        return "a partition was detached or dropped"
    for relid, leaf in leaves.items():
        if relid not in files and not leaf.made_as_partition:
            return f"{table_label(leaf.schema, leaf.table)} was attached as a partition"
        # A table that is published as itself has its TRUNCATE in the stream.
        if relid in files and relid != now.relation.relid and files[relid] != leaf.file_node:
            return (
                f"partition {table_label(leaf.schema, leaf.table)} was truncated or rewritten, which the stream does "
                "not say under publish_via_partition_root"
            )
    return None


def _rewritten(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    files, toasts = dict(then["leaves"]), dict(then.get("toasts", ()))
    for leaf in now.leaves:
        is_harmless = leaf.toast and toasts.get(leaf.relid) == leaf.toast
        if files.get(leaf.relid, leaf.file_node) != leaf.file_node and not is_harmless:
            return (
                "its rows are in a new file, perhaps by SET UNLOGGED and SET LOGGED, and without the event triggers of "
                "`xidstream source prepare` nobody knows whether all of them were in the stream"
            )
    return None


@dataclass(frozen=True)
class _Then:
    attnum: int
    column: Column

    @classmethod
    def of(cls, value: list[Any]) -> _Then:
        return cls(value[0], Column(*value[1:]))


def _columns(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    is_rewritten = _is_rewritten(then, now)
    known = [_Then.of(value) for value in then["columns"]]
    by_attnum = {each.attnum: each.column for each in known}
    names = {each.column.name for each in known}
    expressions = dict(then["expressions"])
    altered = _altered_types(then, now)
    unpublished = set(then["unpublished"])
    if hidden := [by_attnum[attnum] for attnum in now.unpublished if attnum in by_attnum]:
        return f"column {hidden[0].name} is not published any more"
    for attnum, column in zip(now.attnums, now.relation.columns, strict=True):
        before = by_attnum.get(attnum)
        if attnum in unpublished:
            return f"column {column.name} was not published before, so the log lacks its values"
        if before is None and column.name in names:
            return f"column {column.name} was dropped and added again"
        if before is None:
            if column.name in now.missing_defaults:
                return f"column {column.name} was added with a default"
            if is_rewritten:
                return f"column {column.name} was added, and the table was rewritten, perhaps with a default"
        elif before.name != column.name:
            return f"column {before.name} was renamed to {column.name}"
        elif not _keeps_values(before, column, is_rewritten=is_rewritten):
            return f"the type of column {column.name} changed from {type_name(before)} to {type_name(column)}"
        elif dict(now.expressions).get(attnum) not in (None, expressions.get(attnum)):
            return f"the expression of column {column.name} changed"
        elif column.type_oid in altered:
            return (
                f"the type of column {column.name} was altered: a label of an enum was renamed, or a composite type "
                "has other attributes"
            )
    return None


def _altered_types(then: Mapping[str, Any], now: PublishedSource) -> set[int]:
    """Types of columns whose older values have another text now. New labels of an enum change nothing."""
    texts = {(type_oid, part): text for type_oid, part, text in now.type_parts}
    return {
        type_oid for type_oid, part, text in then["type_parts"] if texts.get((type_oid, part), text) != text
    }


def _keeps_values(then: Column, now: Column, *, is_rewritten: bool) -> bool:
    if (then.type_oid, then.type_modifier) == (now.type_oid, now.type_modifier):
        return True
    if is_rewritten:
        return False
    names = {_bare(then), _bare(now)}
    return len(names) == 1 or names <= _SAME_TEXT


def _bare(column: Column) -> str:
    """The base type's name without its modifier."""
    return type_name(Column(column.name, column.type_oid, -1, column.is_key, column.base_type_name))


def _identity(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    if then["replica_identity"] != now.relation.replica_identity.value:
        return "its replica identity changed"
    # A key column that is gone was dropped, and the key with it.
    if {attnum for attnum, *_, is_key, _ in then["columns"] if is_key} != {
        attnum for attnum, column in zip(now.attnums, now.relation.columns, strict=True) if column.is_key
    }:
        return "the columns of its replica identity changed"
    constraint = then["primary_key"]
    if constraint is not None and (now.primary_key is None or now.primary_key.constraint != constraint):
        return "its primary key was dropped, or another one made"
    return None


def _witnesses(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    known = then["witnesses"]
    for witness in now.witnesses:
        xmin, harmless = known.get(witness.row, (witness.xmin, ""))
        if witness.xmin != xmin and witness.harmless == harmless:
            return (
                f"{witness.about} was altered in a way that leaves no difference in the catalog: its rows may have "
                "been written anew, or changes may be missing"
            )
    return None
