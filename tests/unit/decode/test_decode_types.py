"""What each type's text becomes: native values, what stays text, what is poison."""

from __future__ import annotations

import datetime
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.decode.builder import Value, block, insert, numeric_modifier, relation
from xidstream.pipeline.decode import decode_transaction_block
from xidstream.pipeline.errors import PoisonedChange
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.poison import first_poison

UTC = datetime.timezone.utc


def decode(type_: str, values: list[Value], modifier: int = -1) -> tuple[list[Any], list[str | None]]:
    """The decoded column, and each value's entry in ``text``. Raises what its commit would."""
    table = relation(("c", type_, modifier))
    messages = [insert([value]) for value in values]
    decoded = decode_transaction_block(*block(*messages), {5: table}, streamed=False, xid=1, first_ordinal=0)
    if not values:
        return [], []
    if (poison := first_poison(decoded.notes)) is not None:
        raise poison.of(Xid(1), Lsn(2))
    batch = decoded.tables[0].batch
    batch.validate(full=True)
    texts = [dict(each)["c"] if each is not None else None for each in batch.column(4).to_pylist()]
    return batch.column(5).to_pylist(), texts


def native(type_: str, values: list[Value], modifier: int = -1) -> list[Any]:
    decoded, texts = decode(type_, values, modifier)
    assert texts == [None] * len(values)
    return decoded


def kept_as_text(type_: str, values: list[str], modifier: int = -1) -> None:
    """Each value is null in its column and itself in ``text``, among native neighbours and nulls."""
    decoded, texts = decode(type_, [None, *values, None], modifier)
    assert decoded == [None] * (len(values) + 2)
    assert texts == [None, *values, None]


# -- scalars -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type_", "bits"), [("int2", 16), ("int4", 32), ("int8", 64)])
def test_integers_hold_their_whole_range(type_: str, bits: int) -> None:
    numbers = [0, 7, -7, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), None]
    assert native(type_, [None if n is None else str(n) for n in numbers]) == numbers


def test_oid_is_unsigned_in_a_long() -> None:
    assert native("oid", ["0", "4294967295"]) == [0, 2**32 - 1]


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        *(("int4", t) for t in (
            "abc", "", "-", "+1", "1 ", " 1", "1.0", "0x1", "2147483648", "-2147483649", "٣")),
        *(("int2", t) for t in ("32768", "-32769")),
        *(("int8", t) for t in (
            "9223372036854775808", "-9223372036854775809", "99999999999999999999", "1e3")),
        *(("bool", t) for t in ("true", "", "T", "1")),
        *(("float8", t) for t in ("", "x", "1.5x", "--1", "\u00e9")),
        *(("bytea", t) for t in ("", "\\x0", "\\x0g", "abcd", "\\y00", "\\")),
        *(("date", t) for t in (
            "", "2024-02-30", "2023-02-29", "1900-02-29", "2024-13-01", "2024-00-10", "0000-01-01",
            "2024-01-00", "24-01-01", "2024-01-01 ", "2024-01-01 BCE", "2024/01/01", "today!!!",
            "infinity BC", "12345678-01-01", "2024-01-01 00:00:00")),
        *(("timestamp", t) for t in (
            "2024-01-01", "2024-01-01 24:00:00", "2024-01-01 00:60:00", "2024-01-01 00:00:60",
            "2024-01-01 00:00:00.", "2024-01-01 00:00:00.1234567", "2024-01-01T00:00:00",
            "2024-01-01 00:00:00+00", "2024-01-01 0:00:00")),
        *(("timestamptz", t) for t in (
            "2024-01-01 00:00:00", "2024-01-01 00:00:00+0", "2024-01-01 00:00:00+00:", "2024-01-01 00:00:00Z",
            "2024-01-01 00:00:00+00:00:00:00")),
        *(("int4[]", t) for t in (
            "", "{", "}", "{1", "{1,}", "{,1}", "{1}}", "{1} ", "{1,,2}", "1,2", '{"1}', "{a}", '{"1\\',
            '{"1"2}', "{\\1}", "{}{}", "{1}2")),
        *(("text[]", t) for t in ('{"a"b}', '{"a', '{a,"')),
    ],
)  # fmt: skip
def test_malformed_value_is_poison_and_is_not_quoted(type_: str, text: str) -> None:
    with pytest.raises(PoisonedChange) as caught:
        decode(type_, [None, text])
    assert "xid 1, LSN 1/AB1: public.t column c" in caught.value.message
    if len(text) > 4:
        assert text not in str(caught.value)
    # Nor does a cause that a traceback prints quote it.
    assert caught.value.__context__ is None


