"""Which part of a run waits for what, from one account after the other.

A *stall* is work that does not move for ``STALLED_AFTER_S``. The supervisor looks every ``LOOK_INTERVAL_S``, so a stall
is told within 30 s. Two kinds of signs tell one:

- A part says itself for how long it has waited: the server was silent, a batch is in the sink's hands, the storage has
  not taken a position.
- A count does not grow although there is work: bytes are on their way to a buffer, and none were decoded; the next
  entry of the commit order waits for its content; reading is paused, and no batch ends.

One cause is told once. A sink that does not return also fills the backlog and the journal, and pauses the reader: then
only the sink is named, with what that means for the server: its WAL does not wait as long as the journal takes what
commits, and waits when that is full. A journal that stays full is told of a sink that works, too. One that cannot be
written is always told: that is another cause.

A stall is no error, and ends nothing: a large batch may take its minutes. What ends a part that hangs for good is
elsewhere (``receive_timeout_ms``; the watch on Spark's jobs).

This is plain state over the caller's clock. The caller tells people, and puts the stalls into the account.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xidstream.pipeline.account.model import (
    Account,
    JournalPart,
    ReaderPart,
    RestartPart,
    SequencerPart,
    Stall,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.quantities import counted, human_bytes

STALLED_AFTER_S: Final = 15.0
LOOK_INTERVAL_S: Final = 5.0
_IDLE_AFTER_S: Final = 10.0
_ANSWER_S: Final = 10.0
"""Above the interval in which the server is asked: it may take so long to answer."""

RUN, READER, SEQUENCER, BUFFERS, SINK, DRIVER = (
    "run",
    "slot reader",
    "commit sequencer",
    "xid buffers",
    "sink",
    "Spark driver",
)
SERVER, STORAGE, EXECUTORS, SNAPSHOTS = "server", "storage", "Spark executors", "snapshots"
JOURNAL: Final = "journal"
_JOURNALED: Final = "journaled"
_CAUSES: Final = {
    "ConnectionLost": SERVER,
    "StorageFault": STORAGE,
    "SegmentCorrupt": STORAGE,
    "SlotInUse": "another reader of the slot",
}
"""The part that a run which starts again waits for, by the error that ended its last epoch."""
PAIRS: Final = (
    (READER, SERVER),
    (READER, BUFFERS),
    (READER, SINK),
    (SEQUENCER, BUFFERS),
    (SEQUENCER, STORAGE),
    (SEQUENCER, SINK),
    (SEQUENCER, DRIVER),
    (SEQUENCER, SNAPSHOTS),
    (SINK, EXECUTORS),
    (JOURNAL, SINK),
    (JOURNAL, STORAGE),
    *((RUN, cause) for cause in dict.fromkeys(_CAUSES.values())),
)
"""All that can be told: which part, and what it waits for."""


class StallWatch:
    """One run's. ``status_interval_s``: how often the server is asked when nothing happens."""

    def __init__(self, status_interval_s: float) -> None:
        self._silence_limit_s = max(STALLED_AFTER_S, status_interval_s + _ANSWER_S)
        self._epoch = ""
        self._marks: dict[str, tuple[float, int]] = {}

    def look(self, account: Account, now_s: float) -> tuple[Stall, ...]:
        """The stalls of this moment. ``now_s``: a monotonic clock's."""
        run = account.run
        if run is None:
            return ()
        if run.epoch != self._epoch:
            self._epoch, self._marks = run.epoch, {}
        if run.state in ("starting", "restarting") and account.last_error is not None:
            return tuple(_restarting(account, account.last_error))
        sink_stalls = tuple(self._sink(account))
        # Of a session that starts, what the run waits for is told already.
        is_named = bool(sink_stalls or run.waiting_for)
        sequencer_stalls = tuple(self._sequencer(account, now_s, is_sink_named=is_named))
        reader_stalls = tuple(self._reader(account, now_s, is_sink_named=bool(sink_stalls)))
        is_named = any(stall.waits_for in (SINK, EXECUTORS) for stall in (*sink_stalls, *reader_stalls))
        journal_stalls = tuple(self._journal(account.journal, now_s, is_sink_named=is_named))
        return (*sink_stalls, *sequencer_stalls, *reader_stalls, *journal_stalls)

    # -- the parts -------------------------------------------------------------------------------------

    def _sink(self, account: Account) -> Iterator[Stall]:
        sink, meanwhile = account.sink, _meanwhile(account.journal)
        hand = None if sink is None else sink.in_hand
        if sink is None or hand is None or hand.for_s < STALLED_AFTER_S:
            return
        what = f"a batch of {counted(hand.n_transactions, 'transaction')} and {counted(hand.n_rows, 'row')}"
        if sink.idle_s is not None and sink.idle_s >= _IDLE_AFTER_S:
            n = sink.n_executors
            there = "" if n is None else f"; {counted(n, 'executor')} registered"
            yield Stall(
                SINK,
                EXECUTORS,
                sink.idle_s,
                f"{what} waits for Spark's executors: no task has run for {sink.idle_s:.0f} s{there}{meanwhile} "
                "(see that Ray has CPUs and memory for them)",
            )
            return
        yield Stall(
            SEQUENCER,
            SINK,
            hand.for_s,
            f"the sink has had {what} in hand for {hand.for_s:.0f} s{meanwhile} (see what the "
            "sink waits for: its storage, or your function)",
        )

    def _sequencer(self, account: Account, now_s: float, *, is_sink_named: bool) -> Iterator[Stall]:
        sequencer, sink = account.sequencer, account.sink
        if sequencer is None:
            return
        if sequencer.recording_s is not None and sequencer.recording_s >= STALLED_AFTER_S:
            for_s = sequencer.recording_s
            yield Stall(
                SEQUENCER,
                STORAGE,
                for_s,
                f"the storage has not taken the confirmed position for {for_s:.0f} s (check that it can be reached and "
                "has space)",
            )
        if sequencer.journal_failing_s is not None and sequencer.journal_failing_s >= STALLED_AFTER_S:
            for_s = sequencer.journal_failing_s
            yield Stall(
                JOURNAL,
                STORAGE,
                for_s,
                f"the journal could not be written for {for_s:.0f} s: {sequencer.journal_error}; what commits now "
                "waits in the slot, and it is tried again (check space, quota and permissions of the storage)",
            )
        is_stored = sequencer.head_message == _JOURNALED
        waits = sequencer.head_kind != "position" and sequencer.head_state == "waiting"
        # Units of the journal have no ticket, and are read in the order of their LSNs.
        reached = _lsn(sequencer.delivered_lsn) if is_stored else sequencer.head_ticket
        head = "journal's head" if is_stored else "head"
        if (for_s := self._still(head, waits, -1 if reached is None else reached, now_s)) >= STALLED_AFTER_S:
            yield _unsealed(sequencer, for_s)
        n_batches = 0 if sink is None else sink.n_batches
        # What a capture has in the journal nobody asks for.
        has_taker = sink is not None or account.snapshots is not None
        is_there = sequencer.head_state == "ready" or (sequencer.head_state == _JOURNALED and has_taker)
        unpulled = is_there and (sink is None or sink.in_hand is None) and not is_sink_named
        if (for_s := self._still("pull", unpulled, n_batches, now_s)) >= STALLED_AFTER_S:
            yield _unpulled(account, sequencer, for_s)

    def _reader(self, account: Account, now_s: float, *, is_sink_named: bool) -> Iterator[Stall]:
        reader = account.reader
        if reader is None:
            return
        if reader.paused_by is None and reader.silent_s >= self._silence_limit_s:
            yield Stall(
                READER,
                SERVER,
                reader.silent_s,
                f"the server has sent nothing for {reader.silent_s:.0f} s, though it was asked (look at the "
                "network, and at the walsender in pg_stat_activity)",
            )
        n_decoded = reader.n_bytes - reader.in_flight_bytes
        if (
            for_s := self._still("decoding", reader.in_flight_bytes > 0, n_decoded, now_s)
        ) >= STALLED_AFTER_S:
            yield _undecoded(reader, for_s)
        n_batches = 0 if account.sink is None else account.sink.n_batches
        backlogged = reader.paused_by == "backlog_bytes" and not is_sink_named
        if (for_s := self._still("backlog", backlogged, n_batches, now_s)) >= STALLED_AFTER_S:
            is_full = account.journal is not None and account.journal.is_full
            full = ", and the journal is full" if is_full else ""
            yield Stall(
                READER,
                SINK,
                for_s,
                f"reading has been paused for {for_s:.0f} s: {human_bytes(reader.backlog_bytes)} wait for the sink"
                f"{full}, and no batch has ended",
            )

    def _journal(self, journal: JournalPart | None, now_s: float, *, is_sink_named: bool) -> Iterator[Stall]:
        is_full = journal is not None and journal.is_full
        for_s = self._still("journal", is_full, 0, now_s)
        if journal is not None and for_s >= STALLED_AFTER_S and not is_sink_named:
            yield Stall(
                JOURNAL,
                SINK,
                for_s,
                f"the journal has been full for {for_s:.0f} s: {human_bytes(journal.n_bytes)} in it wait for the sink, "
                "and what commits now waits in the slot (give Spark more executors; or raise journal_max_bytes, if "
                "the storage has room)",
            )

    def _still(self, name: str, is_waiting: bool, count: int, now_s: float) -> float:
        """For how long this has waited without ``count`` having grown; 0 if it does not wait."""
        since_s, highest = self._marks.get(name, (now_s, -1))
        if not is_waiting or count > highest or name not in self._marks:
            since_s = now_s
        self._marks[name] = (since_s, max(highest, count))
        return now_s - since_s


