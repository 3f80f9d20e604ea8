"""Journal files: units come back as they were, or the file is refused by its key."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.memory_parts import part_rows
from tests.unit.storage.conftest import COMMIT, XID, files_below, make_batch, read
from xidstream.pipeline.errors import ComponentLost, SegmentCorrupt, StorageFault, Unsupported, UsageError
from xidstream.pipeline.exchange import (
    ArrowRef,
    InlineMessages,
    JournalFile,
    MemoryMessages,
    MemoryPart,
    Sealed,
    SegmentPart,
    SpilledMessages,
    Undeliverable,
    UnitEnd,
)
from xidstream.pipeline.packs import FEW_TABLES, PartsBuilder
from xidstream.pipeline.parked import SkippedTransaction
from xidstream.pipeline.parquet import CommitStamp, fill
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, rows
from xidstream.pipeline.storage.envelope import seal
from xidstream.pipeline.storage.journal_file import (
    flush_segments,
    load_journal_units,
    read_journal_file,
    verify_journal_file,
    write_journal_file,
)
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import write_messages, write_segment
from xidstream.pipeline.storage.storage import Storage

TIMESTAMP_US = 1_700_000_000_123_456
OF_LARGE = CommitStamp(0x2000, TIMESTAMP_US)


class Store(dict[str, pa.Table]):
    """An object store whose references are strings."""

    n_reads = 0

    def put(self, table: pa.Table) -> str:
        ref = f"ref {id(self)} {len(self)}"
        self[ref] = table
        return ref

    def fetch(self, ref: ArrowRef) -> pa.Table:
        self.n_reads += 1
        return self[ref]

    def rows_of(self, unit: Sealed) -> list[dict[str, Any]]:
        """Of what is in memory."""
        parts = [part_rows(part, lambda ref: self[ref].to_batches()) for part in unit.memory]
        return [row for part in parts for row in part.to_pylist()]


def message_rows(n: int, lsn: int = 0x100) -> pa.RecordBatch:
    message = {
        "commit_lsn": 7,
        "lsn": lsn,
        "xid": 700,
        "transactional": True,
        "prefix": "p",
        "content": b"c\0",
    }
    return pa.RecordBatch.from_pylist([message] * n, schema=rows.MESSAGES_SCHEMA)


def transaction_rows(*commit_lsns: int) -> pa.RecordBatch:
    made = [
        {
            "xid": 700 + i,
            "commit_lsn": lsn,
            "end_lsn": lsn + 0x30,
            "commit_timestamp": TIMESTAMP_US + i,
            "gid": "g" if i % 2 else None,
            "streamed": False,
            "rows": i,
            "tables": ["public.t"] * i,
        }
        for i, lsn in enumerate(commit_lsns)
    ]
    return pa.RecordBatch.from_pylist(made, schema=rows.TRANSACTIONS_SCHEMA)


def unit(transactions: pa.RecordBatch, n_rows: int = 0, **parts: tuple) -> Sealed:
    empty = {"memory": (), "segments": (), "messages": ()}
    return Sealed(transactions, **{**empty, **parts}, n_rows=n_rows, n_bytes=10 * n_rows)  # type: ignore[arg-type]


def table(n: int) -> RelationVersion:
    return RelationVersion(n, "public", f"t{n}", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))


def rows_of(relation: RelationVersion, n: int, lsn: int) -> pa.Table:
    row = {"_change_type": "insert", "_commit_lsn": lsn, "_commit_timestamp": 0, "_xid": 7}
    made = [{"a": f"{relation.table} {i}", **row, "_seq": i, "_text": [("a", "x")]} for i in range(n)]
    return pa.Table.from_pylist(made, schema=rows.contract_schema(relation))


class Written:
    """A file with each kind of part, and what it was written from."""

    def __init__(self, storage: Storage, layout: Layout, relation: RelationVersion) -> None:
        self.storage, self.layout, self.store = storage, layout, Store()
        self.units, self.ends = zip(*self._units(relation), strict=True)
        flush_segments(storage, self.units)
        self.file = write_journal_file(storage, layout, 3, self.units, self.ends, self.store.fetch)
        self.key = layout.journal_key(3)

    def _units(self, relation: RelationVersion) -> Iterator[tuple[Sealed, UnitEnd]]:
        layout, storage = self.layout, self.storage
        of_few = PartsBuilder(self.store.put, 1)
        of_few.add(table(1), rows_of(table(1), 5, 0x1000))
        of_few.add(table(1), pa.concat_tables([rows_of(table(1), 1, 0x1100), rows_of(table(1), 2, 0x1100)]))
        of_many = PartsBuilder(self.store.put, FEW_TABLES + 4)
        for n in range(FEW_TABLES + 4):
            of_many.add(table(n), rows_of(table(n), n + 1, 0x3000))
        batches = [make_batch(relation, 0, 300), make_batch(relation, 300, 7)]
        segment_keys = [layout.segment_key(Xid(XID), Lsn(0x1800), n) for n in (0, 1)]
        segments = [write_segment(storage, key, relation, XID, batches) for key in segment_keys]
        of_transaction = write_messages(
            storage, layout.messages_key(Xid(XID), Lsn(0x1800), 2), [message_rows(3)]
        )
        outside = write_messages(storage, layout.messages_key(Xid(0), Lsn(0x1900), 0), [message_rows(2)])
        messages = (
            InlineMessages(message_rows(2)),
            SpilledMessages(of_transaction, Lsn(0x2000), Xid(XID)),
            MemoryMessages(17, self.store.put(pa.Table.from_batches([message_rows(4)]))),
            InlineMessages(message_rows(1, 0x200)),
        )
        yield (
            dataclasses.replace(
                unit(transaction_rows(0x1000, 0x1100), 8, memory=of_few.finish()),
                skipped=(
                    SkippedTransaction(Xid(9), Lsn(0x1080), (16384,)),
                    SkippedTransaction(Xid(9), Lsn(0x1084)),
                ),
            ),
            UnitEnd(Lsn(0x1000), Lsn(0x1100), Lsn(0x1130), 2),
        )
        yield (
            unit(
                transaction_rows(0x2000),
                614,
                segments=tuple(SegmentPart(segment, OF_LARGE) for segment in segments),
                messages=messages,
            ),
            UnitEnd(Lsn(0x2000), Lsn(0x2000), Lsn(0x2030), 1),
        )
        yield (
            unit(transaction_rows(), messages=(SpilledMessages(outside), InlineMessages(message_rows(1)))),
            UnitEnd(INVALID_LSN, INVALID_LSN, Lsn(0x2400), 0),
        )
        yield (
            unit(transaction_rows(0x3000), 210, memory=of_many.finish()),
            UnitEnd(Lsn(0x3000), Lsn(0x3000), Lsn(0x3030), 1),
        )

    def load(self, store: Store | None = None) -> list[tuple[UnitEnd, Sealed]]:
        store = Store() if store is None else store
        return load_journal_units(self.storage, self.layout, self.file, store.put)


TRAILER = struct.Struct("<QI8s")


@pytest.fixture
def written(storage, layout, relation) -> Written:
    return Written(storage, layout, relation)


def without_refs(unit: Sealed) -> Sealed:
    return dataclasses.replace(
        unit,
        memory=tuple(dataclasses.replace(part, ref=None) for part in unit.memory),
        messages=tuple(
            dataclasses.replace(part, ref=None) if isinstance(part, MemoryMessages) else part
            for part in unit.messages
        ),
    )


@pytest.fixture
def small(local, layout) -> Written:
    """On a local disk, of one unit with one row: its bytes can be altered one by one."""
    return Small(local, layout, table(1))


class Small(Written):
    def _units(self, relation: RelationVersion) -> Iterator[tuple[Sealed, UnitEnd]]:
        ref = self.store.put(rows_of(relation, 1, 0x1000))
        inline = InlineMessages(message_rows(1))
        part = MemoryPart(relation, 1, 100, 0x1000, ref)
        yield unit(transaction_rows(0x1000), 1, memory=(part,), messages=(inline,)), ONE_END


ONE_END = UnitEnd(Lsn(0x1000), Lsn(0x1000), Lsn(0x1030), 1)


def test_units_come_back_as_written_but_for_their_references(written, relation) -> None:
    loaded_into = Store()
    loaded = written.load(loaded_into)
    assert [end for end, _ in loaded] == list(written.ends)
    for (_, found), unit in zip(loaded, written.units, strict=True):
        assert without_refs(found) == without_refs(unit)
        for part, before in zip(found.memory, unit.memory, strict=True):
            original = part_rows(before, lambda ref: written.store[ref].to_batches())
            assert part_rows(part, lambda ref: loaded_into[ref].to_batches()) == original
        for part, before in zip(found.messages, unit.messages, strict=True):
            if isinstance(part, MemoryMessages):
                assert loaded_into[part.ref] == written.store[before.ref]
    (_, large), *_ = loaded[1:]
    assert read(written.storage, large.segments[0].segment).num_rows == 307


def test_a_part_of_a_filled_segment_is_loaded_as_before(local, layout, relation) -> None:
    written = Written(local, layout, relation)
    (part, _) = written.units[1].segments
    fill(local.local_path(part.segment.key), part.segment.file, part.commit, name="x")
    assert written.load()[1][1].segments == written.units[1].segments


@pytest.mark.parametrize(
    ("pair", "place"), [((700, 0x1000), 0), ((701, 0x1100), 0), ((700, 0x2000), 1), ((700, 0x3000), 3)]
)
def test_what_was_given_up_is_left_out_of_its_unit_and_all_else_is_there(
    written, pair: tuple[int, int], place: int
) -> None:
    """Of a unit of two transactions, of a large one with segments and messages, and of one whose rows are packed."""
    pair, store = (Xid(pair[0]), Lsn(pair[1])), Store()
    loaded = load_journal_units(written.storage, written.layout, written.file, store.put, frozenset({pair}))
    assert [end for end, _ in loaded] == list(written.ends)
    for i, ((_, found), before) in enumerate(zip(loaded, written.units, strict=True)):
        if i != place:
            assert without_refs(found) == without_refs(before)
            continue
        relids = {
            part.relation.relid
            for part in before.memory
            if pair[1]
            in part_rows(part, lambda ref: written.store[ref].to_batches())["_commit_lsn"].to_pylist()
        }
        relids |= {p.relation.relid for p in before.segments if p.commit.commit_lsn == pair[1]}
        assert relids and found.skipped == (*before.skipped, (*pair, tuple(sorted(relids))))
        of_both = (
            (before.transactions, written.store.rows_of(before)),
            (found.transactions, store.rows_of(found)),
        )
        (lines_before, rows_before), (lines, rows_found) = of_both
        assert lines.to_pylist() == [
            line for line in lines_before.to_pylist() if line["commit_lsn"] != pair[1]
        ]
        assert rows_found == [row for row in rows_before if row["_commit_lsn"] != pair[1]]
        assert len(rows_found) < len(rows_before) or before.segments
        assert found.n_rows == len(rows_found) and found.segments == ()
        # In these files an inline message says commit 7.
        assert all(isinstance(part, (InlineMessages, MemoryMessages)) for part in found.messages)


@pytest.mark.parametrize("pair", [(700, 0x1100), (701, 0x1000), (700, 7)])
def test_nothing_is_left_out_where_xid_and_commit_are_not_of_one_transaction(
    written, pair: tuple[int, int]
) -> None:
    pair = (Xid(pair[0]), Lsn(pair[1]))
    loaded = load_journal_units(written.storage, written.layout, written.file, Store().put, frozenset({pair}))
    assert [without_refs(unit) for _, unit in loaded] == [without_refs(unit) for unit in written.units]


def test_each_object_is_fetched_and_put_once_however_many_parts_it_has(written) -> None:
    n_objects = len({part.ref for unit in written.units for part in unit.memory}) + 1
    assert written.store.n_reads == n_objects
    loaded_into = Store()
    (*_, (_, packed)) = written.load(loaded_into)
    assert len(loaded_into) == n_objects
    assert len(packed.memory) == FEW_TABLES + 4
    assert len({part.ref for part in packed.memory}) == 1


def test_the_summary_tells_what_the_file_holds(written) -> None:
    stored_keys = [key for unit in written.units for key in unit.stored_keys()]
    sizes = [len(written.storage.read_bytes(key)) for key in (written.key, *stored_keys)]
    assert written.file == JournalFile(
        number=3,
        epoch=written.layout.epoch,
        first_commit_lsn=Lsn(0x1000),
        last_commit_lsn=Lsn(0x3000),
        end_lsn=Lsn(0x3030),
        first_commit_timestamp_us=TIMESTAMP_US,
        n_units=4,
        n_transactions=4,
        n_rows=8 + 614 + 210,
        n_bytes=sum(sizes),
        stored_keys=tuple(stored_keys),
        file_bytes=sizes[0],
        memory_bytes=sum(
            part.n_bytes
            for unit in written.units
            for part in (*unit.memory, *unit.messages)
            if isinstance(part, (MemoryPart, MemoryMessages))
        ),
    )
    assert len(stored_keys) == 4
    later = dataclasses.replace(written.layout, epoch="20260102T000000-later")
    for look in (read_journal_file, verify_journal_file):
        assert look(written.storage, later, written.layout.epoch, 3) == written.file
    loaded = load_journal_units(written.storage, later, written.file, Store().put)
    assert [end for end, _ in loaded] == list(written.ends)


def test_reading_the_summary_leaves_all_else_alone(written) -> None:
    altered = bytearray(written.storage.read_bytes(written.key))
    (_, before_summary, *_) = split(altered)
    altered[:before_summary] = bytes(before_summary)
    written.storage.write_bytes(written.key, bytes(altered))
    written.storage.delete(written.file.stored_keys)
    assert read_journal_file(written.storage, written.layout, written.layout.epoch, 3) == written.file


def test_messages_outside_of_transactions_alone_have_a_file_without_a_commit(storage, layout) -> None:
    made = unit(transaction_rows(), messages=(InlineMessages(message_rows(2)),))
    end = UnitEnd(INVALID_LSN, INVALID_LSN, Lsn(0x2400), 0)
    file = write_journal_file(storage, layout, 0, [made], [end], Store().fetch)
    assert (file.first_commit_lsn, file.last_commit_lsn, file.end_lsn) == (0, 0, 0x2400)
    assert (file.first_commit_timestamp_us, file.n_transactions, file.stored_keys) == (0, 0, ())
    assert load_journal_units(storage, layout, file, Store().put) == [(end, made)]


def test_transactions_that_left_nothing_have_a_place_in_the_file(storage, layout) -> None:
    """A unit may be empty and still move the position; the first of the file has no transaction's line."""
    units = [unit(transaction_rows()), unit(transaction_rows(0x2000)), unit(transaction_rows())]
    ends = [UnitEnd(Lsn(n), Lsn(n), Lsn(n + 0x30), 1) for n in (0x1000, 0x2000, 0x3000)]
    file = write_journal_file(storage, layout, 0, units, ends, Store().fetch)
    assert (file.first_commit_lsn, file.end_lsn, file.n_transactions) == (0x1000, 0x3030, 3)
    assert file.first_commit_timestamp_us == TIMESTAMP_US
    assert load_journal_units(storage, layout, file, Store().put) == list(zip(ends, units, strict=True))


