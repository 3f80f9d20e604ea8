"""COPY's binary format, split into values and decoded: against references, and with bytes that no server writes."""

from __future__ import annotations

import decimal
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.adapt import PyFormat, Transformer

from tests.unit.decode.builder import OIDS, numeric_modifier, relation
from xidstream.pipeline.decode import ValuesDoNotFit, decode_copied, text_columns
from xidstream.pipeline.errors import (
    ColumnNameClash,
    MalformedMessage,
    PoisonedChange,
    ProtocolViolation,
    XidstreamError,
)
from xidstream.pipeline.schema import RelationVersion

THREE = relation(("a", "text"), ("b", "text"), ("c", "text"))
EVERY = relation(*((f"c{i}", name, numeric_modifier(20, 3)) for i, name in enumerate(OIDS)))


def copied(row: Sequence[str | bytes | None]) -> bytes:
    """As the manual describes a tuple of the binary format."""
    fields = [v.encode() if isinstance(v, str) else v for v in row]
    sent = (struct.pack(">i", -1) if v is None else struct.pack(">i", len(v)) + v for v in fields)
    return struct.pack(">h", len(row)) + b"".join(sent)


def decode(rows: list[bytes], table: RelationVersion = THREE, as_text: frozenset[int] | None = None) -> Any:
    payload = np.frombuffer(b"".join(rows), np.uint8)
    lengths = np.array([len(row) for row in rows], np.int32)
    return decode_copied(
        payload, lengths, table, text_columns(table) if as_text is None else as_text, "table t"
    )


def values(rows: list[bytes], table: RelationVersion = THREE) -> list[list[Any]]:
    decoded = decode(rows, table)
    for column in decoded.columns:
        column.validate(full=True)
    return [list(row) for row in zip(*(column.to_pylist() for column in decoded.columns), strict=True)]


def sent(value: object) -> bytes:
    """As psycopg writes it for the server to read."""
    data = Transformer().get_dumper(value, PyFormat.BINARY).dump(value)
    assert data is not None
    return bytes(data)


TEXT = st.one_of(
    st.none(), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(TEXT, min_size=3, max_size=3), max_size=8))
def test_what_copy_writes_is_read_as_the_manual_says(rows: list[list[str | None]]) -> None:
    assert values([copied(row) for row in rows]) == rows


def test_nulls_and_empty_strings_are_told_apart() -> None:
    rows: list[list[str | None]] = [[None, "", None], ["", None, ""]]
    assert values([copied(row) for row in rows]) == rows


def test_a_value_of_many_megabytes() -> None:
    huge = "\t" + "x" * (24 << 20) + "\\"
    rows = [["a", huge, None], [huge, "", "c"]]
    assert values([copied(row) for row in rows]) == rows


def test_many_columns_and_rows_keep_their_places() -> None:
    wide = relation(*((f"c{i}", "int4") for i in range(1600)))
    rows = [[r * i if (r + i) % 3 else None for i in range(1600)] for r in range(70)]
    assert (
        values([copied([None if v is None else struct.pack(">i", v) for v in row]) for row in rows], wide)
        == rows
    )


def test_a_table_without_columns_has_rows_all_the_same() -> None:
    none = relation()
    decoded = decode([copied([]), copied([])], none)
    assert decoded.columns == [] and len(decoded.text) == 2
    with pytest.raises(ProtocolViolation):
        decode([copied(["1"])], none)


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_name", "data", "expected"),
    [
        ("bool", b"\1", True),
        ("bool", b"\0", False),
        ("int2", b"\x80\0", -32768),
        ("int4", b"\xff\xff\xff\xfe", -2),
        ("int8", b"\x80" + bytes(7), -(1 << 63)),
        ("oid", b"\xff\xff\xff\xff", (1 << 32) - 1),
        ("float4", struct.pack(">f", -0.5), -0.5),
        ("float8", struct.pack(">d", 5e-324), 5e-324),
        ("bytea", b"\0\xff", b"\0\xff"),
        ("jsonb", b'\1{"a": 1}', '{"a": 1}'),
        ("uuid", bytes(range(16)), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
        ("name", b"n", "n"),
    ],
)
def test_what_send_functions_give(type_name: str, data: bytes, expected: object) -> None:
    table = relation(("v", type_name))
    assert text_columns(table) == frozenset()
    assert values([copied([data]), copied([None]), copied([data])], table) == [[expected], [None], [expected]]


