"""A published table as a snapshot reads it, and the ranges of pages that its readers share.

Tables are cut by pages (ctid), not by keys: every table has pages, ranges of them are even, and a range is found
without an index (a TID range scan, PostgreSQL 14). The size of a table is asked of the file system, never counted. A
range has about ``RANGE_BYTES`` of the table with its TOAST, so that a reader that is lost costs seconds. The last range
has no end, because a table may have grown between the question and the snapshot. Pages after that hold nothing that
the snapshot sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.snapshot.key_filter import BoundComparison
from xidstream.pipeline.snapshot.proven import Look

RANGE_BYTES: Final = 64 << 20
SEQ_BITS: Final = 32
"""``_seq`` is the range's number, and after it so many bits for the row in the range."""
MOST_RANGES: Final = 1 << 20
"""The most ranges of one table. Larger ones get larger ranges: a plan is a message to a reader for each of them."""


@dataclass(frozen=True)
class Leaf:
    """A table with rows of its own: the published table, or a partition of it. ``n_bytes`` includes TOAST.

    ``file_node`` changes when the table's rows are written to a new file (TRUNCATE, VACUUM FULL, some ALTER TABLE).
    ``toast``: its TOAST table, 0 for none. ALTER TABLE gives it another one with the file, and the others do not.
    ``made_as_partition``: it has been a partition since it was made, so its rows have always been the root's.
    """

    relid: int
    schema: str
    table: str
    n_pages: int
    n_bytes: int
    file_node: int = 0
    toast: int = 0
    made_as_partition: bool = False


@dataclass(frozen=True)
class PrimaryKey:
    """What names a row under REPLICA IDENTITY FULL, where R calls all columns the key: the catalog's primary key.

    It counts if it is checked at once (a deferrable one lets equal keys through, within a transaction), is there in all
    partitions, and has published columns alone. ``constraint``: its oid, which another primary key of the same columns
    does not have. ``columns``: their names, in the order of the relation's.
    """

    constraint: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Witness:
    """A catalog row that a table depends on. ``row`` names it, ``xmin`` the transaction that wrote it, and ``harmless``
    digests those of its values that may change without any effect on the table's rows. ``about``: for people."""

    row: str
    xmin: int
    harmless: str
    about: str


@dataclass(frozen=True)
class PublishedSource:
    """A published table, as the catalog has it now.

    ``relation``: what the stream's R message will say of it. ``published_as``: names the catalog rows that publish it,
    and changes with their definition (a column list, a row filter, DROP and ADD). ``row_filter``: an SQL expression of
    its columns, None for all rows: which INSERTs are published; ``change_filters``: the same of UPDATE and DELETE.
    ``leaves``: ordered by relid. ``unpublished_operations``: the operations that are not published. ``attnums``: of the
    relation's columns, in their order. ``missing_defaults``: the columns whose value in older rows is a default that no
    row holds (``pg_attribute.atthasmissing``). ``expressions``: attnums of generated columns, and the oid of each one's
    expression, which another expression does not have. ``primary_key``: see ``PrimaryKey``; None but under FULL.
    ``type_parts``: a column's type, the oid of an enum's label or of a composite type within it, and the label, or the
    attributes. ``unpublished``: attnums of the columns that are there and not published. ``witnesses``: the catalog
    rows that all this was read from, ordered by ``row``.
    """

    relation: RelationVersion
    published_as: str
    row_filter: str | None
    leaves: tuple[Leaf, ...]
    unpublished_operations: tuple[str, ...] = ()
    attnums: tuple[int, ...] = ()
    missing_defaults: tuple[str, ...] = ()
    expressions: tuple[tuple[int, int], ...] = ()
    change_filters: tuple[str | None, ...] = ()
    primary_key: PrimaryKey | None = None
    type_parts: tuple[tuple[int, int, str], ...] = ()
    unpublished: tuple[int, ...] = ()
    witnesses: tuple[Witness, ...] = ()

    @property
    def name(self) -> str:
        """``schema.table``."""
        return self.relation.name

    @property
    def locked(self) -> tuple[int, ...]:
        """The relids of all that a snapshot of it locks."""
        return tuple(sorted({self.relation.relid, *(leaf.relid for leaf in self.leaves)}))

    @cached_property
    def n_bytes(self) -> int:
        return sum(leaf.n_bytes for leaf in self.leaves)


@dataclass(frozen=True)
class Surveyed:
    """What is published now (None: what ``fingerprint`` was told of before), how much WAL the server keeps for the slot
    (None: it is not known), what the look proves, up to where the sink has all (0/0: it is not known), and what it cost
    the process that asked. ``mark``: of the event triggers that tell of DDL, read last (``postgres.ddl_trigger``).
    ``snapshot``: the transactions that the look has seen (``pg_current_snapshot``, 13+). ``end_lsn``: the WAL's end
    after the look: what it found was so at that position. 0/0 where ``sources`` is None: what was found earlier is so
    at the look's own."""

    sources: tuple[PublishedSource, ...] | None
    held_wal_bytes: int | None
    look: Look
    fingerprint: str
    delivered_lsn: Lsn = INVALID_LSN
    cpu_s: float = 0.0
    mark: int | None = None
    snapshot: str | None = None
    end_lsn: Lsn = INVALID_LSN


@dataclass(frozen=True)
class CtidRange:
    """Pages ``first_page`` to before ``end_page`` (None: to the table's end) of one leaf. ``number`` is unique in the
    snapshot of the table, and counts from 0."""

    leaf: Leaf
    number: int
    first_page: int
    end_page: int | None

    @property
    def n_bytes(self) -> int:
        """About how much there is to read."""
        end = self.leaf.n_pages if self.end_page is None else self.end_page
        return self.leaf.n_bytes * max(end - self.first_page, 0) // max(self.leaf.n_pages, 1)


def plan_ranges(
    leaves: Sequence[Leaf], *, by_range: bool, range_bytes: int = RANGE_BYTES, n_readers: int = 1
) -> tuple[CtidRange, ...]:
    """All pages of ``leaves``, each in one range. ``by_range`` is false for a server that cannot scan ranges of ctid:
    then each leaf is one range. ``n_readers`` share the ranges."""
    total = sum(leaf.n_bytes for leaf in leaves)
    range_bytes = max(range_bytes, -(-total // MOST_RANGES))
    ranges: list[CtidRange] = []
    for leaf in leaves:
        n_ranges = -(-leaf.n_bytes // range_bytes)
        if n_ranges > n_readers:
            n_ranges = -(-n_ranges // n_readers) * n_readers
        n_ranges = max(1, min(n_ranges, leaf.n_pages)) if by_range else 1
        starts = [leaf.n_pages * i // n_ranges for i in range(n_ranges)]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            ranges.append(CtidRange(leaf, len(ranges), start, end))
    return tuple(ranges)


@dataclass(frozen=True)
class RangeTask:
    """What a reader needs to read one range. ``snapshot_name`` is that of pg_export_snapshot. ``only``: the rows of the
    range that meet all of this; empty for all of them."""

    source: PublishedSource
    snapshot_name: str
    range: CtidRange
    only: tuple[BoundComparison, ...] = ()
