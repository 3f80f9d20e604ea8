"""A swap: the touched files of one table get new versions, by this process or by Spark.

The net rows come from this process (``pipeline.mirror.tail_rows``), or from Spark. They go into the table's files here
(``pipeline.mirror.local_swap``) as long as they are some hundreds of megabytes at most, and what they replace is not
much more. That is nearly every refresh. What is larger, and keys whose equality Arrow does not share, Spark does
(``pipeline.mirror.rewrite``).

A tail that lacks unchanged values takes them from the base. Then only those files are read for it whose ranges meet the
tail's, and of these the columns that some change lacks.

Called by ``pipeline.mirror.refresh``, which commits what is written.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from xidstream.pipeline.changelog.arrow_rows import CHANGE, is_comparable
from xidstream.pipeline.changelog.fold import net_changes
from xidstream.pipeline.changelog.shape import TableShape
from xidstream.pipeline.changelog.table_at import LogRows
from xidstream.pipeline.changelog.tail import TailFacts
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables import attempt_files
from xidstream.pipeline.log_tables.file_rows import in_schema
from xidstream.pipeline.mirror import local_swap, rewrite
from xidstream.pipeline.mirror.base_table import TEXT_FIELD, BaseTable
from xidstream.pipeline.mirror.file_chunks import footer_of, read_chunks
from xidstream.pipeline.mirror.key_ranges import OWN, RangedKey
from xidstream.pipeline.mirror.net_rows import NetRows
from xidstream.pipeline.mirror.plan import BaseFile, FileGroup, NetCounts, jobs, plan_swap
from xidstream.pipeline.spark.spark_schemas import quoted, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Swapped:
    """``paths``, relative to the table, take the place of the files of ``groups``."""

    paths: list[str]
    groups: list[FileGroup]


@dataclass(frozen=True)
class _Net:
    """Net rows in Parquet files beside the table's own. ``n_bytes``: of their values."""

    paths: list[str]
    n_rows: int
    n_bytes: int


