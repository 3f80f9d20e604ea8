"""One verification: table after table is held, waited for, read and compared.

For a few tables at a time (``_GROUP_TABLES``, ``_GROUP_BYTES``), smallest first: take and hold their snapshots, each
with its own E; wait until the log answers there; then for each table read the source's rows and compare them. So the
wait for the log, seconds where a run keeps up, is not paid by every small table, and no snapshot is held for longer
than its group takes. A table is let go of as soon as its rows are read.

A table that cannot be compared is *not verified*, with the reason, and the others go on: the role may not read it, the
log has no state of it at E, it was dropped and created again, Spark failed. Where the log stands still, all that are
left are not verified, for one reason.

*What it costs the source.* One session holds each table of the group, in a transaction with ACCESS SHARE; an ALTER
TABLE waits for that, and whatever comes behind it. One connection reads, each row once, with a pause between its
ranges. One message is committed where no other commit moves the log on (``slot.verified_server``).

*Going on.* A snapshot ends with its session, so a table that was interrupted is read anew, under another one. Tables
that were finished keep their result, and are not read again: a record (``Record``), written after each table, has them.
Each has the LSN at which it was compared.

Called by ``change_log``.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.credentials import redacted
from xidstream.pipeline.errors import (
    ConfigError,
    EnvironmentFault,
    PreconditionMissing,
    UsageError,
    XidstreamError,
)
from xidstream.pipeline.findings import enumerate_names
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.quantities import human_s
from xidstream.pipeline.slot.admin import sql_connection
from xidstream.pipeline.slot.login import Dsn
from xidstream.pipeline.slot.snapshot_sources import survey_unless_locked
from xidstream.pipeline.slot.table_holder import Held, TableHolder
from xidstream.pipeline.slot.verified_server import VerifiedServer, mark, verified_server
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.spark.naming import Location
from xidstream.pipeline.spark.spark_errors import fault_of
from xidstream.pipeline.stages.range_reading import RangeReader
from xidstream.pipeline.state.change_log import ChangeLog
from xidstream.pipeline.state.generations import generation_at
from xidstream.pipeline.state.log_table import MAX_LSN
from xidstream.pipeline.state.table_at import TableAt
from xidstream.pipeline.verify.comparison import Compared, compare
from xidstream.pipeline.verify.moment import (
    Moment,
    answered_up_to,
    moment_of,
    replayed_upto,
    standby_moment,
    table_at,
)
from xidstream.pipeline.verify.result import TableVerification, Verdict, Verification
from xidstream.pipeline.verify.source_rows import SourceRows, read_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_GROUP_TABLES: Final = 8
_GROUP_BYTES: Final = 64 << 20
_STANDBY_ATTEMPTS: Final = 20
_POLL_S: Final = 0.5
_MARK_AFTER_S: Final = 2.0
"""A commit of somebody else's may come first."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class VerifySettings:
    """How a verification reads and what it shows. Raises ConfigError for a value out of range.

    - ``rows_per_range``: about how many rows a range of the key has; smaller ones are found more exactly, and there are
      ``comparison.MOST_RANGES`` at most.
    - ``pause_ms``: between ranges of pages, of 64 MiB, that are read from the source. 0: the server is read at the
      speed of one connection.
    - ``bytes_per_s``: of the source's rows at most; 0: no limit.
    - ``timeout_s``: how long it waits for the log to reach a snapshot, and for a lock on a table. Five minutes are more
      than a run that keeps up ever needs, and hold a snapshot for less than an autovacuum minds.
    - ``keys``: how many rows that differ are shown of a table. 20 fit on a screen.
    - ``show_values``: whether these rows' values are shown, and not their keys alone.
    - ``staging``: URI of a folder for the source's rows that Spark's executors can read; empty: a temporary folder,
      which a session in one JVM can read.
    """

    rows_per_range: int = 100_000
    pause_ms: int = 0
    bytes_per_s: int = 0
    timeout_s: float = 300.0
    keys: int = 20
    show_values: bool = False
    staging: str = ""

    def __post_init__(self) -> None:
        least = {"rows_per_range": 1, "pause_ms": 0, "bytes_per_s": 0, "timeout_s": 0, "keys": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least {lowest}")


class Record:
    """The finished tables of a verification, in a JSON file (None: nowhere) that an interrupted one goes on from.

    A file of a verification that ended is written anew, and so is one of another log.
    """

    def __init__(self, path: Path | None, log: str) -> None:
        self._path = path
        self._log = log
        self.tables: dict[str, TableVerification] = {}
        if path is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text("utf-8"))
            if found["finished"] or found["log"] != log:
                return
            self.tables = {each["table"]: TableVerification.from_json(each) for each in found["tables"]}
        except (ValueError, KeyError, TypeError, OSError):
            raise UsageError(
                f"{path} is not the result of a verification, or of another version",
                remedy="name another file",
            ) from None

    def write(self, verification: Verification, *, finished: bool) -> None:
        if self._path is None:
            return
        content = {"log": self._log, "finished": finished, **verification.to_json()}
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")
        beside.replace(self._path)


