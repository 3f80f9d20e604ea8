"""Executes a course's actions, each on a thread: hold a table, read a range, commit a table, let go of it.

Each action ends as one event of the course. An error that a person must see ends the run (``fail``). A table that the
role may not read does not, where a stream goes on beside the snapshots: it is told, and tried again now and then. With
``on_poison = park``, one of the table's own rows or columns does not: its snapshot is cancelled until somebody asks for
it. After any other error the range is read again, if its reader was lost, or else the table is taken anew. A commit
alone is repeated here, until the sink answers: the rows are on disk, and the driver may be starting again. What an
attempt that failed has written is removed.

Small tables are taken together: a step has actions of several tables then, and ends as an event of each. A table that
is alone is a group of one, and its error is judged as above. Nothing that goes wrong in a larger group is judged, but
what ends the run in a commit: the table is left out, or has failed, and is taken alone then. A lost process or
connection is nobody's fault: all are taken together again. So are they after a lost reader. To hold them once more is
cheap, and their locks would wait for the next reader. Only ``held_tables`` goes two ways, for one and for several.

A repair is carried when its range is read. Its table is let go of first: what it waits for then, the log, may take as
long as the run lags. It holds nothing of the server meanwhile, and one repair after the other has Spark. Where nothing
can be carried it is refused, and the request forgotten.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from xidstream.actors.runtime.ray_cluster import own_cpus
from xidstream.actors.snapshots.actors import SnapshotActors
from xidstream.actors.snapshots.held_tables import HeldTables
from xidstream.pipeline import events
from xidstream.pipeline.errors import Action as Policy
from xidstream.pipeline.errors import (
    ColumnNameClash,
    ComponentLost,
    ConnectionLost,
    PoisonedChange,
    PreconditionMissing,
    SinkDiverged,
    SinkFailed,
    SnapshotInterrupted,
    SnapshotLost,
    StorageFault,
    TableUnreadable,
    Unsupported,
    UsageError,
    XidstreamError,
)
from xidstream.pipeline.events import of_error
from xidstream.pipeline.initial_copy import copy_schedule
from xidstream.pipeline.initial_copy.copy_schedule import (
    Action,
    Carried,
    Carry,
    CommitSnapshot,
    Dropped,
    Failed,
    Hold,
    LeftOut,
    OneEvent,
    RangeRead,
    Read,
    ReaderLost,
    Release,
    Several,
    SnapshotCommitted,
    Together,
)
from xidstream.pipeline.initial_copy.readers import most_readers, readers_here
from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.log_tables.snapshot_tables import Carrying, SnapshotTables
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.modes import SnapshotMode
from xidstream.pipeline.settings.sink_kinds import Snapshots
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.snapshot.tables import SEQ_BITS, PublishedSource, plan_ranges

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_LOST_WITH_ITS_RANGE = (ComponentLost, ConnectionLost, StorageFault)
"""After these errors of a read the range is read again. A snapshot that is gone shows as SnapshotLost when it is
imported."""
_NO_TABLES_FAULT = (*_LOST_WITH_ITS_RANGE, SnapshotLost)
"""Errors that no table of a group need be the cause of."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_CARRY_PAUSE_S = 1.0
"""Between two questions whether the log answers by now: as often as the catalog is looked at for a proof."""


@dataclass(frozen=True)
class TableTaken:
    """A table is committed. ``n_rows`` were read. ``n_bytes``: of the server's files. ``n_carried``: rows that a repair
    did not read; None for any other snapshot."""

    event: SnapshotCommitted
    generation: Generation
    n_rows: int
    n_bytes: int
    n_carried: int | None = None


