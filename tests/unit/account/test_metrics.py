"""The metrics of a run: names by Prometheus's rules, samples by the account, and the page that lists them."""

from __future__ import annotations

import dataclasses
import datetime
import re

from tests.metrics_page import PAGE, page_with_tables
from tests.unit.account.accounts import (
    AT,
    FAILED,
    FULL,
    HAND,
    LOG,
    OPEN,
    SLOT,
    WELL,
    journal,
    reader,
    run,
    sequencer,
    sink,
)
from xidstream.pipeline.account import Account, LogPart, RestartPart
from xidstream.pipeline.account.metric_table import METRICS, MetricKind
from xidstream.pipeline.account.metric_values import PAUSES
from xidstream.pipeline.account.metrics import Counts, samples
from xidstream.pipeline.settings.config import Config

BASE_UNITS = {"bytes", "seconds", "bytes per second", "Unix time", ""}
NO_BASE_UNIT = re.compile(r"_(ms|millis|kb|mb|mib|kib|minutes|hours|percent)(_|$)")


def values(account: Account) -> dict[str, float]:
    """By name and labels, as Prometheus writes them; the slot's label is on all."""
    found = {}
    for sample in samples(account):
        labels = dict(sample.labels)
        assert labels.pop("slot") == "shop" and tuple(labels) == sample.metric.labels
        name = sample.metric.name.removeprefix("xidstream_")
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        key = f"{name}{{{text}}}" if text else name
        assert key not in found, f"{key} has two samples"
        found[key] = sample.value
    return found


def test_names_and_labels_follow_prometheus_rules() -> None:
    for each in METRICS:
        assert re.fullmatch(r"xidstream_[a-z][a-z0-9_]*", each.name)
        assert each.name.endswith("_total") == (each.kind is MetricKind.COUNTER), each.name
        assert each.unit in BASE_UNITS and not NO_BASE_UNIT.search(each.name), each.name
        assert all(re.fullmatch(r"[a-z_]+", label) and label != "slot" for label in each.labels)
        assert each.help and not each.help.endswith(".")


def test_no_two_metrics_have_one_name() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40


def test_a_full_account_gives_every_metric_its_sample() -> None:
    full = dataclasses.replace(
        FULL,
        slot=dataclasses.replace(FULL.slot or SLOT, wal_bytes_per_s=1e6, lost_in_s=1073.0),
        sink=sink(n_executors=1).sink,
    )
    told = {sample.metric.name for sample in samples(full)}
    assert told == {metric.name for metric in METRICS}


