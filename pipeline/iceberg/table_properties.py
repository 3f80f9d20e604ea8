"""What an Iceberg table says of itself: its properties, and the summaries of its snapshots.

- *Watermarks*: ``xidstream.lsn.<application id>``. The properties outlive the snapshots that brought them, and the
  commits of other programs. The summaries of the snapshots tell where somebody has set the table back to an older
  snapshot: then the newest one that names an application id says less than the property (SinkDiverged).
- *Columns*: ``xidstream.columns`` says of each field id which column of the source it has. So a column that a user
  renames in Iceberg stays the one that its source fills. Files carry no field ids: the name mapping
  (``schema.name-mapping.default``), which pyiceberg renews with each change of the columns, finds theirs.
- *Relation versions*: ``log_tables.relation_history``.

Nothing is committed here. Called by this package alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pyiceberg.table import TableProperties
from pyiceberg.table.name_mapping import create_mapping_from_schema

from xidstream.pipeline.errors import SinkDiverged, SinkFailed
from xidstream.pipeline.iceberg import expiring
from xidstream.pipeline.iceberg.staged_commits import MANIFEST_BYTES
from xidstream.pipeline.log_tables.log_table import NOTHING
from xidstream.pipeline.log_tables.relation_history import VERSIONS, VersionSince, recorded_with
from xidstream.pipeline.log_tables.table_metadata import TableMetadata

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

LSN: Final = "xidstream.lsn."
"""Before an application id: the watermark under it."""
COLUMNS: Final = "xidstream.columns"
COMMENT: Final = "comment"
_FIRST: Final = 1
"""The sequence number of a table's first snapshot."""
_FOREIGN: Final = "delta."
"""What ``TableMetadata`` has for Delta tables alone."""


def watermark_of(table: Table, application_id: str, title: str) -> int:
    """The version last committed under ``application_id`` in the table's snapshot, or ``NOTHING``. ``title``: the
    table's, in errors.

    Raises SinkDiverged where the table was set back to an older snapshot."""
    name = f"{LSN}{application_id}"
    kept = int(table.properties.get(name, NOTHING))
    summaries, is_whole = _summaries(table)
    # Of an id that no snapshot names, the one that did is expired; or it was before all that there are now.
    silent = NOTHING if is_whole else kept
    seen = next((each[name] for each in summaries if name in each), silent)
    if int(seen) != kept:
        raise SinkDiverged(
            f"{title} was set back to an older snapshot: that one holds rows up to {int(seen)}, and the "
            f"table has held them up to {kept}. The rows between would be missing for ever",
            remedy="set the table's main branch to the snapshot that it had, or give the sink another "
            "namespace",
        )
    return kept


def _summaries(table: Table) -> tuple[list[Mapping[str, str]], bool]:
    """What the main branch's snapshots say that are not expired, the newest first; whether that is all of them."""
    snapshots = {each.snapshot_id: each for each in table.snapshots()}
    found: list[Mapping[str, str]] = []
    at, oldest = table.metadata.current_snapshot_id, _FIRST
    while at is not None and (snapshot := snapshots.get(at)) is not None:
        found.append(snapshot.summary.additional_properties if snapshot.summary else {})
        at, oldest = snapshot.parent_snapshot_id, snapshot.sequence_number or 0
    # Where snapshots are expired, pyiceberg takes the parent from the oldest that is left.
    return found, at is None and oldest == _FIRST


def first_properties(
    about: TableMetadata, brought: Sequence[VersionSince], sources: Mapping[int, str], label: str
) -> dict[str, str]:
    """The properties of a new table."""
    return {
        "format-version": "2",
        TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
        TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: str(expiring.EXPIRES_EVERY),
        TableProperties.MANIFEST_MERGE_ENABLED: "true",
        TableProperties.MANIFEST_TARGET_SIZE_BYTES: str(MANIFEST_BYTES),
        COLUMNS: sources_property(sources),
        **properties_of(about),
        **versions_property({}, brought, label),
    }


def properties_of(about: TableMetadata) -> dict[str, str]:
    """The properties of a table that says this of itself."""
    own = {key: value for key, value in about.properties.items() if not key.startswith(_FOREIGN)}
    return {COMMENT: about.description, **own} if about.description else own


def name_mapping_of(schema: Schema) -> str:
    """The property by which columns are found in files without field ids."""
    return create_mapping_from_schema(schema).model_dump_json()


def versions_property(
    found: Mapping[str, str], brought: Sequence[VersionSince], label: str
) -> dict[str, str]:
    """The property that records ``brought``, where ``found`` does not."""
    value = recorded_with(found.get(VERSIONS), brought, label)
    return {} if value is None else {VERSIONS: value}


def sources_of(properties: Mapping[str, str], title: str) -> dict[int, str]:
    """By field id: the column of the source. Raises SinkFailed."""
    try:
        return {int(id_): str(source) for id_, source in json.loads(properties.get(COLUMNS, "{}")).items()}
    except (ValueError, AttributeError):
        raise SinkFailed(
            f"{title}: the property {COLUMNS} is not as this sink writes it",
            remedy="put the property back as it was, or remove it if no column was renamed",
        ) from None


def sources_property(sources: Mapping[int, str]) -> str:
    return json.dumps({str(id_): source for id_, source in sorted(sources.items())}, ensure_ascii=False)
