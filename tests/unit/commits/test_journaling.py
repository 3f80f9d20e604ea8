"""The journal of a sequencer on a loop of the test's: when it cannot be written, and how many files it has."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commits.test_confirming import DEADLINE_S, OPENED, Reader, run, sequence, transaction
from tests.unit.storage.test_journal_file import Store, rows_of, table, transaction_rows
from xidstream.pipeline.commits import journal_merging, journal_policy, journal_retries, slot_storage
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.exchange import MemoryPart, Sealed, UnitEnd
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_journal import findings, stored_journal
from xidstream.pipeline.stream import PlainBlock
from xidstream.pipeline.stream.event_router import OrderedEvent

LAYOUT = Layout(1, "s", "e")
STORE = Store()


def with_store(folder: Path, **settings: Any) -> CommitSequence:
    """What it puts is in ``STORE``."""
    made = sequence(folder, **settings)
    made._fetch, made._put = STORE.fetch, STORE.put
    return made


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A storage with room for a record, and not for a file of the journal, while ``is_full``."""

    class Disk:
        is_full = True
        n_refused = 0

    disk, create = Disk(), Storage.create

    def refuse(self: Storage, key: str) -> Any:
        if disk.is_full and "/journal/" in key:
            disk.n_refused += 1
            raise StorageFault(f"cannot write {key!r}: No space left on device")
        return create(self, key)

    monkeypatch.setattr(Storage, "create", refuse)
    monkeypatch.setattr(journal_retries, "FIRST_S", 0.01)
    monkeypatch.setattr(journal_retries, "LAST_S", 0.05)
    return disk


