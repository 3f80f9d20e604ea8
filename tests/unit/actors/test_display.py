"""What a person reads while a run works, on a terminal of any width and in a file."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from xidstream.actors.cli.display import Display, Pace, picture, summary
from xidstream.actors.driver.batch_loop import LoopProgress
from xidstream.actors.reader.slot_reader import ReaderStats
from xidstream.actors.supervision.run_status import Status
from xidstream.pipeline.account.snapshots import SnapshotProgress, TableProgress
from xidstream.pipeline.commits.sequencer_stats import JournalStats, SequencerStats
from xidstream.pipeline.exchange import Opened, PrepareCover, SlotIdentity
from xidstream.pipeline.pg import Lsn, Xid

OPENED = Opened(
    identity=SlotIdentity(1, "shop", "s"),
    confirmed_flush_lsn=Lsn(0x10),
    target_lsn=Lsn(0x100),
    server_version=180000,
    proto_version=4,
    streaming="on",
    two_phase=False,
    cover=PrepareCover(),
    timeline=1,
    history={},
)
READER = ReaderStats(
    n_messages=1,
    n_bytes=5 << 20,
    received_lsn=Lsn(0x200),
    flushed_lsn=Lsn(0x200),
    pending_bytes=0,
    in_flight_bytes=0,
    backlog_bytes=0,
    paused=False,
    n_buffers=1,
    n_buffers_asked=0,
    n_moved=0,
    open=(),
)
SEQUENCER = SequencerStats(
    n_rows=0,
    n_transactions=0,
    n_batches=1,
    n_waiting=0,
    n_prepared=0,
    confirmed_lsn=Lsn(0x200),
    last_commit_lsn=Lsn(0x200),
    last_commit_timestamp_us=0,
)
JOURNAL = JournalStats(
    n_files=3,
    n_bytes=5 << 30,
    n_units=40,
    n_transactions=12_000,
    first_commit_lsn=Lsn(0x100),
    end_lsn=Lsn(0x200),
    first_commit_timestamp_us=1,
    is_full=False,
)
OPEN = ((Xid(749), 400_000, 9 << 20, 3), (Xid(750), 10_000, 1 << 20, 0), (Xid(751), 1, 100, 0))


def status(
    *,
    n_waiting: int = 0,
    n_rows: int = 1,
    n_batches: int = 1,
    lag_ms: float | None = 27_100.0,
    open_transactions: Sequence[tuple[Xid, int, int, int]] = (),
    backlog_bytes: int = 0,
    paused: bool = False,
    delivered_lsn: int = 0x200,
    journal: JournalStats | None = None,
) -> Status:
    return Status(
        "epoch",
        OPENED,
        dataclasses.replace(
            READER, open=tuple(open_transactions), backlog_bytes=backlog_bytes, paused=paused
        ),
        dataclasses.replace(
            SEQUENCER, n_waiting=n_waiting, delivered_lsn=Lsn(delivered_lsn), journal=journal
        ),
        LoopProgress(n_batches=n_batches, n_rows=n_rows, n_transactions=1, lag_ms=lag_ms),
    )


STARTING = Status("epoch", None, None, None, LoopProgress())


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def noted(*statuses: Status, every_s: float = 1.0) -> Pace:
    pace = Pace()
    for n, each in enumerate(statuses):
        pace.note(each, n * every_s)
    return pace


def test_the_lag_of_the_last_batch_is_not_shown_any_more_when_all_is_caught_up() -> None:
    behind, caught_up = status(n_waiting=2), status()
    assert summary(behind, noted(behind)).startswith("catching up, lag 27.1 s · ")
    assert summary(caught_up, noted(caught_up)).startswith("caught up, lag 27.1 s · "), "a moment ago"
    assert summary(caught_up, noted(*[caught_up] * 7)).startswith("caught up · ")
    assert "27.1" not in summary(caught_up), "nor at the end"


@pytest.mark.parametrize(
    "behind",
    [
        status(n_waiting=1),
        status(backlog_bytes=1),
        status(paused=True),
        status(delivered_lsn=0xFF),
        status(journal=JOURNAL, n_waiting=JOURNAL.n_units, delivered_lsn=0x100),
        status(journal=JOURNAL, delivered_lsn=0xFF),
        STARTING,
    ],
)
def test_what_the_sink_has_not_taken_and_what_was_there_at_the_start_is_behind(behind: Status) -> None:
    assert not behind.is_caught_up


def test_what_is_in_the_journal_is_said_to_wait_beside_the_position_that_is_confirmed() -> None:
    text = summary(status(journal=JOURNAL, delivered_lsn=0x100))
    assert text.endswith(
        " · in the journal: 5.0 GiB, 12,000 transactions wait for the sink · confirmed 0/200"
    )
    full = summary(status(journal=dataclasses.replace(JOURNAL, is_full=True)))
    assert "in the journal, which is full: 5.0 GiB" in full
    assert "journal" not in summary(status())
    one = summary(status(journal=dataclasses.replace(JOURNAL, n_transactions=1)))
    assert "1 transaction waits for the sink" in one


def test_without_a_sink_what_the_journal_has_is_not_behind() -> None:
    captured = status(journal=JOURNAL, n_waiting=JOURNAL.n_units, delivered_lsn=0x10)
    assert not captured.is_caught_up
    assert dataclasses.replace(captured, has_sink=False).is_caught_up


def test_an_open_transaction_is_not_behind() -> None:
    """But "caught up" beside "69 MiB behind the server" was a contradiction."""
    reading = status(open_transactions=OPEN)
    assert reading.is_caught_up
    shown = summary(reading, noted(*[reading] * 7))
    assert shown.startswith("caught up with commits · reading xid 749 and 2 more · ")
    one = status(open_transactions=OPEN[1:2])
    assert summary(one, noted(*[one] * 7)).startswith("caught up with commits · reading xid 750 · ")


def test_a_short_lag_where_changes_come_all_the_time_is_keeping_up() -> None:
    following = [status(n_waiting=1, n_batches=n, lag_ms=783.0) for n in (1, 2, 3)]
    assert summary(following[-1], noted(*following)).startswith("keeping up, lag 783 ms · ")
    stuck = [*following, *[following[-1]] * 6]
    assert summary(stuck[-1], noted(*stuck)).startswith("catching up, lag 783 ms · ")


def test_rates_are_those_of_the_last_seconds_and_begin_anew_with_another_epoch() -> None:
    statuses = [status(n_rows=n) for n in (0, 1000, 3000)]
    assert "1,500 rows/s" in summary(statuses[-1], noted(*statuses))
    idle = [*statuses, *[status(n_rows=3000)] * 12]
    assert "rows/s" not in summary(idle[-1], noted(*idle))
    restarted = [*statuses, status(n_rows=0), status(n_rows=10)]
    assert "10 rows/s" in summary(restarted[-1], noted(*restarted))
    assert "rows/s" not in summary(statuses[0], noted(statuses[0]))


def test_while_snapshots_are_taken_the_wal_that_the_slot_keeps_is_told() -> None:
    waiting = TableProgress("public.t", "reading", 10, 4, 1000, 10 << 20, 4 << 20, 0)
    progress = SnapshotProgress((waiting,), 2, 500, 1 << 20, 3 << 20)
    shown = summary(dataclasses.replace(status(), snapshots=progress))
    assert (
        "2 snapshots taken, 1 table to go: 5.0 MiB of 11.0 MiB read, 1,500 rows, the slot keeps 3.0 MiB of WAL"
        in shown
    )
    moving = dataclasses.replace(progress, bytes_per_s=float(1 << 20))
    assert "5.0 MiB of 11.0 MiB read (1.0 MiB/s), 6.0 s left, 1,500 rows" in summary(
        dataclasses.replace(status(), snapshots=moving)
    )
    unknown = dataclasses.replace(progress, held_wal_bytes=None)
    assert "WAL" not in summary(dataclasses.replace(status(), snapshots=unknown))


def test_the_largest_open_transaction_is_named_and_one_row_is_one_row() -> None:
    several = summary(status(open_transactions=OPEN), noted(status()))
    assert "3 open, 410,001 rows; the largest: xid 749, 400,000 rows" in several
    one = summary(status(open_transactions=OPEN[2:]), noted(status()))
    assert "1 open: xid 751, 1 row" in one and "1 transaction, 1 row delivered" in one
    assert not re.search(r"\b1 (rows|transactions)", several + one)


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_phrase_of_the_picture_is_broken_at_any_width(width: int) -> None:
    shown = status(open_transactions=OPEN, paused=True, backlog_bytes=128 << 20, n_rows=123_456_789)
    pace = noted(status(n_rows=0), shown)
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(picture(shown, pace))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    phrases = summary(shown, pace).split(" · ")
    assert len(phrases) == 7
    for phrase in phrases:
        assert len(phrase) > width or any(phrase in line for line in lines), (phrase, lines)
    assert max(map(len, lines)) <= width


def test_a_file_gets_lines_without_control_characters_one_for_each_change() -> None:
    out, clock = io.StringIO(), Clock()
    with Display(out, clock) as display:
        display.starting("Ray")
        clock.now_s = 4
        waiting = ("the slot reader", "the Spark session")
        for waiting_for in (waiting, waiting, waiting[1:]):
            display.show({"s": dataclasses.replace(STARTING, waiting_for=waiting_for)})
            clock.now_s += 10
        for _ in range(100):
            display.show({"s": status()})
            clock.now_s += 0.25
        display.line("a notice")
    lines = out.getvalue().splitlines()
    assert lines[:4] == [
        "0 s: waiting for Ray",
        "4 s: waiting for the slot reader and the Spark session",
        "24 s: waiting for the Spark session",
        "34 s: reading slot s",
    ]
    assert [line.partition(" · ")[0] for line in lines[4:]] == [
        "caught up, lag 27.1 s",
        "caught up",
        "a notice",
    ]
    assert not re.search(r"[^\x20-\x7e·\n]", out.getvalue())


def test_what_a_run_that_reads_already_waits_for_comes_first() -> None:
    shown = dataclasses.replace(status(), waiting_for=("the Spark session",))
    assert summary(shown, Pace()).startswith("waiting for the Spark session · ")


def test_a_capture_says_where_it_writes_and_not_what_nobody_delivers() -> None:
    shown = summary(dataclasses.replace(status(), has_sink=False), Pace())
    assert "into the journal" in shown and "delivered" not in shown


def test_several_slots_are_told_apart() -> None:
    out = io.StringIO()
    with Display(out, Clock()) as display:
        display.show({"a": status(), "b": dataclasses.replace(STARTING, waiting_for=("the slot",))})
    assert out.getvalue().splitlines()[0].startswith("a: caught up")
    assert out.getvalue().splitlines()[1] == "b: 0 s: waiting for the slot"
