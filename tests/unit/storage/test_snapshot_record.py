"""What the storage keeps of snapshots: the decision, what was taken, and what people asked for."""

from __future__ import annotations

import dataclasses
import json

import pytest

from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.snapshot.key_filter import parse_key_filter
from xidstream.pipeline.storage.cleanup import remove_slot
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import (
    TakenSnapshot,
    cancel,
    forget_request,
    forget_taken,
    read_decision,
    read_taken,
    read_wishes,
    request,
    write_decision,
    write_taken,
)
from xidstream.pipeline.storage.storage import Storage

LAYOUT = Layout(7, "orders", "epoch")
BOUNDS = SnapshotBounds(Lsn(99), Lsn(120), 2**40, 2**40 + 9, (2**40 + 3,), 1_700_000_000_000_000)


def _taken(relid: int, number: int) -> TakenSnapshot:
    columns = (Column("id", 20, -1, True), Column("mood", 16400, -1, False, "public.mood"))
    relation = RelationVersion(relid, "public", 'a "table".name', ReplicaIdentity.DEFAULT, columns)
    return TakenSnapshot(Generation(relation, number, BOUNDS), {"columns": [["id", 20, -1]]})


def test_a_decision_comes_back_with_the_tables_that_were_published(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    assert read_decision(storage, LAYOUT) is None
    for decision in (
        Decision(True, {16384: "table:1", 4_294_967_295: "all:2"}, slot_xmax=1 << 40),
        Decision(True, {16384: "table:1"}),
        Decision(False),
    ):
        write_decision(storage, LAYOUT, decision)
        assert read_decision(storage, LAYOUT) == decision
    assert read_decision(storage, Layout(7, "other", "epoch")) is None


def test_generations_come_back_each_until_it_is_forgotten(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    all_taken = [_taken(16384, 1), _taken(16384, 2), _taken(16385, 1)]
    for taken in all_taken:
        write_taken(storage, LAYOUT, taken)
    write_decision(storage, LAYOUT, Decision(takes_snapshots=True))
    found = sorted(read_taken(storage, LAYOUT), key=lambda t: (t.generation.relid, t.generation.number))
    assert found == all_taken
    forget_taken(storage, LAYOUT, [all_taken[0].generation])
    assert len(read_taken(storage, LAYOUT)) == 2


def test_a_primary_key_under_full_comes_back(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    relation = dataclasses.replace(_taken(5, 1).generation.relation, replica_identity=ReplicaIdentity.FULL)
    keyed = TakenSnapshot(Generation(relation, 1, BOUNDS, ("id",)), {})
    write_taken(storage, LAYOUT, keyed)
    assert read_taken(storage, LAYOUT) == [keyed] and keyed.generation.key == ("id",)


def test_a_request_ends_a_cancellation_and_a_cancellation_a_request(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    cancel(storage, LAYOUT, 5, "public.a")
    assert dict(read_wishes(storage, LAYOUT).cancelled) == {5: "public.a"}
    request(storage, LAYOUT, 5, "public.a")
    wishes = read_wishes(storage, LAYOUT)
    assert (dict(wishes.requests), dict(wishes.cancelled)) == ({5: "public.a"}, {})
    cancel(storage, LAYOUT, 5, "public.a")
    wishes = read_wishes(storage, LAYOUT)
    assert (dict(wishes.requests), dict(wishes.cancelled)) == ({}, {5: "public.a"})
    forget_request(storage, LAYOUT, 5)  # of what is not there


def test_dropping_the_slot_forgets_all_of_it(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    write_decision(storage, LAYOUT, Decision(takes_snapshots=True))
    write_taken(storage, LAYOUT, _taken(5, 1))
    request(storage, LAYOUT, 5, "public.a")
    assert remove_slot(storage, LAYOUT) == {"7/orders/snapshots": 3}
    assert read_decision(storage, LAYOUT) is None and read_taken(storage, LAYOUT) == []


def test_a_damaged_record_is_told_by_its_key(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    write_taken(storage, LAYOUT, _taken(5, 1))
    key = LAYOUT.snapshot_key(5, "taken-1")
    document = json.loads(storage.read_bytes(key))
    document["content"]["generation"]["xmax"] += 1
    storage.write_bytes(key, json.dumps(document).encode())
    with pytest.raises(SegmentCorrupt, match=r"5\.taken-1\.json' is damaged"):
        read_taken(storage, LAYOUT)


def test_a_later_range_takes_the_place_of_an_earlier_one_and_a_whole_table_that_of_both(
    storage_uri: str,
) -> None:
    storage = Storage(storage_uri)
    first, second = parse_key_filter("id < 7"), parse_key_filter("\"Day\" = 'it''s' and id in (1, 2)")
    for where in (first, second):
        assert request(storage, LAYOUT, 5, "public.a", where)
        wishes = read_wishes(storage, LAYOUT)
        assert (dict(wishes.requests), dict(wishes.ranges)) == ({5: "public.a"}, {5: where})
    forget_request(storage, LAYOUT, 5, first)
    assert read_wishes(storage, LAYOUT).ranges == {5: second}
    assert request(storage, LAYOUT, 5, "public.a") and not request(storage, LAYOUT, 5, "public.a", first)
    wishes = read_wishes(storage, LAYOUT)
    assert (dict(wishes.requests), dict(wishes.ranges)) == ({5: "public.a"}, {})
    forget_request(storage, LAYOUT, 5, first)
    assert read_wishes(storage, LAYOUT).requests
    forget_request(storage, LAYOUT, 5)
    assert not read_wishes(storage, LAYOUT).requests


def test_what_a_repair_read_comes_back_with_its_generation(storage_uri: str) -> None:
    storage = Storage(storage_uri)
    repaired = dataclasses.replace(_taken(5, 2), where=parse_key_filter("id < 7"))
    write_taken(storage, LAYOUT, repaired)
    assert read_taken(storage, LAYOUT) == [repaired]
