"""Erasures beside a sink that commits and merges all the time: no row is lost, none is twice, none comes back."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from tests.snapshot_tables import commit_one
from tests.unit.delta.test_erased_rows import LABEL, SLOT, Table, change, read
from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.log_tables.test_snapshot_log import GENERATION, log_of, written
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.erased_copies import copies_in_log, left_of
from xidstream.pipeline.delta.erased_table import erase_rows
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.log_tables.erased_keys import StoredColumn, parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.mirror.base_table import MirrorMarks
from xidstream.pipeline.mirror.erased_base import erase_base
from xidstream.pipeline.mirror.refresh import TableRefresher
from xidstream.pipeline.pg import Lsn

N_COMMITS = 60


def test_a_sink_that_commits_and_merges_meanwhile_loses_no_row_and_has_none_twice(tmp_path: Path) -> None:
    table = Table(Location.parse(str(tmp_path / LABEL)))
    dice = random.Random(3)
    rows = {
        1000 + i: [change("insert", 1000 + i, s, id=dice.randint(1, 20)) for s in range(3)]
        for i in range(N_COMMITS)
    }
    told = [0]
    n_refused = [0]

    def sink() -> None:
        """As the Delta sink does: what is refused is done again from a new snapshot."""
        for lsn, each in rows.items():
            while True:
                writer = DeltaTableWriter.open(table.location, LABEL)
                assert writer is not None
                if writer.watermark(SLOT) >= lsn:
                    break
                try:
                    writer.commit(table.written(each), {SLOT: lsn}, marks={f"{SLOT}/owner": 3})
                except SnapshotOutdated:
                    n_refused[0] += 1
            told[0] = lsn

    thread = threading.Thread(target=sink)
    thread.start()
    erased: list[tuple[int, int]] = []
    while thread.is_alive():
        key, upto = dice.randint(1, 5), told[0]
        erase_rows(table.location, LABEL, SLOT, parse_keys([f"id = {key}"]), upto)
        erased.append((key, upto))
        thread.join(0.02)
    wanted = [
        (row["_commit_lsn"], row["_seq"], row["id"])
        for each in rows.values()
        for row in each
        if not any(row["id"] == key and row["_commit_lsn"] <= upto for key, upto in erased)
    ]
    assert [(row["_commit_lsn"], row["_seq"], row["id"]) for row in read(table.location)] == wanted
    assert len(erased) > 5 and n_refused[0]


def test_copies_in_a_store_are_found_and_removed(s3: Any) -> None:
    location, _ = s3
    table = Table(location)
    table.commit(change("insert", 1010, id=7), change("insert", 1010, 1, id=8))
    keys = parse_keys(["id = 7"])
    failed = table.written([change("insert", 1010, id=7)], "data-failed")[0].path
    erase_rows(location, LABEL, SLOT, keys, 2000)
    ((replaced,), _) = copies_in_log(location, LABEL, keys, 2000, at_once=False)
    assert left_of(location, [replaced, failed]) == [replaced]
    assert copies_in_log(location, LABEL, keys, 2000, at_once=True) == ([], [])
    assert left_of(location, [replaced]) == []
    assert [row["id"] for row in read(location)] == [8]


def test_a_replaced_file_goes_when_the_table_need_not_keep_it_any_more(tmp_path: Path) -> None:
    table = Table(Location.parse(str(tmp_path / LABEL)))
    table.commit(change("insert", 1010, id=7), change("insert", 1010, 1, id=8))
    keys = parse_keys(["id = 7"])
    erase_rows(table.location, LABEL, SLOT, keys, 2000)
    ((replaced,), _) = copies_in_log(table.location, LABEL, keys, 2000, at_once=False)
    told = {"delta.deletedFileRetentionDuration": "interval 0 hours"}
    DeltaTable(table.location.uri).alter.set_table_properties(told, raise_if_not_exists=False)
    assert copies_in_log(table.location, LABEL, keys, 2000, at_once=False) == ([], [])
    assert left_of(table.location, [replaced]) == []


# -- a refresh of the mirror ------------------------------------------------------------------------------

HELD = {"id": [StoredColumn("id", pa.int64(), "bigint")]}


class Mirrored:
    """A table with a snapshot, and refreshes of its base table without Spark."""

    def __init__(self, root: Path) -> None:
        self.root = Location.parse(str(root))
        log = log_of(root)
        assert commit_one(log, GENERATION, written(log, range(5)))
        of_slot = CommitProperties(app_transactions=[Transaction(SLOT, 200), Transaction(f"{SLOT}/owner", 1)])
        write_deltalake(f"{root}/_transactions", pa.table({"commit_lsn": [200]}), commit_properties=of_slot)

    def refresher(self) -> TableRefresher:
        at = LogFrames(self.root.uri).table_at('public."a.b"', Lsn(150))
        return TableRefresher(DeltaBases(self.root), MirrorMarks(SLOT, 1), at, None, 1 << 20, lambda: None)

    def erase_log(self) -> None:
        keys = parse_keys(["id = 2"])
        erase_rows(self.root.child("public.a~2Eb"), GENERATION.name, SLOT, keys, 150)

    def erase_base(self) -> None:
        erase_base(self.root, SLOT, GENERATION.name, parse_keys(["id = 2"]), HELD)

    def ids(self) -> list[int]:
        found = DeltaTable(f"{self.root.uri}/current/public.a~2Eb").to_pyarrow_table()["id"].to_pylist()
        return sorted(found)


@pytest.mark.parametrize("order", ["log", "log base", "base log base"])
def test_a_refresh_that_has_opened_the_log_of_before_brings_no_row_back(tmp_path: Path, order: str) -> None:
    mirrored = Mirrored(tmp_path)
    late = mirrored.refresher()
    for step in order.split():
        mirrored.erase_log() if step == "log" else mirrored.erase_base()
    with pytest.raises(SnapshotOutdated):
        late.here()
    mirrored.erase_base()
    anew = mirrored.refresher()
    assert anew.here() is not None and mirrored.ids() == [0, 1, 3, 4]


def test_a_refresh_that_came_first_is_erased_from(tmp_path: Path) -> None:
    mirrored = Mirrored(tmp_path)
    early = mirrored.refresher()
    assert early.here() is not None and mirrored.ids() == [0, 1, 2, 3, 4]
    mirrored.erase_log()
    mirrored.erase_base()
    assert mirrored.ids() == [0, 1, 3, 4]


def test_a_state_is_refused_where_another_tool_took_rows_and_not_where_an_erasure_did(tmp_path: Path) -> None:
    mirrored = Mirrored(tmp_path)
    mirrored.erase_log()
    at = LogFrames(mirrored.root.uri).table_at('public."a.b"', Lsn(150))
    assert sum(file.n_rows for file in at.snapshot_files()) == 4
    DeltaTable(mirrored.root.child("public.a~2Eb").uri).delete("id = 3")
    at = LogFrames(mirrored.root.uri).table_at('public."a.b"', Lsn(150))
    with pytest.raises(PreconditionMissing, match="had 4 rows, and its Delta table has 3"):
        at.snapshot_files()
