"""Who owns a slot's record: two runs over one storage, one of which does not know yet that it was taken over from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.opened import opened_at
from tests.unit.storage.conftest import make_batch, prepared_of, relation
from tests.unit.storage.journals import Made
from xidstream.pipeline.commits import slot_storage
from xidstream.pipeline.commits.journal import DamagedFile
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import Action, SlotLost, Superseded
from xidstream.pipeline.exchange import JournalSpan, Opened, SlotIdentity
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.storage import progress
from xidstream.pipeline.storage.journal_file import load_journal_units
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import PREPARED, load_prepared, write_prepared
from xidstream.pipeline.storage.progress import check_owner, read_progress, write_progress
from xidstream.pipeline.storage.resumes import read_resumes, request_resume
from xidstream.pipeline.storage.segment_file import write_segment
from xidstream.pipeline.storage.storage import Storage

__all__ = ["relation"]

SLOT = SlotIdentity(7001, "db", "s")


def opened(confirmed: int = 0x100) -> Opened:
    return opened_at(confirmed, 0x10_000, identity=SLOT)


def run(folder: Path, epoch: str, confirmed: int = 0x100) -> SlotStorage:
    """One that has got the slot and takes the storage over."""
    made = SlotStorage(str(folder), opened(confirmed), epoch)
    made.take_over()
    return made


def layout(epoch: str) -> Layout:
    return Layout(SLOT.system_identifier, SLOT.slot, epoch)


def test_a_late_record_of_a_run_that_was_taken_over_from_counts_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the place of the rightful one's, and named a file of the journal that had been cleaned: the next run
    ended with status 4. The late run had looked whose the slot is before it was taken over from: no storage has a
    conditional write."""
    storage = Storage(str(tmp_path))
    ghost = run(tmp_path, "a")
    write, taken_over = progress._write, []

    def stopped(*args: Any) -> Any:
        monkeypatch.setattr(progress, "_write", write)
        taken_over.append(run(tmp_path, "b"))
        taken_over[0].record(Lsn(0x200), [])
        return write(*args)

    monkeypatch.setattr(progress, "_write", stopped)
    with pytest.raises(Superseded):
        ghost.record(Lsn(0x400), [], Lsn(0x180), [JournalSpan("a", 0, 0)])
    (rightful,) = taken_over
    assert storage.exists(layout("a").record_key(1))
    record = read_progress(storage, layout("b"))
    assert record is not None and (record.epoch, record.confirmed_lsn) == ("b", Lsn(0x200))
    rightful.record(Lsn(0x300), [])
    with pytest.raises(Superseded):
        ghost.record(Lsn(0x500), [])
    taken = SlotStorage(str(tmp_path), opened(0x200), "c").take_over()
    assert (taken.confirmed_lsn, taken.delivered_lsn, taken.journal) == (0x300, 0x300, ())
    assert storage.list_keys(layout("c").progress_prefix) == [layout("c").record_key(3)]


