"""COPY's text, split into values: against a reference in Python, and with bytes that no server writes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.decode.builder import OIDS, numeric_modifier, relation
from xidstream.pipeline.decode import decode_copied
from xidstream.pipeline.errors import (
    ColumnNameClash,
    MalformedMessage,
    PoisonedChange,
    ProtocolViolation,
    XidstreamError,
)
from xidstream.pipeline.relations import RelationVersion

THREE = relation(("a", "text"), ("b", "text"), ("c", "text"))
EVERY = relation(*((f"c{i}", name, numeric_modifier(20, 3)) for i, name in enumerate(OIDS)))
ESCAPES = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v", "\\": "\\"}
"""The manual's table of COPY's backslash sequences, for what COPY TO writes."""


def copied(row: list[str | None]) -> bytes:
    """As the manual describes a row of the text format."""
    texts = [
        r"\N" if v is None else "".join("\\" + ESCAPES[c] if c in ESCAPES else c for c in v) for v in row
    ]
    return "\t".join(texts).encode() + b"\n"


def decode(rows: list[bytes], table: RelationVersion = THREE) -> Any:
    payload = np.frombuffer(b"".join(rows), np.uint8).copy()
    return decode_copied(payload, np.array([len(row) for row in rows], np.int32), table, "table t")


def values(rows: list[bytes], table: RelationVersion = THREE) -> list[list[Any]]:
    decoded = decode(rows, table)
    for column in decoded.columns:
        column.validate(full=True)
    return [list(row) for row in zip(*(column.to_pylist() for column in decoded.columns), strict=True)]


TEXT = st.one_of(
    st.none(),
    st.text(st.sampled_from("\\\b\f\n\r\t\vN.bnté🐘 x\x01\x7f"), max_size=12),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), max_size=8))
def test_what_copy_writes_is_read_as_the_manual_says(rows: list[list[str | None]]) -> None:
    assert values([copied(row) for row in rows]) == rows


@pytest.mark.parametrize(
    "text", ["", "\\N", "N", "\\", "\\.", "\t", "a\tb", "\n", "x\\", "\\Nx", "x\\N", "NULL", " "]
)
def test_each_text_that_could_be_taken_for_something_else_stays_itself(text: str) -> None:
    for row in ([text, None, "z"], [None, text, text], ["a", "b", text]):
        assert values([copied(row)]) == [row]


def test_nulls_and_empty_strings_are_told_apart() -> None:
    assert values([b"\\N\t\t\\N\n", b"\t\\N\t\n"]) == [[None, "", None], ["", None, ""]]


def test_a_value_of_many_megabytes_with_an_escape_at_each_end() -> None:
    huge = "\t" + "x" * (24 << 20) + "\\"
    assert values([copied(["a", huge, None]), copied([huge, "", "c"])]) == [
        ["a", huge, None],
        [huge, "", "c"],
    ]


def test_many_columns_and_rows_keep_their_places() -> None:
    wide = relation(*((f"c{i}", "int4") for i in range(1600)))
    rows: list[list[str | None]] = [
        [str(r * i) if (r + i) % 3 else None for i in range(1600)] for r in range(70)
    ]
    got = values([copied(row) for row in rows], wide)
    assert got == [[None if v is None else int(v) for v in row] for row in rows]


def test_a_table_without_columns_has_rows_all_the_same() -> None:
    none = relation()
    decoded = decode([b"\n", b"\n"], none)
    assert decoded.columns == [] and len(decoded.text) == 2
    with pytest.raises(ProtocolViolation):
        decode([b"1\n"], none)


@pytest.mark.parametrize("row", [b"a\tb\n", b"a\n", b"\n", b"a\tb\tc\td\n", b"a\tb\tc\t\n", b"\t\t\t\n"])
def test_a_row_with_too_few_or_too_many_columns_is_a_violation(row: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="does not have the 3 columns of"):
        decode([b"1\t2\t3\n", row])


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"a\tb\tc",  # the last row without its newline
        b"a\tb\tc\\",
        b"a\tb\tc\\\n",  # a backslash with nothing behind it
        b"a\tb\\x41\tc\n",  # COPY FROM takes these, COPY TO does not write them
        b"a\tb\\101\tc\n",
        b"a\tb\\z\tc\n",
        b"a\t\\Nx\tc\n",  # a null with something behind it
        b"a\tx\\N\tc\n",
        b"a\nb\tc\td\n",  # a bare newline
        b"a\t\\\\b\nb\tc\n",
    ],
)
def test_bytes_that_copy_does_not_write_are_malformed(row: bytes) -> None:
    with pytest.raises(MalformedMessage, match="row 1 of a block"):
        decode([b"1\t2\t3\n", row])


@pytest.mark.parametrize("lengths", [[7], [6, -1], [6, 2], [6, 0], [3, 3], [2147483647], [5]])
def test_lengths_that_do_not_fit_the_payload_are_malformed(lengths: list[int]) -> None:
    with pytest.raises(ProtocolViolation):
        decode_copied(
            np.frombuffer(b"a\tb\tc\n", np.uint8).copy(), np.array(lengths, np.int32), THREE, "table t"
        )


SAMPLE = b"".join(
    copied([v] * len(OIDS)) for v in ("1", "t", "2024-01-01", "{1,NULL}", "\\x00ff", None, "tab\t")
)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(SAMPLE)), st.integers(0, 20))
def test_whatever_the_bytes_are_there_is_a_result_or_an_error_of_ours(
    noise: bytes, place: int, cut: int
) -> None:
    data = SAMPLE[:place] + noise + SAMPLE[place + cut :]
    rows = [row for row in re.split(rb"(?<=\n)", data) if row]
    try:
        decoded = decode(rows, EVERY)
    except XidstreamError:
        return
    assert {len(column) for column in decoded.columns} == {len(rows)}


def test_a_value_that_cannot_be_decoded_names_table_and_column_and_not_itself() -> None:
    table = relation(("id", "int4"), ("doc", "text"))
    for row in (b"1\tsecret\xff\n", b"secret\tx\n"):
        with pytest.raises(PoisonedChange, match=r"table t: public\.t column '(id|doc)'") as caught:
            decode([b"1\tx\n", row], table)
        assert "secret" not in f"{caught.value.message} {caught.value.remedy}"
        assert "slot skip" not in caught.value.remedy


def test_a_name_that_clashes_with_a_contract_column_is_told() -> None:
    with pytest.raises(ColumnNameClash, match="_SEQ"):
        decode([b"1\n"], relation(("_SEQ", "int4")))


def test_values_beyond_a_native_type_are_null_and_in_text() -> None:
    table = relation(("d", "date"), ("n", "numeric", numeric_modifier(5, 2)))
    decoded = decode([b"infinity\t1.25\n", b"2024-01-01\tNaN\n"], table)
    assert decoded.columns[0][0].as_py() is None and decoded.columns[1][1].as_py() is None
    assert decoded.text.to_pylist() == [[("d", "infinity")], [("n", "NaN")]]
