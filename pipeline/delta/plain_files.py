"""Whether the files of a Delta table are its rows: each row of each file counts, under the column's own name.

The folds read files, not tables. A tool that deletes rows by deletion vectors, or that renames columns by a column
mapping, makes the files say something else than the table. Rows that somebody deleted would come back.

A table may have the *feature* of deletion vectors and no vector yet. ``check_plain_files`` looks for the vectors
themselves, so that such a table stays readable. The sink's merge of small files asks the protocol alone
(``has_plain_files``): it leaves alone what may get a vector at the same moment.

Called by ``delta_table`` and ``upkeep``, by ``pipeline.changelog.log_table`` and by the mirror. deltalake only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xidstream.pipeline.errors import Unsupported

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.table import ProtocolVersions

_PLAIN_FEATURES: Final = {"timestampNtz", "variantType"}
"""deltalake 1.6.6 lists ``variantType`` with any change of a property of a table that has a timestamp without a time
zone. No column is one for that."""
_VECTORS: Final = "deletionVectors"
_MAPPING_MODE: Final = "delta.columnMapping.mode"
UNMERGED: Final = ("delta.appendOnly", "delta.enableChangeDataFeed")
"""Properties of tables whose files are left as they are."""


def has_plain_files(protocol: ProtocolVersions) -> bool:
    """Whether no feature of the table can make its files say something else. Reader version 2 is column mapping, 3
    lists features."""
    features = set(protocol.reader_features or ())
    return protocol.min_reader_version != 2 and features <= _PLAIN_FEATURES


def is_mergeable(table: DeltaTable) -> bool:
    """Whether small files may become one: not where a file's rows are not the table's, nor where the table says that
    its rows are never removed, or that every change of its rows is told."""
    properties = table.metadata().configuration
    says_no = any(str(properties.get(name)).lower() == "true" for name in UNMERGED)
    return has_plain_files(table.protocol()) and not says_no


def check_plain_files(table: DeltaTable, label: str) -> None:
    """Raise Unsupported where this version of the table has deletion vectors or a column mapping."""
    if has_plain_files(table.protocol()):
        return
    if _VECTORS in (table.protocol().reader_features or ()):
        n_files = sum(batch.num_rows for batch in table.deletion_vectors())
        if n_files:
            raise Unsupported(
                f"another tool has deleted rows of Delta table {label}: {n_files} of its files have deletion vectors, "
                "which reads of a state do not apply",
                remedy="purge them with the tool that made them (REORG TABLE … APPLY (PURGE)), or restore the table to "
                "the version before",
            )
    mode = str(table.metadata().configuration.get(_MAPPING_MODE, "none"))
    if mode != "none":
        raise Unsupported(
            f"another tool has renamed columns of Delta table {label}: its column mapping is by {mode}",
            remedy="restore the table to the version before",
        )