@pytest.mark.parametrize(
    "before_write", [True, False], ids=["before its record", "while it reads the journal"]
)
def test_a_run_that_was_stopped_in_its_take_over_removes_nothing_of_the_one_that_took_over_meanwhile(
    tmp_path: Path, relation: RelationVersion, monkeypatch: pytest.MonkeyPatch, before_write: bool
) -> None:
    """It cleaned by what it had read before, and took what the rightful run had confirmed and the server forgotten."""
    storage = Storage(str(tmp_path))
    run(tmp_path, "z").record(Lsn(0x100), [])
    made = Made(storage, layout("b"), relation)
    name = "take_over_progress" if before_write else "load_prepared"
    go_on = getattr(slot_storage, name)

    taken_over = []

    def stopped(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(slot_storage, name, go_on)
        taken_over.append(run(tmp_path, "b"))
        file = made.write(0, 0x2000, with_segment=True)
        taken_over[0].record(file.end_lsn, [], Lsn(0x100), [JournalSpan("b", 0, 0)])
        return go_on(*args, **named)

    monkeypatch.setattr(slot_storage, name, stopped)
    with pytest.raises(Superseded):
        SlotStorage(str(tmp_path), opened(), "a").take_over()
    (file,) = made.files
    assert load_journal_units(storage, layout("b"), file, lambda _: "ref")
    record = read_progress(storage, layout("b"))
    assert record is not None and record.epoch == "b"
    # It yields, and nobody has to yield to it.
    taken_over[0].record(file.end_lsn, [], Lsn(0x100), [JournalSpan("b", 0, 0)])


@pytest.mark.parametrize("is_alive", [False, True], ids=["stopped before its write", "alive, its link lost"])
def test_a_record_that_is_under_way_while_another_run_takes_over_has_nothing_removed(
    tmp_path: Path, relation: RelationVersion, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """It delivered a file of the journal, recorded that, and removed the file. The other run had read the record
    before, and ended with status 4: only the journal had that file."""
    storage = Storage(str(tmp_path))
    former = run(tmp_path, "a")
    made = Made(storage, layout("a"), relation)
    file = made.write(0, 0x2000, with_segment=True)
    former.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    at_end = dataclasses.replace(opened(int(file.end_lsn)), start_lsn=file.end_lsn)
    rightful = SlotStorage(str(tmp_path), at_end, "b")

    def deliver() -> None:
        former.record(file.end_lsn, [], file.end_lsn, [])
        former.remove_journal([file])

    taken = []
    if is_alive:
        go_on: Any = slot_storage.take_over_progress

        def slow(*args: Any, **named: Any) -> Any:
            monkeypatch.setattr(slot_storage, "take_over_progress", go_on)
            with pytest.raises(Superseded):
                deliver()
            return go_on(*args, **named)

        monkeypatch.setattr(slot_storage, "take_over_progress", slow)
        taken.append(rightful.take_over())
    else:
        write: Any = progress._write

        def stopped(*args: Any) -> Any:
            monkeypatch.setattr(progress, "_write", write)
            taken.append(rightful.take_over())
            return write(*args)

        monkeypatch.setattr(progress, "_write", stopped)
        with pytest.raises(Superseded):
            deliver()
    (found,) = taken[0].journal
    assert found == file and rightful.load_journal(file, lambda table: "ref")
    (found,) = SlotStorage(str(tmp_path), at_end, "c").take_over().journal
    assert found == file
    rightful_again = SlotStorage(str(tmp_path), at_end, "d")
    assert rightful_again.take_over().journal and rightful_again.load_journal(file, lambda table: "ref")


def test_a_damaged_record_of_a_prepare_that_the_journal_is_ahead_of_is_kept(
    tmp_path: Path, relation: RelationVersion
) -> None:
    """The server was asked for what follows the journal, so it does not send that PREPARE again. The slot's own
    position is behind it after a crash of the server."""
    storage, mine = Storage(str(tmp_path)), layout("a")
    first = run(tmp_path, "a")
    key = mine.segment_key(Xid(700), Lsn(0x1700), 0)
    segment = write_segment(storage, key, relation, 700, [make_batch(relation, 0, 3)])
    write_prepared(storage, mine, prepared_of((segment,), end=0x1800))
    file = Made(storage, mine, relation).write(0, 0x2000)
    first.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    (tmp_path / key).rename(tmp_path / "away")
    behind = dataclasses.replace(opened(0x100), start_lsn=file.end_lsn)
    (damaged,) = SlotStorage(str(tmp_path), behind, "b").take_over().prepared
    assert damaged.damage is not None
    (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "away").rename(tmp_path / key)
    (restored,) = SlotStorage(str(tmp_path), behind, "c").take_over().prepared
    assert restored.damage is None and restored.stored_keys() == [key]


def test_what_is_parked_outlives_its_epoch_and_an_epoch_with_a_sink_resumes_it_once(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    bad = ParkedTable(5, "public.bad", Lsn(0x180), Xid(9), "why", n_transactions=2, n_changes=7)
    other = dataclasses.replace(bad, relid=6, table="public.other")
    first = run(tmp_path, "a")
    first.record(Lsn(0x200), [], parked=[bad, other])
    request_resume(storage, layout("a"), 5, "public.bad")
    without_sink = SlotStorage(str(tmp_path), opened(0x200), "b").take_over(resumes=False)
    assert without_sink.parked == (bad, other) and read_resumes(storage, layout("b")) == {5}
    taken_over = SlotStorage(str(tmp_path), opened(0x200), "c").take_over()
    ended = dataclasses.replace(bad, until_lsn=Lsn(0x200), awaits_sink=True)
    assert taken_over.parked == (ended, other)
    assert read_resumes(storage, layout("c")) == frozenset(), "it does not resume the table another time"
    record = read_progress(storage, layout("c"))
    assert record is not None and record.parked == (ended, other), "a crash now changes nothing"


def test_the_park_of_a_dropped_table_ends_and_is_forgotten_before_its_oid_is_given_to_another(
    tmp_path: Path,
) -> None:
    """A new table that got the oid was parked without a word, and the record never became shorter."""
    bad = ParkedTable(5, "public.bad", Lsn(0x180), Xid(9), "why", n_transactions=2, n_changes=7)
    other = dataclasses.replace(bad, relid=6, table="public.other")
    run(tmp_path, "a").record(Lsn(0x200), [], parked=[bad, other])

    def parked(epoch: str, confirmed: int, gone_before: int, then: int) -> tuple[ParkedTable, ...]:
        found = dataclasses.replace(
            opened(confirmed), gone_tables=frozenset({5}), gone_before=Lsn(gone_before)
        )
        storage = SlotStorage(str(tmp_path), found, epoch)
        tables = storage.take_over().parked
        storage.record(Lsn(then), [], parked=tables)
        return tables

    ended = dataclasses.replace(bad, until_lsn=Lsn(0x300))
    assert parked("b", 0x200, 0x300, 0x2FF) == (ended, other), "its last rows may not have come yet"
    assert not ended.covers(0x300) and ended.covers(0x2FF)
    assert parked("c", 0x2FF, 0x400, 0x300) == (ended, other)
    assert parked("d", 0x300, 0x500, 0x300) == (other,)


def test_a_damaged_journal_file_keeps_the_segments_of_a_prepared_transaction_that_it_may_name(
    tmp_path: Path, relation: RelationVersion
) -> None:
    """It is restored, as the error's remedy says, and then everything must still be there."""
    storage, mine = Storage(str(tmp_path)), layout("a")
    run(tmp_path, "a")
    made = Made(storage, mine, relation)
    file = made.write(0, 0x2000, with_segment=True)
    units = load_journal_units(storage, mine, file, lambda table: "ref")
    prepared = prepared_of((units[0][1].segments[0].segment,))
    write_prepared(storage, mine, prepared)
    write_progress(
        storage,
        mine,
        Lsn(0x6000),
        [prepared],
        owner=1,
        delivered_lsn=Lsn(0x1000),
        journal=[JournalSpan("a", 0, 0)],
    )
    path = tmp_path / mine.journal_key(0)
    path.rename(tmp_path / "away")
    (damaged,) = SlotStorage(str(tmp_path), opened(0x6000), "b").take_over().journal
    assert isinstance(damaged, DamagedFile)
    (tmp_path / "away").rename(path)
    restored = SlotStorage(str(tmp_path), opened(0x6000), "c")
    (found,) = restored.take_over().journal
    assert found == file
    assert len(restored.load_journal(file, lambda table: "ref")) == 1


def test_a_server_whose_wal_ends_before_what_the_journal_has_is_refused_and_nothing_is_removed(
    tmp_path: Path, relation: RelationVersion
) -> None:
    """It was restored to an older state, on the same timeline. The slot's own position says nothing: it may be behind
    the record after any crash of the server."""
    storage, mine = Storage(str(tmp_path)), layout("a")
    run(tmp_path, "a")
    made = Made(storage, mine, relation)
    made.write(0, 0x2000)
    unnamed = made.write(1, 0x3000)
    made.record(0x2030, 0x1000, (0, 0))
    kept = storage.list_keys(mine.root)
    restored = opened_at(0x1000, 0x202F, identity=SLOT)
    with pytest.raises(
        SlotLost, match=r"WAL ends at 0/202F, but 0/2030 was confirmed before: it was restored"
    ):
        SlotStorage(str(tmp_path), restored, "b").take_over()
    assert storage.list_keys(mine.root) == kept
    back = dataclasses.replace(opened_at(0x1000, 0x2030, identity=SLOT), start_lsn=Lsn(0x2030))
    (found,) = SlotStorage(str(tmp_path), back, "b").take_over().journal
    assert found == made.files[0] != unnamed


def test_each_run_that_gets_the_slot_has_a_higher_number_and_the_same_position(tmp_path: Path) -> None:
    first = run(tmp_path, "a")
    first.record(Lsn(0x200), [])
    assert first.tenure(0).number == 1
    assert run(tmp_path, "b").tenure(0).number == 2
    record = read_progress(Storage(str(tmp_path)), layout("b"))
    assert record is not None
    assert (record.confirmed_lsn, record.epoch, record.owner) == (Lsn(0x200), "b", 2)


def test_a_run_that_was_taken_over_from_records_delivers_and_claims_nothing_more(tmp_path: Path) -> None:
    """Whoever was behind got status 2 (the position "never goes back"), perhaps the rightful one."""
    ghost = run(tmp_path, "a")
    number = ghost.tenure(0).number
    rightful = run(tmp_path, "b")
    storage = Storage(str(tmp_path))
    for late in (
        lambda: ghost.record(Lsn(0x300), []),
        lambda: ghost.tenure(0),
        lambda: check_owner(storage, layout("a"), number),
    ):
        with pytest.raises(Superseded, match="epoch b's") as refused:
            late()
        assert refused.value.policy.action is Action.RETRY, "it may have the slot again when it is free"
    rightful.record(Lsn(0x200), [])
    check_owner(storage, layout("b"), rightful.tenure(0).number)


def test_a_storage_that_is_younger_than_the_sink_counts_on_from_the_sinks_number(tmp_path: Path) -> None:
    """`slot drop --storage` removes the record; the Delta tables still know the last number."""
    young = run(tmp_path, "a")
    young.record(Lsn(0x200), [])
    assert young.tenure(41).number == 42
    young.record(Lsn(0x300), [])
    assert run(tmp_path, "b").tenure(42).number == 43


def test_the_next_batch_loop_of_an_epoch_claims_the_sink_under_the_same_number(tmp_path: Path) -> None:
    """Under a higher one the sink's own rows, which the server wrote since, were taken for those of another server:
    a run whose JVM was lost ended with status 4."""
    ours = run(tmp_path, "a")
    ours.record(Lsn(0x200), [])
    number = ours.tenure(1).number
    assert number == 2, "the sink has seen 1 from somebody else"
    assert ours.tenure(1).number == number, "the first loop died before it claimed"
    assert ours.tenure(number).number == number


def test_a_superseded_run_cannot_record_past_a_prepare_whose_segments_its_successor_cleaned(
    tmp_path: Path,
) -> None:
    """What was recorded said that the PREPARE is kept, its segments were gone: no later run could start any more,
    though the server, which was never told, sends the PREPARE again."""
    storage = Storage(str(tmp_path))
    ghost = run(tmp_path, "a")
    columns = (Column("id", 23, -1, True), Column("ordinal", 25, -1, False), Column("n", 1700, -1, False))
    relation = RelationVersion(16_400, "public", "t", ReplicaIdentity.DEFAULT, columns)
    key = layout("a").segment_key(Xid(700), Lsn(0x150), 0)
    segment = write_segment(storage, key, relation, 700, [make_batch(relation, 0, 10)])
    run(tmp_path, "b")
    assert not storage.exists(segment.key)
    prepared = prepared_of((segment,), end=0x180)
    manifest = layout("a").prepared_key(prepared.xid, prepared.prepare_end_lsn)
    storage.write_bytes(manifest, PREPARED.seal(prepared))  # an object store does not look for what it names
    with pytest.raises(Superseded):
        ghost.record(Lsn(0x180), [])
    # Nor does it matter where its record came between our look and our taking over: the server's position decides.
    write_progress(storage, layout("b"), Lsn(0x180), owner=2)
    book = SlotStorage(str(tmp_path), opened(0x100), "c").take_over().prepared
    assert (len(book), storage.exists(manifest)) == (0, False)
    storage.write_bytes(manifest, PREPARED.seal(prepared))
    SlotStorage(str(tmp_path), opened(0x180), "d").take_over()
    (damaged,) = load_prepared(storage, layout("d"), Lsn(0x180))
    assert damaged.damage is not None and "missing" in damaged.damage


def test_a_damaged_prepare_that_the_server_was_not_asked_for_again_is_kept(
    tmp_path: Path, relation: RelationVersion
) -> None:
    """With a journal the server begins where the record is, which may be behind what it was told. A manifest between
    the two was taken for one whose PREPARE comes again, and deleted; its COMMIT PREPARED was then lost."""
    storage = Storage(str(tmp_path))
    first = run(tmp_path, "a")
    file = Made(storage, layout("a"), relation).write(0, 0x2000)
    key = layout("a").segment_key(Xid(700), Lsn(0x150), 0)
    segment = write_segment(storage, key, relation, 700, [make_batch(relation, 0, 10)])
    between, behind = (prepared_of((segment,), end=end) for end in (0x180, 0x3000))
    for prepared in (between, behind):
        write_prepared(storage, layout("a"), prepared)
    first.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    manifests = [layout("a").prepared_key(each.xid, each.prepare_end_lsn) for each in (between, behind)]
    for manifest in manifests:
        data = bytearray(storage.read_bytes(manifest))
        data[len(data) // 2] ^= 1
        storage.write_bytes(manifest, bytes(data))
    # The server has not heard of the record: it is asked for what follows that.
    opened = dataclasses.replace(opened_at(0x100, 0x10_000, identity=SLOT), start_lsn=file.end_lsn)
    book = SlotStorage(str(tmp_path), opened, "b").take_over().prepared
    assert [storage.exists(manifest) for manifest in manifests] == [True, False]
    assert len(book) == 1 and not book.is_whole(Xid(700)), "its COMMIT PREPARED says what is damaged"
