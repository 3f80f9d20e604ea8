"""Two runs over one storage, the first of which stands still somewhere, loses the slot, and goes on later.

Each run lives a whole life: it takes the storage over, journals a transaction, delivers what waits for the sink, and
finishes a prepared transaction. It is stopped before one of its calls to the storage, whatever that is: a look, a list,
a read, a write, the removal of one object. Then the next run gets the slot, and lives its life, perhaps with a stop of
its own. A third one takes over at the end and must find all that the server was told and no sink has.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.opened import opened_at
from tests.unit.storage.conftest import make_batch, prepared_of
from tests.unit.storage.journals import Made
from xidstream.pipeline.commits import slot_storage
from xidstream.pipeline.commits.slot_storage import SlotStorage, TakenOver
from xidstream.pipeline.errors import ComponentLost, StorageFault, Superseded
from xidstream.pipeline.exchange import JournalFile, JournalSpan, Opened, SlotIdentity
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import write_prepared
from xidstream.pipeline.storage.progress import journaled_lsn, last_owner
from xidstream.pipeline.storage.segment_file import write_segment
from xidstream.pipeline.storage.storage import Storage

SLOT = SlotIdentity(7001, "db", "s")
COLUMNS = (Column("id", 23, -1, True), Column("ordinal", 25, -1, False), Column("n", 1700, -1, False))
RELATION = RelationVersion(16_400, "public", "t", ReplicaIdentity.DEFAULT, COLUMNS)
FIRST_COMMIT, STEP, COMMIT_BYTES = 0x2000, 0x1000, 0x30
PREPARE_END = 0x1800


def layout(epoch: str) -> Layout:
    return Layout(SLOT.system_identifier, SLOT.slot, epoch)


class Killed(BaseException):
    """The run's process is gone."""


class Life:
    """One run in a thread of its own, which stops before its call number ``stop_at`` to the storage."""

    current = threading.local()

    def __init__(self, live: Callable[[], None], stop_at: int | None = None) -> None:
        self.n_calls = 0
        self.n_calls_at_look = 0
        self.error: BaseException | None = None
        self._stop_at = stop_at
        self._is_killed = False
        self._stands = threading.Event()
        self._may_go_on = threading.Event()
        self._live = live
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stands.wait(60)

    @classmethod
    def step(cls, is_look: bool) -> None:
        life = getattr(cls.current, "life", None)
        if life is not None:
            life._step(is_look)

    def _step(self, is_look: bool) -> None:
        self.n_calls += 1
        if is_look:
            self.n_calls_at_look = self.n_calls
        if self.n_calls == self._stop_at:
            self._stands.set()
            self._may_go_on.wait(60)
        if self._is_killed:
            raise Killed

    def _run(self) -> None:
        self.current.life = self
        try:
            self._live()
        except BaseException as error:
            self.error = error
        self._stands.set()

    def go_on(self) -> Life:
        self._may_go_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self

    def kill(self) -> Life:
        self._is_killed = True
        return self.go_on()