def test_a_summary_that_names_many_segments_is_found(storage, layout, relation, batches) -> None:
    """It is longer than what is read of an object store at first."""
    segment = write_segment(storage, layout.segment_key(Xid(XID), Lsn(1), 0), relation, XID, batches)
    many = unit(transaction_rows(1), segments=(SegmentPart(segment, COMMIT),) * 1_200)
    file = write_journal_file(storage, layout, 0, [many], [ONE_END], Store().fetch)
    (_, before_summary, *_), whole = split(data := storage.read_bytes(layout.journal_key(0))), len(data)
    assert whole - before_summary > 64 << 10
    assert read_journal_file(storage, layout, layout.epoch, 0) == file


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), max_size=60),
            st.lists(st.integers(0, 3), max_size=3),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_units_of_any_shape_come_back(tmp_path_factory, layout, shapes) -> None:
    """Of each unit: the tables of its parts with their rows, the sizes of its messages, its transactions."""
    storage, store, units, ends = Storage(str(tmp_path_factory.mktemp("journal"))), Store(), [], []
    for lsn, (parts, messages, n_transactions) in enumerate(shapes, 1):
        made = PartsBuilder(store.put, len(parts))
        for number, n_rows in parts:
            made.add(table(number), rows_of(table(number), n_rows, lsn))
        inline = tuple(InlineMessages(message_rows(n)) for n in messages)
        transactions = transaction_rows(*[lsn] * n_transactions)
        units.append(unit(transactions, 1, memory=made.finish(), messages=inline))
        ends.append(UnitEnd(Lsn(lsn), Lsn(lsn), Lsn(lsn), n_transactions))
    file = write_journal_file(storage, layout, 0, units, ends, store.fetch)
    assert verify_journal_file(storage, layout, layout.epoch, 0) == file
    loaded_into = Store()
    for before, (_, found) in zip(
        units, load_journal_units(storage, layout, file, loaded_into.put), strict=True
    ):
        assert without_refs(found) == without_refs(before)
        for part, original in zip(found.memory, before.memory, strict=True):
            assert loaded_into[part.ref] == store[original.ref]


