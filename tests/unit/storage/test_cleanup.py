"""What an epoch's start removes, and above all what it does not."""

from __future__ import annotations

from pathlib import Path

from tests.unit.storage.conftest import files_below
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.cleanup import clean_dead_epochs, holds_slot, remove_slot
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import load_prepared, write_prepared
from xidstream.pipeline.storage.progress import claim_slot, write_progress
from xidstream.pipeline.storage.server_record import other_servers
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_journal import slots_servers


def spill(storage: Storage, layout: Layout, xid: int, number: int = 0) -> str:
    key = layout.segment_key(Xid(xid), Lsn(0x1000), number)
    storage.write_bytes(key, b"rows")
    return key


def test_dead_epochs_go_and_the_current_one_stays(storage, layout) -> None:
    old = Layout(layout.system_identifier, layout.slot, "old")
    older = Layout(layout.system_identifier, layout.slot, "older")
    for dead in (spill(storage, old, 1), spill(storage, old, 1, 1), spill(storage, older, 2)):
        assert storage.exists(dead)
    alive = spill(storage, layout, 3)
    assert clean_dead_epochs(storage, layout, set()) == 3
    assert storage.list_keys(layout.root) == [alive]
    assert storage.list_folders(layout.epochs_prefix) == [f"{layout.epochs_prefix}/{layout.epoch}"]
    assert clean_dead_epochs(storage, layout, set()) == 0


def test_what_a_prepared_transaction_names_stays_of_a_dead_epoch(storage, layout, prepare) -> None:
    old = Layout(layout.system_identifier, layout.slot, "old")
    prepared = prepare(in_layout=old)
    write_prepared(storage, old, prepared)
    kept = prepared.segments[0].key
    spill(storage, old, 700, 1)
    spill(storage, old, 701)
    keep = {s.key for p in load_prepared(storage, layout) for s in p.segments}
    assert clean_dead_epochs(storage, layout, keep) == 2
    assert storage.list_keys(layout.epochs_prefix) == [kept]
    assert len(load_prepared(storage, layout)) == 1


def test_nothing_outside_the_slots_epochs_is_touched(storage, layout) -> None:
    write_progress(storage, layout, Lsn(5))
    strangers = [
        spill(storage, Layout(layout.system_identifier, "orders2", "old"), 1),
        spill(storage, Layout(layout.system_identifier, "order", "old"), 1),
        spill(storage, Layout(1, layout.slot, "old"), 1),
    ]
    storage.write_bytes("_transactions/part-0.parquet", b"somebody's table under the same root")
    spill(storage, Layout(layout.system_identifier, layout.slot, "old"), 1)
    assert clean_dead_epochs(storage, layout, set()) == 1
    assert all(storage.exists(key) for key in strangers)
    assert storage.exists("_transactions/part-0.parquet")
    assert storage.exists(layout.record_key(1))


def test_an_empty_storage_has_nothing_to_clean(storage, layout) -> None:
    assert clean_dead_epochs(storage, layout, set()) == 0


def test_half_written_files_of_a_killed_buffer_go_with_its_epoch(local, layout, tmp_path: Path) -> None:
    folder = tmp_path / "local" / layout.epochs_prefix / "old" / "1-0000000000001000"
    folder.mkdir(parents=True)
    (folder / ".0.parquet.0123456789abcdef.tmp").write_bytes(b"half")
    assert clean_dead_epochs(local, layout, set()) == 0
    assert files_below(tmp_path / "local") == set()


def test_a_dropped_slots_record_goes_whole_and_its_neighbours_stay(storage, layout, prepare) -> None:
    neighbours = [Layout(layout.system_identifier, "orders2", "e"), Layout(1, layout.slot, "e")]
    for neighbour in neighbours:
        write_progress(storage, neighbour, Lsn(5))
        spill(storage, neighbour, 1)
    write_progress(storage, layout, Lsn(5))
    write_prepared(storage, layout, prepare())
    spill(storage, Layout(layout.system_identifier, layout.slot, "old"), 1)
    storage.write_bytes(layout.journal_key(0), b"journal")
    assert holds_slot(storage, layout)
    assert remove_slot(storage, layout) == {
        layout.prepared_prefix: 1,
        layout.journal_prefix: 1,
        layout.epochs_prefix: 2,
        layout.progress_prefix: 1,
    }
    assert not holds_slot(storage, layout)
    assert storage.list_keys(layout.root) == []
    assert remove_slot(storage, layout) == {}
    assert all(len(storage.list_keys(n.root)) == 2 for n in neighbours)


def test_a_position_or_a_prepared_transaction_is_a_record_and_segments_are_none(
    storage, layout, prepare
) -> None:
    assert not holds_slot(storage, layout)
    prepared = prepare()
    assert not holds_slot(storage, layout)
    write_prepared(storage, layout, prepared)
    assert holds_slot(storage, layout)
    remove_slot(storage, layout)
    storage.write_bytes(layout.record_key(1), b"damaged")
    assert holds_slot(storage, layout)


def test_a_cloned_servers_slot_is_seen_by_its_record_alone(storage, layout) -> None:
    """The clone has another system identifier, and the storage a folder for each of the two."""
    clone = Layout(1, layout.slot, "e")
    claim_slot(storage, layout)
    assert not holds_slot(storage, layout) and other_servers(storage, clone) == [], "a claim records nothing"
    write_progress(storage, layout, Lsn(5))
    assert other_servers(storage, clone) == slots_servers(storage, layout.slot) == [layout.system_identifier]
    assert other_servers(storage, layout) == other_servers(storage, Layout(1, "orders2", "e")) == []
    assert holds_slot(storage, layout) and not holds_slot(storage, clone)
