"""One verification: table after table is held, waited for, read and compared.

For a few tables at a time (``_GROUP_TABLES``, ``_GROUP_BYTES``), smallest first: take and hold their snapshots, each
with its own E; wait until the log answers there; then for each table read the source's rows and compare them. So the
wait for the log, seconds where a run keeps up, is not paid by every small table, and no snapshot is held for longer
than its group takes. A table is let go of as soon as its rows are read.

A table that cannot be compared is *not verified*, with the reason, and the others go on: the role may not read it, the
log has no state of it at E, it was dropped and created again, Spark failed. Where the log stands still, all that are
left are not verified, for one reason.

*What it costs the source.* One session holds each table of the group, in a transaction with ACCESS SHARE; an ALTER
TABLE waits for that, and whatever comes after it. One connection reads, each row once, with a pause between its
ranges. One message is committed where no other commit moves the log on (``postgres.verified_server``).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from xidstream.pipeline.changelog.generations import generation_at
from xidstream.pipeline.changelog.log_table import MAX_LSN
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.errors import (
    ConfigError,
    PreconditionMissing,
    UsageError,
)
from xidstream.pipeline.findings import enumerate_names
from xidstream.pipeline.initial_copy.range_reading import RangeReader
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import ColumnNames
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.snapshot_sources import survey_unless_locked
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.postgres.verified_server import VerifiedServer, verified_server
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.verify.comparing import Comparing, LogStandsStill, not_verified
from xidstream.pipeline.verify.result import TableVerification, Verdict, Verification
from xidstream.pipeline.verify.settings import VerifySettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_GROUP_TABLES: Final = 8
_GROUP_BYTES: Final = 64 << 20

Tell = Callable[[str], None]


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


def verify(
    log: SlotLog,
    session: Callable[[], SparkSession],
    dsn: Dsn,
    publications: Sequence[str],
    *,
    tables: Sequence[str] = (),
    settings: VerifySettings | None = None,
    result: str | os.PathLike[str] | None = None,
    tell: Tell = lambda text: None,
    check: Callable[[], None] = lambda: None,
    column_names: ColumnNames = MappingProxyType({}),
) -> Verification:
    """Compare the tables whose names match one of ``tables`` (all, if there are none). See ``ChangeLog.verify``.

    ``session`` gives the Spark session; it is not asked where nothing can be compared. ``check`` is called now and
    then, and may raise to end it. ``tell`` gets the text of each table's result. ``column_names``: the run's.
    """
    verifying = _Verifying(
        log, session, dsn, publications, settings or VerifySettings(), tell, check, column_names
    )
    return verifying.run(tables, result)


@dataclass
class _Verifying:
    log: SlotLog
    session: Callable[[], SparkSession]
    dsn: Dsn
    publications: Sequence[str]
    settings: VerifySettings
    tell: Tell
    check: Callable[[], None]
    column_names: ColumnNames

    def run(self, patterns: Sequence[str], result: str | os.PathLike[str] | None) -> Verification:
        server = verified_server(self.dsn, self._id.split("/", 2)[2])
        self._check_server(server)
        with sql_connection(self.dsn, "the published tables") as connection:
            found = survey_unless_locked(connection, self.publications, self.column_names)
            sources = {each.name: each for each in found}
        chosen = self._chosen(sources, patterns)
        record = Record(None if result is None else Path(result), f"{self.log.name} {self._id}")
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
                finish(not_verified(name, reason))
            else:
                wanted.append(sources[name])
        if wanted:
            self._compare(wanted, server, done, finish)
        verification = Verification(done)
        record.write(verification, finished=True)
        return verification

    def _compare(
        self,
        wanted: Sequence[PublishedSource],
        server: VerifiedServer,
        done: Sequence[TableVerification],
        finish: Callable[[TableVerification], None],
    ) -> None:
        groups = _groups(sorted(wanted, key=lambda source: (source.n_bytes, source.name)))
        spark = self.session()  # before a table is held
        holder = TableHolder(
            self.dsn, self.publications, of_standby=server.is_standby, column_names=self.column_names
        )
        reader = RangeReader(self.dsn)
        try:
            with self._staging(spark) as folder:
                comparing = Comparing(
                    self.log,
                    spark,
                    self.dsn,
                    server,
                    self.settings,
                    holder,
                    reader,
                    folder,
                    self.check,
                    finish,
                )
                for number, group in enumerate(groups):
                    try:
                        comparing.group(group)
                    except LogStandsStill as error:
                        for source in (each for later in groups[number:] for each in later):
                            if all(each.table != source.name for each in done):
                                finish(not_verified(source.name, error.message))
                        break
        finally:
            reader.close()
            holder.close()

    # -- which tables ----------------------------------------------------------------------------------

    @property
    def _id(self) -> str:
        return self.log.application_id

    def _check_server(self, server: VerifiedServer) -> None:
        system, database, _ = self._id.split("/", 2)
        is_same = server.database == database or server.has_slot
        if server.system_identifier != system or not is_same:
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
        if source.relation.clash is not None:
            return source.relation.clash
        try:
            generation = generation_at(name, self.log.generations().get(name, []), Lsn(MAX_LSN))
        except PreconditionMissing as error:
            return error.message
        if generation.relid != source.relation.relid:
            return "it was dropped and created again since the log's snapshot of it"
        return None

    # -- the staging folder ----------------------------------------------------------------------------

    @contextmanager
    def _staging(self, spark: SparkSession) -> Iterator[Location]:
        if self.settings.staging:
            found = Location.parse(self.settings.staging)
            if not found.is_local:
                raise ConfigError(
                    "staging must be a folder", remedy="one that all of Spark's executors can read"
                )
            folder = tempfile.mkdtemp(prefix="xidstream-verify-", dir=found.uri)
        elif str(spark.sparkContext.master).startswith("local"):
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
