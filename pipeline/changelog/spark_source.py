"""``spark.read.format("xidstream")`` and ``spark.readStream.format("xidstream")``: a change log as a source of Spark 4.

Spark's Python Data Source API. Spark finds it by the module ``pyspark_xidstream``, on a Connect server, too. It needs
neither Ray nor a run: a run may write the log meanwhile, or have written it.

A stream's offset is ``{"lsn": n}``: all transactions with a commit LSN up to ``n`` have been read. ``n`` never lies
beyond the newest complete commit, so a batch is whole transactions. The files after two offsets hold the same rows at
any later time, so a batch that is repeated is the same. Nothing depends on ``commit``, which Spark calls late or never.

Two sources in one query are asked one after the other, and a commit may come between. So tables whose transactions must
stay whole are read by one source, with one offset (``tables``): each row has a struct for its table.

Spark makes a reader in each of several processes: one that plans, those that read. Each holds the options and nothing
else, and opens the log when it is asked. A batch's partitions carry all that reading them needs but credentials.

Rejected: a state of the tables (``asOf``). Spark folds it, by joins, and a Python source has no Spark to do so:
``ChangeLog.as_of`` does. Filters that Spark pushes: a reader that takes them fails in every session that has not turned
``spark.sql.python.filterPushdown.enabled`` on. The options ``since`` and ``until`` do the same by files.

What decides is in ``log_ranges``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from xidstream.pipeline.changelog.log_ranges import (
    Commits,
    FileRange,
    QueryTable,
    admitted,
    missing_commit,
)
from xidstream.pipeline.changelog.log_root import root_of
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.errors import ConfigError, PreconditionMissing, Unsupported, UsageError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS
from xidstream.pipeline.spark.spark_schemas import arrow_type, spark_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from xidstream.pipeline.log_tables.batch_parts import TableName

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # before Spark 4.2, which has admission control
    ReadAllAvailable = ReadMaxRows = None
    SupportsTriggerAvailableNow = object

_OF_BATCH: Final = ("until", "endingLsn", "changes")
_OF_STREAM: Final = ("maxTransactionsPerTrigger", "maxBytesPerTrigger")
_OPTIONS: Final = ("path", "table", "tables", "slot", "since", "startingLsn", "failOnDataLoss")
_STORAGE: Final = "storage."
_TABLE: Final = "_table"


@dataclass(frozen=True)
class SourceOptions:
    """``tables``: of the option ``tables``, whose rows are structs, or the one of ``table``. ``since`` is exclusive,
    and None is the beginning; ``until`` is inclusive, and None is the newest complete commit."""

    path: str
    tables: tuple[str | TableName, ...]
    is_many: bool
    slot: str | None
    storage_options: dict[str, str] | None = field(repr=False)
    since: int | None
    until: int | None
    max_transactions: int | None
    max_bytes: int | None
    fail_on_data_loss: bool

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_stream: bool | None = None) -> SourceOptions:
        """From Spark's options, whose names have no case. ``is_stream``: None where it is not known. Raises
        ConfigError, Unsupported for a state."""
        given = {name.lower(): value for name, value in options.items()}
        storage = {n[len(_STORAGE) :].upper(): v for n, v in given.items() if n.startswith(_STORAGE)}
        if "asof" in given:
            raise Unsupported(
                "format('xidstream') reads changes, and not the state of a table",
                remedy="ChangeLog(path).as_of(spark, …)[table] is the state as a DataFrame, also with Spark Connect",
            )
        known = {name.lower(): name for name in (*_OPTIONS, *_OF_BATCH, *_OF_STREAM)}
        for name in sorted(given):
            if name not in known and not name.startswith(_STORAGE):
                names = ", ".join(sorted(known.values()))
                raise ConfigError(
                    f"format('xidstream') has no option {name!r}", remedy=f"it has {names}, storage.*"
                )
        for name in () if is_stream is None else _OF_BATCH if is_stream else _OF_STREAM:
            if name.lower() in given:
                method = "spark.read" if is_stream else "spark.readStream"
                raise ConfigError(f"the option {name} is one of {method} alone")
        if given.get("changes", "all") != "all":
            raise Unsupported(
                f"format('xidstream') reads all changes, not {given['changes']!r}",
                remedy="ChangeLog(path).changes(spark, table, net=True) has one row for each key",
            )
        if not given.get("path"):
            raise ConfigError(
                "format('xidstream') needs the root of a change log", remedy="give it to load(PATH)"
            )
        if ("table" in given) == ("tables" in given):
            raise ConfigError("format('xidstream') needs one of the options table and tables")
        is_many = "tables" in given
        tables = _several(given["tables"]) if is_many else (_one(given["table"]),)
        if len({_joined(name) for name in tables}) < max(len(tables), 1):
            raise ConfigError(
                "the option tables must name at least one table, and no two that are written alike"
            )
        return cls(
            given["path"],
            tables,
            is_many,
            given.get("slot"),
            storage or None,
            _lsn_option(given, "since", "startingLsn", -1),
            _lsn_option(given, "until", "endingLsn", 0),
            _number(given, "maxTransactionsPerTrigger"),
            _number(given, "maxBytesPerTrigger"),
            _flag(given, "failOnDataLoss", True),
        )


def _one(text: str) -> str | TableName:
    if not text.startswith("["):
        return text
    (found,) = _several(f"[{text}]")
    return found


def _several(text: str) -> tuple[str | TableName, ...]:
    """Names apart by commas; or JSON, where a name has a comma, or a schema a dot: a list of names and of pairs."""
    if not text.startswith("["):
        return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    try:
        found = [tuple(each) if isinstance(each, list) else each for each in json.loads(text)]
    except ValueError:
        found = []
    if not found or not all(
        isinstance(part, str) for each in found for part in ((each,), each)[type(each) is tuple]
    ):
        raise ConfigError(
            "the option table or tables is not a table's name",
            remedy='give schema.table, or a pair as ["schema", "table"]; tables takes a list of these',
        )
    return tuple(dict.fromkeys(found))


def _lsn_option(given: Mapping[str, str], name: str, other: str, shift: int) -> int | None:
    """``since`` and ``until`` are ``ChangeLog.changes``'. ``startingLsn`` and ``endingLsn`` are both inclusive."""
    found = [(each, given[each.lower()]) for each in (name, other) if each.lower() in given]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"give one of the options {name} and {other}")
    option, text = found[0]
    try:
        lsn = int(text) if text.isdecimal() else int(Lsn.parse(text))
    except UsageError:
        raise ConfigError(f"the option {option} is no LSN: {text!r}", remedy="such as 0/16B3748") from None
    return max(lsn + (shift if option == other else 0), 0)


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name.lower())
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"the option {name} is a number from 1 on, got {text!r}")
    return int(text)


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"the option {name} is true or false, got {text!r}")
    return text == "true"


