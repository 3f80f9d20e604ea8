"""Many objects of a store are asked for, and deleted, several at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.opened import opened_at
from tests.unit.storage.journals import Made
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.exchange import JournalSpan, SlotIdentity
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.side_by_side import N_THREADS, side_by_side
from xidstream.pipeline.storage.storage import Storage

SLOT = SlotIdentity(7001, "db", "s")
TOGETHER = 4


class Meeting:
    """Goes on when so many threads are in it at once; raises where they never are."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(TOGETHER)

    def wait(self) -> None:
        self._barrier.wait(20)


def test_a_take_over_reads_the_journals_summaries_side_by_side(
    tmp_path: Path, relation: RelationVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 15 ms each, 3,700 files took a minute, and the server hung up."""
    layout = Layout(SLOT.system_identifier, SLOT.slot, "a")
    first = SlotStorage(str(tmp_path), opened_at(0x100, 0x10_000, identity=SLOT), "a")
    first.take_over()
    made = Made(Storage(str(tmp_path)), layout, relation)
    for number in range(2 * TOGETHER):
        file = made.write(number, 0x2000 + 0x100 * number)
    first.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 2 * TOGETHER - 1)])
    meeting, read_tail = Meeting(), Storage.read_tail

    def slow(self: Storage, *given: Any) -> Any:
        meeting.wait()
        return read_tail(self, *given)

    monkeypatch.setattr(Storage, "read_tail", slow)
    opened = opened_at(file.end_lsn, 0x10_000, identity=SLOT)
    taken = SlotStorage(str(tmp_path), opened, "b").take_over()
    assert [found.number for found in taken.journal] == list(range(2 * TOGETHER))


def test_objects_of_a_store_are_deleted_side_by_side(
    s3_server: Any, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(s3_server.uri("deleted-side-by-side"))
    keys = [layout.journal_key(number) for number in range(2 * TOGETHER)]
    for key in keys:
        storage.write_bytes(key, b"x")
    meeting, delete_in = Meeting(), Storage._delete_in

    def slow(self: Storage, *given: Any) -> None:
        meeting.wait()
        delete_in(self, *given)

    monkeypatch.setattr(Storage, "_delete_in", slow)
    storage.delete(keys)
    assert storage.list_keys(layout.journal_prefix) == []


def test_the_first_error_of_the_items_order_is_raised() -> None:
    def ask(item: int) -> int:
        if item >= 3:
            raise StorageFault(f"item {item}")
        return item

    answers = side_by_side(ask, range(N_THREADS + 10))
    assert [next(answers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StorageFault, match="item 3"):
        next(answers)
