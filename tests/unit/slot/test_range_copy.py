"""What a snapshot's reader asks of the server, and what it makes of the server's errors; no server, only its words."""

from __future__ import annotations

import pytest

from tests.unit.decode.builder import relation
from xidstream.pipeline.errors import (
    ConnectionLost,
    EnvironmentFault,
    PoisonedChange,
    PreconditionMissing,
    XidstreamError,
)
from xidstream.pipeline.slot.failures import ServerReport
from xidstream.pipeline.slot.range_copy import copy_statement, failure_of, told
from xidstream.pipeline.snapshot.tables import CtidRange, Leaf, PublishedSource, RangeTask

LEAF = Leaf(7, 'odd "schema"', "leaf;drop", 9, 9 << 13)


def task(first: int, end: int | None, row_filter: str | None = None) -> RangeTask:
    source = PublishedSource(relation(("a", "int4"), ('b"', "text")), "", row_filter, (LEAF,))
    return RangeTask(source, "0000-1", CtidRange(LEAF, 3, first, end))


@pytest.mark.parametrize(
    ("first", "end", "row_filter", "where"),
    [
        (0, None, None, ""),
        (0, 5, None, " WHERE ctid < '(5,0)'::pg_catalog.tid"),
        (5, None, "a > 1 OR b", " WHERE ctid >= '(5,0)'::pg_catalog.tid AND (a > 1 OR b)"),
        (5, 9, None, " WHERE ctid >= '(5,0)'::pg_catalog.tid AND ctid < '(9,0)'::pg_catalog.tid"),
    ],
)
def test_the_statement_names_the_leaf_its_pages_and_the_columns_of_the_published_table(
    first: int, end: int | None, row_filter: str | None, where: str
) -> None:
    expected = f'COPY (SELECT "a", "b""" FROM ONLY "odd ""schema"""."leaf;drop"{where}) TO STDOUT'
    assert copy_statement(task(first, end, row_filter)) == expected


def test_a_range_is_told_by_its_leaf_and_pages() -> None:
    assert told(task(5, 9)) == 'the snapshot of odd "schema".leaf;drop from page 5 to page 9'
    assert told(task(0, None)).endswith("from page 0 to the end")


@pytest.mark.parametrize(
    ("sqlstate", "message", "function", "expected"),
    [
        ("54000", "out of memory", "enlargeStringInfo", PoisonedChange),
        ("54000", "string buffer exceeds maximum allowed length", "", PoisonedChange),
        ("XX000", "invalid memory alloc request size 1200000004", "palloc", PoisonedChange),
        ("22021", 'invalid byte sequence for encoding "UTF8": 0xSECRET', "", PoisonedChange),
        ("22P05", "character with byte sequence 0xSECRET has no equivalent", "", PoisonedChange),
        ("22P02", 'invalid input syntax for type integer: "SECRET"', "", PoisonedChange),
        ("22012", "division by zero", "", PoisonedChange),
        ("P0001", "value SECRET is not allowed", "exec_stmt_raise", PoisonedChange),
        ("38000", "SECRET", "", PoisonedChange),
        ("42501", "permission denied for table t", "", PreconditionMissing),
        ("42P01", 'relation "t" does not exist', "", PreconditionMissing),
        ("25P03", "terminating connection due to idle-in-transaction timeout", "", ConnectionLost),
        ("57P01", "terminating connection due to administrator command", "", ConnectionLost),
        ("57014", "canceling statement due to user request", "", ConnectionLost),
        ("XX001", "invalid page in block 5 of relation base/5/16384", "", EnvironmentFault),
        ("53200", "out of memory", "", EnvironmentFault),
    ],
)
def test_what_the_server_says_instead_of_rows(
    sqlstate: str, message: str, function: str, expected: type[XidstreamError]
) -> None:
    error = failure_of(ServerReport(sqlstate, message, "ERROR", function), "the snapshot of s.t")
    assert type(error) is expected
    assert error.message.startswith("the snapshot of s.t: ")
    assert "SECRET" not in f"{error.message} {error.remedy}"
    assert "slot skip" not in error.remedy