@pytest.mark.parametrize(
    ("type_name", "data"),
    [
        ("jsonb", b'\2{"a": 1}'),
        ("jsonb", b""),
        ("bool", b"\2"),
        ("int4", b"\0\0\1"),
        ("uuid", bytes(15)),
        ("numeric", struct.pack(">hhhhh", 1, 0, 0, 0, 10_000)),
        ("numeric", struct.pack(">hhhh", 1, 0, 0, 0)),
        ("numeric", struct.pack(">hhhh", 0, 0, 1, 0)),
    ],
)
def test_what_no_send_function_gives_is_refused(type_name: str, data: bytes) -> None:
    for modifier in (-1, numeric_modifier(20, 3)):
        with pytest.raises(PoisonedChange, match="column v has a value that is malformed"):
            decode([copied([data])], relation(("v", type_name, modifier)))


def test_all_the_many_nan_become_the_one_that_text_has() -> None:
    strange = b"\xff\xf8\0\0\0\0\0\1"
    decoded = decode([copied([strange])], relation(("v", "float8")))
    assert decoded.columns[0].buffers()[1].to_pybytes() == struct.pack("<d", float("nan"))


@settings(max_examples=600, deadline=None)
@given(
    st.decimals(allow_nan=False, allow_infinity=False) | st.decimals(places=4) | st.integers().map(Decimal)
)
def test_a_numeric_without_a_precision_is_the_text_that_numeric_out_gives(number: Decimal) -> None:
    if not number.is_finite() or number.adjusted() > 2000 or number.adjusted() < -2000:
        number = Decimal(0)
    if number.is_zero():
        number = abs(number)  # PostgreSQL has one zero
    assert values([copied([sent(number)])], relation(("n", "numeric"))) == [[f"{number:f}"]]


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_a_numeric_with_a_precision_is_that_decimal(data: st.DataObject) -> None:
    precision = data.draw(st.integers(1, 38))
    scale = data.draw(st.integers(0, precision))
    units = data.draw(
        st.one_of(st.integers(-(10**precision) + 1, 10**precision - 1), st.integers(-10_000, 10_000))
    )
    units = max(min(units, 10**precision - 1), 1 - 10**precision)
    with decimal.localcontext(prec=80):
        number = Decimal(units).scaleb(-scale)
        table = relation(("n", "numeric", numeric_modifier(precision, scale)))
        assert values([copied([sent(number)])], table) == [[number]]


@pytest.mark.parametrize(
    "number", ["NaN", "1000", "-1000", "99999999999999999999999999999999999999", "0.001", "1e-9", "999.999"]
)
def test_a_numeric_that_its_precision_cannot_hold_is_not_taken_for_another(number: str) -> None:
    table = relation(("a", "int4"), ("n", "numeric", numeric_modifier(5, 2)))
    with pytest.raises(ValuesDoNotFit) as caught:
        decode([copied([b"\0\0\0\1", sent(Decimal(number))])], table)
    assert caught.value.columns == {1}


def test_numerics_of_a_few_bytes_whose_texts_are_giant_are_asked_for_as_text() -> None:
    giant = copied([struct.pack(">hhhhh", 1, 10_000, 0, 0, 1)])  # 1e40000
    with pytest.raises(ValuesDoNotFit) as caught:
        decode([giant] * 65_536, relation(("n", "numeric")))
    assert caught.value.columns == {0}
    assert values([giant], relation(("n", "numeric"))) == [["1" + "0" * 40_000]]


def test_values_beyond_a_native_type_name_all_their_columns_and_are_text_when_they_come_as_text() -> None:
    table = relation(("d", "date"), ("k", "int4"), ("t", "timestamptz"))
    rows = [
        [b"\x7f\xff\xff\xff", b"\0\0\0\1", b"\0" * 8],  # infinity
        [b"\0" * 4, b"\0\0\0\2", b"\x80" + b"\0" * 7],  # -infinity
    ]
    with pytest.raises(ValuesDoNotFit) as caught:
        decode([copied(row) for row in rows], table)
    assert caught.value.columns == {0, 2}
    again = [["infinity", b"\0\0\0\1", "2000-01-01 00:00:00+00"], ["2000-01-01", b"\0\0\0\2", "-infinity"]]
    decoded = decode([copied(row) for row in again], table, frozenset({0, 2}))
    assert [column.null_count for column in decoded.columns] == [1, 0, 1]
    assert decoded.columns[1].to_pylist() == [1, 2]
    assert decoded.text.to_pylist() == [[("d", "infinity")], [("t", "-infinity")]]