def test_samples_are_in_base_units_and_say_what_the_account_says() -> None:
    found = values(FULL)
    expected = {
        "run_up": 1,
        "run_start_timestamp_seconds": (AT - datetime.timedelta(hours=2, minutes=5)).timestamp(),
        'run_state{state="reading"}': 1,
        'run_state{state="restarting"}': 0,
        "run_caught_up": 1,
        'stalled{part="commit sequencer",waits_for="sink"}': 1,
        'stalled{part="slot reader",waits_for="server"}': 0,
        "restarts_total": 1,
        "recent_restarts": 1,
        'last_error_timestamp_seconds{error="StorageFault"}': FAILED.at.timestamp(),
        "server_answers": 1,
        "slot_active": 1,
        "slot_lag_bytes": 2 << 20,
        "slot_flush_lag_seconds": 0.25,
        "slot_wal_held_bytes": 3 << 20,
        "slot_wal_held_without_journal_bytes": 703 << 20,
        "slot_wal_limit_bytes": 1 << 30,
        'slot_wal_status{status="reserved"}': 1,
        'slot_wal_status{status="lost"}': 0,
        "reader_received_bytes_total": 50 << 20,
        'reader_paused{setting="backlog_bytes"}': 0,
        "open_transactions": 1,
        "open_rows": 400_000,
        'open_bytes{place="storage"}': OPEN.n_bytes_spilled,
        "oldest_open_transaction_seconds": 184,
        "prepared_transactions": 1,
        "journal_bytes": 1 << 30,
        "journal_limit_bytes": 64 << 30,
        "journal_full": 0,
        "journal_files": 18,
        "journal_transactions": 12_000,
        "journal_oldest_seconds": 200,
        "journal_wal_bytes": 700 << 20,
        "sink_behind_bytes": 702 << 20,
        "sink_behind_seconds": 0,
        "sink_rows_total": 3_000,
        'sink_latency_seconds{percentile="50"}': 0.12,
        'sink_latency_seconds{percentile="99"}': 1.5,
        "sink_last_lag_seconds": 0.12,
        "sink_in_hand_seconds": 0,
        "log_reach_bytes": 0xFFFF00 - 0xF0000,
        "log_cut_tables": 2,
        "log_consumers": 2,
        "log_consumer_behind_bytes": 0xEFFF00,
        "log_consumer_silent_seconds": 700_000,
        "log_held_bytes": 3 << 20,
        'snapshot_tables{state="reading"}': 1,
        'snapshot_tables{state="resting"}': 0,
        "snapshots_taken_total": 1,
        "snapshot_size_bytes": 81 << 20,
        "snapshot_read_bytes": 31 << 20,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_what_is_not_known_has_no_sample_and_is_not_zero() -> None:
    starting = Account(at=AT, run=run(state="starting").run)
    assert set(values(starting)) == {
        *(f'run_state{{state="{state}"}}' for state in ("starting", "reading", "restarting", "ended")),
        *(key for key in values(WELL) if key.startswith("stalled")),
        "run_up",
        "run_start_timestamp_seconds",
        "run_caught_up",
        "restarts_total",
        "recent_restarts",
    }
    assert values(dataclasses.replace(starting, slot_error="no route"))["server_answers"] == 0
    assert list(samples(Account(at=AT, run=None, slot=SLOT))) == [], "nothing runs"


def test_a_paused_reader_and_a_batch_in_hand_are_there_as_long_as_they_last() -> None:
    paused = values(reader(paused_by="backlog_bytes"))
    assert paused['reader_paused{setting="backlog_bytes"}'] == 1
    assert paused['reader_paused{setting="reader_memory_bytes"}'] == 0
    assert values(sink(in_hand=HAND))["sink_in_hand_seconds"] == 16
    assert set(PAUSES) <= {field.name for field in dataclasses.fields(Config)}


def test_an_empty_journal_is_zero_and_one_that_is_off_has_no_sample() -> None:
    empty = values(WELL)
    assert (empty["journal_bytes"], empty["journal_oldest_seconds"], empty["journal_full"]) == (0, 0, 0)
    assert not any(name.startswith("journal") for name in values(dataclasses.replace(WELL, journal=None)))
    draining = values(journal(max_bytes=0))
    assert draining["journal_bytes"] == 1 << 30 and "journal_limit_bytes" not in draining
    assert "journal_oldest_seconds" not in values(journal(oldest_s=None)), "it is not known"


def test_a_log_that_nothing_is_removed_from_has_no_sample_and_one_without_consumers_holds_nothing() -> None:
    assert not any(name.startswith("log_") for name in values(WELL))
    alone = values(dataclasses.replace(WELL, log=dataclasses.replace(LOG, consumers=(), n_consumers=0)))
    names = ("log_consumers", "log_consumer_behind_bytes", "log_consumer_silent_seconds", "log_held_bytes")
    assert [alone[name] for name in names] == [0, 0, 0, 0]
    first = dataclasses.replace(LOG.consumers[0], held_bytes=None)
    before = values(dataclasses.replace(WELL, log=dataclasses.replace(LOG, consumers=(first,))))
    assert "log_held_bytes" not in before, "the retention has not had its turn"
    failed = values(dataclasses.replace(WELL, log=LogPart(error="the sink cannot be reached")))
    assert "log_reach_bytes" not in failed and "log_consumer_behind_bytes" not in failed


def test_an_error_of_an_hour_ago_is_no_recent_restart() -> None:
    old = dataclasses.replace(FAILED, at=AT - datetime.timedelta(hours=1))
    errors: tuple[RestartPart, ...] = (old, old, FAILED)
    found = values(dataclasses.replace(WELL, restarts=errors, n_restarts=3, last_error=FAILED))
    assert (found["recent_restarts"], found["restarts_total"]) == (1, 3)


def test_no_label_is_an_xid_a_table_or_a_position() -> None:
    labels = {value for sample in samples(FULL) for value in sample.labels.values()}
    facts = {"749", "750", "public.orders", "public.parts", "payment-1", "0/1000000", FAILED.message}
    assert not labels & facts
    assert len(list(samples(FULL))) < 100, "of one slot"


def increments(counts: Counts, account: Account) -> dict[str, float]:
    assert account.run is not None
    counts.begin(account.run.epoch)
    grown = {
        s.metric.name: counts.increment(s) for s in samples(account) if s.metric.kind is MetricKind.COUNTER
    }
    return {name.removeprefix("xidstream_"): value for name, value in grown.items() if value}


def test_a_counter_grows_by_what_is_new_and_never_falls_when_an_epoch_or_a_driver_counts_anew() -> None:
    counts = Counts()
    assert increments(counts, WELL)["sink_rows_total"] == 3_000, "all of a run that nobody asked before"
    assert increments(counts, WELL) == {}
    assert increments(counts, sink(n_rows=3_500)) == {"sink_rows_total": 500}
    assert increments(counts, sink(n_rows=200)) == {"sink_rows_total": 200}, "another driver"
    next_epoch = run(reader(sequencer(n_left_out=1), n_bytes=60 << 20, n_messages=20_000), epoch="another")
    grown = increments(counts, next_epoch)
    assert grown["reader_received_bytes_total"] == 60 << 20, "the epoch's own, though it is more than before"
    assert grown["given_up_transactions_total"] == 1
    assert grown["sink_rows_total"] == 2_800, "the driver goes on"


def test_the_page_lists_every_metric_with_its_type_unit_labels_and_meaning() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(text) == text, "run `make docs`"
    named = set(re.findall(r"xidstream_\w+", text))
    assert named == {metric.name for metric in METRICS}