def _meanwhile(journal: JournalPart | None) -> str:
    """The consequence for the server of a sink that takes nothing more."""
    if journal is None or not journal.n_files:
        return ""
    if journal.is_full:
        return (
            f"; the journal is full ({human_bytes(journal.n_bytes)}), and what commits now waits in the slot"
        )
    held = f"{counted(journal.n_transactions, 'transaction')}, {human_bytes(journal.n_bytes)}"
    return f"; what commits meanwhile is in the journal ({held}), and the server need not keep it"


def _restarting(account: Account, error: RestartPart) -> Iterator[Stall]:
    cause = _CAUSES.get(error.error)
    if cause is not None:
        for_s = max(0.0, (account.at - error.at).total_seconds())
        yield Stall(RUN, cause, for_s, f"the run starts again: {error.message} ({error.remedy})")


def _unsealed(sequencer: SequencerPart, for_s: float) -> Stall:
    what, has, its = _head(sequencer)
    if sequencer.head_message != "COMMIT":
        text = f"{what} {has} waited for the storage for {for_s:.0f} s (check that it can be reached and has space)"
        return Stall(SEQUENCER, STORAGE, for_s, text)
    return Stall(
        SEQUENCER,
        BUFFERS,
        for_s,
        f"{what} {has} waited for {its} xid buffer for {for_s:.0f} s (look at the buffers' CPU, and at the storage "
        "they write to)",
    )