class LogSource:
    """What a query asks of the log. ``schema``: the query's, or None where it is asked for."""

    def __init__(self, options: SourceOptions, schema: StructType | None = None) -> None:
        self.options = options
        self._schema = schema
        self.log = SlotLog(root_of(options.path, options.storage_options), options.slot)

    def tables(self, lsn: Lsn) -> list[QueryTable]:
        """The tables, opened anew: after the look at ``lsn``, so that they have all up to it."""
        names, schema = self.options.tables, self._schema
        if schema is None or not self.options.is_many:
            return [QueryTable(self.log, name, lsn, schema) for name in names]
        structs: dict[str, Any] = {field.name: field.dataType for field in schema.fields}
        missing = [_joined(name) for name in names if _joined(name) not in structs]
        if missing:
            raise UsageError(f"the query's schema has no struct for {', '.join(missing)}")
        return [QueryTable(self.log, name, lsn, _with_contract(structs[_joined(name)])) for name in names]

    def newest_schema(self) -> StructType:
        """At ``until``, or at the newest complete commit."""
        lsn = self.until()
        found = self.tables(lsn)
        if not self.options.is_many:
            return found[0].schema
        own = [pa.struct([pa.field(c.name, c.type) for c in table.own_columns]) for table in found]
        fields = [pa.field(table.name, type_) for table, type_ in zip(found, own, strict=True)]
        return spark_schema(pa.schema([pa.field(_TABLE, pa.string()), *CONTRACT_FIELDS, *fields]))

    def until(self) -> Lsn:
        newest, until = self.log.last_commit_lsn, self.options.until
        if until is not None and until > newest:
            raise UsageError(
                f"{Lsn(until)} lies beyond {newest}, the newest complete commit of the change log",
                remedy="ask for an LSN up to ChangeLog.last_commit_lsn",
            )
        return newest if until is None else Lsn(until)

    def beginning(self) -> int:
        """The LSN after which a new query reads."""
        if self.options.since is not None:
            return self.options.since
        oldest = Commits(self.log, 0, 0).oldest
        cuts = [table.cut for table in self.tables(self.log.last_commit_lsn)]
        return max([*cuts, 0 if oldest is None else oldest - 1])

    def ranges(self, tables: Sequence[QueryTable], since: int, until: int) -> list[FileRange]:
        """Raises PreconditionMissing where changes after ``since`` are gone."""
        found = [(table, table.files(since, until)) for table in tables]
        if self.options.fail_on_data_loss:
            for table in tables:
                if since < table.cut:
                    raise _lost(
                        f"the change log of table {table.name} was shortened up to {Lsn(table.cut)} (log_retention)",
                        since,
                    )
        if self.options.fail_on_data_loss and since > 0:
            commits = Commits(self.log, since, until)
            is_known = commits.cut and since >= commits.cut
            if commits.oldest is not None and commits.oldest > since + 1 and until > since and not is_known:
                raise _lost(f"the change log begins at {Lsn(commits.oldest)}", since)
            for table, files in found:
                missing = missing_commit(commits.of(table.name), files, table.erased_lsn)
                if missing is not None:
                    raise _lost(f"table {table.name} lacks the rows of the commit at {Lsn(missing)}", since)
        return [each for table, files in found for each in table.ranges(files, since, until)]


