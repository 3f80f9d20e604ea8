"""A storage that is taken over without a record, or with a damaged one: what may be the only copy stays."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.opened import opened_at
from tests.unit.storage.conftest import make_batch, prepared_of, relation
from tests.unit.storage.journals import Made
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import ExitStatus, SegmentCorrupt, SlotLost, StorageFault
from xidstream.pipeline.exchange import Beginning, JournalSpan, SlotIdentity
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.beginning_record import read_beginning, write_beginning
from xidstream.pipeline.storage.journal_file import load_journal_units
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import write_prepared
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.segment_file import write_segment
from xidstream.pipeline.storage.storage import Storage

__all__ = ["relation"]

SLOT = SlotIdentity(7001, "db", "s")


def layout(epoch: str) -> Layout:
    return Layout(SLOT.system_identifier, SLOT.slot, epoch)


def run(folder: Path, epoch: str, confirmed: int = 0x100) -> SlotStorage:
    made = SlotStorage(str(folder), opened_at(confirmed, 0x10_000, identity=SLOT), epoch)
    made.take_over()
    return made


def test_whoever_follows_the_remedy_of_a_damaged_record_or_removes_it_all_the_same_keeps_the_journal(
    tmp_path: Path, relation: RelationVersion
) -> None:
    """The remedy was to remove the record, "if nothing else has read from the slot". Nothing else had. Then the next
    take-over trusted the slot, and deleted the journal, with all that was confirmed and delivered to nobody."""
    storage = Storage(str(tmp_path))
    first = run(tmp_path, "a")
    file = Made(storage, layout("a"), relation).write(0, 0x2000, with_segment=True)
    first.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    record = read_progress(storage, layout("a"))
    assert record is not None
    data = bytearray(storage.read_bytes(record.key))
    data[len(data) // 2] ^= 1
    backup, damaged = storage.read_bytes(record.key), bytes(data)
    storage.write_bytes(record.key, damaged)
    with pytest.raises(SegmentCorrupt) as refused:
        run(tmp_path, "b", int(file.end_lsn))
    assert "remove nothing" in refused.value.remedy
    (tmp_path / refused.value.message.split("'")[1]).unlink()
    kept = storage.list_keys(layout("a").root)
    with pytest.raises(SlotLost, match="has no record of slot s, but 1 object of its journal") as lost:
        run(tmp_path, "b", int(file.end_lsn))
    assert lost.value.policy.exit_status is ExitStatus.TERMINAL
    assert storage.list_keys(layout("a").root) == kept
    storage.write_bytes(record.key, backup)
    (found,) = (
        SlotStorage(str(tmp_path), opened_at(int(file.end_lsn), 0x10_000, identity=SLOT), "c")
        .take_over()
        .journal
    )
    assert found == file
    assert load_journal_units(storage, layout("c"), file, lambda _: "ref")


def test_a_prepared_transaction_without_a_record_is_kept_and_refused(
    tmp_path: Path, relation: RelationVersion
) -> None:
    """It was there for the next run, under a record that trusted the slot: nobody had looked what else was missing."""
    storage = Storage(str(tmp_path))
    key = layout("a").segment_key(Xid(700), Lsn(0x50), 0)
    segment = write_segment(storage, key, relation, 700, [make_batch(relation, 0, 10)])
    write_prepared(storage, layout("a"), prepared_of((segment,), end=0x180))
    kept = storage.list_keys(layout("a").root)
    with pytest.raises(SlotLost, match="1 object of its journal and of prepared transactions"):
        run(tmp_path, "b")
    assert storage.list_keys(layout("a").root) == kept


def test_an_epoch_whose_storage_goes_away_records_nothing_in_the_empty_folder(tmp_path: Path) -> None:
    """The volume was unmounted: it wrote its record into the folder below, and confirmed. The volume's own record was
    behind the slot then, for good."""
    folder, away = tmp_path / "mnt" / "xs", tmp_path / "volume"
    epoch = run(folder, "a")
    epoch.record(Lsn(0x200), [])
    shutil.move(folder, away)
    folder.mkdir()
    with pytest.raises(StorageFault, match="is gone: the storage is not the one"):
        epoch.record(Lsn(0x300), [])
    assert not list(folder.rglob("*.json"))
    folder.rmdir()
    shutil.move(away, folder)
    epoch.record(Lsn(0x300), [])
    assert run(folder, "b", 0x300).tenure(0).number == 2


def test_a_first_run_may_go_on_where_its_storage_began_and_not_where_somebody_else_has_confirmed_since(
    tmp_path: Path,
) -> None:
    storage = Storage(str(tmp_path))
    write_beginning(storage, layout("a"), Beginning(Lsn(0x100)))
    with pytest.raises(SlotLost, match="began at 0/100, and the slot is confirmed up to 0/101"):
        run(tmp_path, "a", 0x101)
    assert storage.list_keys(layout("a").progress_prefix) == []
    run(tmp_path, "a", 0x100)
    assert read_progress(storage, layout("a")) is not None


def test_what_a_sink_that_remembers_has_held_never_falls_and_outlives_its_epoch(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    first = run(tmp_path, "a")
    first.held_lsn = Lsn(0x180)
    first.record(Lsn(0x200), [])
    second = run(tmp_path, "b", 0x200)
    second.record(Lsn(0x300), [])
    third = run(tmp_path, "c", 0x300)
    third.held_lsn = Lsn(0x280)
    third.record(Lsn(0x400), [])
    record = read_progress(storage, layout("c"))
    assert record is not None and record.held_lsn == 0x280


# -- the sequencer, when it knows the sink -----------------------------------------------------------------


class Reader:
    async def tell(self, confirmed_lsn: Lsn, done: int, free: int) -> None:
        """Nothing is confirmed here."""


def open_sink(folder: Path, watermark: int, owner: int, *, sink: str = "delta:/lake", anew: str = "") -> None:
    config = Config(storage=str(folder), slot="s", sink=sink, begin_anew=anew)

    async def work() -> None:
        sequencer = CommitSequence(config, "z", lambda error: error, lambda ref: ref, lambda table: table)
        await sequencer.open(Reader().tell, opened_at(0x500, 0x10_000, identity=SLOT), None)
        await sequencer.sink_opened(Lsn(watermark), owner)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_first_run_into_a_sink_that_knows_the_slot_is_refused_and_a_person_may_begin_anew(
    tmp_path: Path,
) -> None:
    write_beginning(Storage(str(tmp_path)), layout("z"), Beginning(Lsn(0x500)))
    with pytest.raises(SlotLost, match=r"run 3 of the slot \(its transactions: up to 0/400\)") as refused:
        open_sink(tmp_path, 0x400, 3)
    assert "`--begin-anew 0/500`" in refused.value.remedy
    shutil.rmtree(tmp_path / str(SLOT.system_identifier))
    write_beginning(Storage(str(tmp_path)), layout("z"), Beginning(Lsn(0x500)))
    open_sink(tmp_path, 0x400, 3, anew="0/500")
    begun = read_beginning(Storage(str(tmp_path)), layout("z"))
    assert begun is not None and begun.is_anew and "run 3" in begun.against[0]


def test_who_was_told_where_the_sink_ends_while_there_was_no_slot_begins_anew_with_the_slot_that_is_made(
    tmp_path: Path,
) -> None:
    write_beginning(Storage(str(tmp_path)), layout("z"), Beginning(Lsn(0x500)))
    open_sink(tmp_path, 0x400, 3, anew="0/400")
    begun = read_beginning(Storage(str(tmp_path)), layout("z"))
    assert begun == Beginning(Lsn(0x500), True, begun.against if begun else ())


@pytest.mark.parametrize("watermark", [0, 0x380], ids=["empty", "older"])
def test_a_sink_that_has_less_than_was_delivered_to_one_is_refused_and_a_person_may_go_on(
    tmp_path: Path, watermark: int
) -> None:
    """A Delta root whose volume was not mounted was made anew: what came before was in no table, and nobody said it."""
    before = run(tmp_path, "a")
    before.held_lsn = Lsn(0x400)
    before.record(Lsn(0x500), [])
    with pytest.raises(SlotLost, match="up to the commit at 0/400 to its Delta tables"):
        open_sink(tmp_path, watermark, 0)
    open_sink(tmp_path, 0, 0, sink="foreach:m:f")  # a function has no memory
    open_sink(tmp_path, watermark, 0, anew="0/400")
    open_sink(tmp_path, watermark, 0)  # it is noted
    open_sink(tmp_path, 0x400, 1)