def _head(sequencer: SequencerPart) -> tuple[str, str, str]:
    """What the head of the order is, as the server calls it; and how a sentence goes on."""
    xid, lsn, n = sequencer.head_xid, sequencer.head_commit_lsn, sequencer.head_n_transactions
    message = sequencer.head_message
    if message == _JOURNALED:
        return f"the journal's first transaction after {sequencer.delivered_lsn}", "has", "its"
    if message != "COMMIT":
        return f"{message} of transaction {xid}, which ends at {sequencer.head_end_lsn},", "has", "its"
    if lsn is None:
        return f"logical messages outside of transactions, after {sequencer.delivered_lsn},", "have", "their"
    if n is not None and n > 1:
        first = sequencer.head_first_commit_lsn
        return f"{counted(n, 'transaction')} with commits from {first} to {lsn}", "have", "their"
    whose = "" if xid is None else f" of transaction {xid}"
    return f"the commit{whose} at {lsn}", "has", "its"


def _lsn(text: str | None) -> int:
    return -1 if text is None else int(Lsn.parse(text))


def _unpulled(account: Account, sequencer: SequencerPart, for_s: float) -> Stall:
    if account.snapshots is not None and account.snapshots.tables:
        meanwhile = _meanwhile(account.journal)
        text = f"commits have waited for {for_s:.0f} s: a function sink gets the tables' snapshots first{meanwhile}"
        return Stall(SEQUENCER, SNAPSHOTS, for_s, text)
    what, has, _ = _head(sequencer)
    return Stall(
        SEQUENCER,
        DRIVER,
        for_s,
        f"{what} {has} been ready for {for_s:.0f} s, and the Spark driver has not taken "
        f"{'it' if has == 'has' else 'them'}{_meanwhile(account.journal)}",
    )


def _undecoded(reader: ReaderPart, for_s: float) -> Stall:
    return Stall(
        READER,
        BUFFERS,
        for_s,
        f"the xid buffers have {human_bytes(reader.in_flight_bytes)} to decode, and decoded none for {for_s:.0f} s "
        "(look at the buffers' CPU, and at the storage they write to)",
    )
