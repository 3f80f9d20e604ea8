"""What the sequencer tells of itself while the sink does not pull: both positions, and what the journal holds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.opened import opened_at
from xidstream.pipeline.account.model import SequencerReport
from xidstream.pipeline.commits.commit_sequence import CommitSequence
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.exchange import Sealed, TransactionEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream import Committed, PlainBlock, Prepared
from xidstream.pipeline.stream.event_router import OrderedEvent
from xidstream.pipeline.transactions.sealed import transaction_row

OPENED = opened_at(5, 100, two_phase=False)


async def told(sequence: CommitSequence) -> SequencerReport:
    report = await sequence.account(with_prepared=True)
    assert report is not None
    return report


async def tell_reader(confirmed_lsn: Lsn, done_ticket: int, free_ticket: int) -> None:
    pass


async def opened(config: Config) -> CommitSequence:
    sequence = CommitSequence(config, "e", lambda error: error, lambda ref: ref, lambda table: table)
    await sequence.open(tell_reader, OPENED, None)
    return sequence


async def submit(sequence: CommitSequence, committed_s: float) -> None:
    """A transaction of messages alone, so that nothing of it is in memory."""
    end = TransactionEnd(Xid(700), Lsn(20), Lsn(24), int(committed_s * 1e6))
    content: asyncio.Future[Sealed] = asyncio.get_running_loop().create_future()
    content.set_result(Sealed(transaction_row(end, 0, [], with_messages=True), (), (), (), 0, 0))
    await sequence.submit([OrderedEvent(0, Committed(end, has_blocks=True), content)])


async def until(sequence: CommitSequence, confirmed: str) -> SequencerReport:
    deadline_s = time.monotonic() + 30
    while (report := await told(sequence)).sequencer.confirmed_lsn != confirmed:
        assert time.monotonic() < deadline_s, report
        await asyncio.sleep(0.01)
    return report


def test_what_is_in_the_journal_is_confirmed_and_not_delivered_until_the_sink_has_it(tmp_path: Path) -> None:
    async def work() -> tuple[SequencerReport, ...]:
        sequence = await opened(Config(storage=str(tmp_path), journal_after_bytes=0))
        before = await told(sequence)
        await submit(sequence, time.time() - 60)
        journaled = await until(sequence, str(Lsn(24)))
        loop = (await sequence.sink_opened(Lsn(0), 0)).loop
        batch = await sequence.next_batch(30, loop)
        assert batch is not None
        await sequence.batch_done(batch.number, loop)
        while (after := await told(sequence)).sequencer.delivered_lsn == "0/5":
            await asyncio.sleep(0.01)
        return before, journaled, after

    before, journaled, after = asyncio.run(work())
    assert (before.sequencer.delivered_lsn, before.sequencer.undelivered_s) == ("0/5", 0.0)
    assert before.journal is None
    assert (journaled.sequencer.delivered_lsn, journaled.sequencer.confirmed_lsn) == ("0/5", "0/18")
    held = journaled.journal
    assert held is not None and (held.n_files, held.n_transactions, held.wal_bytes) == (1, 1, 19)
    assert (held.first_commit_lsn, held.end_lsn, held.is_full) == ("0/14", "0/18", False)
    assert held.oldest_s == pytest.approx(60, abs=30) and held.n_bytes > 0
    assert journaled.sequencer.undelivered_s == held.oldest_s
    assert (after.sequencer.delivered_lsn, after.sequencer.undelivered_s) == ("0/18", 0.0)
    assert after.journal is None


def test_a_transaction_that_waits_and_is_not_in_the_journal_tells_since_when_it_is_ready(
    tmp_path: Path,
) -> None:
    async def work() -> SequencerReport:
        sequence = await opened(Config(storage=str(tmp_path), journal_max_bytes=0))
        await submit(sequence, time.time() - 60)
        await asyncio.sleep(0.05)
        return await told(sequence)

    report = asyncio.run(work())
    waited_s = report.sequencer.undelivered_s
    assert report.journal is None and waited_s is not None and 0 < waited_s < 30, "not since its COMMIT"
    assert report.sequencer.delivered_lsn == report.sequencer.confirmed_lsn == "0/5"


END = TransactionEnd(Xid(700), Lsn(0x20), Lsn(0x24), 0, gid="g")
HEADS = {
    "a transaction": (Committed(END, True), ("COMMIT", 700, 1, "0/20", "0/20", "0/24")),
    "a block of small transactions": (
        PlainBlock(None, Lsn(0x20), Lsn(0x40), Lsn(0x44), 3),
        ("COMMIT", None, 3, "0/20", "0/40", "0/44"),
    ),
    "messages outside of transactions": (
        PlainBlock(None, INVALID_LSN, INVALID_LSN, INVALID_LSN, 0),
        ("COMMIT", None, 0, None, None, None),
    ),
    "a PREPARE": (
        Prepared(Xid(700), "g", Lsn(0x20), Lsn(0x24), True, None, True),
        ("PREPARE", 700, 0, None, None, "0/24"),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_what_waits_for_its_buffer_is_named_by_xid_and_lsn(tmp_path: Path, name: str) -> None:
    """Of messages outside of transactions the run said that "the commit at None" waits."""
    event, named = HEADS[name]

    async def work() -> SequencerReport:
        sequence = await opened(Config(storage=str(tmp_path)))
        content = asyncio.get_running_loop().create_future()
        await sequence.submit([OrderedEvent(0, event, content)])
        return await told(sequence)

    head = asyncio.run(work()).sequencer
    assert head.head_state == "waiting"
    assert named == (
        head.head_message,
        head.head_xid,
        head.head_n_transactions,
        head.head_first_commit_lsn,
        head.head_commit_lsn,
        head.head_end_lsn,
    )


def test_a_commit_prepared_is_named_as_one() -> None:
    order = CommitOrder(batch_rows=1, batch_bytes=1)
    order.add_unit(0, Lsn(0x20), Lsn(0x20), Lsn(0x24), 1, message="COMMIT PREPARED", xid=Xid(700))
    head = order.head
    assert head is not None and (head.message, head.xid, head.state) == ("COMMIT PREPARED", 700, "waiting")


def test_what_the_journal_has_and_nobody_has_asked_for_waits_for_no_buffer(tmp_path: Path) -> None:
    """A capture said "the commit at None has waited for its xid buffer", and so did a run whose Spark was away."""

    async def work() -> SequencerReport:
        config = Config(storage=str(tmp_path), journal_after_bytes=0)
        sequence = CommitSequence(config, "e", lambda error: error, lambda ref: ref, lambda table: table)
        await sequence.open(tell_reader, OPENED, None, has_sink=False)
        await submit(sequence, time.time())
        return await until(sequence, str(Lsn(24)))

    head = asyncio.run(work()).sequencer
    assert (head.head_state, head.head_message, head.head_commit_lsn) == ("journaled", "journaled", "0/14")
