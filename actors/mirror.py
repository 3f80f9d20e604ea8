"""Refreshes base tables, once or again and again: for the command line, for a run, and for a PySpark script.

``Mirror`` is the public class. ``MirrorLoop`` repeats refreshes on whatever thread calls it, until it is stopped. It
ends at the first error that repeating does not mend (``errors.POLICY``), another mirror of the slot among them. Any
other error it tells, and it goes on at the next turn: nothing that readers see has changed.

In a run the loop has a thread of the Spark driver's process (``start_beside``). It shares the session with the sink,
and nothing else: no lock, no table that the sink writes. Its jobs are in a pool of their own, after the
sink's (``fairscheduler.xml``). A task of its that runs already is not interrupted. So the sink waits for one task at
the most, which reads and writes one file, and only where it needs Spark at all. Most refreshes start no job, and write
their files on threads of this process. So they do without a session, and none is started for them.

Where there is a catalog, ``_Register`` has it name the tables after each refresh, on one more thread: a catalog that
does not answer holds up neither the next refresh nor a vacuum. What goes wrong there is told, once as long as it stays
the same, and tried again behind the next refresh. A single refresh waits for the catalog, and tells its failure, too.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.errors import Action, Superseded, UsageError, XidstreamError
from xidstream.pipeline.mirror.base_tables import BaseTables, Refreshed
from xidstream.pipeline.mirror.table_folder import Vacuumed
from xidstream.pipeline.quantities import counted, human_bytes
from xidstream.pipeline.settings.catalog_names import CatalogName
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.times import duration_s

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULTS = Config()
_JOBS: Final = ("xidstream-mirror", "base tables")
"""The group of Spark's jobs, and what Spark's user interface says of them."""


class Mirror:
    """Base tables of the change log below ``uri``: plain Delta tables that any engine reads, at one LSN.

    ``slot`` is needed where several slots write below ``uri``. ``storage_options`` are deltalake's. The tables are
    below ``uri/current``, and ``uri/current/_manifest`` names the versions that belong together (docs/mirror.md). Of a
    log in Iceberg tables, ``iceberg:CATALOG/namespace``, they are Iceberg tables in ``namespace_current``
    (docs/iceberg.md).
    ``catalog``, such as ``glue:shop``, gets an entry for each. What goes wrong there is a warning (RuntimeWarning).
    """

    def __init__(
        self,
        uri: str,
        slot: str | None = None,
        *,
        file_bytes: int = _DEFAULTS.mirror_file_bytes,
        storage_options: Mapping[str, str] | None = None,
        catalog: str = _DEFAULTS.mirror_catalog,
    ) -> None:
        self._tables = BaseTables(uri, slot, file_bytes, storage_options, CatalogName.parse(catalog))
        self._register = _register_of(self._tables, _warn)
        self._loop: MirrorLoop | None = None
        self._thread: threading.Thread | None = None

    def refresh(self, spark: SparkSession) -> Refreshed | None:
        """Bring all base tables to the newest complete commit of the log; None where there is nothing new.

        ``spark``: any session; its executors must reach ``uri``. Raises Superseded where another mirror of the slot has
        taken over.
        """
        refreshed = self._tables.refresh(lambda: spark)
        if self._register is not None:
            self._register.now()
        return refreshed

    def vacuum(self, retention: str = _DEFAULTS.mirror_retention) -> Vacuumed:
        """Remove what no reader needs who takes up to ``retention`` (``24h``) for one moment of the tables.

        It and a refresh wait for each other, also beside the thread that ``start`` began.
        """
        return self._tables.vacuum(duration_s(retention, "retention"))

    def start(
        self, spark: SparkSession, every: str, retention: str | None = _DEFAULTS.mirror_retention
    ) -> None:
        """Refresh now and ``every`` so often (``60s``), on a thread, until ``stop``. In between remove what ``vacuum``
        does, unless ``retention`` is None."""
        vacuum_s = None if retention is None else duration_s(retention, "retention")
        session = LoopSession(DriverSession.given(spark), *_JOBS)
        self._loop = MirrorLoop(
            self._tables,
            session,
            every_s=duration_s(every, "every"),
            vacuum_s=vacuum_s,
            register=self._register,
        )
        self._thread = threading.Thread(target=self._loop.run_quietly, name="xidstream-mirror", daemon=True)
        self._thread.start()

    def exception(self) -> BaseException | None:
        """What ended the thread that ``start`` began; None while it runs, and after ``stop``."""
        return None if self._loop is None else self._loop.failure

    def stop(self) -> None:
        """End it. A running refresh is cancelled: the next one goes on from what it has done."""
        if self._loop is not None and self._thread is not None:
            self._loop.stop()
            self._thread.join()


def _warn(text: str, is_fault: bool) -> None:
    if is_fault:
        warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Register:
    """Has the catalog name the tables. ``tell``: a text, and whether something is wrong."""

    def __init__(self, tables: BaseTables, tell: Callable[[str, bool], None]) -> None:
        self._tables = tables
        self._tell = tell
        self._last_text = ""
        self._one = threading.Lock()

    def beside(self, is_cancelled: Callable[[], bool]) -> None:
        """On a thread of its own; nothing where the last one is not done yet."""
        if not self._one.locked():
            threading.Thread(
                target=self.now, args=(is_cancelled,), name="xidstream-mirror-catalog", daemon=True
            ).start()

    def now(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Once. Nothing is raised for the catalog's sake."""
        with self._one:
            try:
                done = self._tables.register(is_cancelled)
            except XidstreamError as error:
                remedy = f" ({error.remedy})" if error.remedy else ""
                if not is_cancelled():
                    self._once(f"{error.message}{remedy}; the next refresh tries again")
                return
            refused = [
                f"  not in {self._tables.catalog}: {table}: {why}" for table, why in done.refused.items()
            ]
            self._once("\n".join(["some base tables are not registered", *refused]) if refused else "")
            if done.n_put or done.n_removed:
                self._tell(
                    f"{self._tables.catalog}: {counted(done.n_tables, 'table')}, {done.n_put} of them new or changed, "
                    f"{done.n_removed} removed",
                    False,
                )

    def _once(self, text: str) -> None:
        """Tell what is wrong; nothing where ``text`` is empty, or was told the last time."""
        if text and text != self._last_text:
            self._tell(text, True)
        self._last_text = text