class _LogStandsStill(EnvironmentFault):
    """The log does not reach a snapshot. It ends the verification, and is the reason of all that are left."""


def verify(
    log: ChangeLog,
    spark: SparkSession,
    dsn: Dsn,
    publications: Sequence[str],
    *,
    tables: Sequence[str] = (),
    settings: VerifySettings | None = None,
    result: str | os.PathLike[str] | None = None,
    tell: Tell = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> Verification:
    """Compare the tables whose names match one of ``tables`` (all, if there are none). See ``ChangeLog.verify``.

    ``check`` is called now and then, and may raise to end it. ``tell`` gets a line for each table.
    """
    return _Verifying(log, spark, dsn, publications, settings or VerifySettings(), tell, check).run(
        tables, result
    )


@dataclass
class _Verifying:
    log: ChangeLog
    spark: SparkSession
    dsn: Dsn
    publications: Sequence[str]
    settings: VerifySettings
    tell: Tell
    check: Callable[[], None]

    def run(self, patterns: Sequence[str], result: str | os.PathLike[str] | None) -> Verification:
        server = verified_server(self.dsn)
        self._check_server(server)
        with sql_connection(self.dsn, "the published tables") as connection:
            sources = {each.name: each for each in survey_unless_locked(connection, self.publications)}
        chosen = self._chosen(sources, patterns)
        record = Record(None if result is None else Path(result), f"{redacted(self.log.root.uri)} {self._id}")
        done: list[TableVerification] = []

        def finish(one: TableVerification) -> None:
            done.append(one)
            record.write(Verification(done), finished=False)
            self.tell(str(one))

        wanted: list[PublishedSource] = []
        for name in chosen:
            known = record.tables.get(name)
            if known is not None and known.verdict is not Verdict.NOT_VERIFIED:
                done.append(known)
            elif (reason := self._reason_not_to_read(name, sources.get(name))) is not None:
                finish(_not_verified(name, reason))
            else:
                wanted.append(sources[name])
        groups = _groups(sorted(wanted, key=lambda source: (source.n_bytes, source.name)))
        holder = TableHolder(self.dsn, self.publications, of_standby=server.is_standby)
        reader = RangeReader(self.dsn)
        try:
            with self._staging() as folder:
                for number, group in enumerate(groups):
                    try:
                        self._group(group, holder, reader, folder, server, finish)
                    except _LogStandsStill as error:
                        for source in (each for later in groups[number:] for each in later):
                            if all(each.table != source.name for each in done):
                                finish(_not_verified(source.name, error.message))
                        break
        finally:
            reader.close()
            holder.close()
        verification = Verification(done)
        record.write(verification, finished=True)
        return verification

    # -- which tables ----------------------------------------------------------------------------------

    @property
    def _id(self) -> str:
        return self.log.application_id

    def _check_server(self, server: VerifiedServer) -> None:
        system, database, _ = self._id.split("/", 2)
        if (server.system_identifier, server.database) != (system, database):
            raise PreconditionMissing(
                f"the change log is one of database {database} of system {system}, and the dsn leads to database "
                f"{server.database} of system {server.system_identifier}",
                remedy="give the dsn of the log's own server and database",
            )

    def _chosen(self, sources: Mapping[str, PublishedSource], patterns: Sequence[str]) -> list[str]:
        names = sorted({*sources, *self.log.tables()})
        if not patterns:
            return names
        unmet = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        if unmet:
            raise UsageError(
                f"no table of the log or the publication is called {enumerate_names(unmet)}",
                remedy="give schema.table, or a pattern such as 'sales.*'",
            )
        return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]

    def _reason_not_to_read(self, name: str, source: PublishedSource | None) -> str | None:
        """Why the table cannot be compared, as far as that is known without its snapshot."""
        if source is None:
            return f"it is not in the server's publication {enumerate_names(list(self.publications))}"
        if not source.relation.columns:
            return "it has no columns"
        try:
            generation = generation_at(name, self.log.generations().get(name, []), Lsn(MAX_LSN))
        except PreconditionMissing as error:
            return error.message
        if generation.relid != source.relation.relid:
            return "it was dropped and created again since the log's snapshot of it"
        return None

    # -- one group -------------------------------------------------------------------------------------

    def _group(
        self,
        group: Sequence[PublishedSource],
        holder: TableHolder,
        reader: RangeReader,
        folder: Location,
        server: VerifiedServer,
        finish: Callable[[TableVerification], None],
    ) -> None:
        held: list[Held] = []
        try:
            for source in group:
                self.check()
                try:
                    held.append(self._hold(holder, source))
                except XidstreamError as error:
                    finish(_not_verified(source.name, error.message))
            if held:
                self._await(max(_wanted_lsn(each, server) for each in held), server)
            for each in held:
                finish(self._compared(each, holder, reader, folder, server))
                holder.release(each.source.relation.relid)
        finally:
            for each in held:
                holder.release(each.source.relation.relid)

    def _hold(self, holder: TableHolder, source: PublishedSource) -> Held:
        deadline = time.monotonic() + self.settings.timeout_s

        def waiting(blockers: Sequence[object]) -> None:
            self.check()
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"it stays locked, by {'; '.join(map(str, blockers)) or 'an unknown session'}"
                )

        # What was open when the table was published is a matter of the log's snapshot, not of this one.
        return holder.hold(source, wait_for_writers=False, on_wait=waiting)

    def _await(self, lsn: Lsn, server: VerifiedServer) -> None:
        """Until the log answers at ``lsn``. Raises _LogStandsStill."""
        began_s = time.monotonic()
        has_marked = False
        while (found := answered_up_to(self.log)) < lsn:
            self.check()
            waited_s = time.monotonic() - began_s
            if waited_s >= self.settings.timeout_s:
                hint = (
                    "" if server.can_mark else "; with this server a commit of a published table has to come"
                )
                raise _LogStandsStill(
                    f"the change log answers up to {found}, and the source's snapshot needs {lsn}: waited for "
                    f"{human_s(waited_s)}; is a run of slot {self._id.rpartition('/')[2]} up?{hint}"
                )
            if (
                not has_marked
                and server.can_mark
                and waited_s >= min(_MARK_AFTER_S, self.settings.timeout_s / 2)
            ):
                mark(self.dsn)
                has_marked = True
            time.sleep(_POLL_S)

    def _placed(self, held: Held, holder: TableHolder, server: VerifiedServer) -> tuple[Held, Moment]:
        """When the snapshot is, in the log; another snapshot where that cannot be told."""
        name = held.source.name
        if not server.is_standby:
            return held, moment_of(self.log, name, held.bounds)
        for _ in range(_STANDBY_ATTEMPTS):
            moment = standby_moment(self.log, name, held.bounds)
            if moment is not None:
                return held, moment
            self.check()
            held = self._hold(holder, held.source)
            self._await(_wanted_lsn(held, server), server)
        raise EnvironmentFault(
            f"the standby replayed a change of it while each of {_STANDBY_ATTEMPTS} snapshots was taken"
        )

    def _compared(
        self, held: Held, holder: TableHolder, reader: RangeReader, folder: Location, server: VerifiedServer
    ) -> TableVerification:
        name, began_s = held.source.name, time.monotonic()
        try:
            held, moment = self._placed(held, holder, server)
            at = table_at(self.log, name, moment)
            rows = read_source(
                reader,
                held,
                folder,
                at.generation.key,
                pause_ms=self.settings.pause_ms,
                bytes_per_s=self.settings.bytes_per_s,
                check=self.check,
            )
            # The session has held the table all the time.
            holder.confirm(held.source.relation.relid, held.bounds.valid_from)
            holder.release(held.source.relation.relid)
            self.check()
            found = self._in_spark(rows, at)
        except _LogStandsStill:
            raise
        except XidstreamError as error:
            return _not_verified(name, error.message)
        finally:
            _remove(folder)
        absent = tuple(column for column in rows.shape.columns if column not in at.shape.columns)
        return TableVerification(
            name,
            Verdict.EQUAL if found.differences is None else Verdict.DIFFERS,
            str(moment.lsn),
            len(moment.left_out),
            found.source_rows,
            found.log_rows,
            found.n_ranges,
            absent,
            elapsed_s=round(time.monotonic() - began_s, 3),
            differences=found.differences,
        )

    def _in_spark(self, rows: SourceRows, at: TableAt) -> Compared:
        try:
            return compare(
                rows.frame(self.spark),
                at.state(self.spark),
                rows.shape,
                source_rows=rows.n_rows,
                rows_per_range=self.settings.rows_per_range,
                n_shown=self.settings.keys,
                with_values=self.settings.show_values,
            )
        except Exception as error:
            raise fault_of(error, f"comparing table {rows.shape.table}") from error

    # -- the staging folder ----------------------------------------------------------------------------

    @contextmanager
    def _staging(self) -> Iterator[Location]:
        if self.settings.staging:
            found = Location.parse(self.settings.staging, self.log.root.storage_options)
            if not found.is_local:
                raise ConfigError(
                    "staging must be a folder", remedy="one that all of Spark's executors can read"
                )
            folder = tempfile.mkdtemp(prefix="xidstream-verify-", dir=found.uri)
        elif str(self.spark.sparkContext.master).startswith("local"):
            folder = tempfile.mkdtemp(prefix="xidstream-verify-")
        else:
            raise ConfigError(
                "Spark's executors may be on other machines, and have to read the source's rows",
                remedy="give as staging a folder that they can read",
            )
        try:
            yield Location.parse(f"{folder}/rows")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _wanted_lsn(held: Held, server: VerifiedServer) -> Lsn:
    return replayed_upto(held.bounds) if server.is_standby else held.bounds.valid_from


def _remove(folder: Location) -> None:
    shutil.rmtree(folder.uri, ignore_errors=True)


def _not_verified(table: str, reason: str) -> TableVerification:
    return TableVerification(table, Verdict.NOT_VERIFIED, reason=reason)


def _groups(sources: Sequence[PublishedSource]) -> list[list[PublishedSource]]:
    """In their order, each of a few tables; a large one is alone."""
    groups: list[list[PublishedSource]] = []
    n_bytes = 0
    for source in sources:
        if not groups or len(groups[-1]) >= _GROUP_TABLES or n_bytes + source.n_bytes > _GROUP_BYTES:
            groups.append([])
            n_bytes = 0
        groups[-1].append(source)
        n_bytes += source.n_bytes
    return groups