@pytest.mark.parametrize(("type_name", "unit"), [("date", 1), ("timestamp", 86_400_000_000)])
def test_the_first_and_the_last_day_that_are_held(type_name: str, unit: int) -> None:
    table = relation(("d", type_name))
    form = ">i" if unit == 1 else ">q"
    first, last = -730_119 * unit, 2_921_940 * unit - 1  # 0001-01-01, and before 10000-01-01
    got = values([copied([struct.pack(form, first)]), copied([struct.pack(form, last)])], table)
    assert [str(row[0])[:10] for row in got] == ["0001-01-01", "9999-12-31"]
    for beyond in (first - 1, last + 1):
        with pytest.raises(ValuesDoNotFit):
            decode([copied([struct.pack(form, beyond)])], table)


def test_types_of_other_forms_are_asked_for_as_text() -> None:
    assert {name for i, name in enumerate(OIDS) if i in text_columns(EVERY)} == {
        '"char"', "interval", *(name for name in OIDS if name.endswith("[]"))
    }  # fmt: skip
    table = relation(("n", "int4[]"), ("v", "interval"))
    assert values([copied(["{1,NULL}", "1 day"])], table) == [[[1, None], "1 day"]]


# -- what no server writes -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [copied(["a", "b"]), copied([]), copied(["a", "b", "c", "d"])])
def test_a_row_with_too_few_or_too_many_columns_is_a_violation(row: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="does not have the 3 columns of"):
        decode([copied(["1", "2", "3"]), row])


@pytest.mark.parametrize(
    "row",
    [
        b"",
        b"\0",
        b"\0\3",
        copied(["a", "b", "c"])[:-1],
        copied(["a", "b", "c"]) + b"x",
        copied(["a", "b", "c"])[:-5],
        b"\0\3" + struct.pack(">i", -2) * 3,
        b"\0\3" + struct.pack(">i", 2147483647) * 3,
    ],
)
def test_bytes_that_copy_does_not_write_are_malformed(row: bytes) -> None:
    with pytest.raises(MalformedMessage, match="row 1 of a block"):
        decode([copied(["1", "2", "3"]), row])


@pytest.mark.parametrize("change", [1, -1, 1 << 30, -100])
def test_lengths_that_do_not_fit_the_payload_are_malformed(change: int) -> None:
    row = copied(["a", "b", "c"])
    for lengths in ([len(row) + change], [len(row), change], [len(row) + change, -change]):
        with pytest.raises(ProtocolViolation):
            decode_copied(
                np.frombuffer(row, np.uint8), np.array(lengths, np.int32), THREE, frozenset(), "table t"
            )


SAMPLE = [
    copied([data] * len(OIDS))
    for data in (b"\1", b"\0\1", b"\0\0\0\1", bytes(8), bytes(16), sent(Decimal("1.5")), None)
]


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.sampled_from(SAMPLE), max_size=3), st.binary(max_size=60), st.integers(0), st.integers(0, 20)
)
def test_whatever_the_bytes_are_there_is_a_result_or_an_error_of_ours(
    rows: list[bytes], noise: bytes, place: int, cut: int
) -> None:
    for i, row in enumerate(rows):
        place %= len(row)
        rows[i] = row[:place] + noise + row[place + cut :]
    try:
        decoded = decode(rows, EVERY)
    except (XidstreamError, ValuesDoNotFit):
        return
    assert {len(column) for column in decoded.columns} == {len(rows)}


@pytest.mark.parametrize("type_name", [name for i, name in enumerate(OIDS) if i not in text_columns(EVERY)])
@settings(max_examples=60, deadline=None)
@given(data=st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=3), modifier=st.booleans())
def test_whatever_a_values_bytes_are_its_column_is_valid_or_an_error_of_ours(
    type_name: str, data: list[bytes | None], modifier: bool
) -> None:
    table = relation(("v", type_name, numeric_modifier(20, 3) if modifier else -1))
    try:
        decoded = decode([copied([each]) for each in data], table)
    except (PoisonedChange, ValuesDoNotFit):
        return
    decoded.columns[0].validate(full=True)
    assert [v is None for v in decoded.columns[0].to_pylist()] == [v is None for v in data]


def test_a_value_that_cannot_be_decoded_names_table_and_column_and_not_itself() -> None:
    table = relation(("id", "int4"), ("doc", "text"))
    for row in ([b"\0\0\0\1", b"secret\xff"], [b"secret", b"x"]):
        with pytest.raises(PoisonedChange, match=r"table t: public\.t column (id|doc) ") as caught:
            decode([copied([b"\0\0\0\1", b"x"]), copied(row)], table)
        assert "secret" not in f"{caught.value.message} {caught.value.remedy}"
        assert "slot skip" not in caught.value.remedy


def test_a_name_that_clashes_with_a_contract_column_is_told() -> None:
    with pytest.raises(ColumnNameClash, match="_SEQ"):
        decode([copied([b"\0\0\0\1"])], relation(("_SEQ", "int4")))