@dataclass(frozen=True)
class Swap:
    """The swap of one table. ``session`` gives Spark's, when it is needed. ``check`` raises where the refresh is to be
    given up."""

    session: Callable[[], SparkSession]
    base: BaseTable
    shape: TableShape
    ranged: RangedKey
    file_bytes: int
    check: Callable[[], None]

    def here(self, files: Sequence[BaseFile], net: NetRows) -> Swapped | None:
        """``files``: all of the table's, in key order. None where so much is replaced that Spark should do it."""
        counts = net.counts(files)
        groups = self._plan(files, counts)
        if not local_swap.fits(groups):
            return None
        reach("writing_base")
        schema = self.base.file_schema(self.base.fields)
        swap = local_swap.LocalSwap(self.base.location, schema, files, net, self._key, self.check)
        return Swapped(swap.write(groups, new_directory()), groups)

    def by_spark(
        self, files: Sequence[BaseFile], tail: LogRows, facts: TailFacts, by_key: LogRows
    ) -> Swapped | None:
        """None where a key has a null: write the table as a whole. ``by_key``: the tail in its key alone."""
        session = self.session()
        rewrite.set_shuffle_partitions(session, tail.n_bytes)
        base = self._base_values(self._with_values(files, facts, by_key), facts)
        rows = net_changes(base, tail.frame, self.shape, facts)
        with self._written(rows, self._net_schema) as net:
            types = {field.name: field.type for field in self.base.fields}
            is_small = net.n_rows <= local_swap.NET_ROWS and net.n_bytes <= local_swap.NET_BYTES
            if is_small and is_comparable(self._key, types):
                here = NetRows(self._read(net), self._key, self.ranged)
                if here.n_null_keys:
                    return None
                if (swapped := self.here(files, here)) is not None:
                    return swapped
            return self._in_executors(files, net)

    @property
    def _key(self) -> list[str]:
        return self.ranged.ahead_in(self.shape.key or ())

    def _plan(self, files: Sequence[BaseFile], counts: NetCounts) -> list[FileGroup]:
        if counts.n_texts and not self.base.has_text:
            self.base.add_columns([TEXT_FIELD])
        return plan_swap(files, counts.touched, counts.arriving, self.file_bytes)

    # -- net rows --------------------------------------------------------------------------------------

    def _with_values(
        self, files: Sequence[BaseFile], facts: TailFacts, by_key: LogRows
    ) -> Sequence[BaseFile]:
        """The files that may have a value which the tail lacks."""
        if not facts.unchanged:
            return []
        bounds = rewrite.bounds_of(by_key.frame, self.ranged)
        return [file for file in files if bounds is None or file.range is None or file.range.meets(bounds)]

    def _base_values(self, files: Sequence[BaseFile], facts: TailFacts) -> DataFrame:
        """The rows of these files as ``net_changes`` wants them: null in columns that no change of the tail lacks,
        which are not read."""
        from pyspark.sql import functions

        asked = {*facts.unchanged, *(self.shape.key or ()), TEXT_FIELD.name}
        whole = self.base.fields if self.base.has_text else [*self.base.fields, TEXT_FIELD]
        rows = base_rows(self.session(), self.base, files, [field for field in whole if field.name in asked])
        types = {field.name: field.dataType for field in spark_schema(pa.schema(list(whole))).fields}
        return rows.select(
            *(
                functions.col(quoted(field.name))
                if field.name in asked
                else functions.lit(None).cast(types[field.name]).alias(field.name)
                for field in whole
            )
        )

    @contextmanager
    def _written(self, net: DataFrame, schema: pa.Schema) -> Iterator[_Net]:
        """Files with the rows, meanwhile. What cannot be removed then, the next vacuum removes."""
        directory = f"net-{uuid.uuid4().hex}"
        try:
            paths = rewrite.write_net(net, self.base.location, directory, schema)
            footers = [footer_of(self.base.location, path) for path in paths]
            sizes = [f.row_group(i).total_byte_size for f in footers for i in range(f.num_row_groups)]
            yield _Net(paths, sum(footer.num_rows for footer in footers), sum(sizes))
        finally:
            with suppress(OSError):
                attempt_files.remove(self.base.location, directory)

    @property
    def _net_schema(self) -> pa.Schema:
        fields = [field for field in self.base.fields if field.name != TEXT_FIELD.name]
        return pa.schema([*fields, TEXT_FIELD, pa.field(CHANGE, pa.string())])

    def _read(self, net: _Net) -> pa.Table:
        schema = self._net_schema
        chunks = (rows for path in net.paths for rows in read_chunks(self.base.location, path))
        tables = [in_schema(rows, schema) for rows in chunks]
        return pa.concat_tables([schema.empty_table(), *tables])

    # -- files -----------------------------------------------------------------------------------------

    def _in_executors(self, files: Sequence[BaseFile], written: _Net) -> Swapped | None:
        finder = rewrite.SlotFinder(self.ranged, files)
        schema = self._net_schema
        table = self.base.location
        net = rewrite.read_files(self.session(), schema, table, written.paths)
        net = net.withColumn(rewrite.SLOT, finder.slot())
        # In order, and so in portions with statistics: each group decodes little more than its own rows.
        schema = schema.append(pa.field(rewrite.SLOT, pa.string()))
        with self._written(net.sortWithinPartitions(rewrite.SLOT), schema) as in_slots:
            net = rewrite.read_files(self.session(), schema, table, in_slots.paths)
            counts = finder.counts(net, self._key)
            if counts.n_null_keys:
                return None
            groups = self._plan(files, counts)
            reach("writing_base")
            paths = []
            for portion in jobs(groups):
                paths += self._write_portion(portion, files, net, counts.n_keys)
        return Swapped(paths, groups)

    def _write_portion(
        self, groups: Sequence[FileGroup], files: Sequence[BaseFile], net: DataFrame, n_keys: int
    ) -> list[str]:
        fields = self.base.fields
        names = [field.name for field in fields]
        old = [base_rows(self.session(), self.base, [files[i] for i in g.files], fields) for g in groups]
        frame = rewrite.group_frame(groups, old, net, self._key, names, n_keys)
        return rewrite.write_files(frame, self.base.location, new_directory(), self.base.file_schema(fields))


def base_rows(
    session: SparkSession,
    base: BaseTable,
    files: Sequence[BaseFile],
    fields: Sequence[pa.Field] | None = None,
) -> DataFrame:
    """The rows of files of a base table in its own columns and ``_text``, or in ``fields``."""
    if fields is None:
        fields = base.fields if base.has_text else [*base.fields, TEXT_FIELD]
    return rewrite.read_files(session, pa.schema(list(fields)), base.location, [file.path for file in files])


def new_directory() -> str:
    return f"{OWN}{uuid.uuid4().hex}"
