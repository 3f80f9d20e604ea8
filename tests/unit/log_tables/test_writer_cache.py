"""How many handles of Delta tables a sink keeps open."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.writer_cache import WriterCache


def writer(root: Path, name: str) -> DeltaTableWriter:
    location = Location.parse(str(root)).child(name)
    return DeltaTableWriter.open_or_create(location, name, [TableColumn("id", pa.int64(), "id")])


def test_handles_of_the_tables_written_last_are_kept_and_the_sinks_own_always(tmp_path: Path) -> None:
    kept = WriterCache(limit=3)
    kept[locations.TRANSACTIONS] = writer(tmp_path, locations.TRANSACTIONS)
    kept[locations.MESSAGES] = writer(tmp_path, locations.MESSAGES)
    made = {name: writer(tmp_path, name) for name in "abcde"}
    for name in "abc":
        kept[name] = made[name]
    assert kept.get("a") is made["a"], "used again"
    kept["d"] = made["d"]
    kept["d"] = made["d"]
    assert kept.get("b") is None and len(kept) == 3 + 2
    assert [kept.get(name) for name in "acd"] == [made[name] for name in "acd"]
    for _ in range(2):
        for name in "abcde":
            kept[name] = made[name]
    assert kept.get(locations.TRANSACTIONS) is not None and kept.get(locations.MESSAGES) is not None
    assert kept.pop("e") is made["e"] and kept.get("e") is None and kept.pop("e", None) is None
    kept.clear()
    assert len(kept) == 0
