"""Which neighbouring units of the commit order become one, so that a small unit that waits costs little.

A unit has a price beside its rows: its objects here, an object in Ray's store and the references to it, 15 KB in all
(``UNIT_BYTES``). A trickle of commits makes a unit of each of them. While the sink keeps up nobody notices. Where it
does not, an hour of 200 commits a second would take 11 GB for 200 MB of rows. So when many units wait, those that are
neighbours and small are made one. A joined unit has the transactions, rows and messages of all of them, in the same
order. It is a unit like that of a block of many small transactions, and nobody after the order can tell them apart.

``CommitOrder.to_join`` gives a *run* of units, ``commits.joined_units`` makes their content one, and
``CommitOrder.joined`` puts the unit into their place. In between the order goes on: a run of which the sink or the
journal has taken a unit meanwhile is left as it is.

A run has neither a unit that is not ready, nor one that cannot be delivered or has a table to be parked, nor a hold
that waits. It has only units whose turn in the order of commits has come (``settle``), or only such whose turn has not;
the latter where no table is parked (``Parking.may_join``). Positions within a run go with it. A joined unit is within
the bounds of a batch. A unit above ``small_bytes`` is left alone: what it costs beside its rows is little, and no row
is copied more than a few times.

Rejected: to join all units as they come, because it would cost the latency of each; all rows by value in what a
buffer returns, because the sequencer would hold them until the sink has them, outside of the object store. So it has
some kilobytes alone, which take less than an object's own price.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xidstream.pipeline.commits.entries import Entry, EntryKind, EntryState
from xidstream.pipeline.exchange import SINGLE_UNITS, MemoryMessages, Sealed, UnitEnd
from xidstream.pipeline.pg import INVALID_LSN


@dataclass(frozen=True)
class JoinRule:
    """When units are joined, and how many. Tests have smaller numbers."""

    step: int = 128
    """Units are looked for when so many more are ready: a look walks over thousands of entries."""
    single_entries: int = SINGLE_UNITS - 128
    """So many entries may wait before any are joined: at 100 units a second, a sink that takes 5 s for a batch."""
    looked_at: int = 4096
    """How many of the newest entries are looked at. Those before them were looked at when they were the newest."""
    least_units: int = 32
    """The least units of a run: joining costs two calls to the object store beside one for each unit."""
    most_units: int = 512
    small_bytes: int = 32 << 10
    joined_bytes: int = 1 << 20
    """The most bytes of a run: beside such a unit what each costs is nothing, and the copy takes milliseconds."""

    def is_due(self, n_entries: int, n_arrived: int) -> bool:
        return n_entries >= self.single_entries and n_arrived >= self.step


def first_run(entries: Iterable[Entry], rule: JoinRule, batch_rows: int, batch_bytes: int) -> list[Entry]:
    """The units of the first run among neighbouring entries; empty if there is none. A joined unit fits into a batch of
    so many rows and bytes."""
    most_bytes = min(rule.joined_bytes, batch_bytes)
    run: list[Entry] = []
    n_rows = n_bytes = 0
    for entry in entries:
        if entry.kind is not EntryKind.UNIT and entry.state is EntryState.DONE:
            continue  # a position, or a hold that is resolved
        content = _small_content(entry, rule.small_bytes)
        rows, size = (0, 0) if content is None else (content.n_rows, _bytes_of(content))
        is_full = len(run) == rule.most_units or n_rows + rows > batch_rows or n_bytes + size > most_bytes
        if content is None or is_full:
            if len(run) >= rule.least_units:
                return run
            run, n_rows, n_bytes = [], 0, 0
        if content is not None:
            run.append(entry)
            n_rows += rows
            n_bytes += size
    return run if len(run) >= rule.least_units else []


def joined_entry(run: list[Entry], content: Sealed) -> Entry:
    """The entry of a joined unit. It has the last ticket, because it is done when all of them are."""
    commits = [entry.end for entry in run if entry.last_commit_lsn]
    end = UnitEnd(
        commits[0].first_commit_lsn if commits else INVALID_LSN,
        commits[-1].last_commit_lsn if commits else INVALID_LSN,
        max(entry.end_lsn for entry in run),
        sum(entry.end.n_transactions for entry in run),
    )
    parked_rows = tuple(each for entry in run for each in entry.parked_rows)
    return Entry(
        run[-1].ticket,
        EntryKind.UNIT,
        end,
        EntryState.READY,
        content,
        ready_s=min(entry.ready_s for entry in run),
        parked_rows=parked_rows,
    )


def _small_content(entry: Entry, small_bytes: int) -> Sealed | None:
    """The content of a unit that may be joined. Messages in the object store are their buffer's, and are not small."""
    content = entry.content if entry.state is EntryState.READY else None
    if content is None or content.undeliverable is not None or content.bad_tables:
        return None
    has_large = any(isinstance(part, MemoryMessages) for part in content.messages)
    return None if has_large or _bytes_of(content) > small_bytes else content


def _bytes_of(content: Sealed) -> int:
    return content.n_bytes + content.transactions_bytes
