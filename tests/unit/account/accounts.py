"""Accounts for tests: of a run that is well, with what a test changes of it."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from xidstream.pipeline.account import (
    Account,
    BatchInHand,
    BatchPart,
    ConsumerPart,
    JournalPart,
    LatencyPart,
    LogPart,
    OpenPart,
    PreparedPart,
    ProcessPart,
    ReaderPart,
    RestartPart,
    RunPart,
    SequencerPart,
    SinkPart,
    SlotPart,
    Stall,
)
from xidstream.pipeline.account.snapshots import SnapshotProgress, TableProgress

AT = datetime.datetime(2026, 11, 23, 1, 2, 3, tzinfo=datetime.timezone.utc)
RUN = RunPart(
    slot="shop",
    system_identifier="7300000000000000001",
    database="shop",
    publication=("shop",),
    sink="delta:s3://bucket/tables",
    storage="s3://bucket/xidstream",
    pid=4711,
    host="worker-1",
    started_at=AT - datetime.timedelta(hours=2, minutes=5),
    state="reading",
    waiting_for=(),
    epoch="20261123T000000-0a0b0c0d",
    is_caught_up=True,
    page="http://127.0.0.1:8275/",
    metrics="http://127.0.0.1:8276/metrics",
)
SLOT = SlotPart(
    name="shop",
    database="shop",
    plugin="pgoutput",
    active_pid=99,
    two_phase=False,
    confirmed_lsn="0/1000000",
    restart_lsn="0/F00000",
    server_lsn="0/1200000",
    behind_bytes=2 << 20,
    flush_lag_s=0.25,
    wal_held_bytes=3 << 20,
    wal_limit_bytes=1 << 30,
    wal_status="reserved",
    safe_wal_size_bytes=1 << 30,
    invalidation_reason=None,
)
READER = ReaderPart(
    received_lsn="0/1200000",
    told_lsn="0/1000000",
    n_messages=10_000,
    n_bytes=50 << 20,
    paused_by=None,
    silent_s=0.1,
    pending_bytes=0,
    in_flight_bytes=0,
    backlog_bytes=0,
    n_buffers=2,
    n_buffers_asked=0,
    n_moved=0,
    n_open=1,
    n_open_rows=400_000,
    oldest_open_s=184.0,
)
SEQUENCER = SequencerPart(
    confirmed_lsn="0/1000000",
    n_waiting=0,
    head_ticket=None,
    head_kind=None,
    head_state=None,
    head_commit_lsn=None,
    recording_s=None,
    n_prepared=1,
    n_batches=3,
    n_transactions=30,
    n_rows=3_000,
    n_left_out=0,
    delivered_lsn="0/1000000",
    undelivered_s=0.0,
)
JOURNAL = JournalPart(
    n_files=18,
    n_bytes=1 << 30,
    max_bytes=64 << 30,
    n_units=900,
    n_transactions=12_000,
    wal_bytes=700 << 20,
    first_commit_lsn="0/1000100",
    end_lsn="0/2CC00000",
    oldest_s=200.0,
)
"""Of a sink that is behind."""
SINK = SinkPart(
    last_commit_lsn="0/FFFF00",
    n_batches=3,
    n_transactions=30,
    n_rows=3_000,
    last_lag_ms=120.0,
    latency=LatencyPart(120.0, 1_500.0, 30),
    in_hand=None,
    batches=(BatchPart(AT, 0.8, 10, 1_000, 5 << 20, "0/FFFF00"),),
)
OPEN = OpenPart(
    xid=749,
    age_s=184.0,
    n_rows=400_000,
    n_bytes=90 << 20,
    n_bytes_in_memory=9 << 20,
    n_bytes_spilled=60 << 20,
    n_segments=3,
    n_rolled_back_subtransactions=2,
    tables=("public.orders", "public.parts"),
    n_tables=2,
    buffer=1,
    streamed=True,
)
LOG = LogPart(
    last_commit_lsn="0/FFFF00",
    oldest_lsn="0/F0000",
    cut_lsn="0/E0000",
    reach_bytes=0xFFFF00 - 0xF0000,
    n_tables=4,
    n_cut_tables=2,
    consumers=(
        ConsumerPart("billing", "0/100000", 0xEFFF00, 700_000.0, 3 << 20, is_forgotten=True),
        ConsumerPart("audit", "0/FFFF00", 0, 900_000.0, 0),
    ),
    n_consumers=2,
)
FAILED = RestartPart(
    AT - datetime.timedelta(seconds=20),
    "StorageFault",
    "the storage is full",
    "check space, permissions and reachability of the storage",
    1.0,
)
WELL = Account(
    at=AT,
    run=RUN,
    slot=SLOT,
    reader=READER,
    sequencer=SEQUENCER,
    journal=JournalPart(max_bytes=64 << 30),
    sink=SINK,
)
FULL = dataclasses.replace(
    WELL,
    slot=dataclasses.replace(SLOT, undelivered_bytes=702 << 20, wal_held_without_journal_bytes=703 << 20),
    journal=JOURNAL,
    open=(OPEN,),
    prepared=(PreparedPart(750, "payment-1", "0/1100000", 20, 4_000, ("public.orders",), 1),),
    log=LOG,
    snapshots=SnapshotProgress(
        (TableProgress("public.parts", "reading", 8, 3, 30_000, 80 << 20, 30 << 20, 0),),
        1,
        10_000,
        1 << 20,
        3 << 20,
    ),
    processes=(
        ProcessPart("slot reader", 4712, "10.0.0.2", 150 << 20),
        ProcessPart("xid buffer 0", None, None, None),
    ),
    restarts=(FAILED,),
    n_restarts=1,
    last_error=FAILED,
    stalls=(Stall("commit sequencer", "sink", 20.0, "the sink has had a batch in hand for 20 s"),),
)
HAND = BatchInHand(16.0, 3, 1_000, 1 << 20)


def run(account: Account = WELL, **changes: Any) -> Account:
    assert account.run is not None
    return dataclasses.replace(account, run=dataclasses.replace(account.run, **changes))


def reader(account: Account = WELL, **changes: Any) -> Account:
    assert account.reader is not None
    return dataclasses.replace(account, reader=dataclasses.replace(account.reader, **changes))


def sequencer(account: Account = WELL, **changes: Any) -> Account:
    assert account.sequencer is not None
    return dataclasses.replace(account, sequencer=dataclasses.replace(account.sequencer, **changes))


def journal(account: Account = WELL, **changes: Any) -> Account:
    return dataclasses.replace(account, journal=dataclasses.replace(JOURNAL, **changes))


def sink(account: Account = WELL, **changes: Any) -> Account:
    assert account.sink is not None
    return dataclasses.replace(account, sink=dataclasses.replace(account.sink, **changes))