@given(st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), max_size=40))
def test_int8_round_trip(numbers: list[int | None]) -> None:
    assert native("int8", [None if n is None else str(n) for n in numbers]) == numbers


@pytest.mark.parametrize("n", [1, 7, 8, 9, 64, 65])
def test_bools_and_nulls_at_bitmap_borders(n: int) -> None:
    texts: list[Value] = [("t", "f", None)[i % 3] for i in range(n)]
    assert native("bool", texts) == [(True, False, None)[i % 3] for i in range(n)]


def test_floats_hold_nan_and_infinities_natively() -> None:
    decoded = native(
        "float8", ["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e+308", None]
    )
    assert math.isnan(decoded[0])
    assert decoded[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, decoded[3]) == -1
    assert decoded[4:] == [5e-324, 1.7976931348623157e308, None]
    assert native("float4", ["1.1", "3.4028235e+38", "1e-45"]) == [
        struct.unpack("f", struct.pack("f", x))[0] for x in (1.1, 3.4028235e38, 1e-45)
    ]


@given(st.lists(st.floats(allow_nan=False), max_size=20))
def test_float8_round_trip(numbers: list[float]) -> None:
    texts = [repr(n).replace("inf", "Infinity") for n in numbers]
    assert list(map(repr, native("float8", list(texts)))) == list(map(repr, numbers))


def test_first_malformed_float_among_many_is_located() -> None:
    values: list[Value] = [str(i / 7) for i in range(1000)]
    values[777] = "seven"
    with pytest.raises(PoisonedChange, match=f"LSN 1/{0xAB0 + 777:X}:"):
        decode("float8", values)


@st.composite
def _decimals(draw: st.DrawFn) -> tuple[int, int, list[Decimal]]:
    precision = draw(st.integers(1, 38))
    scale = draw(st.integers(0, precision))
    unscaled = draw(st.lists(st.integers(-(10**precision) + 1, 10**precision - 1), min_size=1, max_size=10))
    return precision, scale, [Decimal((n < 0, tuple(map(int, str(abs(n)))), -scale)) for n in unscaled]


@given(_decimals())
def test_numeric_round_trip_at_every_precision_and_scale(case: tuple[int, int, list[Decimal]]) -> None:
    precision, scale, numbers = case
    texts: list[Value] = [f"{n:f}" for n in numbers]
    assert native("numeric", texts, numeric_modifier(precision, scale)) == numbers


@given(_decimals())
def test_numeric_with_trailing_zeros_left_out_is_the_same_number(
    case: tuple[int, int, list[Decimal]],
) -> None:
    precision, scale, numbers = case
    texts: list[Value] = [
        (t.rstrip("0").rstrip(".") or "0") if "." in (t := f"{n:f}") else t for n in numbers
    ]
    texts = ["0" if t == "-" else t for t in texts]
    assert native("numeric", texts, numeric_modifier(precision, scale)) == numbers


def test_numeric_beyond_its_precision_stays_text() -> None:
    kept_as_text(
        "numeric", ["NaN", "Infinity", "-Infinity", "1000.00", "0.001", "9" * 60], numeric_modifier(5, 2)
    )
    kept_as_text("numeric", ["1" + "0" * 38, "9" * 39, "-" + "9" * 40], numeric_modifier(38, 0))


@pytest.mark.parametrize("text", ["", "-", ".", "1e5", "1.2.3", "1,5", "nan", "abc"])
def test_numeric_malformed_is_poison(text: str) -> None:
    with pytest.raises(PoisonedChange):
        decode("numeric", [text], numeric_modifier(10, 2))


def test_numeric_without_precision_is_its_text() -> None:
    assert native("numeric", ["1.500", "NaN"]) == ["1.500", "NaN"]


