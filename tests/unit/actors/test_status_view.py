"""What a person sees of an account, on a terminal of any width."""

from __future__ import annotations

import dataclasses
import datetime
import io

import pytest
from rich.console import Console

from tests.unit.account.accounts import AT, FULL, HAND, LOG, OPEN, SLOT, WELL, journal, reader, run, sink
from xidstream.actors.cli.status_view import view
from xidstream.pipeline.account import Account, LogPart, StoredPart


def shown(account: Account, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=False)
    console.print(view(account))
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_a_run_that_is_well_is_said_to_be_in_its_first_words() -> None:
    text = shown(WELL)
    assert text.splitlines()[1].startswith(
        "caught up with commits · reading 1 open transaction · running for 2 h 5 min"
    )
    assert WELL.reader is not None
    idle = dataclasses.replace(WELL, reader=dataclasses.replace(WELL.reader, n_open=0))
    assert shown(idle).splitlines()[1].startswith("caught up · running for 2 h 5 min")
    assert "confirmed 0/1000000 · 2.0 MiB behind the server" in text
    assert "120 ms (p50), 1.5 s (p99) of 30 transactions" in text
    assert "stalled" not in text and "lost in" not in text and "journal" not in text


def test_an_open_transaction_is_named_before_it_commits_with_all_that_is_known_of_it() -> None:
    line = next(line for line in shown(FULL).splitlines() if "xid 749" in line)
    for fact in ("█", "3 min 4 s", "400,000", "90.0 MiB", "60.0 MiB", "public.orders, public.parts"):
        assert fact in line, line


def test_stalls_come_first_then_the_way_of_the_data_and_at_last_the_restarts() -> None:
    text = shown(FULL, 200)
    order = [
        "stalled · running",
        "stalled: the commit sequencer waits for the sink",
        "slot  ",
        "reader  ",
        "journal  ",
        "sink  ",
        "xid 749",
        "payment-1",
        "snapshot of",
        "xid buffer 0",
        "the storage is full, started again after 1.0 s",
        "remedy: check space",
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "no answer" in text


def test_a_paused_reader_a_batch_in_hand_and_a_slot_that_may_be_lost_are_said() -> None:
    slot = dataclasses.replace(SLOT, wal_bytes_per_s=1 << 20, lost_in_s=1024.0)
    account = dataclasses.replace(
        sink(reader(paused_by="backlog_bytes", backlog_bytes=128 << 20), in_hand=HAND), slot=slot
    )
    text = shown(account, 200)
    assert "paused: backlog_bytes is reached" in text and "128.0 MiB wait for the sink" in text
    assert "writing for 16 s: 3 transactions, 1,000 rows" in text
    assert "limit 1.0 GiB" in text and "lost in 17 min 4 s if nothing more is confirmed" in text


def test_a_journal_says_what_it_holds_how_far_the_sink_is_behind_and_what_the_slot_would_hold() -> None:
    text = shown(FULL, 250)
    assert "the sink is 702.0 MiB behind · without the journal it would hold 703.0 MiB" in text
    assert (
        "1.0 GiB of 64.0 GiB in 18 files · 12,000 transactions wait for the sink · the oldest committed 3 min 20 s ago"
        " · from 0/1000100 to 0/2CC00000 · 700.0 MiB of WAL that the server need not keep"
    ) in text
    assert "full: " not in text
    full = shown(journal(is_full=True), 250)
    assert "journal  full: what commits now waits in the slot · 1.0 GiB of 64.0 GiB" in full


def test_a_log_says_how_far_back_it_answers_and_which_consumer_holds_it_back() -> None:
    text = shown(FULL, 300)
    assert (
        "log        states from 0/F0000 on, 15.1 MiB of WAL · changes behind 0/E0000, cut in 2 of 4 tables · "
        "2 consumers, billing 15.0 MiB behind · holds back 3.0 MiB · billing has told nothing for 8 d 2 h: "
        "`xidstream consumer remove` if it is gone"
    ) in text
    row = next(line.split() for line in text.splitlines() if line.startswith("audit"))
    assert row == ["audit", "0/FFFF00", "0", "B", "0", "B", "10", "d", "10", "h", "ago"]
    assert "states from" not in shown(WELL)
    failed = dataclasses.replace(WELL, log=LogPart(error="the sink cannot be reached"))
    assert "log      could not be read: the sink cannot be reached" in shown(failed, 250)
    uncut = dataclasses.replace(LOG, cut_lsn=None, consumers=(), n_consumers=0)
    lines = shown(dataclasses.replace(WELL, log=uncut), 250).splitlines()
    assert any(line.rstrip().endswith("of WAL · nothing was cut") for line in lines)


def test_where_nothing_runs_the_slot_and_the_storage_say_what_they_know() -> None:
    stopped = Account(
        at=AT,
        run=None,
        slot=dataclasses.replace(SLOT, active_pid=None),
        stored=StoredPart("0/10", "e1", ("xid 7: left out",)),
    )
    text = shown(stopped)
    assert "no run was found" in text and "no reader is connected" in text
    assert "confirmed 0/10, by epoch e1" in text and "given up: xid 7: left out" in text
    assert "journal" not in text
    journaled = StoredPart("0/10", "e1", (), "0/8", 3)
    text = shown(dataclasses.replace(stopped, stored=journaled))
    assert "delivered 0/8; what lies between is in the journal, 3 files" in text


def test_a_run_that_starts_says_what_it_waits_for_and_shows_no_number_that_is_not_known() -> None:
    account = Account(at=AT, run=run(state="starting", waiting_for=("the Spark session",)).run)
    text = shown(account)
    assert "starting" in text and "waiting for the Spark session" in text
    assert "reader" not in text and " 0 " not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_a_tables_name_is_no_markup(width: int) -> None:
    strange = dataclasses.replace(OPEN, tables=("public.[red]x[/red]",), n_tables=1)
    text = shown(dataclasses.replace(FULL, open=(strange,)), width)
    assert max(len(line) for line in text.splitlines()) <= width
    if width == 200:
        assert "public.[red]x[/red]" in text


def test_the_lag_of_an_old_batch_is_said_to_be_the_last_batchs() -> None:
    """43 s stood there for ever beside "caught up"."""
    assert "120 ms from COMMIT to the sink ·" in shown(WELL)
    later = dataclasses.replace(WELL, at=AT + datetime.timedelta(minutes=3))
    assert "120 ms from COMMIT to the sink in the last batch, 3 min 0 s ago" in shown(later, 160)


def test_the_bar_of_the_only_transaction_grows() -> None:
    bars = [
        shown(dataclasses.replace(FULL, open=(dataclasses.replace(OPEN, n_rows=n_rows),)), 160).count("█")
        for n_rows in (210_000, 300_000, 490_000)
    ]
    assert bars == [8, 12, 20]


def test_of_what_waits_one_waits() -> None:
    assert WELL.journal is not None and WELL.sequencer is not None
    one = dataclasses.replace(
        WELL,
        journal=dataclasses.replace(WELL.journal, n_files=1, n_transactions=1),
        sequencer=dataclasses.replace(WELL.sequencer, n_waiting=1, head_state="ready"),
    )
    assert "1 transaction waits for the sink" in shown(one)
    assert "1 waits, the first is ready" in shown(one)
