"""Which tables need a snapshot: by the catalog, by what the sink tells, by the record and by people's wishes."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pytest

from xidstream.pipeline.errors import SnapshotInterrupted
from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine
from xidstream.pipeline.parked import ParkedTable, SkippedTransaction, resumed
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.snapshot.key_filter import KeyFilter, Repair, parse_key_filter
from xidstream.pipeline.snapshot.tables import Leaf, PrimaryKey, PublishedSource, Witness
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.skips import Skip, note_skipped, write_skip
from xidstream.pipeline.storage.snapshot_record import cancel, read_taken, read_wishes, request
from xidstream.pipeline.storage.storage import Storage

LAYOUT = Layout(7, "orders", "epoch")
BOUNDS = SnapshotBounds(Lsn(99), Lsn(120), 700, 710, (705,), 0)
LSN = Lsn(50)
"""Of a survey that was taken before any snapshot here."""
INITIAL, NEVER = Decision(takes_snapshots=True), Decision(takes_snapshots=False)


def source_of(relid: int, table: str = "", published_as: str = '["table"]') -> PublishedSource:
    relation = RelationVersion(
        relid, "public", table or f"t{relid}", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),)
    )
    leaf = Leaf(relid, "public", relation.table, 1, 8192)
    return PublishedSource(relation, published_as, None, (leaf,), attnums=(1,))


def told(generation: Generation, *, is_ours: bool = True) -> GenerationLine:
    return GenerationLine(
        generation.name, generation.relid, generation.number, 99, 100, GenerationState.FINISHED, is_ours
    )


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def book_of(storage: Storage, decision: Decision = INITIAL) -> SnapshotBook:
    return SnapshotBook(storage, LAYOUT, decision)


def taken(storage: Storage, source: PublishedSource) -> GenerationLine:
    """As if a run had taken and committed it."""
    book = book_of(storage)
    generation = book.begin(source, BOUNDS, 0)
    assert generation is not None
    book.finish(generation)
    return told(generation)


def wanted(book: SnapshotBook, sources: list[PublishedSource], lines: list[GenerationLine]) -> list[int]:
    return [each.source.relation.relid for each in book.needs(sources, lines, LSN).wanted]


def test_every_published_table_is_wanted_until_the_sink_tells_its_generation(storage: Storage) -> None:
    sources = [source_of(1), source_of(2)]
    assert wanted(book_of(storage), sources, []) == [1, 2]
    line = taken(storage, sources[0])
    assert wanted(book_of(storage), sources, [line]) == [2]
    assert wanted(book_of(storage), sources, []) == [1, 2], "a sink without the line does not have the rows"
    assert wanted(book_of(storage, NEVER), sources, []) == []


def test_a_generation_under_full_is_keyed_by_the_primary_key_that_was_there_under_the_lock(
    storage: Storage,
) -> None:
    source = source_of(1)
    full = dataclasses.replace(source.relation, replica_identity=ReplicaIdentity.FULL)
    keyless = dataclasses.replace(source, relation=full)
    keyed = dataclasses.replace(keyless, primary_key=PrimaryKey(4711, ("id",)))
    book = book_of(storage)
    keys = [book.begin(each, BOUNDS, 0).key for each in (source, keyless, keyed)]
    assert keys == [("id",), None, ("id",)]
    again = dataclasses.replace(keyed, primary_key=PrimaryKey(4712, ("id",)))
    line = told(book.begin(keyed, BOUNDS, 0))
    assert book.needs([keyed], [line], LSN).ended == ()
    assert [reason for _, reason in book.needs([again], [line], LSN).ended] == [
        "its primary key was dropped, or another one made"
    ]


def test_a_table_that_was_published_before_the_slot_waits_for_no_writer(storage: Storage) -> None:
    decision = Decision(takes_snapshots=True, published={1: "as then", 2: "as then"})
    sources = [source_of(1, published_as="as then"), source_of(2, published_as="now"), source_of(3)]
    needs = book_of(storage, decision).needs(sources, [], LSN)
    assert [each.wait_for_writers for each in needs.wanted] == [False, True, True]


def test_a_request_is_taken_once_and_a_cancellation_holds_until_the_next_request(storage: Storage) -> None:
    source = source_of(1)
    line = taken(storage, source)
    request(storage, LAYOUT, 1, "public.t1")
    book = book_of(storage, NEVER)
    assert book.is_wanting() and wanted(book, [source], [line]) == [1]
    generation = book.begin(source, BOUNDS, line.number)
    assert generation.number == 2
    book.finish(generation)
    assert not read_wishes(storage, LAYOUT).requests and wanted(book, [source], [told(generation)]) == []
    assert [each.generation.number for each in read_taken(storage, LAYOUT)] == [2], (
        "the earlier one is forgotten"
    )
    cancel(storage, LAYOUT, 2, "public.t2")
    needs = book_of(storage).needs([source, source_of(2)], [told(generation)], LSN)
    assert (needs.wanted, needs.unwanted) == ((), (2,))
    storage.write_bytes(
        LAYOUT.snapshot_key(2, "request"), storage.read_bytes(LAYOUT.snapshot_key(2, "cancelled"))
    )
    needs = book_of(storage).needs([source_of(2)], [], LSN)
    assert (len(needs.wanted), needs.unwanted) == (1, ()), (
        "a crash may leave both, and the table must not begin anew"
    )


def test_a_change_that_came_before_the_lock_ends_the_former_generation(storage: Storage) -> None:
    """No survey saw it: the next one compares the table with the new generation alone."""
    leaf = Leaf(5, "public", "part", 1, 8192, file_node=50, made_as_partition=True)
    then = dataclasses.replace(source_of(1), leaves=(leaf,))
    line = taken(storage, then)
    held = dataclasses.replace(then, leaves=(dataclasses.replace(leaf, file_node=51),))
    book = book_of(storage)
    assert book.ended(then, [line]) is None and book.ended(source_of(2), [line]) is None
    ended = book.ended(held, [line])
    assert ended is not None and ended[0] == line and "part was truncated or rewritten" in ended[1]
    for other in (
        dataclasses.replace(line, is_ours=False),
        dataclasses.replace(line, state=GenerationState.ENDED),
    ):
        assert book.ended(held, [other]) is None


def test_what_ended_a_generation_is_told_and_the_table_taken_again(storage: Storage) -> None:
    source = source_of(1)
    line = taken(storage, source)
    filtered = dataclasses.replace(source, row_filter="(id > 5)")
    needs = book_of(storage).needs([filtered], [line], LSN)
    assert needs.ended == ((line, "the row filter of its publication changed"),)
    assert [each.source for each in needs.wanted] == [filtered]
    assert book_of(storage, NEVER).needs([filtered], [line], LSN).wanted == ()
    (gone,) = book_of(storage).needs([], [line], LSN).ended
    assert gone == (line, "the table is not published any more")
    (again,) = book_of(storage).needs([source_of(9, table="t1")], [line], LSN).ended
    assert again == (line, "the table was dropped and created again")


def test_a_parked_table_has_no_snapshot_until_it_is_resumed_and_then_needs_a_new_one(
    storage: Storage,
) -> None:
    source, other = source_of(1), source_of(2)
    line = taken(storage, source)
    parked = ParkedTable(1, "public.t1", Lsn(200), Xid(9), "a value that is not valid UTF-8")
    write_progress(storage, LAYOUT, Lsn(250), parked=[parked])
    needs = book_of(storage).needs([source, other], [line], LSN)
    ((ended, reason),) = needs.ended
    assert ended == line and "parked at commit LSN 0/C8: a value that is not valid UTF-8" in reason
    assert [each.source for each in needs.wanted] == [other] and needs.unwanted == (1,)
    request(storage, LAYOUT, 1, "public.t1")
    assert wanted(book_of(storage), [source], []) == [], "what is missing behind it would be missing for ever"
    write_progress(storage, LAYOUT, Lsn(260), parked=resumed([parked], {1}, Lsn(260)))
    needs = book_of(storage).needs([source], [line], LSN)
    assert [each.source for each in needs.wanted] == [source] and needs.unwanted == ()
    assert [each for each, _ in needs.ended] == [line], "also one that was taken while the table was parked"
    later = dataclasses.replace(line, snapshot_lsn=260, valid_from=261)
    assert book_of(storage, NEVER).needs([source], [later], LSN).ended == ()


def test_the_snapshot_behind_a_park_waits_for_writers_however_long_the_table_was_published(
    storage: Storage,
) -> None:
    """Of a commit that was left out, and that no snapshot sees yet, neither the log nor the snapshot had the rows."""
    sources = [source_of(1), source_of(2), source_of(3)]
    decision = Decision(takes_snapshots=True, published=dict.fromkeys((1, 2, 3), '["table"]'))
    parks = [ParkedTable(i, f"public.t{i}", Lsn(200), Xid(9), "why") for i in (2, 3)]
    write_progress(storage, LAYOUT, Lsn(260), parked=resumed(parks, {2}, Lsn(260)))
    needs = book_of(storage, decision).needs(sources, [], LSN)
    assert [(each.source, each.wait_for_writers) for each in needs.wanted] == [
        (sources[0], False),
        (sources[1], True),
    ]


def test_a_snapshot_that_is_taken_on_an_idle_server_after_a_resume_stands(storage: Storage) -> None:
    source, end = source_of(1), Lsn(0x600)
    parks = resumed([ParkedTable(1, "public.t1", Lsn(200), Xid(9), "why")], {1}, end)
    write_progress(storage, LAYOUT, end, parked=parks)
    book = book_of(storage)
    bounds = SnapshotBounds(end.before.before, end.before, 700, 700, (), 0)
    generation = book.begin(source, bounds, 0)
    book.finish(generation)
    line = dataclasses.replace(
        told(generation), snapshot_lsn=int(bounds.snapshot_lsn), valid_from=int(bounds.valid_from)
    )
    needs = book.needs([source], [line], LSN)
    assert (needs.wanted, needs.ended) == ((), ())


@pytest.mark.parametrize("relids", [(1,), None])
def test_a_transaction_that_was_given_up_has_the_snapshots_of_its_tables_taken_again(
    storage: Storage, relids: tuple[int, ...] | None
) -> None:
    sources = [source_of(1), source_of(2)]
    lines = [taken(storage, source) for source in sources]
    skip = Skip(Xid(9), Lsn(200), datetime.datetime.now(datetime.timezone.utc))
    write_skip(storage, LAYOUT, skip)
    assert book_of(storage).needs(sources, lines, LSN).ended == (), "no run has met it yet"
    note_skipped(storage, LAYOUT, [SkippedTransaction(skip.xid, skip.commit_lsn, relids)])
    needs = book_of(storage).needs(sources, lines, LSN)
    why = "transaction 9, with its commit at 0/C8, was given up (`xidstream slot skip`)"
    assert needs.ended == tuple((line, why) for line in lines[: 1 if relids else 2])
    assert [(each.source, each.wait_for_writers) for each in needs.wanted] == [
        (source, True) for source in sources[: 1 if relids else 2]
    ]
    later = [dataclasses.replace(line, snapshot_lsn=300, valid_from=310) for line in lines]
    assert book_of(storage).needs(sources, later, LSN).ended == (), "they were taken behind it"


def test_a_snapshot_contains_up_to_an_lsn_what_an_earlier_one_of_another_table_did(storage: Storage) -> None:
    """Its own checkpoint tells nothing, because a transaction has been open since before it."""
    book = book_of(storage)
    book.begin(source_of(1), dataclasses.replace(BOUNDS, contained_upto=Lsn(90)), 0)
    later = book_of(storage).begin(source_of(2), BOUNDS, 0)
    assert later is not None and later.bounds == dataclasses.replace(BOUNDS, contained_upto=Lsn(90))
    newest = dataclasses.replace(BOUNDS, contained_upto=Lsn(95))
    generation = book.begin(source_of(1), newest, 1)
    assert generation is not None and generation.bounds == newest


def test_a_snapshot_takes_over_nothing_of_a_later_one_that_is_committed_before_it(storage: Storage) -> None:
    """Transaction 705 waits for its synchronous standby: its COMMIT is in the WAL below 90, and the first snapshot does
    not see it. The second one does, and knows of a checkpoint at 90."""
    book = book_of(storage)
    book.begin(source_of(2), SnapshotBounds(Lsn(101), Lsn(122), 710, 710, (), 0, contained_upto=Lsn(90)), 0)
    overtaken = book.begin(source_of(1), BOUNDS, 0)
    assert overtaken is not None and overtaken.bounds == BOUNDS
    assert not overtaken.bounds.contains(Xid(705), Lsn(85))


def test_what_a_snapshot_knows_by_its_tables_writers_is_recorded_and_taken_over_by_no_other_table(
    storage: Storage,
) -> None:
    waited = dataclasses.replace(BOUNDS, writers_upto=BOUNDS.snapshot_lsn)
    first = book_of(storage).begin(source_of(1), waited, 0)
    assert first is not None and first.bounds == waited
    assert [each.generation for each in read_taken(storage, LAYOUT)] == [first]
    later = book_of(storage).begin(source_of(2), BOUNDS, 0)
    assert later is not None and later.bounds == BOUNDS


def test_a_generation_without_its_record_is_of_an_earlier_slot(storage: Storage) -> None:
    line = GenerationLine("public.t1", 1, 3, 99, 100, GenerationState.FINISHED, is_ours=True)
    needs = book_of(storage).needs([source_of(1)], [line], LSN)
    assert [reason for _, reason in needs.ended] == [
        "this storage has no record of it: the slot was made again, or its run began anew in another storage"
    ]
    assert len(needs.wanted) == 1
    theirs = dataclasses.replace(line, is_ours=False)
    needs = book_of(storage).needs([source_of(1)], [theirs], LSN)
    assert needs.ended == () and len(needs.wanted) == 1, "another slot's is not ours to end"


def test_what_a_crash_left_between_record_and_line_is_asked_for_and_given_up(storage: Storage) -> None:
    book = book_of(storage)
    generation = book.begin(source_of(1), BOUNDS, 4)
    assert generation.number == 5
    after = book_of(storage)
    assert after.unfinished([]) == [generation]
    assert after.unfinished([told(generation)]) == []
    after.give_up(generation)
    assert after.unfinished([]) == [] and read_taken(storage, LAYOUT) == []


def test_a_slot_that_nobody_wants_snapshots_of_asks_nothing(storage: Storage) -> None:
    assert book_of(storage, INITIAL).is_wanting()
    book = book_of(storage, NEVER)
    assert not book.is_wanting() and not book.is_one_standing([])
    line = taken(storage, source_of(1))
    assert book.is_one_standing([line]), "what stands may end"
    ended = dataclasses.replace(line, state=GenerationState.ENDED)
    assert not book.is_one_standing([ended, told(book.begin(source_of(2), BOUNDS, 0), is_ours=False)])


def altered(source: PublishedSource) -> PublishedSource:
    """With a column that was added with a default."""
    columns = (*source.relation.columns, Column("n", 23, -1, False))
    relation = dataclasses.replace(source.relation, columns=columns)
    return dataclasses.replace(source, relation=relation, attnums=(1, 2), missing_defaults=("n",))


def test_a_survey_proves_nothing_where_a_generation_that_is_being_committed_is_another_table(
    storage: Storage,
) -> None:
    """Its line comes into the sink after the proof, and readers would take it for proven."""
    source = source_of(1)
    book = book_of(storage)
    assert book.needs([source], [], Lsn(130)).is_proof
    generation = book.begin(source, BOUNDS, 0)
    assert generation is not None
    assert book.needs([source], [], Lsn(140)).is_proof
    assert not book.needs([altered(source)], [], Lsn(150)).is_proof
    needs = book.needs([altered(source)], [told(generation)], Lsn(160))
    assert needs.is_proof, "it is ended before anything is told"
    assert [reason for _, reason in needs.ended] == ["column n was added with a default"]


def test_a_generation_does_not_begin_where_a_later_survey_has_found_another_table(storage: Storage) -> None:
    source = source_of(1)
    book = book_of(storage)
    book.needs([altered(source)], [], Lsn(98))
    assert book.begin(source, BOUNDS, 0) is not None, "that survey was taken before its lock"
    book.needs([altered(source)], [], Lsn(125))
    assert book.begin(source, BOUNDS, 0) is None
    book.needs([], [], Lsn(130))
    assert book.begin(source, BOUNDS, 0) is None, "the table is not published any more"


def test_what_a_survey_found_harmless_is_recorded_for_the_next_run(storage: Storage) -> None:
    def with_xmin(xmin: int, harmless: str) -> PublishedSource:
        return dataclasses.replace(
            source_of(1), witnesses=(Witness("pg_class 1", xmin, harmless, "table t1"),)
        )

    line = taken(storage, with_xmin(700, "no grant"))
    assert book_of(storage).needs([with_xmin(701, "a grant")], [line], LSN).ended == ()
    needs = book_of(storage).needs([with_xmin(702, "no grant")], [line], LSN)
    assert needs.ended == (), "compared with the survey before"
    ((_, reason),) = book_of(storage).needs([with_xmin(703, "no grant")], [line], LSN).ended
    assert "table t1 was altered in a way that leaves no difference in the catalog" in reason


def test_two_tables_whose_names_differ_in_the_place_of_a_dot_do_not_end_each_other(storage: Storage) -> None:
    """Each was taken for the other one, dropped and created again, and so both were read anew for ever."""
    first, second = source_of(1), source_of(2)
    first = dataclasses.replace(first, relation=dataclasses.replace(first.relation, schema="a.b", table="c"))
    second = dataclasses.replace(
        second, relation=dataclasses.replace(second.relation, schema="a", table="b.c")
    )
    lines = [taken(storage, source) for source in (first, second)]
    assert [line.number for line in lines] == [1, 1]
    book = book_of(storage)
    needs = book.needs([first, second], lines, LSN)
    assert needs.ended == () and needs.wanted == () and needs.is_proof
    assert book.ended(second, lines) is None and book.ended(first, lines) is None


def test_a_table_that_had_a_snapshot_before_waits_for_its_writers(storage: Storage) -> None:
    """One that had written before its publication was changed committed after the new snapshot, with the columns and
    operations of before."""
    source = source_of(1)
    decision = Decision(takes_snapshots=True, published={1: source.published_as})
    line = taken(storage, source)
    ended = dataclasses.replace(line, state=GenerationState.ENDED)
    (first,) = book_of(storage, decision).needs([source], [], LSN).wanted
    (again,) = book_of(storage, decision).needs([source], [ended], LSN).wanted
    assert not first.wait_for_writers and again.wait_for_writers


WHERE = parse_key_filter("id between 1 and 7")


def test_a_repair_of_a_generation_that_stands_is_wanted_until_it_is_done(storage: Storage) -> None:
    source = source_of(1)
    line = taken(storage, source)
    assert request(storage, LAYOUT, 1, "public.t1", WHERE)
    book = book_of(storage, NEVER)
    (wish,) = book.needs([source], [line], LSN).wanted
    assert wish.repair == Repair(WHERE, line.number) and wish.wait_for_writers
    only = book.rows_of(wish.repair, source)
    assert [(each.column.name, each.operator, each.values) for each in only] == [
        ("id", ">=", ("1",)),
        ("id", "<=", ("7",)),
    ]
    generation = book.begin(source, BOUNDS, line.number, WHERE)
    assert generation is not None and [each.where for each in read_taken(storage, LAYOUT)] == [None, WHERE]
    book.finish(generation)
    assert not read_wishes(storage, LAYOUT).requests
    assert book.needs([source], [told(generation)], LSN).wanted == ()


@pytest.mark.parametrize("later", [None, parse_key_filter("id = 9")])
def test_what_is_asked_for_while_a_repair_is_made_is_not_forgotten_with_it(
    storage: Storage, later: KeyFilter | None
) -> None:
    source = source_of(1)
    line = taken(storage, source)
    request(storage, LAYOUT, 1, "public.t1", WHERE)
    generation = book_of(storage).begin(source, BOUNDS, line.number, WHERE)
    assert generation is not None
    request(storage, LAYOUT, 1, "public.t1", later)
    book = book_of(storage, NEVER)  # of the next run, which finds the rows in the sink
    book.finish(generation)
    (wish,) = book.needs([source], [told(generation)], LSN).wanted
    assert (None if wish.repair is None else wish.repair.key_filter) == later


def test_without_a_generation_that_stands_a_repair_is_refused_or_the_whole_table_is_taken(
    storage: Storage,
) -> None:
    source = source_of(1)
    line = taken(storage, source)
    request(storage, LAYOUT, 1, "public.t1", WHERE)
    altered = source_of(1, published_as='["another"]')
    for lines, now in (([], source), ([line], altered)):
        needs = book_of(storage, NEVER).needs([now], lines, LSN)
        assert needs.wanted == () and [each for each, _ in needs.refused] == [now]
        assert "no snapshot of the table stands" in needs.refused[0][1]
        needs = book_of(storage, INITIAL).needs([now], lines, LSN)
        assert needs.refused == () and [each.repair for each in needs.wanted] == [None]
    book = book_of(storage, NEVER)
    book.refuse(source, parse_key_filter("id = 9"))
    assert read_wishes(storage, LAYOUT).ranges == {1: WHERE}, "that is another one's"
    book.refuse(source)
    assert not read_wishes(storage, LAYOUT).requests


def test_a_repair_by_a_column_that_is_no_key_any_more_is_refused(storage: Storage) -> None:
    source = source_of(1)
    line = taken(storage, source)
    request(storage, LAYOUT, 1, "public.t1", parse_key_filter("other = 1"))
    ((_, reason),) = book_of(storage, NEVER).needs([source], [line], LSN).refused
    assert "column other is not one of the key" in reason
    with pytest.raises(SnapshotInterrupted, match="is gone"):
        book_of(storage).rows_of(Repair(WHERE, 9), source)


def test_a_next_snapshot_is_placed_behind_all_of_the_tables_name(storage: Storage) -> None:
    source = source_of(1)
    assert book_of(storage).last_snapshot_lsn(source) == 0
    taken(storage, source)
    again = source_of(2, "t1")
    assert (
        book_of(storage).last_snapshot_lsn(again) == BOUNDS.snapshot_lsn
        and book_of(storage).last_snapshot_lsn(source_of(3)) == 0
    )


def grown(source: PublishedSource) -> PublishedSource:
    """With a column that was added without a default."""
    return dataclasses.replace(altered(source), missing_defaults=())


def test_columns_that_no_row_brings_are_to_be_told_until_the_log_has_been_also_by_the_next_run(
    storage: Storage,
) -> None:
    source = source_of(1)
    line = taken(storage, source)
    book = book_of(storage)
    assert book.needs([source], [line], Lsn(130), Lsn(131)).layouts == ()
    (layout,) = book.needs([grown(source)], [line], Lsn(140), Lsn(145)).layouts
    assert (layout.source, layout.number, layout.found_lsn) == (grown(source), 1, Lsn(144)), (
        "a commit at 145 is to come"
    )
    assert book.needs([grown(source)], [line], Lsn(150), Lsn(155)).layouts == (layout,), (
        "as it was found first"
    )
    (again,) = book_of(storage).needs([grown(source)], [line], Lsn(160)).layouts
    assert again.found_lsn == Lsn(159)
    book.lay_out(layout)
    for each in (book, book_of(storage)):
        needs = each.needs([grown(source)], [line], Lsn(170))
        assert needs.layouts == () and needs.ended == () and needs.is_proof
    (dropped,) = book.needs([source], [line], Lsn(180)).layouts
    assert dropped.source == source


def test_a_generation_in_hand_with_columns_that_are_new_proves_nothing_and_does_not_begin(
    storage: Storage,
) -> None:
    """It would be told with the columns of before, and what is proven by then be read with them."""
    source = source_of(1)
    book = book_of(storage)
    book.needs([grown(source)], [], Lsn(125))
    assert book.begin(source, BOUNDS, 0) is None
    book.needs([source], [], Lsn(126))
    generation = book.begin(source, BOUNDS, 0)
    assert generation is not None
    assert not book.needs([grown(source)], [], Lsn(150)).is_proof
    assert book.needs([grown(source)], [told(generation)], Lsn(160)).is_proof


def in_a_new_file(source: PublishedSource) -> PublishedSource:
    (leaf,) = source.leaves
    return dataclasses.replace(source, leaves=(dataclasses.replace(leaf, file_node=leaf.file_node + 1),))


def test_rows_in_a_new_file_end_a_generation_where_ddl_may_have_left_no_message(storage: Storage) -> None:
    source = source_of(1)
    line = taken(storage, source)
    assert book_of(storage).needs([in_a_new_file(source)], [line], LSN).ended == ()
    needs = book_of(storage).needs([in_a_new_file(source)], [line], LSN, is_witnessed=False)
    assert needs.ended == (), "an earlier look has found it harmless"
    again = in_a_new_file(in_a_new_file(source))
    ((ended, reason),) = book_of(storage).needs([again], [line], LSN, is_witnessed=False).ended
    assert ended == line and "without the event triggers of `xidstream source prepare`" in reason