def _register_of(tables: BaseTables, tell: Callable[[str, bool], None]) -> _Register | None:
    return None if tables.catalog is None else _Register(tables, tell)


VACUUM_EVERY_S: Final = 600.0
_MOST_VERSIONS: Final = 1_500
"""With a thousand, a refresh of a base table in Iceberg takes three times the CPU time (docs/iceberg.md). A refresh a
minute makes 1,440 in a day, which is the default retention."""


class MirrorLoop:
    """``every_s`` None: once. ``vacuum_s``: the retention of a vacuum after a refresh; None: no vacuum. It lists every
    base table, so it comes with the first refresh, and then ``VACUUM_EVERY_S`` apart; for a short retention more often.

    ``waits_for_log``: a log that is not there yet is no error, because the sink beside has only begun.
    """

    def __init__(
        self,
        tables: BaseTables,
        session: LoopSession,
        *,
        every_s: float | None,
        vacuum_s: float | None = None,
        tell: Callable[[str], None] = lambda text: None,
        waits_for_log: bool = False,
        register: _Register | None = None,
    ) -> None:
        self._register = register
        self._waits_for_log = waits_for_log
        self._has_reported = False
        self._tables = tables
        self._session = session
        self._every_s = every_s
        self._vacuum_s = vacuum_s
        self._vacuumed_s = float("-inf")
        self._tell = tell
        self._stop = threading.Event()
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """Any thread: end now. The running refresh or vacuum is cancelled, and so are Spark jobs."""
        self._stop.set()
        self._session.cancel_jobs()

    def run(self) -> None:
        """Raises what ended it."""
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                self._turn()
            except XidstreamError as error:
                if self._stop.is_set():
                    return
                if not (isinstance(error, UsageError) and self._waits_for_log):
                    if self._every_s is None or not _is_mended_by_repeating(error):
                        raise
                    self._tell(f"base tables: {error.message}; the next refresh takes it up")
            if self._every_s is None:
                return
            self._stop.wait(max(0.0, self._every_s - (time.monotonic() - began_s)))

    def run_quietly(self) -> None:
        """Run on a thread of its own: the error is kept and told."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - for whoever asks for it
            self.failure = error
            text = (
                error.message if isinstance(error, XidstreamError) else f"unexpected {type(error).__name__}"
            )
            self._tell(f"base tables are not refreshed any more: {text}")

    def _turn(self) -> None:
        refreshed = self._tables.refresh(self._session.get, self._stop.is_set)
        self._waits_for_log = False
        if refreshed is not None or not self._has_reported:
            self._has_reported = True
            self._tell(describe(refreshed))
        if self._register is not None:
            turn = self._register.now if self._every_s is None else self._register.beside
            turn(self._stop.is_set)
        now_s = time.monotonic()
        if self._vacuum_s is not None and now_s - self._vacuumed_s >= min(
            VACUUM_EVERY_S, self._vacuum_s / 12
        ):
            self._vacuumed_s = now_s
            vacuumed = self._tables.vacuum(self._vacuum_s, self._stop.is_set)
            if vacuumed.n_files:
                self._tell(f"base tables: {counted(vacuumed.n_files, 'old file')} removed")


def _is_mended_by_repeating(error: XidstreamError) -> bool:
    return error.policy.action is not Action.STOP and not isinstance(error, Superseded)


def describe(refreshed: Refreshed | None) -> str:
    """A line for people."""
    if refreshed is None:
        return "base tables: nothing new"
    changed = [table for table in refreshed.tables if table.n_files_written or table.n_files_removed]
    text = (
        f"base tables: {counted(len(refreshed.tables), 'table')} at {refreshed.lsn}, {len(changed)} of them changed, "
        f"{human_bytes(refreshed.bytes_written)} written in {refreshed.seconds:.1f} s"
    )
    left_out = [f"  left out: {table}: {reason}" for table, reason in sorted(refreshed.left_out.items())]
    return "\n".join([text, *left_out])


def loop_of(
    config: Config,
    session: DriverSession,
    *,
    every_s: float | None,
    tell: Callable[[str], None],
    beside: str = "",
) -> MirrorLoop:
    """By the settings of a command, or of the run ``beside``, a slot's name. Its sink has base tables."""
    catalog = CatalogName.parse(config.mirror_catalog)
    tables = BaseTables(config.sink, config.slot or None, config.mirror_file_bytes, catalog=catalog)
    vacuum_s = duration_s(config.mirror_retention, "mirror_retention") if config.mirror_vacuum else None
    if note := versions_note(config, every_s):
        tell(note)
    group, about = _JOBS
    return MirrorLoop(
        tables,
        LoopSession(session, f"{group}-{beside}", about),
        every_s=every_s,
        vacuum_s=vacuum_s,
        tell=tell,
        waits_for_log=bool(beside),
        register=_register_of(tables, lambda text, is_fault: tell(text)),
    )


def versions_note(config: Config, every_s: float | None) -> str | None:
    """What to tell where a commit of a base table would come to write very many former versions anew."""
    if every_s is None or not config.sink_kind.rewrites_versions:
        return None
    n = duration_s(config.mirror_retention, "mirror_retention") / every_s
    if config.mirror_vacuum and n <= _MOST_VERSIONS:
        return None
    kept = f"up to {round(n):,} snapshots (mirror_retention)" if config.mirror_vacuum else "all its snapshots"
    return (
        f"note: a base table that each refresh changes keeps {kept}, and each commit writes all of them anew; some "
        "hundreds cost little: choose a longer time between two refreshes, or a shorter mirror_retention "
        "(docs/iceberg.md)"
    )


def start_beside(config: Config, session: DriverSession, tell: Callable[[str], None]) -> MirrorLoop:
    """The loop of a run with ``mirror_every``, on a thread of this process."""
    every_s = duration_s(config.mirror_every, "mirror_every")
    loop = loop_of(config, session, every_s=every_s, tell=tell, beside=config.slot)
    threading.Thread(target=loop.run_quietly, name=f"xidstream-mirror-{config.slot}", daemon=True).start()
    return loop