class SnapshotSteps:
    """``last_number`` gives the number of a table's last generation, by name. ``end_former`` ends the standing
    generation, if it does not fit the table as it is under its lock. ``report`` gets the result of each action, and
    ``fail`` an error that ends the run. All four are called on any thread."""

    def __init__(
        self,
        config: Config,
        book: SnapshotBook,
        tables: SnapshotTables,
        last_number: Callable[[str], int],
        end_former: Callable[[PublishedSource], None],
        report: Callable[[copy_schedule.Event | TableTaken], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._book = book
        self._tables = tables
        self._last_number = last_number
        self._end_former = end_former
        self._report = report
        self._fail = fail
        self._most_readers = config.snapshot_connections
        """How many connections may read at once."""
        self._parks = config.on_poison == "park"
        """Whether a table whose rows cannot be read is set aside."""
        self._is_awaited = (
            config.snapshot == SnapshotMode.ONLY.value
            or config.available_now
            or config.sink_kind.snapshots is not Snapshots.BESIDE
        )
        """Whether the run cannot go on without the snapshots, so that a table that cannot be read ends it."""
        self._actors = SnapshotActors(config)
        """The actors that hold and read tables."""
        self._held = HeldTables(self._actors, book, tables)
        """The tables in hand, and where their rows go."""
        self._stop = threading.Event()
        """Set by ``close``: every pause ends."""
        self._carrying = threading.Lock()
        """One repair at a time has Spark carry rows over."""
        threads = 2 * most_readers(config.snapshot_connections) + 2
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="xidstream-snapshot")
        """Runs the actions."""

    def start_readers(self, sources: Iterable[PublishedSource]) -> int:
        """Start as many readers as server and machine have room for. Returns how many. ``sources``: what is to be read
        first."""
        n_ranges = sum(len(plan_ranges(source.leaves, by_range=True)) for source in sources)
        n_most = readers_here(self._most_readers, own_cpus())
        self._held.n_readers = self._actors.start_readers(n_most, n_ranges)
        return self._held.n_readers

    def end_actors(self) -> None:
        """No action runs: give the actors' connections and processes back. The next action starts others."""
        self._actors.close()
        self._held.clear()

    def close(self) -> None:
        """End everything, whatever it does."""
        self._stop.set()
        self._actors.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def waiting_for(self) -> list[str]:
        """In words: for whom tables wait."""
        return self._actors.waiting_for()

    def missing_readers(self) -> str | None:
        """In words: the readers that Ray has no CPUs for."""
        return self._actors.missing_readers()

    def submit(self, action: Action) -> None:
        if isinstance(action, Release):
            # At once: nobody reads for a later snapshot of this table yet.
            self._actors.cancel_reads(action.relid)
            self._pool.submit(self._held.release, action)
        else:
            actions = action.actions if isinstance(action, Together) else (action,)
            self._pool.submit(self._watched, self._act, actions)

    def _act(self, actions: Sequence[Any]) -> None:
        """``actions``: of one kind, each of another table."""
        if isinstance(actions[0], Hold):
            self._hold(actions)
        elif isinstance(actions[0], Read):
            self._read(actions)
        elif isinstance(actions[0], Carry):
            self._carry(actions[0])
        else:
            self._commit(actions)

    def _watched(self, act: Callable[[Sequence[Any]], None], actions: Sequence[Any]) -> None:
        try:
            act(actions)
        except XidstreamError as error:
            if not self._stop.is_set():
                self._judge(error, actions)
        except BaseException as error:  # noqa: BLE001 - the supervisor raises it
            if not self._stop.is_set():
                self._fail(error)

    def _judge(self, error: XidstreamError, actions: Sequence[Any]) -> None:
        """Report what becomes of tables whose step has failed."""
        is_alone, stops = len(actions) == 1, error.policy.action_of(logged_in=True) is Policy.STOP
        if is_alone:
            is_clash = isinstance(error, ColumnNameClash)
            if (self._parks and isinstance(error, PoisonedChange)) or (is_clash and self._is_awaited):
                self._give_up(error, actions[0])
                return
            # Whoever waits for the snapshots alone would wait for ever.
            goes_on = is_clash or (isinstance(error, TableUnreadable) and not self._is_awaited)
            if stops and not goes_on:
                self._fail(_with_way_out(error, actions[0]))
                return
        elif stops and isinstance(actions[0], CommitSnapshot):
            self._fail(error)
            return
        log.warning(of_error("snapshot_failed", f"snapshots: {error.message}", error))
        events = tuple(_failed(action, error, is_alone) for action in actions)
        if isinstance(events[0], ReaderLost):
            self._stop.wait(_FIRST_PAUSE_S)
        self._report(events[0] if is_alone else Several(events))

    def _give_up(self, error: XidstreamError, action: Hold | Read | Carry | CommitSnapshot) -> None:
        """Go on without this snapshot."""
        source = _source_of(action)
        self._until_done(lambda: self._book.cancel(source))
        text = (
            f"snapshots: {error.message}: table {source.name} is left without a snapshot until "
            f"`xidstream snapshot request --table {source.name}`"
        )
        log.warning(of_error("snapshot_failed", text, error))
        self._report(Failed(source.relation.relid, action.attempt))

    def _hold(self, actions: Sequence[Hold]) -> None:
        if len(actions) == 1:
            self._report(self._held.hold(actions[0]))
            return
        found = zip(actions, self._held.hold_together(actions), strict=True)
        events = (
            _failed(action, each, is_alone=False) if isinstance(each, XidstreamError) else each
            for action, each in found
        )
        self._report(Several(tuple(events)))

    def _read(self, actions: Sequence[Read]) -> None:
        # One that was given up meanwhile has no place for its rows any more.
        there = [
            (each, self._held.outputs[each.attempt]) for each in actions if each.attempt in self._held.outputs
        ]
        if not there:
            return
        tasks = [action.task for action, _ in there]
        found = self._actors.read(tasks, there[0][0].bounds, [output for _, output in there])
        events: list[OneEvent] = []
        for (action, _), read in zip(there, found, strict=True):
            relid = action.task.source.relation.relid
            if isinstance(read, XidstreamError):
                if len(actions) == 1:
                    raise read
                log.warning(of_error("snapshot_failed", f"snapshots: {read.message}", read))
                events.append(_failed(action, read, is_alone=False))
            else:
                events.append(RangeRead(relid, action.attempt, action.task.range.number, *read))
        self._report(Several(tuple(events)))

    def _carry(self, action: Carry) -> None:
        relid, relation = action.source.relation.relid, action.source.relation
        if lost := self._held.let_go([action.source], action.bounds):
            raise lost[relid]
        self._until_done(lambda: self._end_former(action.source))
        first_seq = action.first_number << SEQ_BITS
        carrying = Carrying(relation, action.repair.number, action.bounds, action.only, first_seq)
        pause_s = _CARRY_PAUSE_S
        with self._carrying:
            while (output := self._held.outputs.get(action.attempt)) is not None:
                # Of its own for each try: what one that failed wrote may be most of a large table.
                tried = replace(output, directory=f"{output.directory}-{secrets.token_hex(8)}")
                try:
                    files = self._tables.carry(carrying, tried)
                except (PreconditionMissing, Unsupported, UsageError, SinkFailed) as error:
                    if isinstance(error, SinkDiverged):
                        raise
                    # One table that cannot be repaired must not keep the others from their stream.
                    self._refuse(error, action)
                    return
                except XidstreamError as error:
                    is_over = isinstance(error, SnapshotInterrupted)
                    if is_over or error.policy.action_of(logged_in=True) is Policy.STOP:
                        raise
                    log.warning(
                        of_error("snapshot_retried", f"snapshots: {error.message}; trying again", error)
                    )
                    self._held.discard(tried)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    files = None
                if files is not None:
                    if action.attempt not in self._held.outputs:
                        self._held.discard(tried)  # it was given up meanwhile
                    n_rows = sum(file.n_rows for file in files)
                    self._report(Carried(relid, action.attempt, files, n_rows))
                    return
                if self._stop.wait(pause_s):
                    raise ComponentLost("the run ends")

    def _refuse(self, error: XidstreamError, action: Carry) -> None:
        source = action.source
        self._until_done(lambda: self._book.refuse(source, action.repair.key_filter))
        log.warning(repair_refused(source, error.message))
        self._report(Dropped(source.relation.relid))

    def _commit(self, actions: Sequence[CommitSnapshot]) -> None:
        """A repair is alone, and was let go of before it was carried."""
        lost: dict[int, SnapshotLost] = {}
        if actions[0].repair is None:
            lost = self._held.let_go([action.source for action in actions], actions[0].bounds)
        left: list[tuple[CommitSnapshot, Generation]] = []
        for action in actions:
            if (error := lost.get(action.source.relation.relid)) is not None:
                self._judge(error, [action])
            elif (generation := self._begun(action)) is None:
                self._judge(
                    SnapshotInterrupted(
                        f"table {action.source.name} was altered while its rows were written"
                    ),
                    [action],
                )
            else:
                left.append((action, generation))
        pause_s = _FIRST_PAUSE_S
        while left:
            taken = [(generation, action.files) for action, generation in left]
            found = self._until_done(partial(self._tables.commit, taken))
            again = []
            for (action, generation), done in zip(left, found, strict=True):
                if done is True:
                    self._finish(action, generation)
                elif not isinstance(done, XidstreamError):
                    again.append((action, generation))
                elif isinstance(done, SnapshotInterrupted):
                    self._until_done(partial(self._book.give_up, generation))
                    self._judge(done, [action])
                elif done.policy.action_of(logged_in=True) is Policy.STOP:
                    self._judge(done, [action])
                else:
                    log.warning(
                        of_error("snapshot_retried", f"snapshots: {done.message}; trying again", done)
                    )
                    again.append((action, generation))
            left = again
            # A function has the rows when its turn has come. A store that fails is left alone for longer and longer.
            is_failing = any(isinstance(done, XidstreamError) for done in found)
            if left and self._stop.wait(pause_s if is_failing else _FIRST_PAUSE_S):
                raise ComponentLost("the run ends")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if is_failing else _FIRST_PAUSE_S

    def _finish(self, action: CommitSnapshot, generation: Generation) -> None:
        self._until_done(lambda: self._book.finish(generation))
        self._held.outputs.pop(action.attempt, None)
        event = SnapshotCommitted(action.source.relation.relid, action.attempt)
        n_carried = None if action.repair is None else action.n_carried
        self._report(TableTaken(event, generation, action.n_rows, action.source.n_bytes, n_carried))

    def _begun(self, action: CommitSnapshot) -> Generation | None:
        """The generation that is about to be committed; None where the table was altered meanwhile."""
        if action.repair is None:
            self._until_done(lambda: self._end_former(action.source))
        last_number = self._last_number(action.source.name)
        where = None if action.repair is None else action.repair.key_filter
        return self._until_done(lambda: self._book.begin(action.source, action.bounds, last_number, where))

    def _until_done(self, act: Callable[[], _T]) -> _T:
        """Repeat ``act`` until it succeeds. Raises what a person must see, SnapshotInterrupted, and ComponentLost when
        the run ends."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return act()
            except SnapshotInterrupted:
                raise
            except XidstreamError as error:
                if error.policy.action_of(logged_in=True) is Policy.STOP:
                    raise
                log.warning(of_error("snapshot_retried", f"snapshots: {error.message}; trying again", error))
                if self._stop.wait(pause_s):
                    raise ComponentLost("the run ends") from error
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _failed(action: Hold | Read | Carry | CommitSnapshot, error: XidstreamError, is_alone: bool) -> OneEvent:
    """What becomes of a table, alone or in a group, whose step has failed."""
    relid = _source_of(action).relation.relid
    if is_alone and isinstance(action, Read) and isinstance(error, _LOST_WITH_ITS_RANGE):
        return ReaderLost(relid, action.attempt, action.task.range.number)
    if isinstance(error, _NO_TABLES_FAULT):
        return Failed(relid, action.attempt, is_own=False)
    is_left_out = isinstance(action, Hold) and not is_alone
    return LeftOut(relid, action.attempt) if is_left_out else Failed(relid, action.attempt)


def repair_refused(source: PublishedSource, reason: str) -> events.Event:
    """The event for people about a repair that cannot be done."""
    text = (
        f"snapshots: the key range of table {source.name} is not repaired: {reason}; take the whole table again: "
        f"`xidstream snapshot request --table {source.name}`"
    )
    return events.Event("repair_refused", text, table=source.name)


def _with_way_out(error: XidstreamError, action: Hold | Read | Carry | CommitSnapshot) -> XidstreamError:
    """One table that cannot be read must not keep the others from their stream."""
    source = _source_of(action)
    remedy = (
        f"{error.remedy}; or go on without this snapshot: `xidstream snapshot cancel --table {source.name}`"
    )
    return type(error)(error.message, remedy=remedy)


def _source_of(action: Hold | Read | Carry | CommitSnapshot) -> PublishedSource:
    return action.task.source if isinstance(action, Read) else action.source