class SteppedStorage(Storage):
    """Each call is a step of the life whose thread makes it; of a removal, each object is."""

    def _step(self, prefix: str = "") -> None:
        Life.step(prefix == layout("x").progress_prefix)

    def write_bytes(self, key: str, data: bytes) -> None:
        self._step()
        super().write_bytes(key, data)

    @contextmanager
    def create(self, key: str) -> Iterator[Any]:
        with super().create(key) as write:
            yield write
            self._step()

    def sync(self, keys: Iterable[str]) -> None:
        self._step()
        super().sync(keys)

    def read_buffer(self, key: str, start: int = 0) -> pa.Buffer | None:
        self._step()
        return super().read_buffer(key, start)

    def list_keys(self, prefix: str) -> list[str]:
        self._step(prefix)
        return super().list_keys(prefix)

    def list_folders(self, prefix: str | None = None) -> list[str]:
        self._step()
        return super().list_folders(prefix)

    def list_unfinished(self, prefix: str) -> list[str]:
        self._step()
        return super().list_unfinished(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._step()
            super().delete([key])

    def delete_empty_folder(self, prefix: str) -> None:
        self._step()
        super().delete_empty_folder(prefix)


class World:
    """A storage, the server's slot, and a sink. A run that has lost the slot tells the server nothing."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder)
        self.told_lsn = Lsn(FIRST_COMMIT - 0x100)
        self.sink: set[int] = set()
        self.has_prepared = False
        self.slot_is_of = ""

    def opened(self, epoch: str) -> Opened:
        """It has got the slot."""
        self.slot_is_of = epoch
        storage = Storage(self.uri)
        start_lsn = journaled_lsn(storage, layout(epoch))
        found = opened_at(self.told_lsn, 0x100_000, identity=SLOT)
        return dataclasses.replace(found, start_lsn=start_lsn, last_owner=last_owner(storage, layout(epoch)))

    def tell(self, epoch: str, lsn: Lsn) -> None:
        if epoch == self.slot_is_of:
            self.told_lsn = max(self.told_lsn, lsn)

    def live(self, epoch: str) -> Callable[[], None]:
        """A whole life, of a run that gets the slot now."""
        opened = self.opened(epoch)
        return lambda: self._live(epoch, opened)

    def _live(self, epoch: str, opened: Opened) -> None:
        slot = SlotStorage(self.uri, opened, epoch)
        taken = slot.take_over()
        files = self.loaded(slot, taken)
        # What comes after all that is confirmed goes to the journal.
        commit = max([int(taken.confirmed_lsn) // STEP, FIRST_COMMIT // STEP - 1]) * STEP + STEP
        made = Made(SteppedStorage(self.uri), layout(epoch), RELATION)
        number = max((file.number for file in files), default=-1) + 1
        try:
            new = made.write(number, commit, with_segment=True)
        except StorageFault:
            slot.tenure(0)  # its epoch was cleaned under its hands, or this is a defect
            raise
        files.append(new)
        self._record(slot, epoch, new.end_lsn, taken.delivered_lsn, files, [])
        # The sink takes the oldest, and a prepared transaction is committed.
        oldest = files.pop(0)
        self.sink.add(int(oldest.first_commit_lsn))
        finished = list(taken.prepared)
        self.has_prepared |= bool(finished)
        self._record(slot, epoch, new.end_lsn, oldest.end_lsn, files, finished)
        slot.remove_journal([oldest])

    def _record(
        self,
        slot: SlotStorage,
        epoch: str,
        confirmed_lsn: Lsn,
        delivered_lsn: Lsn,
        files: list[JournalFile],
        finished: list[Any],
    ) -> None:
        spans = [JournalSpan(file.epoch, file.number, file.number) for file in files]
        slot.record(confirmed_lsn, finished, delivered_lsn if files else confirmed_lsn, spans)
        self.tell(epoch, confirmed_lsn)

    @staticmethod
    def loaded(slot: SlotStorage, taken: TakenOver) -> list[JournalFile]:
        """The journal, each file of which can be loaded."""
        files = []
        for file in taken.journal:
            if not isinstance(file, JournalFile):
                raise file.error
            assert slot.load_journal(file, lambda table: "ref")
            files.append(file)
        return files

    def judge(self) -> None:
        """By the next run: all that the server was told is in the sink, or there."""
        slot = SlotStorage(self.uri, self.opened("judge"), "judge")
        taken = slot.take_over()
        journaled = {int(file.first_commit_lsn) for file in self.loaded(slot, taken)}
        told = set(range(FIRST_COMMIT, int(self.told_lsn), STEP))
        assert told <= self.sink | journaled, "confirmed, and nowhere"
        assert taken.confirmed_lsn >= self.told_lsn
        if not self.has_prepared:
            (prepared,) = taken.prepared
            assert prepared.damage is None
        kept = {key for file in taken.journal for key in file.stored_keys}  # type: ignore[union-attr]
        kept.update(*(prepared.stored_keys() for prepared in taken.prepared))
        storage = Storage(self.uri)
        assert set(storage.list_keys(layout("x").epochs_prefix)) == kept, "and nothing else is left"
        assert len(storage.list_keys(layout("x").journal_prefix)) == len(taken.journal)
        assert len(storage.list_keys(layout("x").progress_prefix)) == 1


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], World]:
    """Each with a journal file that the sink lacks, a prepared transaction, and what a killed run left."""
    monkeypatch.setattr(slot_storage, "Storage", SteppedStorage)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    numbers = itertools.count()

    def make() -> World:
        world = World(tmp_path / str(next(numbers)))
        storage, first = Storage(world.uri), layout("first")
        slot = SlotStorage(world.uri, world.opened("first"), "first")
        slot.take_over()
        key = first.segment_key(Xid(700), Lsn(0x1700), 0)
        segment = write_segment(storage, key, RELATION, 700, [make_batch(RELATION, 0, 3)])
        write_prepared(storage, first, prepared_of((segment,), end=PREPARE_END))
        made = Made(storage, first, RELATION)
        file = made.write(0, FIRST_COMMIT, with_segment=True)
        slot.record(file.end_lsn, [], Lsn(FIRST_COMMIT - 0x100), [JournalSpan("first", 0, 0)])
        world.tell("first", file.end_lsn)
        made.write(1, FIRST_COMMIT + STEP, with_segment=True)  # no record names it
        storage.write_bytes(first.segment_key(Xid(800), Lsn(0x2500), 0), b"of an open transaction")
        return world

    return make


def n_calls(world: World) -> int:
    life = Life(world.live("a"))
    assert life.error is None
    world.judge()
    return life.n_calls


def check_yielded(life: Life) -> None:
    """It had nothing more to do than remove what it had listed before its last look, or it noticed."""
    assert isinstance(life.error, Superseded) or (life.error is None and life.n_calls_at_look < life._stop_at)


def test_a_run_that_stood_still_before_any_of_its_calls_yields_and_removes_nothing_that_counts(
    worlds: Callable[[], World],
) -> None:
    """It listed what the rightful run had written meanwhile, found it unnamed by its own record, and removed it. Or it
    removed what the rightful run had read of, and the next one ended with status 4."""
    total = n_calls(worlds())
    assert total > 40
    for stop_at in range(1, total + 1):
        world = worlds()
        stopped = Life(world.live("a"), stop_at)
        rightful = Life(world.live("b"))
        assert rightful.error is None, f"{stop_at}: {rightful.error!r}"
        stopped.go_on()
        check_yielded(stopped)
        Life(world.live("c"))
        world.judge()


def pairs(worlds: Callable[[], World], n: int | None) -> list[tuple[int, int]]:
    total = n_calls(worlds())
    every = list(itertools.product(range(1, total + 1), repeat=2))
    return every if n is None else random.Random(7).sample(every, n)


def both_stand_still(worlds: Callable[[], World], n: int | None) -> None:
    for first_stop, second_stop in pairs(worlds, n):
        world = worlds()
        first = Life(world.live("a"), first_stop)
        second = Life(world.live("b"), second_stop)
        first.go_on()
        # Who claims between the other's list and its claim has it yield, also from a slot that it has.
        assert first.error is None or isinstance(first.error, Superseded), (
            first_stop,
            second_stop,
            first.error,
        )
        second.go_on()
        if second.error is not None:
            # Or the first one has recorded since the second one has asked the server.
            assert isinstance(second.error, (Superseded, ComponentLost)), (
                first_stop,
                second_stop,
                second.error,
            )
            again = Life(world.live("c"))
            assert again.error is None, (first_stop, second_stop, again.error)
        world.judge()


def the_second_dies(worlds: Callable[[], World], n: int | None) -> None:
    for first_stop, second_stop in pairs(worlds, n):
        for first_goes_on in (True, False):
            world = worlds()
            first = Life(world.live("a"), first_stop)
            Life(world.live("b"), second_stop).kill()
            if first_goes_on:
                first.go_on()
                assert first.error is None or isinstance(first.error, Superseded), (first_stop, second_stop)
            else:
                first.kill()
            world.judge()


def test_two_runs_that_both_stand_still_lose_nothing(worlds: Callable[[], World]) -> None:
    both_stand_still(worlds, 100)


def test_a_run_that_stood_still_behind_one_that_died_loses_nothing(worlds: Callable[[], World]) -> None:
    the_second_dies(worlds, 50)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_runs_that_stand_still_at_every_pair_of_calls_lose_nothing(worlds: Callable[[], World]) -> None:
    both_stand_still(worlds, None)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_that_stood_still_anywhere_behind_one_that_died_anywhere_loses_nothing(
    worlds: Callable[[], World],
) -> None:
    the_second_dies(worlds, None)
