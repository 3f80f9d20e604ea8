"""Leads the snapshots of one slot's tables, on a thread of the run's process, beside the epochs of its stream.

A shell around ``CopySchedule`` (what is next), ``SnapshotBook`` (what is wanted) and ``Proving`` (what a look at the
catalog proves): it looks at catalog, sink and storage now and then, has ``SnapshotSteps`` execute the course's actions,
and takes in what came of them. It holds no row, and nothing that cannot be had again: finished tables are in the sink,
and everything else is taken anew by the next run.

Storage and wishes are looked at every ten seconds. While the sink has commits that nothing proves yet, the catalog is
looked at every second, because no reader may see a state at them before that (``pipeline.changelog``).

The stream's epochs may end and begin meanwhile, and the Spark driver be replaced: what needs them waits, and all else
goes on.

Rejected: an actor of its own for this. Its death would cost the tables in hand, and it would save nothing, because a
run that has ended has nobody who would commit them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from xidstream.actors.snapshots.steps import SnapshotSteps, TableTaken, repair_refused
from xidstream.pipeline import events
from xidstream.pipeline.account.snapshots import SnapshotProgress
from xidstream.pipeline.errors import Action as Policy
from xidstream.pipeline.errors import ComponentLost, SegmentCorrupt, XidstreamError
from xidstream.pipeline.initial_copy.copy_schedule import (
    Carry,
    CopySchedule,
    Dropped,
    Event,
    Failed,
    Retry,
    Several,
)
from xidstream.pipeline.initial_copy.progress import ReadingRate, Sums, progress_of
from xidstream.pipeline.initial_copy.retry_backoff import RetryBackoff
from xidstream.pipeline.initial_copy.snapshot_book import Needs, NewLayout, SnapshotBook
from xidstream.pipeline.initial_copy.snapshot_lines import SnapshotLines, recovered
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine, SnapshotTables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.quantities import counted, human_bytes
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.ddl import Marks, Witnessed
from xidstream.pipeline.snapshot.generation import GenerationState
from xidstream.pipeline.snapshot.proven import Proving
from xidstream.pipeline.snapshot.tables import PublishedSource, Surveyed

_LOOK_S = 10.0
_PROOF_S = 1.0
_PROOFS_PER_S = 10
"""Such a look takes one part in so many of the time, at most: the server adds up its catalogs meanwhile."""
_LOOKS_PER_CPU = 100
"""Looks at what is wanted take one part in so many of a CPU: that of the reader's threads, where the catalog has
changed (with 10,000 tables 3 s), and that of the run's process, which compares."""
_LONGEST_LOOK_S = 300.0
_STREAM_LOOK_S = 1.0
"""While the stream alone has to come on, it is asked how far it is, and the catalog is not."""
_STREAM_WAIT_S = 3.0
"""So long an ending waits for the DDL's message, for its place. Meanwhile nothing more is proven."""
_STREAM_POLL_S = 0.1
_POLL_S = 0.5
_NOTE_S = 1.0
_ENDED = GenerationState.ENDED