# -- what is not written -----------------------------------------------------------------------------------


def one_unit(store: Store, **changes: Any) -> Sealed:
    ref = store.put(rows_of(table(1), 2, 0x1000))
    part = dataclasses.replace(MemoryPart(table(1), 2, 100, 0x1000, ref), **changes)
    return unit(transaction_rows(0x1000), 2, memory=(part,))


def test_a_unit_that_ends_at_an_undeliverable_transaction_is_refused(local, layout, tmp_path: Path) -> None:
    store = Store()
    halted = dataclasses.replace(one_unit(store), undeliverable=Undeliverable(UsageError("x")))
    with pytest.raises(UsageError, match="cannot be delivered"):
        write_journal_file(local, layout, 0, [halted], [ONE_END], store.fetch)
    assert files_below(tmp_path / "local") == set()


def test_units_without_their_ends_are_refused(local, layout) -> None:
    store = Store()
    for units, ends in (([], []), ([one_unit(store)], []), ([one_unit(store)], [ONE_END] * 2)):
        with pytest.raises(UsageError, match="units and their ends"):
            write_journal_file(local, layout, 0, units, ends, store.fetch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_rows": 3}, "2 rows, not 3"),
        (
            {"relation": RelationVersion(1, "public", "other", ReplicaIdentity.FULL, ())},
            "columns of public.other",
        ),
        ({"pack_index": 0}, "no element 0"),
    ],
)
def test_an_object_that_is_not_what_its_part_says_is_not_confirmed(
    local, layout, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    store = Store()
    with pytest.raises(UsageError, match=reason):
        write_journal_file(local, layout, 0, [one_unit(store, **changes)], [ONE_END], store.fetch)
    assert files_below(tmp_path / "local") == set()


def test_a_place_behind_the_end_of_its_pack_is_not_confirmed(local, layout) -> None:
    store = Store()
    made = PartsBuilder(store.put, FEW_TABLES + 1)
    made.add(table(1), rows_of(table(1), 1, 1))
    (part,) = made.finish()
    for place in (1, -1):
        wrong = unit(transaction_rows(1), 1, memory=(dataclasses.replace(part, pack_index=place),))
        with pytest.raises(UsageError, match=f"no element {place}"):
            write_journal_file(local, layout, 0, [wrong], [ONE_END], store.fetch)


def test_memory_that_is_lost_meanwhile_leaves_no_file(storage, layout) -> None:
    store = Store()

    def lost(ref: ArrowRef) -> pa.Table:
        raise ComponentLost("its owner died")

    with pytest.raises(ComponentLost):
        write_journal_file(storage, layout, 0, [one_unit(store)], [ONE_END], lost)
    assert storage.list_keys(layout.root) == []


def test_a_segment_that_is_missing_already_is_not_confirmed(local, layout, relation, batches) -> None:
    segment = write_segment(local, layout.segment_key(Xid(XID), Lsn(1), 0), relation, XID, batches)
    local.delete([segment.key])
    gone = unit(transaction_rows(1), 1_007, segments=(SegmentPart(segment, COMMIT),))
    with pytest.raises(StorageFault, match=segment.key):
        flush_segments(local, [gone])
    assert local.list_keys(layout.journal_prefix) == []


def test_all_is_flushed_when_the_file_is_written_and_segments_before_it_appears(
    local, layout, relation, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        log.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def spy_replace(source: str, target: str) -> None:
        log.append(f"-> {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    written = Written(local, layout, relation)
    appeared = log.index(f"-> {local.local_path(written.key)}")
    assert {local.local_path(key) for key in written.file.stored_keys} <= set(log[:appeared])
    assert local.local_path(written.key) in log[appeared:]
    assert local.local_path(layout.journal_prefix) in log[appeared:]


# -- damage ------------------------------------------------------------------------------------------------


Look = Callable[[Written], object]


def look(written: Written) -> JournalFile:
    return read_journal_file(written.storage, written.layout, written.layout.epoch, 3)


def verify(written: Written) -> JournalFile:
    return verify_journal_file(written.storage, written.layout, written.layout.epoch, 3)


def refused(written: Written, *looks: Look, match: str | None = None) -> None:
    for each in looks or (look, verify, Written.load):
        with pytest.raises(SegmentCorrupt, match=match or written.key) as caught:
            each(written)
        assert written.key in caught.value.message or match is not None
        assert caught.value.remedy


def test_a_missing_file_is_named(written) -> None:
    written.storage.delete([written.key])
    refused(written, match=f"{written.key}.*is missing")


def test_a_file_cut_off_anywhere_is_refused(written) -> None:
    whole = written.storage.read_bytes(written.key)
    for length in {
        0,
        1,
        8,
        27,
        28,
        *range(100, len(whole), len(whole) // 15),
        *range(len(whole) - 8, len(whole)),
    }:
        written.storage.write_bytes(written.key, whole[:length])
        refused(written)


def test_a_file_that_is_longer_than_written_is_refused(written) -> None:
    whole = written.storage.read_bytes(written.key)
    for longer in (whole + b"\0", b"\0" + whole, whole[:100] + b"\0" * 8 + whole[100:], whole + whole):
        written.storage.write_bytes(written.key, longer)
        refused(written)


def test_an_altered_bit_is_found_wherever_it_is(small) -> None:
    path = Path(small.storage.local_path(small.key))
    whole = path.read_bytes()
    before_directory, before_summary, *_ = split(whole)
    for position in {*range(0, len(whole), 3), *range(len(whole) - TRAILER.size, len(whole))}:
        altered = bytearray(whole)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        refused(small, verify, *([Written.load] if position >= before_directory else []))
        if position >= before_summary:
            refused(small, look)
    path.write_bytes(whole)
    assert small.load()[0][0] == ONE_END


def test_an_altered_byte_gives_no_unit_wherever_it_is(written) -> None:
    whole = written.storage.read_bytes(written.key)
    for position in range(3, len(whole), len(whole) // 15):
        altered = bytearray(whole)
        altered[position] ^= 0x10
        written.storage.write_bytes(written.key, bytes(altered))
        refused(written, verify, Written.load)


def test_objects_that_changed_places_are_found(small) -> None:
    """A writer's defect, under a checksum that fits."""
    whole = small.storage.read_bytes(small.key)
    before_directory, _, directory, _ = split(whole)
    places = list(itertools.accumulate((n for n, _ in directory["objects"]), initial=8))
    streams = [whole[start:end] for start, end in itertools.pairwise(places)]
    swapped = b"".join([whole[:8], *streams[::-1], whole[before_directory:]])
    small.storage.write_bytes(small.key, swapped)
    with_directory(small, lambda content: content["objects"].reverse())
    assert look(small).n_units == 1
    refused(small, verify)


def test_a_file_of_another_name_is_refused(written) -> None:
    whole, layout = written.storage.read_bytes(written.key), written.layout
    other_epoch = dataclasses.replace(layout, epoch="20260102T000000-other")
    others = [
        (layout, 4),
        (other_epoch, 3),
        (dataclasses.replace(layout, slot="other"), 3),
        (dataclasses.replace(layout, system_identifier=1), 3),
    ]
    for other, number in others:
        written.storage.write_bytes(other.journal_key(number), whole)
        for each in (read_journal_file, verify_journal_file):
            with pytest.raises(SegmentCorrupt, match="its content is another file's"):
                each(written.storage, other, other.epoch, number)


def test_a_file_that_is_not_the_one_that_was_written_gives_no_unit(storage, layout) -> None:
    store, made = Store(), []
    for n in (1, 2):
        units = [unit(transaction_rows(0x1000))] * n
        made.append(write_journal_file(storage, layout, 0, units, [ONE_END] * n, store.fetch))
    assert len(load_journal_units(storage, layout, made[1], store.put)) == 2
    with pytest.raises(SegmentCorrupt, match="another than the one that was written"):
        load_journal_units(storage, layout, made[0], store.put)


@pytest.mark.parametrize("place", range(4))
def test_a_segment_that_is_missing_or_altered_is_named(written, place: int) -> None:
    key = written.file.stored_keys[place]
    whole = written.storage.read_bytes(key)
    altered = bytearray(whole)
    altered[len(whole) // 2] ^= 1
    for damaged in (None, whole[:-1], bytes(altered)):
        if damaged is None:
            written.storage.delete([key])
        else:
            written.storage.write_bytes(key, damaged)
        assert look(written) == written.file
        loaded_into = Store()
        with pytest.raises(SegmentCorrupt, match=key):
            verify(written)
        with pytest.raises(SegmentCorrupt, match=key):
            written.load(loaded_into)
        assert not loaded_into, "segments are verified before anything is put"
    written.storage.write_bytes(key, whole)
    assert verify(written) == written.file


# -- a writer's defects, under checksums that fit ----------------------------------------------------------


def split(whole: bytes | bytearray) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """Where directory and summary begin, and what they say."""
    end = len(whole) - TRAILER.size
    start = end - TRAILER.unpack(whole[end:])[0]
    summary = json.loads(whole[start:end])["content"]
    before_directory = start - summary["directory"][0]
    return before_directory, start, json.loads(whole[before_directory:start]), summary


Change = Callable[[dict[str, Any]], object]


def with_directory(
    written: Written,
    change: Change = lambda content: None,
    *,
    change_summary: Change = lambda content: None,
    version: int = 2,
) -> None:
    """Give the file another directory, and another summary."""
    whole = written.storage.read_bytes(written.key)
    before_directory, _, directory, summary = split(whole)
    change(directory)
    document = json.dumps(directory, separators=(",", ":")).encode()
    summary["directory"] = [len(document), zlib.crc32(document)]
    change_summary(summary)
    end = seal("xidstream.journal", version, summary)
    trailer = TRAILER.pack(len(end), zlib.crc32(end), b"XIDSJRNL")
    written.storage.write_bytes(written.key, whole[:before_directory] + document + end + trailer)


def test_a_file_with_a_directory_like_its_own_is_whole(small) -> None:
    """What the tests below change is not the way in which they write it."""
    with_directory(small)
    assert verify(small) == small.file


def memory(content: dict[str, Any]) -> list[Any]:
    return content["units"][0]["memory"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("relations"),
        lambda c: c.pop("objects"),
        lambda c: c.update(units=[]),
        lambda c: c.update(units=None),
        lambda c: c.update(units=[3]),
        lambda c: c["units"][0].pop("end_lsn"),
        lambda c: c["units"][0].update(end_lsn="x"),
        lambda c: c["units"][0].update(end_lsn=3),
        lambda c: c["units"][0].update(left_out=[[1 << 40, "0/1"]]),
        lambda c: c["units"][0].update(segments=[{"key": "../etc"}]),
        lambda c: c["units"][0].update(messages=[{"kind": "other"}]),
        lambda c: c["objects"].append([-8, 0]),
        lambda c: c["objects"][0].pop(),
        lambda c: memory(c).pop(),
        lambda c: memory(c).__setitem__(2, 1),
    ],
)
def test_a_directory_that_lacks_a_part_is_refused(small, change) -> None:
    with_directory(small, change)
    refused(small, verify)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("end_lsn"),
        lambda c: c.update(end_lsn="x"),
        lambda c: c.update(slot=None),
        lambda c: c.update(n_rows=-1),
        lambda c: c.update(n_rows=True),
        lambda c: c.update(stored_keys=["../etc"]),
        lambda c: c.update(stored_keys=[3]),
        lambda c: c.update(directory=[3]),
        lambda c: c.update(directory=[c["directory"][0] + 8, 0]),
        lambda c: c.update(objects_bytes=0),
    ],
)
def test_a_summary_that_lacks_a_part_is_refused(small, change) -> None:
    with_directory(small, change_summary=change)
    refused(small, look, verify)


@pytest.mark.parametrize("figure", ["n_units", "n_transactions", "n_rows", "n_stored_bytes"])
def test_a_summary_of_other_units_gives_no_unit(small, figure: str) -> None:
    with_directory(small, change_summary=lambda c: c.update({figure: 7}))
    refused(small, verify, match="other units than its summary says")


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["objects"].clear(),
        lambda c: c["units"][0]["messages"].clear(),
        lambda c: c["units"][0]["messages"].append({"kind": "inline"}),
        lambda c: c["units"][0]["messages"].append({"kind": "memory", "object": 2, "n_bytes": 1}),
        lambda c: c["units"][0]["messages"].append({"kind": "memory", "object": 9, "n_bytes": 1}),
        lambda c: c["units"].append(c["units"][0]),
        lambda c: c["objects"].append([0, 0]),
        lambda c: c["objects"].append([0, zlib.crc32(b"")]),
        lambda c: memory(c).__setitem__(0, 0),
        lambda c: memory(c).__setitem__(0, "2"),
        lambda c: memory(c).__setitem__(0, [2]),
        lambda c: memory(c).__setitem__(0, -1),
        lambda c: memory(c).__setitem__(1, 0),
        lambda c: memory(c).__setitem__(3, 9),
    ],
)
def test_a_directory_that_does_not_fit_its_objects_gives_no_unit(small, change) -> None:
    with_directory(small, change)
    refused(small, verify)


def test_an_object_that_is_no_arrow_stream_is_refused(small) -> None:
    whole = small.storage.read_bytes(small.key)
    before_directory, _, directory, _ = split(whole)
    noise = b"\xff" * directory["objects"][2][0]
    start = before_directory - len(noise)
    small.storage.write_bytes(small.key, whole[:start] + noise + whole[before_directory:])

    def change(content: dict[str, Any]) -> None:
        content["objects"][2][1] = zlib.crc32(noise)

    with_directory(small, change)
    refused(small, verify, match="no Arrow stream")


def test_another_version_is_not_guessed(small) -> None:
    with_directory(small, version=1)
    for each in (look, verify, Written.load):
        with pytest.raises(Unsupported, match=small.key):
            each(small)
