"""Which part waits for what, told within 30 s, once, and not told of a run that works."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.account.accounts import FAILED, FULL, HAND, WELL, journal, reader, run, sequencer, sink
from xidstream.pipeline.account import Account, StallWatch
from xidstream.pipeline.account.stalls import LOOK_INTERVAL_S

WAITING = {
    "n_waiting": 2,
    "head_ticket": 7,
    "head_kind": "unit",
    "head_message": "COMMIT",
    "head_xid": 735,
    "head_n_transactions": 1,
    "head_first_commit_lsn": "0/1100000",
    "head_commit_lsn": "0/1100000",
    "head_end_lsn": "0/1100030",
    "delivered_lsn": "0/1000000",
}
MANY = {"head_xid": None, "head_n_transactions": 12, "head_first_commit_lsn": "0/10FF000"}
MESSAGES = {**MANY, "head_n_transactions": 0, "head_first_commit_lsn": None, "head_commit_lsn": None}
JOURNALED = {"head_message": "journaled", "head_xid": None, "head_ticket": -1}
NO_BATCH = sequencer(head_state="taken", **WAITING)

STALLED = {
    "the server is silent although it is asked every 10 s": (
        reader(silent_s=21.0),
        ("slot reader", "server", "sent nothing for 21 s"),
    ),
    "what was sent to a buffer is not decoded": (
        reader(in_flight_bytes=8 << 20),
        ("slot reader", "xid buffers", "the xid buffers have 8.0 MiB to decode"),
    ),
    "reading is paused because the buffers do not keep up": (
        reader(in_flight_bytes=64 << 20, paused_by="reader_memory_bytes"),
        ("slot reader", "xid buffers", "decoded none"),
    ),
    "reading is paused because of what waits for the sink": (
        reader(backlog_bytes=128 << 20, paused_by="backlog_bytes"),
        ("slot reader", "sink", "128.0 MiB wait for the sink"),
    ),
    "the head of the order waits for its buffer": (
        sequencer(head_state="waiting", **WAITING),
        (
            "commit sequencer",
            "xid buffers",
            "the commit of transaction 735 at 0/1100000 has waited for its xid buffer for 15 s",
        ),
    ),
    "the head of the order is a block of small transactions": (
        sequencer(head_state="waiting", **{**WAITING, **MANY}),
        (
            "commit sequencer",
            "xid buffers",
            "12 transactions with commits from 0/10FF000 to 0/1100000 have waited for their xid buffer",
        ),
    ),
    "the head of the order has messages outside of transactions alone": (
        sequencer(head_state="waiting", **{**WAITING, **MESSAGES}),
        (
            "commit sequencer",
            "xid buffers",
            "logical messages outside of transactions, after 0/1000000, have waited",
        ),
    ),
    "a COMMIT PREPARED waits for what its PREPARE has stored": (
        sequencer(head_state="waiting", **{**WAITING, "head_message": "COMMIT PREPARED"}),
        (
            "commit sequencer",
            "storage",
            "COMMIT PREPARED of transaction 735, which ends at 0/1100030, has waited",
        ),
    ),
    "the head of the order is read from the journal": (
        sequencer(head_state="waiting", **{**WAITING, **JOURNALED}),
        (
            "commit sequencer",
            "storage",
            "the journal's first transaction after 0/1000000 has waited for the storage",
        ),
    ),
    "the driver does not ask for what is in the journal": (
        sequencer(head_state="journaled", **{**WAITING, **JOURNALED}),
        (
            "commit sequencer",
            "Spark driver",
            "the journal's first transaction after 0/1000000 has been ready",
        ),
    ),
    "a PREPARE waits for the storage": (
        sequencer(**{**WAITING, "head_kind": "hold", "head_message": "PREPARE", "head_state": "waiting"}),
        (
            "commit sequencer",
            "storage",
            "PREPARE of transaction 735, which ends at 0/1100030, has waited for the storage",
        ),
    ),
    "the storage does not take the position": (
        sequencer(recording_s=15.0),
        ("commit sequencer", "storage", "confirmed position"),
    ),
    "the journal cannot be written": (
        sequencer(journal_failing_s=15.0, journal_error="cannot write 'x': No space left on device"),
        ("journal", "storage", "No space left on device; what commits now waits in the slot"),
    ),
    "a batch is in the sink's hands": (
        sink(in_hand=HAND),
        ("commit sequencer", "sink", "3 transactions and 1,000 rows in hand for 16 s"),
    ),
    "Spark has a job and no executor": (
        sink(in_hand=HAND, idle_s=12.0, n_executors=0),
        ("sink", "Spark executors", "0 executors registered"),
    ),
    "the driver does not pull": (
        sequencer(head_state="ready", **WAITING),
        ("commit sequencer", "Spark driver", "has not taken it"),
    ),
    "a batch is in the sink's hands, and the journal takes what commits": (
        journal(sink(in_hand=HAND)),
        (
            "commit sequencer",
            "sink",
            "what commits meanwhile is in the journal (12,000 transactions, 1.0 GiB), and the server need not keep it",
        ),
    ),
    "a batch is in the sink's hands, and the journal is full": (
        journal(sink(in_hand=HAND), is_full=True, n_bytes=64 << 30),
        (
            "commit sequencer",
            "sink",
            "for 16 s; the journal is full (64.0 GiB), and what commits now waits in the slot (see what",
        ),
    ),
    "reading is paused behind a full journal": (
        journal(reader(backlog_bytes=128 << 20, paused_by="backlog_bytes"), is_full=True),
        (
            "slot reader",
            "sink",
            "128.0 MiB wait for the sink, and the journal is full, and no batch has ended",
        ),
    ),
    "the journal is full though the sink works": (
        journal(is_full=True, n_bytes=64 << 30),
        ("journal", "sink", "64.0 GiB in it wait for the sink, and what commits now waits in the slot"),
    ),
    "Spark starts while the journal takes what commits": (
        journal(sequencer(head_state="ready", **WAITING)),
        ("commit sequencer", "Spark driver", "what commits meanwhile is in the journal"),
    ),
    "a function gets the snapshots first": (
        sequencer(dataclasses.replace(WELL, snapshots=FULL.snapshots), head_state="ready", **WAITING),
        ("commit sequencer", "snapshots", "snapshots first"),
    ),
}


@pytest.mark.parametrize("name", STALLED)
def test_within_thirty_seconds_the_part_that_waits_is_named_with_what_it_waits_for(name: str) -> None:
    account, (part, waits_for, text) = STALLED[name]
    watch, now_s = StallWatch(10.0), 100.0
    watch.look(WELL, now_s - LOOK_INTERVAL_S)
    while not (stalls := watch.look(account, now_s)):
        now_s += LOOK_INTERVAL_S
        assert now_s <= 125.0, "a look more may pass before the next one: then it is 30 s"
    (stall,) = stalls
    assert (stall.part, stall.waits_for) == (part, waits_for)
    assert text in stall.text


def look_on(accounts: list[Account]) -> list[tuple[str, str]]:
    """What was told at any of the looks, one every ``LOOK_INTERVAL_S``."""
    watch = StallWatch(10.0)
    looks = [watch.look(account, i * LOOK_INTERVAL_S) for i, account in enumerate(accounts)]
    return [(stall.part, stall.waits_for) for stalls in looks for stall in stalls]


WORKING = {
    "the journal is read, one file after the other": [
        sequencer(head_state="waiting", **{**WAITING, **JOURNALED, "delivered_lsn": f"0/{i:X}"})
        for i in range(20)
    ],
    "a capture has all in the journal": [
        dataclasses.replace(
            sequencer(head_state="journaled", **{**WAITING, **JOURNALED}), sink=None, snapshots=None
        )
    ]
    * 20,
    "nothing happens": [WELL] * 20,
    "the server answers every 10 s": [reader(silent_s=s) for s in (0.0, 5.0, 10.0, 0.1) * 5],
    "blocks are decoded, and others follow": [
        reader(in_flight_bytes=8 << 20, n_bytes=(50 + i) << 20) for i in range(20)
    ],
    "reading is paused, and batches end": [
        sink(reader(backlog_bytes=128 << 20, paused_by="backlog_bytes"), n_batches=3 + i) for i in range(20)
    ],
    "one head follows the other": [
        sequencer(head_state="waiting", **{**WAITING, "head_ticket": i}) for i in range(20)
    ],
    "each batch takes ten seconds": [
        sink(in_hand=dataclasses.replace(HAND, for_s=5.0 * (i % 3)), n_batches=i // 3) for i in range(20)
    ],
    "a keepalive's position is the head": [
        sequencer(**{**WAITING, "head_kind": "position", "head_state": "done"})
    ]
    * 20,
    "the Spark session starts while the reader reads": [
        run(sequencer(head_state="ready", **WAITING), waiting_for=("the Spark session",))
    ]
    * 20,
    "the sink is behind, and the journal takes what commits": [
        journal(sink(n_batches=3 + i), n_bytes=i << 30) for i in range(20)
    ],
    "the journal is full for a moment": [journal(is_full=i % 3 < 2) for i in range(20)],
    "a silent server of a paused reader": [
        sink(reader(silent_s=9.0 * i, paused_by="backlog_bytes"), n_batches=i) for i in range(20)
    ],
}


@pytest.mark.parametrize("name", WORKING)
def test_a_run_that_works_is_told_no_stall(name: str) -> None:
    assert look_on(WORKING[name]) == []


def test_a_sink_that_does_not_return_is_the_one_cause_that_is_told() -> None:
    stuck = sink(
        reader(NO_BATCH, backlog_bytes=128 << 20, paused_by="backlog_bytes"),
        in_hand=dataclasses.replace(HAND, for_s=60.0),
    )
    assert set(look_on([stuck] * 10)) == {("commit sequencer", "sink")}


def test_a_full_journal_is_not_told_beside_the_sink_that_fills_it() -> None:
    stuck = journal(sink(in_hand=dataclasses.replace(HAND, for_s=60.0)), is_full=True)
    assert set(look_on([stuck] * 10)) == {("commit sequencer", "sink")}
    paused = journal(reader(backlog_bytes=128 << 20, paused_by="backlog_bytes"), is_full=True)
    assert set(look_on([paused] * 10)) == {("slot reader", "sink")}


def test_a_stall_ends_with_the_first_progress() -> None:
    watch, stuck = StallWatch(10.0), reader(in_flight_bytes=8 << 20)
    assert [bool(watch.look(stuck, s)) for s in (0.0, 10.0, 20.0)] == [False, False, True]
    assert not watch.look(reader(in_flight_bytes=7 << 20), 25.0), "a MiB was decoded"
    assert [bool(watch.look(reader(in_flight_bytes=7 << 20), s)) for s in (30.0, 40.0)] == [False, True]


def test_another_epoch_counts_anew() -> None:
    watch = StallWatch(10.0)
    stuck = reader(in_flight_bytes=8 << 20)
    watch.look(stuck, 0.0)
    assert not watch.look(run(reader(stuck, n_bytes=9 << 20), epoch="another"), 20.0)


@pytest.mark.parametrize(
    ("error", "waits_for"),
    [("StorageFault", "storage"), ("ConnectionLost", "server"), ("SlotInUse", "another reader of the slot")],
)
def test_a_run_that_starts_again_waits_for_what_failed(error: str, waits_for: str) -> None:
    failed = dataclasses.replace(FAILED, error=error)
    account = dataclasses.replace(run(state="restarting"), last_error=failed)
    (stall,) = StallWatch(10.0).look(account, 0.0)
    assert (stall.part, stall.waits_for, stall.for_s) == ("run", waits_for, 20.0)
    assert failed.message in stall.text and failed.remedy in stall.text
    assert not StallWatch(10.0).look(dataclasses.replace(account, run=WELL.run), 0.0), "it reads again"