def test_dates_from_year_1_to_9999_are_native() -> None:
    days = [
        datetime.date(1, 1, 1),
        datetime.date(9999, 12, 31),
        datetime.date(2000, 2, 29),
        datetime.date(1970, 1, 1),
    ]
    assert native("date", [d.isoformat() for d in days]) == days


@given(st.lists(st.dates(), max_size=20))
def test_date_round_trip(days: list[datetime.date]) -> None:
    assert native("date", [d.isoformat() for d in days]) == days


def test_dates_outside_stay_text() -> None:
    kept_as_text(
        "date",
        [
            "infinity",
            "-infinity",
            "4714-11-24 BC",
            "0001-12-31 BC",
            "0001-02-29 BC",
            "10000-01-01",
            "5874897-12-31",
        ],
    )


@given(st.lists(st.datetimes(), max_size=20))
def test_timestamp_round_trip_with_postgresqls_shortened_fractions(moments: list[datetime.datetime]) -> None:
    full = [moment.isoformat(" ") for moment in moments]
    texts = [text.rstrip("0") if "." in text else text for text in full]
    assert native("timestamp", list(texts)) == moments
    zoned = [moment.replace(tzinfo=UTC) for moment in moments]
    assert native("timestamptz", [f"{text}+00" for text in texts]) == zoned


def test_timestamps_outside_stay_text() -> None:
    values = ["infinity", "-infinity", "4714-11-24 00:00:00 BC", "294276-12-31 23:59:59.999999"]
    kept_as_text("timestamp", values)
    kept_as_text(
        "timestamptz",
        ["infinity", "0001-01-01 00:00:00+00 BC", "10000-01-01 00:00:00+00", "0001-01-01 00:00:00+01",
         "9999-12-31 23:59:59-00:00:01"],
    )  # fmt: skip


def test_timestamptz_with_offsets_of_other_zones_is_the_same_instant() -> None:
    texts: list[Value] = [
        "2024-01-01 00:00:00+05:30",
        "2024-01-01 00:00:00-08",
        "1890-01-01 00:00:00+00:53:28",
    ]
    assert native("timestamptz", texts) == [
        datetime.datetime(2023, 12, 31, 18, 30, tzinfo=UTC),
        datetime.datetime(2024, 1, 1, 8, tzinfo=UTC),
        datetime.datetime(1889, 12, 31, 23, 6, 32, tzinfo=UTC),
    ]


def test_bytea_hex_of_both_cases() -> None:
    every = bytes(range(256))
    assert native("bytea", ["\\x", "\\x" + every.hex(), "\\xABcd", None]) == [b"", every, b"\xab\xcd", None]


@pytest.mark.parametrize(
    "type_", ['"char"', "name", "bpchar", "varchar", "json", "jsonb", "uuid", "interval"]
)
def test_text_family_is_verbatim(type_: str) -> None:
    values: list[Value] = ["", " padded ", "NULL", "ünïcødé 🐘", "{a}", None]
    assert native(type_, values) == values


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"ok\x80", b"\xe2\x82"]
)
def test_invalid_utf8_is_poison_at_its_row(bad: bytes) -> None:
    with pytest.raises(
        PoisonedChange, match=r"LSN 1/AB3: public\.t column c has a value that is not valid UTF-8"
    ):
        decode("text", ["ä", None, "fine", bad, "more", bad])


def test_characters_split_over_two_values_are_not_valid() -> None:
    # After each other in the output buffer they would be one valid character.
    with pytest.raises(PoisonedChange, match="UTF-8"):
        decode("text", [b"\xc3", b"\xa4"])


