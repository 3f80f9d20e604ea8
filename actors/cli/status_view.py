"""An account for a terminal: first whether all is well, then the way of the data from the slot to the sink.

``view`` is used once, and again and again. It asks nobody. What is unknown is left out, and never shown as zero. A line
is broken between its phrases (``Phrases``), so it can be read at any width.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from xidstream.actors.cli.display import Phrases
from xidstream.pipeline.account import (
    Account,
    JournalPart,
    LogPart,
    OpenPart,
    ReaderPart,
    SequencerPart,
    SinkPart,
    SlotPart,
    StoredPart,
)
from xidstream.pipeline.account.model import state_words
from xidstream.pipeline.quantities import counted, human_bytes, human_ms, human_s, visible, waiting

_FRESH_S: Final = 15.0
_MOST_OPEN: Final = 10
_MOST_BATCHES: Final = 5
_MOST_RESTARTS: Final = 5
_BAR_CELLS: Final = 20
_GOOD, _BAD, _DIM = "bold green", "bold red", "dim"


def view(account: Account) -> RenderableType:
    parts: list[RenderableType] = [_head(account)]
    parts += [
        Text(f"stalled: the {s.part} waits for the {s.waits_for}: {s.text}", style=_BAD)
        for s in account.stalls
    ]
    parts += [
        Text(
            f"parked: {visible(p.table)}, since commit LSN {p.since_lsn}, {counted(p.n_changes, 'change')} of "
            f"{counted(p.n_transactions, 'transaction')} left out: {p.reason}",
            style=_BAD,
        )
        for p in (account.sequencer.parked if account.sequencer is not None else ())
    ]
    parts.append(_way(account))
    parts += _tables(account)
    return Group(*parts)


def _head(account: Account) -> RenderableType:
    run, slot = account.run, account.slot
    if run is None:
        name = "?" if slot is None else slot.name
        return Group(Rule(f"slot {name}", style="cyan"), Text("no run was found", style="yellow"))
    state, style = run.state, "yellow"
    if account.stalls:
        state, style = "stalled", _BAD
    elif run.state == "reading":
        state, style = state_words(account), _GOOD
    phrases = [state, f"running for {human_s(max(0.0, (account.at - run.started_at).total_seconds()))}"]
    if run.waiting_for:
        phrases.append(f"waiting for {' and '.join(run.waiting_for)}")
    phrases.append(f"process {run.pid} on {run.host}")
    if run.page is not None:
        phrases.append(run.page)
    if run.metrics is not None:
        phrases.append(run.metrics)
    if account.n_restarts:
        phrases.append(counted(account.n_restarts, "restart"))
    return Group(Rule(f"slot {run.slot}", style="cyan"), Phrases(phrases, style))


def _way(account: Account) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=_DIM, no_wrap=True)
    grid.add_column()
    for name, phrases, style in _lines(account):
        grid.add_row(name, Phrases(phrases, style))
    return grid


def _lines(account: Account) -> Iterator[tuple[str, list[str], str]]:
    if account.slot is not None:
        yield "slot", _slot(account.slot), _BAD if account.slot.wal_status in ("unreserved", "lost") else ""
    elif account.slot_error is not None:
        yield "slot", [account.slot_error], _BAD
    if account.reader is not None:
        yield "reader", _reader(account.reader), "yellow" if account.reader.paused_by else ""
    if account.sequencer is not None:
        yield "commits", _sequencer(account.sequencer), ""
    if account.journal is not None and account.journal.n_files:
        yield "journal", _journal(account.journal), _BAD if account.journal.is_full else "yellow"
    if account.sink is not None:
        yield "sink", _sink(account.sink, account.at), ""
    if account.log is not None:
        is_held = any(each.is_forgotten for each in account.log.consumers)
        yield "log", _log(account.log), _BAD if is_held else ""
    if account.stored is not None:
        yield "storage", _stored(account.stored), ""
    snapshots = account.snapshots
    if snapshots is not None and (snapshots.tables or snapshots.n_finished):
        yield (
            "snapshots",
            [
                f"{snapshots.n_finished} taken",
                f"{len(snapshots.tables)} to go",
                f"{human_bytes(snapshots.n_bytes_read)} of {human_bytes(snapshots.n_bytes)} read",
                counted(snapshots.n_rows, "row"),
            ],
            "",
        )


def _slot(slot: SlotPart) -> list[str]:
    phrases = [f"confirmed {slot.confirmed_lsn}", f"{human_bytes(slot.behind_bytes)} behind the server"]
    held = f"holds {human_bytes(slot.wal_held_bytes)} of WAL ({slot.wal_status or 'status unknown'})"
    if slot.wal_limit_bytes is not None:
        held += f", limit {human_bytes(slot.wal_limit_bytes)}"
    phrases.append(held)
    if slot.wal_bytes_per_s is not None:
        phrases.append(f"the server writes {human_bytes(slot.wal_bytes_per_s)}/s")
    if slot.lost_in_s is not None:
        phrases.append(f"lost in {human_s(slot.lost_in_s)} if nothing more is confirmed")
    if slot.undelivered_bytes is not None and slot.undelivered_bytes > slot.behind_bytes:
        phrases.append(f"the sink is {human_bytes(slot.undelivered_bytes)} behind")
    without = slot.wal_held_without_journal_bytes
    if without is not None and without > slot.wal_held_bytes:
        phrases.append(f"without the journal it would hold {human_bytes(without)}")
    if slot.active_pid is None:
        phrases.append("no reader is connected")
    return phrases


def _reader(reader: ReaderPart) -> list[str]:
    phrases = []
    if reader.paused_by is not None:
        phrases.append(f"paused: {reader.paused_by} is reached")
    if reader.bytes_per_s is not None and reader.messages_per_s is not None:
        phrases.append(f"{human_bytes(reader.bytes_per_s)}/s, {reader.messages_per_s:,.0f} messages/s")
    phrases.append(f"{human_bytes(reader.n_bytes)} read, up to {reader.received_lsn}")
    if reader.in_flight_bytes or reader.pending_bytes:
        phrases.append(f"{human_bytes(reader.in_flight_bytes + reader.pending_bytes)} not decoded yet")
    if reader.backlog_bytes:
        phrases.append(f"{human_bytes(reader.backlog_bytes)} wait for the sink")
    asked = f", {reader.n_buffers_asked} more requested" if reader.n_buffers_asked else ""
    phrases.append(f"{counted(reader.n_buffers, 'buffer')}{asked}")
    phrases.append(f"{reader.n_open:,} open, {counted(reader.n_open_rows, 'row')}")
    return phrases


def _sequencer(sequencer: SequencerPart) -> list[str]:
    phrases = [f"confirmed {sequencer.confirmed_lsn}"]
    if sequencer.delivered_lsn is not None and sequencer.delivered_lsn != sequencer.confirmed_lsn:
        phrases.append(f"delivered {sequencer.delivered_lsn}")
    phrases.append(f"{counted(sequencer.n_transactions, 'transaction')} released")
    if sequencer.n_waiting:
        wait = "1 waits" if sequencer.n_waiting == 1 else f"{sequencer.n_waiting:,} wait"
        phrases.append(f"{wait}, the first is {sequencer.head_state}")
    if sequencer.n_prepared:
        phrases.append(f"{sequencer.n_prepared:,} prepared")
    return phrases


def _journal(journal: JournalPart) -> list[str]:
    phrases = []
    if journal.is_full:
        phrases.append("full: what commits now waits in the slot")
    limit = f" of {human_bytes(journal.max_bytes)}" if journal.max_bytes else ""
    phrases.append(f"{human_bytes(journal.n_bytes)}{limit} in {counted(journal.n_files, 'file')}")
    phrases.append(f"{waiting(journal.n_transactions, 'transaction')} for the sink")
    if journal.oldest_s is not None:
        phrases.append(f"the oldest committed {human_s(journal.oldest_s)} ago")
    if journal.first_commit_lsn is not None:
        phrases.append(f"from {journal.first_commit_lsn} to {journal.end_lsn}")
    phrases.append(f"{human_bytes(journal.wal_bytes)} of WAL that the server need not keep")
    return phrases


def _stored(stored: StoredPart) -> list[str]:
    phrases = (
        [f"confirmed {stored.confirmed_lsn}, by epoch {stored.epoch}"] if stored.epoch else ["nothing yet"]
    )
    if stored.n_journal_files:
        files = counted(stored.n_journal_files, "file")
        phrases.append(f"delivered {stored.delivered_lsn}; what lies between is in the journal, {files}")
    phrases += [f"parked: {text}" for text in stored.parked]
    return [*phrases, *(f"given up: {text}" for text in stored.given_up)]


def _sink(sink: SinkPart, at: datetime.datetime) -> list[str]:
    phrases = []
    if (hand := sink.in_hand) is not None:
        what = f"{counted(hand.n_transactions, 'transaction')}, {counted(hand.n_rows, 'row')}"
        phrases.append(f"writing for {human_s(hand.for_s)}: {what}")
    phrases.append(f"{counted(sink.n_rows, 'row')} delivered")
    if sink.rows_per_s:
        phrases.append(f"{sink.rows_per_s:,.0f} rows/s")
    if sink.last_lag_ms is not None:
        ago_s = max(0.0, (at - sink.batches[-1].done_at).total_seconds()) if sink.batches else 0.0
        # An old batch's lag is no present one.
        when = "" if ago_s < _FRESH_S else f" in the last batch, {human_s(ago_s)} ago"
        phrases.append(f"{human_ms(sink.last_lag_ms)} from COMMIT to the sink{when}")
    if (latency := sink.latency) is not None:
        of = counted(latency.n_transactions, "transaction")
        phrases.append(f"{human_ms(latency.p50_ms)} (p50), {human_ms(latency.p99_ms)} (p99) of {of}")
    if sink.last_commit_lsn is not None:
        phrases.append(f"up to {sink.last_commit_lsn}")
    return phrases


def _log(log: LogPart) -> list[str]:
    phrases = []
    if log.oldest_lsn is not None and log.reach_bytes is not None:
        phrases.append(f"states from {log.oldest_lsn} on, {human_bytes(log.reach_bytes)} of WAL")
    if log.cut_lsn is not None:
        of = f"{log.n_cut_tables:,} of {counted(log.n_tables, 'table')}"
        phrases.append(f"changes behind {log.cut_lsn}, cut in {of}")
    elif log.last_commit_lsn is not None:
        phrases.append("nothing was cut")
    if log.n_consumers:
        first = log.consumers[0]
        behind = f"{human_bytes(first.behind_bytes)} behind" if first.behind_bytes else "has all"
        phrases.append(f"{counted(log.n_consumers, 'consumer')}, {visible(first.name)} {behind}")
        if first.held_bytes:
            phrases.append(f"holds back {human_bytes(first.held_bytes)}")
    phrases += [
        f"{visible(each.name)} has told nothing for {human_s(each.told_s)}: `xidstream consumer remove` if it is gone"
        for each in log.consumers
        if each.is_forgotten
    ]
    if log.error is not None:
        phrases.append(f"could not be read: {log.error}")
    return phrases


def _tables(account: Account) -> Iterator[RenderableType]:
    if account.open:
        yield _below(_open(account.open, account.reader.n_open if account.reader else len(account.open)))
    if account.prepared:
        rows = [
            (
                p.xid,
                p.gid,
                p.prepare_lsn,
                f"{p.n_rows:,}",
                human_bytes(p.n_bytes),
                _names(p.tables, p.n_tables),
            )
            for p in account.prepared[:_MOST_OPEN]
        ]
        yield _below(_table(("prepared", "gid", "LSN", "rows", "bytes", "tables"), rows))
    if account.snapshots is not None and account.snapshots.tables:
        snapshots = [
            (
                t.table,
                t.state,
                f"{t.n_ranges_read}/{t.n_ranges}",
                f"{t.n_rows:,}",
                f"{human_bytes(t.n_bytes_read)} of {human_bytes(t.n_bytes)}",
            )
            for t in account.snapshots.tables[:_MOST_OPEN]
        ]
        yield _below(_table(("snapshot of", "state", "ranges", "rows", "read"), snapshots))
    if account.sink is not None and account.sink.batches:
        batches = [
            (
                f"{b.done_at:%H:%M:%S}",
                f"{b.n_transactions:,}",
                f"{b.n_rows:,}",
                human_bytes(b.n_bytes),
                human_ms(b.seconds * 1000),
                b.last_commit_lsn,
            )
            for b in account.sink.batches[: -_MOST_BATCHES - 1 : -1]
        ]
        yield _below(_table(("batch (UTC)", "transactions", "rows", "bytes", "took", "up to"), batches))
    if account.log is not None and account.log.consumers:
        consumers = [
            (
                c.name,
                c.lsn,
                human_bytes(c.behind_bytes),
                "not known yet" if c.held_bytes is None else human_bytes(c.held_bytes),
                f"{human_s(c.told_s)} ago",
            )
            for c in account.log.consumers[:_MOST_OPEN]
        ]
        yield _below(_table(("consumer", "LSN", "behind", "holds back", "told"), consumers))
    if account.processes:
        processes = [
            (
                p.part,
                p.pid or "no answer",
                p.node or "",
                "" if p.memory_bytes is None else human_bytes(p.memory_bytes),
            )
            for p in account.processes
        ]
        yield _below(_table(("process", "pid", "node", "memory"), processes))
    for restart in account.restarts[-_MOST_RESTARTS:]:
        again = "" if restart.pause_s is None else f", started again after {restart.pause_s:.1f} s"
        yield Text(f"{restart.at:%Y-%m-%d %H:%M:%S} UTC: {restart.message}{again}", style="yellow")
        yield Text(f"  remedy: {restart.remedy}", style=_DIM)


def _open(transactions: Sequence[OpenPart], n_open: int) -> RenderableType:
    most = _scale(max(each.n_rows for each in transactions))
    rows = [
        (
            f"xid {each.xid}",
            _bar(each.n_rows, most),
            human_s(each.age_s),
            f"{each.n_rows:,}",
            human_bytes(each.n_bytes),
            human_bytes(each.n_bytes_spilled),
            f"{each.n_rolled_back_subtransactions:,}",
            str(each.buffer),
            _names(each.tables, each.n_tables),
        )
        for each in transactions[:_MOST_OPEN]
    ]
    if n_open > len(rows):
        rows.append((f"and {n_open - len(rows):,} more", "", "", "", "", "", "", "", ""))
    names = ("open", "", "age", "rows", "bytes", "spilled", "rolled back", "buffer", "tables")
    return _table(names, rows)


def _scale(n: int) -> int:
    """What a whole bar stands for: the next of 1, 2, 5, 10, …, so that the bar of the only transaction grows."""
    scale = 1
    while scale < n:
        scale = scale * 5 // 2 if str(scale)[0] == "2" else scale * 2
    return scale


def _bar(n: int, most: int) -> str:
    return "█" * max(1, round(_BAR_CELLS * n / most)) if most and n else ""


def _names(tables: Sequence[str], n: int) -> str:
    more = f" and {n - 3:,} more" if n > 3 else ""
    return ", ".join(tables[:3]) + more


def _table(names: Iterable[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style=_DIM)
    for i, name in enumerate(names):
        is_text = i == 0 or name in ("", "tables", "gid", "state", "node", "up to", "LSN")
        table.add_column(Text(name), justify="left" if is_text else "right", no_wrap=i == 0)
    for row in rows:
        # As Text: a table's name may look like markup.
        cells = (visible(str(cell)) for cell in row)
        table.add_row(*(Text(cell, style="cyan" if "█" in cell else "") for cell in cells))
    return table


def _below(table: RenderableType) -> RenderableType:
    return Padding(table, (1, 0, 0, 0))