def _lost(what: str, since: int) -> PreconditionMissing:
    return PreconditionMissing(
        f"changes after {Lsn(since)} are missing: {what}",
        remedy="they were deleted from the log's tables, or left out while the table was parked. Read the table's "
        "state with ChangeLog.as_of and begin after its LSN (option since, a new checkpoint), or take what there is "
        "with failOnDataLoss=false",
    )


def _joined(name: str | TableName) -> str:
    return name if isinstance(name, str) else ".".join(name)


def _with_contract(struct: StructType) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([*struct.fields, *spark_schema(pa.schema(CONTRACT_FIELDS)).fields])


class _Partition(InputPartition):
    def __init__(self, files: FileRange) -> None:
        self.files = files


class _Reader:
    """What both readers share. It pickles: the log is opened where it is asked."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_schema": self._schema}

    @cached_property
    def _source(self) -> LogSource:
        return LogSource(self._options, self._schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In an executor's process."""
        if not isinstance(partition, _Partition):  # Spark's own, of a read without partitions
            return
        types = [(field.name, arrow_type(field.dataType)) for field in self._schema.fields]
        schema = pa.schema(
            [pa.field(n, t, f.nullable) for (n, t), f in zip(types, self._schema.fields, strict=True)]
        )
        for rows in partition.files.batches(self._options.storage_options):
            if self._options.is_many:
                arrays = [_of_many(rows, name, type_, partition.files.table) for name, type_ in types]
            else:
                arrays = rows.columns
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _of_many(rows: pa.RecordBatch, name: str, type_: pa.DataType, table: str) -> pa.Array:
    if name == _TABLE:
        return pa.repeat(table, rows.num_rows).cast(type_)
    if name == table:
        arrays = [rows.column(rows.schema.get_field_index(field.name)) for field in type_]
        return pa.StructArray.from_arrays(arrays, fields=list(type_))
    i = rows.schema.get_field_index(name)
    return pa.nulls(rows.num_rows, type_) if pa.types.is_struct(type_) or i < 0 else rows.column(i)


