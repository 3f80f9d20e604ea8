"""What a Delta table says of itself beside its rows: its description, its properties, and comments on its columns.

| property | |
| --- | --- |
| ``xidstream.source`` | the table of PostgreSQL, ``schema.table`` |
| ``xidstream.key`` | JSON: the columns of its replica identity, in order; ``[]`` where it has none |
| ``xidstream.replica_identity`` | ``default``, ``index``, ``full`` or ``nothing`` |
| ``xidstream.types`` | JSON: column → PostgreSQL's type, in the table's order |
| ``xidstream.versions`` | JSON: every layout whose rows the table has (``relation_history``) |
| ``delta.dataSkippingStatsColumns`` | the columns whose minimum and maximum stand in the log, that of the LSNs first |
| ``xidstream.layout`` | the source column that merged files are ordered by, where one is asked for (``layout``) |
| ``delta.logRetentionDuration`` and others | for how long the table keeps what it does not need (``DeltaRetention``) |

All but the versions and the retention are those of the newest layout whose rows the table has. A table is made with
them in one commit. After an ALTER they change before the first batch that has the new layout: in one commit, however
many columns changed.
A batch under the same layout costs one comparison of objects. The types are a property, and not metadata of each
column, because deltalake needs a commit for each column's metadata. Comments stand on the contract's columns alone,
which never change. They are made with the table, as is the description, so that what a user changes there stays.

``delta.dataSkippingStatsColumns`` must be there. deltalake takes each column that it does not exclude for one with
statistics. For a file without them it compares with null, so every filter on another column of a ``to_pyarrow_dataset``
found no row (deltalake 1.6.6). Statistics of all columns were considered. They would have to come from each file's
footer with every commit, and deltalake still gets columns wrong that are null throughout. ``_transactions`` has those
of two more, by which readers look for a commit. One of an earlier xidstream never gets them: it has files without.

A column of a layout is not listed there. Files that nothing has merged yet have no statistics of it, and to list it
would lose their rows to ``to_pyarrow_dataset``, as above (run with deltalake 1.6.6). Its ranges stand in the log all
the same, of the files that are ordered by it, and readers that look at what a file says, not at the property, skip by
them.

Who calls this: ``delta``, for what a table should say, and ``delta_table``, which makes it so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.layout import LAYOUT
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.type_names import type_name
from xidstream.pipeline.settings.delta_retention import DeltaRetention

PREFIX: Final = "xidstream."
SOURCE: Final = f"{PREFIX}source"
KEY: Final = f"{PREFIX}key"
TYPES: Final = f"{PREFIX}types"
STATISTICS: Final = "delta.dataSkippingStatsColumns"

CONTRACT_COMMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "_change_type": "insert, update_preimage, update_postimage, delete, truncate or snapshot",
        "_commit_lsn": "LSN of the transaction's commit; with _seq it orders and identifies every row",
        "_commit_timestamp": "when the transaction committed, by the server's clock",
        "_xid": "the top-level transaction's id",
        "_seq": "place among the rows of the transaction, over all tables, from 0",
        "_unchanged": "columns that the server did not send (unchanged TOAST) and no old tuple fills; null when none",
        "_text": "column -> PostgreSQL's text, of values that the column's type cannot hold; null when none",
    }
)


@dataclass(frozen=True, eq=False)
class TableMetadata:
    """``comments`` are by the name of the Delta column. ``retention`` is None for a table that keeps what Delta keeps.
    ``layout`` is the source column that merged files are ordered by, empty for none, and None to leave the table's. It
    equals only itself."""

    description: str
    properties: Mapping[str, str]
    comments: Mapping[str, str]
    retention: DeltaRetention | None = None
    layout: str | None = None

    def missing(self, found: Mapping[str, str | None]) -> dict[str, str]:
        """The properties that a table has not, or has with another value. A retention that a person has set stays."""
        missing = {key: value for key, value in self.properties.items() if found.get(key) != value}
        if found.get(STATISTICS) == self.properties.get(STATISTICS, "").partition(",")[0]:
            missing.pop(STATISTICS, None)
        if self.layout is not None and (found.get(LAYOUT) or "") != self.layout:
            missing[LAYOUT] = self.layout
        return {**missing, **self.retention.missing(found)} if self.retention is not None else missing


def columns_with_statistics(properties: Mapping[str, str | None]) -> list[str]:
    """The names that the property ``delta.dataSkippingStatsColumns`` lists."""
    return (properties.get(STATISTICS) or "").split(",")


@lru_cache(maxsize=512)
def metadata_of_source(
    relation: RelationVersion, retention: DeltaRetention | None = None, layout: str | None = None
) -> TableMetadata:
    """The metadata of the table with the changes of this relation. It is the same object for equal relations, as long
    as it is remembered; with another one the properties are compared, and no more.
    """
    key = [column.name for column in relation.columns if column.is_key]
    types = {column.name: type_name(column) for column in relation.columns}
    return TableMetadata(
        f"Changes of the PostgreSQL table {relation.name}, one row each, appended by xidstream in commit order.",
        {
            SOURCE: relation.name,
            KEY: json.dumps(key, ensure_ascii=False),
            f"{PREFIX}replica_identity": relation.replica_identity.name.lower(),
            TYPES: json.dumps(types, ensure_ascii=False),
            STATISTICS: "_commit_lsn",
        },
        CONTRACT_COMMENTS,
        retention,
        layout,
    )


NOTHING_KNOWN: Final = TableMetadata("", {}, {})

OF_OWN_TABLES: Final[Mapping[str, TableMetadata]] = MappingProxyType(
    {
        locations.TRANSACTIONS: TableMetadata(
            "One row for each transaction with rows or messages, committed after its rows: what has a commit LSN up to "
            "the greatest commit_lsn here is whole.",
            {STATISTICS: "commit_lsn,commit_timestamp,xid"},
            {},
        ),
        locations.MESSAGES: TableMetadata(
            "One row for each logical message (pg_logical_emit_message), each LSN once.",
            {STATISTICS: "lsn"},
            {},
        ),
        locations.SNAPSHOTS: TableMetadata(
            "One row for each generation of a table, whose rows with _change_type 'snapshot' and _commit_lsn = place "
            "stand for all before the stream, and one more when it has ended.",
            {STATISTICS: "place"},
            {},
        ),
    }
)