class SnapshotCoordinator:
    """``survey`` reads the published tables, unless the fingerprint that it gets says that they are unchanged; None
    while it cannot read them. ``delivered`` gives the LSN up to which the sink has all, and its last commit; None while
    it is not known. ``notify`` tells people. ``once``: end when it is complete for the first time."""

    def __init__(
        self,
        config: Config,
        book: SnapshotBook,
        survey: Callable[[str | None], Surveyed | None],
        delivered: Callable[[], tuple[Lsn, Lsn] | None],
        tables: SnapshotTables,
        notify: Callable[[str], None],
        *,
        once: bool = False,
    ) -> None:
        self._book = book
        self._once = once
        self._survey = survey
        self._delivered = delivered
        self._bytes_per_s = config.snapshot_bytes_per_s
        """A limit for all readers together; 0 is none."""
        self._pause_s = _LOOK_S
        """Until the next look at the catalog."""
        self._tables = tables
        self._notify = notify
        self._events: queue.SimpleQueue[Event | TableTaken] = queue.SimpleQueue()
        """What came of actions, and tables that were taken. Any thread puts, the coordinator's takes."""
        self._steps = SnapshotSteps(
            config, book, tables, self._last_number, self._end_former, self._events.put, self._fail
        )
        """Executes what the schedule says, on threads of its own."""
        self._course: CopySchedule | None = None
        """What is next for each wanted table; None while no table is wanted."""
        self._lines: SnapshotLines | None = None
        """The generations that the sink tells of; None until the first look."""
        self._is_ready = False
        """Whether the sink was told that lines may be added."""
        self._sources: tuple[PublishedSource, ...] = ()
        """The published tables, as the last look that read them found them."""
        self._fingerprint: str | None = None
        """The catalog's fingerprint when ``_sources`` were read and every generation was compared with them; None if
        one has begun or something has failed since."""
        self._looking = threading.Lock()
        """Held during a look: ``prove_last`` looks on another thread."""
        self._is_changed = False
        """Whether a look for a proof found something to do."""
        self._proving = Proving()
        """Up to where the looks at the catalog prove the states of tables."""
        self._proven_lsn = Lsn(0)
        """The proven LSN that the sink has."""
        self._marks = Marks()
        """The mark of the DDL triggers, as looks at the catalog have found it."""
        self._witnessed: Witnessed | None = None
        """Since when the DDL triggers have been on, as the last look found it; None if they are not."""
        self._to_extend: list[GenerationLine] = []
        """The generations that DDL has ended. They stand up to that DDL, if the next look finds that nothing was
        missed."""
        self._is_new_sink = False
        """Whether the sink was claimed anew: what was ended before that is known from its lines alone."""
        self._resting = RetryBackoff()
        """The tables that failed, each until it is tried again."""
        self._stop = threading.Event()
        """Set by ``stop``: nothing more is begun."""
        self._last_text = ""
        """The last message to people, so that none is repeated."""
        self._finished = self._announced = Sums()
        """The sums of all finished tables, and the sums that were last announced."""
        self._held_wal_bytes: int | None = None
        """The WAL that the slot holds back, as of the last look."""
        self._rate = ReadingRate()
        """How fast the current tables are read."""
        self.valid_from = Lsn(0)
        """The greatest ``valid_from`` of the generations that this run took."""
        self.is_complete = False
        """Whether every table that is wanted has its snapshot, as of the last look."""
        self.is_reached = False
        """Whether the sink's log is also whole up to ``valid_from``."""
        self.failure: BaseException | None = None
        """What ended the thread, for the supervisor to raise; None while nothing did."""
        self._thread = threading.Thread(target=self._run, name="xidstream-snapshots", daemon=True)
        """The coordinator's own thread. It begins here and ends with ``stop``."""
        self._thread.start()

    def stop(self) -> None:
        """End it, and cancel what is running."""
        self._stop.set()
        self._steps.close()
        self._thread.join()

    def begin_epoch(self) -> None:
        """On any thread: the sink was claimed anew."""
        self._is_new_sink = True

    def prove_last(self) -> None:
        """One more look at the catalog, on the caller's thread, when the sink has got its last batch."""
        try:
            with self._looking:
                self._prove()
        except XidstreamError as error:
            text = (
                f"the tables' states can be read up to {self._proven_lsn} only, until the next run has looked at the "
                f"catalog: {error.message}"
            )
            self._notify(events.of_error("snapshots_wait", text, error))

    def progress(self) -> SnapshotProgress:
        course = self._course
        tables = [] if course is None else list(course.tables.values())
        return progress_of(tables, self._finished, self._held_wal_bytes, self._rate.bytes_per_s)

    def _last_number(self, table: str) -> int:
        """The highest number among the table's generations in the sink; 0 if there is none. On any thread."""
        return 0 if self._lines is None else self._lines.last_number(table)

    def _end_former(self, source: PublishedSource) -> None:
        """On any thread. The table's new generation takes the place of the line that ends here."""
        ended = None if self._lines is None else self._book.ended(source, self._lines)
        if ended is not None:
            self._tables.end(*ended)
            self._tell_ended(*ended)

    def _tell_ended(self, line: GenerationLine, reason: str) -> None:
        text = f"the snapshot of table {line.table} is no longer valid: {reason}"
        self._notify(events.Event("snapshot_ended", text, table=line.table))

    def _fail(self, error: BaseException) -> None:
        self.failure = error

    def _run(self) -> None:
        look_s = stream_s = note_s = proof_s = 0.0
        try:
            while not (self._stop.is_set() or self.failure is not None or (self._once and self.is_complete)):
                if time.monotonic() >= look_s or self._is_changed:
                    self._is_changed = False
                    with self._looking:
                        self._try_to(self._look)
                    look_s = time.monotonic() + self._pause_s
                    proof_s = time.monotonic() + _PROOF_S
                elif time.monotonic() >= proof_s:
                    began_s = time.monotonic()
                    with self._looking:
                        self._try_to(self._prove)
                    proof_s = time.monotonic() + max(_PROOF_S, _PROOFS_PER_S * (time.monotonic() - began_s))
                elif self._waits_for_log and time.monotonic() >= stream_s:
                    self._try_to(self._look_at_stream)
                    stream_s = time.monotonic() + _STREAM_LOOK_S
                if rested := self._resting.wake(time.monotonic()):
                    self._handle(Several(tuple(map(Retry, rested))))
                if time.monotonic() >= note_s:
                    note_s = time.monotonic() + _NOTE_S
                    self._rate.note(time.monotonic(), self.progress().n_bytes_read)
                try:
                    event = self._events.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                self._handle(event)
                if self._course is not None and not self._course.tables:
                    look_s = 0.0
        except BaseException as error:  # noqa: BLE001 - the supervisor raises it
            self.failure = error
        finally:
            self._steps.close()

    def _try_to(self, look: Callable[[], None]) -> None:
        try:
            look()
        except XidstreamError as error:
            if error.policy.action_of(logged_in=True) is Policy.STOP or isinstance(error, SegmentCorrupt):
                raise
            # While the stream starts there is nobody to ask. What lasts is told.
            if not isinstance(error, ComponentLost):
                text = f"snapshots: {error.message}; asking again in {self._pause_s:.0f} s"
                self._tell(events.of_error("snapshots_wait", text, error))

    def _look(self) -> None:
        """Look at the sink, the catalog and the wishes, and act on the difference."""
        wants = self._book.is_wanting()
        if self._lines is None or (wants and not self._is_ready):
            self._tables.clean()
            self._lines, self._is_ready = recovered(self._tables, self._book, makes=wants), wants
        if self._course is None and not wants and not self._book.is_one_standing(self._lines):
            self.is_complete = self.is_reached = True
            return
        if self._is_new_sink and not self._once:
            self._note_ended((line, "") for line in self._tables.lines(False) if line.state is _ENDED)
            self._is_new_sink = False
        surveyed = self._ask()
        if surveyed is not None:
            began_s = time.thread_time()
            needs = self._compare(surveyed, self._lines)
            cpu_s = surveyed.cpu_s + time.thread_time() - began_s
            self._pause_s = min(max(_LOOK_S, _LOOKS_PER_CPU * cpu_s), _LONGEST_LOOK_S)
            self._take(needs, surveyed, self._lines)

    def _prove(self) -> None:
        """Is there a commit that nothing proves yet? Then a look at the catalog alone."""
        delivered = self._delivered()
        if (
            self._once
            or delivered is None
            or self._lines is None
            or not self._book.is_one_standing(self._lines)
        ):
            return
        if max(delivered[1], self._lines.reached_lsn) <= self._proven_lsn:
            return
        surveyed = self._ask()
        if surveyed is None:
            return
        if surveyed.sources is None:
            self._note_proof(surveyed)
        else:
            needs = self._compare(surveyed, self._lines)
            self._is_changed |= bool(needs.wanted or needs.unwanted)

    def _ask(self) -> Surveyed | None:
        surveyed = self._survey(self._fingerprint)
        if surveyed is not None:
            self._witnessed = self._marks.note(surveyed.mark, surveyed.look.lsn)
            waiting, self._to_extend = self._to_extend, []
            if self._witnessed is not None:
                for line in waiting:
                    self._tables.extend(line, self._witnessed)
        return surveyed

    def _note_proof(self, surveyed: Surveyed) -> None:
        """Every generation that stands, or is about to, is what the look found."""
        # No further than the log is whole: what comes after is another server's if this one is lost.
        proven_lsn = min(self._proving.note(surveyed.look), surveyed.delivered_lsn)
        if not self._once and proven_lsn > self._proven_lsn:
            proven = self._tables.prove(proven_lsn, surveyed.snapshot)
            self._proven_lsn = max(self._proven_lsn, proven.lsn)
            self._note_ended(proven.ended)

    def _note_ended(self, ended: Iterable[tuple[GenerationLine, str]]) -> None:
        """Take note of generations that the sink has ended by itself, because the stream told of DDL."""
        assert self._lines is not None
        standing = {(line.table, line.number): line for line in self._lines if line.state is not _ENDED}
        for ended_line, reason in ended:
            if reason and self._book.leaves_messages(ended_line):
                self._to_extend.append(ended_line)
            line = standing.get((ended_line.table, ended_line.number))
            if line is None or line.snapshot_lsn != ended_line.snapshot_lsn:
                continue  # a look was faster
            self._lines.end(line)
            self._is_changed = True
            if reason:
                self._tell_ended(line, reason)

    def _compare(self, surveyed: Surveyed, lines: SnapshotLines) -> Needs:
        """Decide what each published table needs, and end the generations that do not stand any more."""
        self._held_wal_bytes = surveyed.held_wal_bytes
        if surveyed.sources is not None:
            self._sources = surveyed.sources
        self._fingerprint = None
        is_witnessed = self._witnessed is not None
        needs = self._book.needs(
            self._sources, lines, surveyed.look.lsn, surveyed.end_lsn, is_witnessed=is_witnessed
        )
        if needs.ended and self._witnessed is not None:
            self._await_stream(surveyed.look.lsn)
        for line, reason in needs.ended:
            witnessed = self._witnessed if self._book.leaves_messages(line) else None
            self._tables.end(line, reason, witnessed)
            lines.end(line)
            self._tell_ended(line, reason)
        if needs.is_proof and self._lay_out(needs.layouts):
            self._fingerprint = surveyed.fingerprint
            # The columns may be younger than the look's position: the next look proves more.
            if not needs.layouts:
                self._note_proof(surveyed)
        return needs

    def _lay_out(self, layouts: Sequence[NewLayout]) -> bool:
        """Record the new layouts in the log, once it has all rows with the old columns. Returns whether all were
        recorded."""
        if not layouts:
            return True
        self._await_stream(max(layout.found_lsn for layout in layouts))
        delivered = self._delivered()
        ready = [each for each in layouts if delivered is not None and each.found_lsn <= delivered[0]]
        if ready:
            relations = [(each.source.relation, each.found_lsn) for each in ready]
            self._tables.lay_out(relations, self._witnessed)
            for layout in ready:
                self._book.lay_out(layout)
        return len(ready) == len(layouts)

    def _await_stream(self, lsn: Lsn) -> None:
        """For a while, until the sink knows all DDL up to ``lsn``."""
        deadline_s = time.monotonic() + _STREAM_WAIT_S
        while time.monotonic() < deadline_s and not self._stop.is_set():
            try:
                delivered = self._delivered()
            except ComponentLost:
                return
            if delivered is None or delivered[0] >= lsn:
                return
            time.sleep(_STREAM_POLL_S)

    def _take(self, needs: Needs, surveyed: Surveyed, lines: SnapshotLines) -> None:
        if needs.wanted and self._course is None:
            n_readers = self._steps.start_readers(wanted.source for wanted in needs.wanted)
            self._course = CopySchedule(n_readers, self._bytes_per_s)
        waits = [missing] if (missing := self._steps.missing_readers()) else []
        if writers := self._steps.waiting_for():
            waits.append(
                f"tables wait for transactions that have written to them and are still open: {'; '.join(writers)}"
            )
        if waits:
            self._tell(events.Event("snapshots_wait", f"snapshots: {'. '.join(waits)}"))
        for source, reason in needs.refused:
            self._book.refuse(source)
            self._notify(repair_refused(source, reason))
        for relid in (*needs.unwanted, *(source.relation.relid for source, _ in needs.refused)):
            self._handle(Dropped(relid))
        self._handle(Several(needs.wanted))
        self.is_complete = not needs.wanted and not (self._course is not None and self._course.tables)
        if self.is_complete and self._course is not None:
            self._course = None
            self._rate = ReadingRate()
            self._steps.end_actors()
            self._tell_complete()
        # Also while others are wanted: one that cannot be taken must not keep the taken ones from their readers.
        reaches = self._reaches(lines, surveyed.delivered_lsn)
        self.is_reached = self.is_complete and reaches

    def _look_at_stream(self) -> None:
        """Is the log whole by now?"""
        delivered = self._delivered()
        if self._lines is not None and delivered is not None:
            self.is_reached = self._reaches(self._lines, delivered[0]) and self.is_complete

    @property
    def _waits_for_log(self) -> bool:
        """Whether the run, or a repair, can go on only when the log is whole up to a snapshot."""
        is_awaited = self._lines is not None and self._lines.is_awaited
        return is_awaited or (self.is_complete and not self.is_reached)

    def _reaches(self, lines: SnapshotLines, delivered_lsn: Lsn) -> bool:
        """Whether the log is whole up to where the snapshots are valid from. Has it say so."""
        if self._once or lines.is_reached():
            return True  # a function has no log
        if not lines.may_reach(delivered_lsn):
            return False
        self._tables.reach(lines.valid_from)
        lines.reach()
        return True

    def _tell(self, text: str) -> None:
        """Each text once in a row."""
        if text != self._last_text:
            self._last_text = text
            self._notify(text)

    def _tell_complete(self) -> None:
        news, self._announced = self._finished.less(self._announced), self._finished
        if news.n_tables:
            text = (
                f"{counted(news.n_tables, 'table')}: the rows from before are in the sink, "
                f"{counted(news.n_rows, 'row')}, {human_bytes(news.n_bytes)} of the server's files"
            )
            facts = {"n_tables": news.n_tables, "n_rows": news.n_rows, "n_bytes": news.n_bytes}
            self._notify(events.Event("snapshots_taken", text, logging.INFO, **facts))

    def _tell_repaired(self, table: str, n_rows: int, n_carried: int) -> None:
        text = (
            f"table {table}: a key range is repaired: {counted(n_rows, 'row')} read from the source, "
            f"{counted(n_carried, 'row')} carried over"
        )
        facts = {"n_rows": n_rows, "n_carried": n_carried}
        self._notify(events.Event("snapshot_repaired", text, logging.INFO, table=table, **facts))

    def _handle(self, event: Event | TableTaken) -> None:
        if isinstance(event, TableTaken):
            self._note(event)
            event = event.event
        if self._course is None:
            return
        for each in event.events if isinstance(event, Several) else (event,):
            if isinstance(each, Failed) and self._course.is_in_hand(each.relid, each.attempt):
                self._resting.rest(each.relid, time.monotonic())
        for action in self._course.handle(event):
            if isinstance(action, Carry) and self._lines is not None:
                self._lines.await_(action.bounds.valid_from)
            self._steps.submit(action)

    def _note(self, taken: TableTaken) -> None:
        assert self._lines is not None
        generation = taken.generation
        if taken.n_carried is None:
            self._finished = self._finished.plus(1, taken.n_rows, taken.n_bytes)
        else:
            self._tell_repaired(generation.name, taken.n_rows, taken.n_carried)
        self._resting.forget(generation.relid)
        self.valid_from = max(self.valid_from, generation.bounds.valid_from)
        self._lines.finish(generation)
        self._fingerprint = None
