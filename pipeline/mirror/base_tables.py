"""All base tables of one slot under one mirror: refresh them to one LSN, name them, remove what is old.

``BaseTables`` holds the number that fences (``ManifestWriter.claim``), taken at its first refresh. ``refresh`` does
nothing where the log has no newer commit than the manifest. Otherwise the tables are refreshed
(``pipeline.mirror.refresh``): what needs no Spark on a few threads, the others in turn. Then the manifest names them
all. Somebody else's commit in between makes it look at
everything again: at the manifest, which tells whether this mirror was overtaken, at the log, and at each table. An
erasure does so, too (``erased_base``).

A table that has no snapshot, or whose generation has ended, is left out, with its reason. The manifest then does not
name it at the new LSN, and its base table has a property that says so (``base_table.LEFT_OUT``). After the retention a
vacuum removes it.

A refresh and a vacuum have the same number, so the number does not keep them apart: a vacuum would take files that a
refresh has written and not committed. So there is a lock, and one waits for the other.

In an object store the handles of the log's tables, of the manifest and of the base tables are kept from one refresh to
the next (``delta.kept_tables``), and so is the log that was looked at. A look at it that finds nothing new is eight
requests. Whatever goes wrong lets them go.

``register`` has a catalog name the tables, if there is one (``catalog``). It takes what the last refresh left behind,
and no lock: neither a refresh nor a vacuum waits for a catalog.

Called by ``actors.mirror``, from any thread.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from xidstream.pipeline.changelog.base_stores import BaseStore
from xidstream.pipeline.changelog.generations import TableGeneration, generation_at
from xidstream.pipeline.changelog.log_root import DeltaRoot, LogRoot, root_of
from xidstream.pipeline.changelog.manifest import ManifestLine, ManifestWriter
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.changelog.table_at import TableAt
from xidstream.pipeline.delta.kept_tables import KeptTables
from xidstream.pipeline.errors import (
    ComponentLost,
    ConfigError,
    PreconditionMissing,
    StorageFault,
    Unsupported,
)
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.watched_clock import WatchedClock
from xidstream.pipeline.mirror import rewrite
from xidstream.pipeline.mirror.base_table import BaseFacts, BaseTable, MirrorMarks
from xidstream.pipeline.mirror.catalog import Registered, Registration
from xidstream.pipeline.mirror.file_chunks import THREADS
from xidstream.pipeline.mirror.refresh import Answer, TableRefresh, TableRefresher, directory_of
from xidstream.pipeline.mirror.table_folder import Vacuumed
from xidstream.pipeline.mirror.vacuum import VacuumedDeltaTables, VacuumedTables, vacuum_tables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import labelled_table, table_label
from xidstream.pipeline.settings.catalog_names import CatalogName
from xidstream.pipeline.spark_errors import fault_of

if TYPE_CHECKING:
    from xidstream.pipeline.spark.session import GetSession

Generations: TypeAlias = Mapping[str, list[TableGeneration]]

ATTEMPTS: Final = 4
"""How often a refresh or a vacuum is tried when others commit at the same time. Each failure means that another mirror
committed first, which ends soon."""
_PORTION: Final = 4 * THREADS
"""So many tables are tried between two looks at the manifest."""
_POLL_S: Final = 0.2
"""A refresh that waits for a vacuum, or the reverse, looks so often whether it was cancelled."""


@dataclass(frozen=True)
class Refreshed:
    """What a refresh did. ``left_out``: table → why the manifest does not name it at this LSN."""

    lsn: Lsn
    tables: tuple[TableRefresh, ...]
    left_out: Mapping[str, str]
    seconds: float

    @property
    def bytes_written(self) -> int:
        return sum(table.bytes_written for table in self.tables)


class BaseTables:
    """The base tables of the log below ``uri``. ``slot`` must be given where there are several. ``storage_options`` are
    deltalake's. Raises XidstreamErrors alone."""

    def __init__(
        self,
        uri: str,
        slot: str | None,
        file_bytes: int,
        storage_options: Mapping[str, str] | None = None,
        catalog: CatalogName | None = None,
    ) -> None:
        self._kept = KeptTables()
        """The Delta tables as they were last read, so that the next refresh reads only what is new."""
        self._stored: LogRoot = root_of(uri, storage_options)
        self._root = self._stored.delta_location
        if self._root is not None:
            self._stored = DeltaRoot(self._root, self._kept)
        self._bases = self._stored.bases(makes=True)
        """The store of the base tables and of their manifest."""
        self._seen: SlotLog | None = None
        """The log as the last refresh opened it; None before the first one, and after ``_forget``."""
        self._slot = slot
        self._file_bytes = file_bytes
        self._manifest: ManifestWriter | None = None
        """None before the first refresh that came as far as the manifest."""
        self._busy = threading.Lock()
        """Held by a refresh and by a vacuum: one at a time."""
        self._ages = WatchedClock()
        self._named: tuple[str, Sequence[ManifestLine]] | None = None
        """The slot, and what the manifest names of it; None before the first refresh."""
        self._facts: dict[str, BaseFacts] = {}
        """By table: what is known of its base table since the last refresh that looked at it."""
        self._registration: Registration | None = None
        if catalog is not None:
            if self._root is None:
                raise ConfigError(
                    f"mirror_catalog is for Delta tables: base tables of {self._stored.name} are in its catalog",
                    remedy="leave mirror_catalog out",
                )
            from xidstream.pipeline.mirror.glue_catalog import GlueCatalog

            self._registration = Registration(self._root, GlueCatalog(catalog, self._root))

    @property
    def catalog(self) -> str | None:
        """The catalog that ``register`` is for, as the setting names it; None where there is none."""
        return None if self._registration is None else str(self._registration)

    @property
    def owner(self) -> int:
        """The number of this mirror; 0 before its first refresh."""
        return 0 if self._manifest is None else self._manifest.owner

    def refresh(
        self, session: GetSession, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Refreshed | None:
        """None where there is nothing new. ``session`` is asked for where a table is too large for this process. Raises
        ComponentLost where ``is_cancelled`` says so, which is asked now and then; Spark's jobs are the caller's to
        cancel."""
        check = _check_of(is_cancelled, "the refresh of base tables was given up")
        try:
            with self._alone(check):
                for _ in range(ATTEMPTS):
                    try:
                        return self._refresh(session, check)
                    except SnapshotOutdated:
                        self._forget()
        except Exception as error:
            self._forget()
            raise fault_of(error, "refreshing the base tables") from error
        raise StorageFault(f"base tables were changed by others during {ATTEMPTS} attempts to refresh them")

    def vacuum(self, retention_s: float, is_cancelled: Callable[[], bool] = lambda: False) -> Vacuumed:
        """Remove what no reader needs who takes up to ``retention_s``. Raises ComponentLost as ``refresh``."""
        check = _check_of(is_cancelled, "the removal of what base tables no longer need was given up")
        retention = datetime.timedelta(seconds=retention_s)
        try:
            with self._alone(check):
                log = self._log()
                manifest = self._claimed(log)
                for _ in range(ATTEMPTS):
                    try:
                        tables = self._vacuumed(log.application_id)
                        return vacuum_tables(tables, manifest, retention, check, self._ages)
                    except SnapshotOutdated:
                        self._forget()
        except Exception as error:
            self._forget()
            raise fault_of(error, "removing what base tables no longer need") from error
        raise StorageFault(
            f"base tables were changed by others during {ATTEMPTS} attempts to remove old files"
        )

    def register(self, is_cancelled: Callable[[], bool] = lambda: False) -> Registered:
        """Have the catalog name what the last refresh named. From one thread at a time, beside refreshes, too: it takes
        no lock. Raises XidstreamErrors, ComponentLost as ``refresh``; the next call begins anew."""
        assert self._registration is not None, "there is no catalog"
        check = _check_of(is_cancelled, "registering the base tables was given up")
        if self._named is None:
            return Registered()
        application_id, lines = self._named
        named = {line.table for line in lines}
        known = {label: facts for label, facts in self._facts.copy().items() if label in named}
        try:
            return self._registration.bring(lines, known, application_id, check)
        except Exception as error:
            raise fault_of(error, f"registering the base tables in {self.catalog}") from error

    @contextmanager
    def _alone(self, check: Callable[[], None]) -> Iterator[None]:
        while not self._busy.acquire(timeout=_POLL_S):
            check()
        try:
            yield
        finally:
            self._busy.release()

    def _log(self) -> SlotLog:
        return SlotLog(self._stored, self._slot)

    def _vacuumed(self, application_id: str) -> VacuumedTables:
        if self._root is not None:
            return VacuumedDeltaTables(self._root, application_id)
        # It imports pyiceberg, which may not be there.
        from xidstream.pipeline.changelog.iceberg_bases import IcebergBases
        from xidstream.pipeline.mirror.iceberg_vacuum import IcebergVacuumedTables

        assert isinstance(self._bases, IcebergBases), "the log has Delta tables, or Iceberg tables"
        return IcebergVacuumedTables(self._bases, application_id)

    def _forget(self) -> None:
        self._kept.forget()
        self._bases.forget()
        self._seen = None

    def _claimed(self, log: SlotLog) -> ManifestWriter:
        if self._manifest is None:
            manifest = ManifestWriter(self._bases, log.application_id)
            manifest.claim()
            self._manifest = manifest
        return self._manifest

    def _refresh(self, session: GetSession, check: Callable[[], None]) -> Refreshed | None:
        began_s = time.monotonic()
        self._ages.look()
        if self._seen is not None and self._is_named(self._seen):
            return None
        # Opened anew: another slot may have come.
        self._seen = log = self._log()
        manifest = self._claimed(log)
        last_lsn, n_erasures = manifest.look()
        lsn = log.readable_lsn
        if lsn <= last_lsn:
            if self._registration is not None and self._named is None:
                self._named = log.application_id, manifest.newest()
            return None
        lines = {line.table: line for line in manifest.newest()}
        marks = MirrorMarks(log.application_id, manifest.owner)
        generations = log.generations()
        kept = {line.table: line for line in _untouched(self._bases, log, generations, lines.values(), lsn)}
        tables, left_out = _tables_at(log, lsn, generations, kept)
        done: list[tuple[TableAt, TableRefresh]] = []

        def refresher(table: TableAt) -> TableRefresher:
            line = lines.get(table.shape.table)
            return TableRefresher(self._bases, marks, table, line, self._file_bytes, check, self._kept)

        for_spark = []
        with ThreadPoolExecutor(THREADS, thread_name_prefix="xidstream-mirror-table") as threads:
            for portion in _portions(tables):
                # Between some tables: what overtook this mirror need not meet it at each of them.
                manifest.check()
                check()
                tried = threads.map(partial(_here, refresher), portion)
                for table, found in zip(portion, tried, strict=True):
                    if isinstance(found, Unsupported):
                        left_out[table.shape.table] = found.message
                    elif isinstance(found, TableRefresher):
                        for_spark.append((table, found))
                    else:
                        done.append((table, found))
        if for_spark:
            spark = rewrite.mirror_session(session())
            with rewrite.in_own_pool(spark):
                for table, waiting in for_spark:
                    manifest.check()
                    check()
                    try:
                        done.append((table, waiting.run(spark)))
                    except Unsupported as error:
                        left_out[table.shape.table] = error.message
        self._mark(left_out, marks)
        named = _lines(self._bases, log.application_id, lsn, done, kept.values())
        if named:
            reach("committing_manifest")
            manifest.append(named, n_erasures)
            reach("manifest_committed")
        self._facts.update((each.table, each.facts) for _, each in done if each.facts is not None)
        self._named = log.application_id, named
        refreshed = [each for _, each in done]
        refreshed += [TableRefresh(line.table, Answer.KEEP, line.version) for line in kept.values()]
        refreshed.sort(key=lambda each: each.table)
        return Refreshed(lsn, tuple(refreshed), left_out, time.monotonic() - began_s)

    def _is_named(self, log: SlotLog) -> bool:
        """Whether the manifest has all that can be read now. Raises Superseded."""
        last_lsn, _ = self._claimed(log).look()
        return log.readable_lsn <= last_lsn

    def _mark(self, left_out: Mapping[str, str], marks: MirrorMarks) -> None:
        """Mark the base of a table that is left out. It keeps its last rows, and a reader of one table looks
        at no manifest."""
        for label, reason in left_out.items():
            name = labelled_table(label)
            assert name is not None, label
            with suppress(Unsupported):  # what another tool did to it is the reason, and told
                if (base := BaseTable.open(self._bases, self._bases.key_of(*name), label, marks)) is not None:
                    base.leave_out(reason)


def _here(
    refresher: Callable[[TableAt], TableRefresher], table: TableAt
) -> TableRefresh | TableRefresher | Unsupported:
    """What this process made of the table; the refresher itself where Spark has to go on."""
    try:
        found = refresher(table)
        return found.here() or found
    except Unsupported as error:
        return error


def _portions(tables: Sequence[TableAt]) -> Iterator[Sequence[TableAt]]:
    for i in range(0, len(tables), _PORTION):
        yield tables[i : i + _PORTION]


def _check_of(is_cancelled: Callable[[], bool], message: str) -> Callable[[], None]:
    def check() -> None:
        if is_cancelled():
            raise ComponentLost(message)

    return check


def _untouched(
    bases: BaseStore,
    log: SlotLog,
    generations: Generations,
    lines: Iterable[ManifestLine],
    lsn: Lsn,
) -> Iterator[ManifestLine]:
    """The lines of tables without new rows in the log. Its transactions alone tell it, so hundreds of unchanged tables
    are not opened. After a change of columns every table is opened, because no transaction names it. The version in a
    line must be the table's newest: the log of an older one may be removed."""
    lines = list(lines)
    if not lines or log.laid_out_lsn > lines[0].lsn:
        return
    touched = log.tables_between(Lsn(lines[0].lsn), lsn)
    for line in lines:
        if line.table in touched:
            continue
        with suppress(PreconditionMissing):
            generation = generation_at(line.table, generations.get(line.table, []), lsn)
            is_same = (generation.number, int(generation.bounds.snapshot_lsn)) == (
                line.generation,
                line.snapshot_lsn,
            )
            if is_same and bases.is_newest(line.directory, line.version):
                yield line


def _tables_at(
    log: SlotLog, lsn: Lsn, generations: Generations, kept: Container[str]
) -> tuple[list[TableAt], dict[str, str]]:
    """The tables that have a state there, without ``kept``, and the reasons why others have none."""
    found, left_out = [], {}
    for name in log.table_names():
        label = table_label(*name)
        if label in kept:
            continue
        try:
            found.append(log.table_at(name, lsn, generations))
        except (PreconditionMissing, Unsupported) as error:
            left_out[label] = error.message.removeprefix(f"table {label} is not known at {lsn}: ")
    return found, left_out


def _lines(
    bases: BaseStore,
    application_id: str,
    lsn: int,
    done: Sequence[tuple[TableAt, TableRefresh]],
    kept: Iterable[ManifestLine],
) -> list[ManifestLine]:
    now = datetime.datetime.now(datetime.timezone.utc)
    new = [
        ManifestLine(
            application_id,
            lsn,
            now,
            table.shape.table,
            directory_of(bases, table),
            table.generation.number,
            int(table.generation.bounds.snapshot_lsn),
            refreshed.version,
        )
        for table, refreshed in done
    ]
    return [*new, *(replace(line, lsn=lsn, refreshed_at=now) for line in kept)]
