"""What a person reads while a run works, on a terminal of any width and in a file."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from tests.unit.account.accounts import AT, READER, RUN, SEQUENCER
from xidstream.actors.cli.display import Display, Rates, picture, summary
from xidstream.actors.supervision.run_accounts import has_caught_up
from xidstream.actors.supervision.run_status import RunStatus
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.model import JournalPart, OpenPart, ReaderReport, SequencerReport, SinkPart
from xidstream.pipeline.account.snapshots import SnapshotProgress, TableProgress
from xidstream.pipeline.exchange import Opened, PrepareCover, SlotIdentity
from xidstream.pipeline.pg import Lsn

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
JOURNAL = JournalPart(
    n_files=3,
    n_bytes=5 << 30,
    max_bytes=64 << 30,
    n_units=40,
    n_transactions=12_000,
    first_commit_lsn="0/100",
    end_lsn="0/200",
)
OPEN = tuple(
    OpenPart(xid, 1.0, n_rows, n_bytes, n_bytes, 0, n_segments, 0, ("public.t",), 1, 0, True)
    for xid, n_rows, n_bytes, n_segments in (
        (749, 400_000, 9 << 20, 3),
        (750, 10_000, 1 << 20, 0),
        (751, 1, 100, 0),
    )
)


def status(
    *,
    n_waiting: int = 0,
    n_rows: int = 1,
    n_batches: int = 1,
    lag_ms: float | None = 27_100.0,
    open_transactions: Sequence[OpenPart] = (),
    backlog_bytes: int = 0,
    paused: bool = False,
    delivered_lsn: int = 0x200,
    journal: JournalPart | None = None,
    has_sink: bool = True,
    waiting_for: tuple[str, ...] = (),
    snapshots: SnapshotProgress | None = None,
    epoch: str = "epoch",
) -> RunStatus:
    reader = dataclasses.replace(
        READER,
        n_bytes=5 << 20,
        n_open=len(open_transactions),
        n_open_rows=sum(each.n_rows for each in open_transactions),
        backlog_bytes=backlog_bytes,
        paused_by="backlog_bytes" if paused else None,
    )
    sequencer = dataclasses.replace(
        SEQUENCER, n_waiting=n_waiting, confirmed_lsn="0/200", delivered_lsn=str(Lsn(delivered_lsn))
    )
    is_caught_up = has_caught_up(
        OPENED, ReaderReport(reader, ()), SequencerReport(sequencer, journal=journal), has_sink=has_sink
    )
    return RunStatus(
        Account(
            at=AT,
            run=dataclasses.replace(RUN, epoch=epoch, is_caught_up=is_caught_up, waiting_for=waiting_for),
            reader=reader,
            open=tuple(open_transactions),
            sequencer=sequencer,
            journal=journal or JournalPart(max_bytes=64 << 30),
            sink=SinkPart(n_batches=n_batches, n_rows=n_rows, n_transactions=1, last_lag_ms=lag_ms),
            snapshots=snapshots,
        ),
        OPENED,
        has_sink,
    )


def starting(*waiting_for: str) -> RunStatus:
    run = dataclasses.replace(RUN, state="starting", epoch="", is_caught_up=False, waiting_for=waiting_for)
    return RunStatus(Account(at=AT, run=run))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def noted(*statuses: RunStatus, every_s: float = 1.0) -> Rates:
    pace = Rates()
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
        starting(),
    ],
)
def test_what_the_sink_has_not_taken_and_what_was_there_at_the_start_is_behind(behind: RunStatus) -> None:
    assert not behind.run.is_caught_up


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
    for has_sink in (True, False):
        captured = status(journal=JOURNAL, n_waiting=JOURNAL.n_units, delivered_lsn=0x10, has_sink=has_sink)
        assert captured.run.is_caught_up is not has_sink


def test_nothing_is_said_to_be_caught_up_while_a_part_does_not_answer() -> None:
    reader, sequencer = ReaderReport(READER, ()), SequencerReport(SEQUENCER)
    assert has_caught_up(OPENED, reader, sequencer, has_sink=True)
    assert not has_caught_up(OPENED, None, sequencer, has_sink=True)
    assert not has_caught_up(OPENED, reader, None, has_sink=True)


def test_an_open_transaction_is_not_behind() -> None:
    """But "caught up" beside "69 MiB behind the server" was a contradiction."""
    reading = status(open_transactions=OPEN)
    assert reading.run.is_caught_up
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
    shown = summary(status(snapshots=progress))
    assert (
        "2 snapshots taken, 1 table to go: 5.0 MiB of 11.0 MiB read, 1,500 rows, the slot keeps 3.0 MiB of WAL"
        in shown
    )
    moving = dataclasses.replace(progress, bytes_per_s=float(1 << 20))
    assert "5.0 MiB of 11.0 MiB read (1.0 MiB/s), 6.0 s left, 1,500 rows" in summary(status(snapshots=moving))
    unknown = dataclasses.replace(progress, held_wal_bytes=None)
    assert "WAL" not in summary(status(snapshots=unknown))


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
            display.show({"s": starting(*waiting_for)})
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
    shown = status(waiting_for=("the Spark session",))
    assert summary(shown, Rates()).startswith("waiting for the Spark session · ")


def test_a_capture_says_where_it_writes_and_not_what_nobody_delivers() -> None:
    shown = summary(status(has_sink=False), Rates())
    assert "into the journal" in shown and "delivered" not in shown


def test_several_slots_are_told_apart() -> None:
    out = io.StringIO()
    with Display(out, Clock()) as display:
        display.show({"a": status(), "b": starting("the slot")})
    assert out.getvalue().splitlines()[0].startswith("a: caught up")
    assert out.getvalue().splitlines()[1] == "b: 0 s: waiting for the slot"
