"""What a snapshot's reader asks of the server, and what it makes of the server's answers; no server, only its words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.unit.decode.builder import relation
from xidstream.pipeline.errors import (
    ConnectionLost,
    EnvironmentFault,
    PoisonedChange,
    PreconditionMissing,
    ProtocolViolation,
    TableUnreadable,
    XidstreamError,
)
from xidstream.pipeline.postgres.failures import ServerReport
from xidstream.pipeline.postgres.range_copy import (
    CopiedRows,
    Frame,
    copy_statement,
    failure_of,
    range_text,
)
from xidstream.pipeline.snapshot.key_filter import bound, parse_key_filter
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
    expected = f'COPY (SELECT "a", "b""" FROM ONLY "odd ""schema"""."leaf;drop"{where})'
    assert copy_statement(task(first, end, row_filter)) == f"{expected} TO STDOUT (FORMAT binary)"


def test_the_statement_asks_for_the_text_of_some_columns_and_not_of_a_null() -> None:
    statement = copy_statement(task(0, None), frozenset({1}))
    assert statement.startswith(
        'COPY (SELECT "a", CASE WHEN "b""" IS DISTINCT FROM NULL THEN pg_catalog.concat("b""") END FROM ONLY '
    )


@pytest.mark.parametrize(
    ("where", "condition"),
    [
        ("a >= -1", """"a" OPERATOR(pg_catalog.>=) '-1'::pg_catalog.int4"""),
        ("a in (1, 2)", """"a" OPERATOR(pg_catalog.=) ANY (ARRAY['1', '2']::pg_catalog.int4[])"""),
        (
            """"b""\" < 'it''s'""",
            """"b""\" COLLATE pg_catalog."C" OPERATOR(pg_catalog.<) 'it''s'::pg_catalog.text""",
        ),
        (
            """"b""\" = '\\'""",
            (
                """"b""\" OPERATOR(pg_catalog.=) ANY (ARRAY['\\']::pg_catalog.text[]) AND """
                """"b""\" COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) ANY (ARRAY['\\']::pg_catalog.text[])"""
            ),
        ),
    ],
)
def test_the_statement_of_a_repair_asks_for_the_rows_of_its_range_by_literals_of_the_columns_type(
    where: str, condition: str
) -> None:
    whole = task(0, None, "a > 1 OR b")
    only = bound(parse_key_filter(where), whole.source.relation, ("a", 'b"'))
    statement = copy_statement(dataclasses.replace(whole, only=only))
    assert f" WHERE {condition} AND (a > 1 OR b)) TO STDOUT" in statement


HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"


def unframed(*blocks: list[bytes]) -> list[bytes]:
    """The rows that are found in these blocks of messages."""
    frame = Frame("the snapshot of s.t")
    found = []
    for messages in blocks:
        payload = np.frombuffer(b"".join(messages), np.uint8)
        rows = frame.without(CopiedRows(payload, np.array([len(m) for m in messages], np.int32)))
        ends = np.cumsum(rows.lengths)
        found += [rows.payload[end - n : end].tobytes() for end, n in zip(ends, rows.lengths, strict=True)]
        assert len(rows.payload) == sum(rows.lengths)
    frame.check_end()
    return found


@pytest.mark.parametrize(
    "blocks",
    [
        [[HEADER + b"row 1", b"row 2", TRAILER]],
        [[HEADER + b"row 1"], [b"row 2", TRAILER]],
        [[HEADER + b"row 1", b"row 2"], [TRAILER]],
        [[HEADER, b"row 1"], [], [b"row 2"], [TRAILER], []],
        [[HEADER], [b"row 1", b"row 2", TRAILER]],
    ],
)
def test_header_and_trailer_are_no_rows_wherever_a_block_ends(blocks: list[list[bytes]]) -> None:
    assert unframed(*blocks) == [b"row 1", b"row 2"]


def test_a_copy_without_rows_has_header_and_trailer_in_one_message() -> None:
    assert unframed([HEADER + TRAILER]) == []


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        ([[b"row 1", TRAILER]], "does not begin with its header"),
        ([[HEADER[:-1]]], "does not begin with its header"),
        ([[HEADER[:11] + b"\0\1\0\0" + bytes(4) + b"row 1", TRAILER]], "does not begin with its header"),
        ([[HEADER + b"row 1"]], "no trailer"),
        ([[]], "no trailer"),
        ([[HEADER + b"row 1", TRAILER, b"row 2"]], "no trailer"),
        ([[HEADER + b"row 1", TRAILER], [b"row 2"]], "something after COPY's trailer"),
    ],
)
def test_a_frame_that_no_server_sends_is_a_violation(blocks: list[list[bytes]], what: str) -> None:
    with pytest.raises(ProtocolViolation, match=f"the snapshot of s.t: .*{what}"):
        unframed(*blocks)


def test_a_range_is_told_by_its_leaf_and_pages() -> None:
    assert range_text(task(5, 9)) == 'the snapshot of odd "schema".leaf;drop from page 5 to page 9'
    assert range_text(task(0, None)).endswith("from page 0 to the end")


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
        ("42501", "permission denied for table t", "", TableUnreadable),
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