def test_a_journal_that_cannot_be_written_keeps_no_batch_from_being_confirmed(
    tmp_path: Path, unwritable: Any
) -> None:
    """It ended the epoch, and a batch of a slow sink never got through: the sink got the same transactions for ever."""

    async def work() -> None:
        sequencer, reader = sequence(tmp_path, journal_after_bytes=0, batch_rows=1), Reader()
        await sequencer.open(reader.tell, OPENED, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        for i in range(3):
            await sequencer.submit([transaction(i, 20 * (i + 1))])
            batch = await sequencer.next_batch(DEADLINE_S, loop)
            n_refused = unwritable.n_refused
            while unwritable.n_refused < n_refused + 2:
                await asyncio.sleep(0.005)
            assert batch is not None
            await sequencer.batch_done(batch.number, loop)
            await reader.hears_of(20 * (i + 1) + 4)
        await sequencer.submit([transaction(3, 80)])
        account = await sequencer.account(with_prepared=True)
        while account is None or account.sequencer.journal_error is None:
            await asyncio.sleep(0.005)
            account = await sequencer.account(with_prepared=True)
        assert "No space left on device" in account.sequencer.journal_error
        assert account.sequencer.journal_failing_s is not None
        assert account.sequencer.confirmed_lsn == "0/40", "what is in no journal waits in the slot"
        unwritable.is_full = False
        await reader.hears_of(84)
        account = await sequencer.account(with_prepared=True)
        assert account is not None and account.sequencer.journal_error is None
        record = read_progress(Storage(str(tmp_path)), LAYOUT)
        assert record is not None and (record.confirmed_lsn, record.delivered_lsn) == (84, 64)

    run(work())


def test_a_run_that_ends_with_a_journal_that_cannot_be_written_leaves_the_rest_in_the_slot(
    tmp_path: Path, unwritable: Any
) -> None:
    async def work() -> None:
        sequencer, reader = sequence(tmp_path), Reader()
        await sequencer.open(reader.tell, OPENED, None)
        await sequencer.submit([transaction(0, 20)])
        await sequencer.stop()
        while not await sequencer.finished():
            await asyncio.sleep(0.005)
        assert unwritable.n_refused
        record = read_progress(Storage(str(tmp_path)), LAYOUT)
        assert record is not None and (record.confirmed_lsn, record.journal) == (5, ())

    run(work())


def test_a_segment_that_could_not_be_flushed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel forgets what it could not write: the next flush says that all is well."""

    def failing(*_: object) -> None:
        raise StorageFault("cannot flush 'x': Input/output error")

    monkeypatch.setattr(slot_storage, "flush_segments", failing)

    async def work() -> None:
        sequencer, reader = sequence(tmp_path, journal_after_bytes=0), Reader()
        await sequencer.open(reader.tell, OPENED, None)
        await sequencer.submit([transaction(0, 20)])
        with pytest.raises(StorageFault, match="cannot flush"):
            await sequencer.failed()

    run(work())


def block(ticket: int) -> OrderedEvent:
    """A transaction with one row."""
    lsn = Lsn(0x100 * (ticket + 1))
    relation = table(1)
    filled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    part = MemoryPart(relation, 1, 100, lsn, STORE.put(rows_of(relation, 1, lsn)))
    filled.set_result(Sealed(transaction_rows(lsn), (part,), (), (), 1, 100))
    end = UnitEnd(lsn, lsn, Lsn(lsn + 0x30), 1)
    event = PlainBlock(None, *dataclasses.astuple(end))  # type: ignore[arg-type]
    return OrderedEvent(ticket, event, filled)


def delivered_by(folder: Path, n_transactions: int, confirmed_lsn: Lsn) -> list[int]:
    """What a sink gets of the journal that was left."""
    got: list[int] = []

    async def work() -> None:
        sequencer, reader = with_store(folder), Reader()
        opened = dataclasses.replace(OPENED, confirmed_flush_lsn=confirmed_lsn, target_lsn=Lsn(1 << 40))
        await sequencer.open(reader.tell, opened, None)
        loop = (await sequencer.sink_opened(Lsn(0), 0)).loop
        while len(got) < n_transactions:
            batch = await sequencer.next_batch(DEADLINE_S, loop)
            assert batch is not None
            for each in batch.units:
                of_unit = each.transactions.column("commit_lsn").to_pylist()
                rows = [
                    row for part in each.memory for row in STORE[part.ref].column("_commit_lsn").to_pylist()
                ]
                assert rows == of_unit
                got.extend(of_unit)
            await sequencer.batch_done(batch.number, loop)
        await sequencer.stop()
        while not await sequencer.finished():
            await asyncio.sleep(0.005)

    run(work())
    return got


@pytest.mark.parametrize("damaged", [False, True])
def test_a_capture_keeps_few_files_and_the_next_run_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """A file for each moment stayed a file for each. A file that cannot be read is left alone, and found by whoever
    comes to it."""
    monkeypatch.setattr(journal_merging, "FREE_FILES", 4)
    monkeypatch.setattr(journal_policy, "GATHER_S", 0.0)
    monkeypatch.setattr(journal_policy, "PACE_S", 0.0)
    storage, n = Storage(str(tmp_path)), 60
    most = 0

    async def work() -> None:
        nonlocal most
        sequencer, reader = with_store(tmp_path), Reader()
        await sequencer.open(reader.tell, OPENED, None, has_sink=False)
        for ticket in range(n):
            await sequencer.submit([block(ticket)])
            await reader.hears_of(0x100 * (ticket + 1) + 0x30)
            journal = sequencer._order.journal
            most = max(most, len(journal.files))
            if damaged and ticket == 3:
                (_, key, *_) = storage.list_keys(LAYOUT.journal_prefix)
                Path(storage.local_path(key) or "").write_bytes(b"torn")
        await sequencer.stop()
        while not await sequencer.finished():
            await asyncio.sleep(0.005)

    run(work())
    record = read_progress(storage, LAYOUT)
    assert record is not None and record.confirmed_lsn == 0x100 * n + 0x30
    assert most <= 4 + 5 + 4 * damaged
    found = stored_journal(storage, LAYOUT, verify=True)
    assert found is not None and found.unnamed == ()
    named = [finding.key for finding in findings(found)]
    if damaged:
        assert len(named) == 1
        return
    assert not named
    expected = [0x100 * (ticket + 1) for ticket in range(n)]
    assert delivered_by(tmp_path, n, record.confirmed_lsn) == expected
    assert storage.list_keys(LAYOUT.journal_prefix) == []


def test_a_crash_between_a_file_that_absorbed_others_and_its_record_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names the others still; the file counts for nothing, and goes."""
    monkeypatch.setattr(journal_merging, "FREE_FILES", 4)
    monkeypatch.setattr(journal_policy, "GATHER_S", 0.0)
    monkeypatch.setattr(journal_policy, "PACE_S", 0.0)
    record = SlotStorage.record
    n_before = 5

    class Crash(Exception):
        pass

    def crashing(self: SlotStorage, confirmed_lsn: Lsn, *given: Any) -> None:
        if confirmed_lsn > 0x100 * n_before + 0x30:
            raise Crash
        record(self, confirmed_lsn, *given)

    monkeypatch.setattr(SlotStorage, "record", crashing)

    async def work() -> None:
        sequencer, reader = with_store(tmp_path), Reader()
        await sequencer.open(reader.tell, OPENED, None, has_sink=False)
        for ticket in range(n_before):
            await sequencer.submit([block(ticket)])
            await reader.hears_of(0x100 * (ticket + 1) + 0x30)
        await sequencer.submit([block(n_before)])
        with pytest.raises(Crash):
            await sequencer.failed()

    run(work())
    monkeypatch.setattr(SlotStorage, "record", record)
    storage = Storage(str(tmp_path))
    assert len(storage.list_keys(LAYOUT.journal_prefix)) == n_before + 1
    stored = read_progress(storage, LAYOUT)
    assert stored is not None
    expected = [0x100 * (ticket + 1) for ticket in range(n_before)]
    assert delivered_by(tmp_path, n_before, stored.confirmed_lsn) == expected
    assert storage.list_keys(LAYOUT.journal_prefix) == []