class BatchReader(_Reader, DataSourceReader):
    """The changes after ``since`` up to ``until``, as ``ChangeLog.changes`` has them."""

    def partitions(self) -> Sequence[InputPartition]:
        source, since = self._source, self._options.since or 0
        until = source.until()
        return [_Partition(each) for each in source.ranges(source.tables(until), since, until)]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source as a stream, in batches of whole transactions."""

    _target: int | None = None
    _last_offset: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"lsn": self._source.beginning()}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._source.log.last_commit_lsn

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """Spark knows no limit by transactions. It gives this one back where the options count."""
        limits = (self._options.max_transactions, self._options.max_bytes)
        return ReadAllAvailable() if limits == (None, None) else ReadMaxRows(1)

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:  # noqa: N802
        """Spark before 4.2 gives neither argument, and has no limits. Raises Unsupported when all is read that the
        query has the columns for."""
        source = self._source
        newest = int(source.log.last_commit_lsn if self._target is None else self._target)
        begun = self._last_offset if start is None else start["lsn"]
        if begun is not None and newest <= begun:
            return {"lsn": begun}
        tables = source.tables(Lsn(newest))
        ending = min(tables, key=lambda table: table.last_lsn)
        if newest > ending.last_lsn:
            newest = ending.last_lsn
            if begun is not None and begun >= newest:
                raise Unsupported(
                    f"table {ending.name} has other columns from the commit at {Lsn(newest + 1)} on, and this query "
                    f"has those before: it has read all changes up to {Lsn(begun)}",
                    remedy="start the query anew with the same checkpoint: it goes on after that LSN, with the "
                    "table's new columns. Its sink must take them",
                    facts={"lsn": str(Lsn(newest + 1))},
                )
        if begun is not None and limit is not None and not isinstance(limit, ReadAllAvailable):
            options, behind, transactions = self._options, begun, source.log.transactions_table()
            files = [file for table in tables for file in table.files(begun, newest)]
            files.sort(key=lambda file: (file.min_lsn, file.max_lsn))

            def lsns(until: int, at_most: int | None) -> list[int]:
                found: list[int] = transactions.between(behind, until, at_most=at_most)[
                    "commit_lsn"
                ].to_pylist()
                return found

            newest = admitted(newest, lsns, files, options.max_transactions, options.max_bytes)
        self._last_offset = newest
        return {"lsn": newest}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Raises Unsupported for an end before the start. Spark before 4.2 does not tell ``latestOffset`` where the
        checkpoint is, so a query with older columns, or over a log that was set back, gets there."""
        if end["lsn"] < start["lsn"]:
            raise Unsupported(
                f"this query has read all changes up to {Lsn(start['lsn'])}, and in its columns the log has them up to "
                f"{Lsn(end['lsn'])} only",
                remedy=f"start it with a new checkpoint, the option since={Lsn(start['lsn'])}, and the tables' newest "
                "columns. Where the log itself was set back, copy it anew",
            )
        source = self._source
        tables = source.tables(Lsn(end["lsn"]))
        return [_Partition(each) for each in source.ranges(tables, start["lsn"], end["lsn"])]


class DefaultSource(DataSource):
    """``xidstream``: docs/spark-source.md has the options."""

    @classmethod
    def name(cls) -> str:
        return "xidstream"

    def schema(self) -> StructType:
        # Spark does not say whether of a stream or a batch. The reader refuses what is the other's.
        return LogSource(SourceOptions.parse(self.options)).newest_schema()

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(SourceOptions.parse(self.options, is_stream=False), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        return StreamReader(SourceOptions.parse(self.options, is_stream=True), schema)