# -- arrays --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        ("int4[]", "{}", []),
        ("int4[]", "{1,NULL,-3}", [1, None, -3]),
        ("int2[]", "{NULL}", [None]),
        ("int8[]", "{9223372036854775807}", [2**63 - 1]),
        ("bool[]", "{t,f,NULL}", [True, False, None]),
        ("float8[]", "{1.5,-Infinity}", [1.5, -math.inf]),
        ("date[]", "{2024-02-29,NULL}", [datetime.date(2024, 2, 29), None]),
        ("timestamp[]", '{"2024-01-01 00:00:00.5"}', [datetime.datetime(2024, 1, 1, 0, 0, 0, 500_000)]),
        ("timestamptz[]", '{"2024-01-01 00:00:00+00"}', [datetime.datetime(2024, 1, 1, tzinfo=UTC)]),
        ("bytea[]", '{"\\\\x00ff","\\\\x",NULL}', [b"\0\xff", b"", None]),
        ("text[]", '{1,2,NULL,"a \\"b\\"",""}', ["1", "2", None, 'a "b"', ""]),
        ("text[]", '{"NULL","null","{}",",","\\\\","é"," "}', ["NULL", "null", "{}", ",", "\\", "é", " "]),
        ("text[]", "{a b}", ["a b"]),
        ("uuid[]", "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    ],
)
def test_one_dimensional_arrays(type_: str, text: str, value: list[Any]) -> None:
    decoded = native(type_, [None, text, "{}", text])
    assert decoded == [None, value, [], value]


def test_numeric_array_uses_the_modifier() -> None:
    assert native("numeric[]", ["{1.50,NULL}"], numeric_modifier(10, 2)) == [[Decimal("1.50"), None]]


def _quoted(element: str | None) -> str:
    if element is None:
        return "NULL"
    return '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'


_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), _TEXTS), max_size=5)), max_size=10))
def test_text_array_round_trip(arrays: list[list[str | None] | None]) -> None:
    texts: list[Value] = [None if a is None else "{" + ",".join(map(_quoted, a)) + "}" for a in arrays]
    assert native("text[]", texts) == arrays


def test_arrays_that_a_list_cannot_hold_stay_text() -> None:
    kept_as_text("int4[]", ["{{1,2},{3,4}}", "[0:1]={1,2}", "[1:1][2:3]={{1,2}}", "{{NULL}}"])


def test_array_with_an_element_that_its_type_cannot_hold_is_text_as_a_whole() -> None:
    good = [datetime.date(2024, 1, 1)]
    decoded, texts = decode(
        "date[]",
        [
            "{2024-01-01}",
            "{2024-01-01,infinity}",
            None,
            "{}",
            "{{2024-01-01}}",
            "{infinity,-infinity}",
            "{2024-01-01}",
        ],
    )
    assert decoded == [good, None, None, [], None, None, good]
    assert texts == [
        None,
        "{2024-01-01,infinity}",
        None,
        None,
        "{{2024-01-01}}",
        "{infinity,-infinity}",
        None,
    ]
    kept_as_text("numeric[]", ["{1.00,NaN}"], numeric_modifier(10, 2))


def test_malformed_element_is_poison_at_its_arrays_row() -> None:
    with pytest.raises(PoisonedChange, match="LSN 1/AB2:"):
        decode("int4[]", ["{1,2}", "{}", "{3,x}", "{4}"])


def test_array_element_that_is_not_utf8_is_poison_natively_and_as_text() -> None:
    for bad in (b"{a,\xff}", b"{{\xff}}"):
        with pytest.raises(PoisonedChange, match=r"LSN 1/AB1: .* not valid UTF-8"):
            decode("text[]", ["{a}", bad])


# -- the two columns of exceptions ---------------------------------------------------------------------


def test_several_exceptions_of_one_row_are_in_wire_order() -> None:
    table = relation(("z", "date"), ("a", "timestamp"), ("m", "int4[]"))
    messages = [
        insert(["2024-01-01", "infinity", "{1}"]),
        insert(["infinity", "2024-01-01 00:00:00", "{{1}}"]),
        insert(["infinity", "infinity", "[2:2]={1}"]),
    ]
    decoded = decode_transaction_block(*block(*messages), {5: table}, streamed=False, xid=1, first_ordinal=0)
    batch = decoded.tables[0].batch
    batch.validate(full=True)
    assert batch.column(4).type == pa.map_(pa.string(), pa.string())
    assert batch.column(4).to_pylist() == [
        [("a", "infinity")],
        [("z", "infinity"), ("m", "{{1}}")],
        [("z", "infinity"), ("a", "infinity"), ("m", "[2:2]={1}")],
    ]
