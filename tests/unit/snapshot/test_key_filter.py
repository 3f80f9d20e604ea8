"""Conditions on a table's key, as people write them: read, told again, and brought into one form of each type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.snapshot.key_filter import (
    Comparison,
    KeyFilter,
    bound,
    parse_key_filter,
    ranged_filter,
)

COLUMNS = (
    Column("id", 20, -1, True),
    Column("small", 21, -1, True),
    Column("Day", 1082, -1, True),
    Column("at", 1184, -1, True),
    Column("local", 1114, -1, True),
    Column("price", 1700, (10 << 16 | 2) + 4, True),
    Column("free", 1700, -1, True),
    Column("u", 2950, -1, True),
    Column("code", 1042, 4 + 3, True),
    Column("name", 1043, -1, True),
    Column("flag", 16, -1, True),
    Column("ratio", 701, -1, True),
    Column("mood", 16400, -1, True, "public.mood"),
    Column("domain", 16401, -1, True, "int4"),
    Column("note", 25, -1, False),
)
RELATION = RelationVersion(7, "public", "t", ReplicaIdentity.DEFAULT, COLUMNS)


def values_of(where: str) -> list[tuple[str, ...]]:
    return [each.values for each in bound(parse_key_filter(where), RELATION, RELATION.key)]


@pytest.mark.parametrize(
    ("text", "comparisons"),
    [
        ("id = 1", [("id", "=", ("1",))]),
        ("ID<-5 and id >= '7'", [("id", "<", ("-5",)), ("id", ">=", ("7",))]),
        ("id between 100 AND 200", [("id", ">=", ("100",)), ("id", "<=", ("200",))]),
        (
            "\"Day\" between '2026-01-01' and '2026-01-31' and id in (1,2 , 2)",
            [("Day", ">=", ("2026-01-01",)), ("Day", "<=", ("2026-01-31",)), ("id", "=", ("1", "2"))],
        ),
        ("name = 'it''s' and flag = TRUE", [("name", "=", ("it's",)), ("flag", "=", ("true",))]),
        ('"a ""b""" > 1.50', [('a "b"', ">", ("1.50",))]),
        ("  id\n=\t1  ", [("id", "=", ("1",))]),
    ],
)
def test_conditions_are_read_as_postgresql_reads_them(
    text: str, comparisons: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    assert parse_key_filter(text) == KeyFilter(tuple(Comparison(*each) for each in comparisons))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "at its end"),
        ("id", "at its end"),
        ("id = ", "at its end"),
        ("id = 1 or id = 2", r"'or id = 2' \(character 8\)"),
        ("id = other", r"'other' \(character 6\)"),
        ("id = 1;", r"';' \(character 7\)"),
        ("id in ()", r"'\)' \(character 8\)"),
        ("id in (1, 2", "at its end"),
        ("id between 1 or 2", "'or 2'"),
        ("not id = 1", "'id = 1'"),
        ("lower(id) = 1", r"'\(id\) = 1'"),
        ("id = 'open", '"\'open"'),
        ("id = 1a", "'1a'"),
        ("id = 1 -- x", "'-- x'"),
        ("id::text = 1", "'::text = 1'"),
        ("and = 1", "'and = 1'"),
        ("id = 'a\0b'", "NUL"),
    ],
)
def test_what_is_no_condition_is_told_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=place) as raised:
        parse_key_filter(text)
    assert "IN (…)" in raised.value.remedy


texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
comparisons = st.one_of(
    st.builds(
        Comparison,
        texts.filter(bool),
        st.sampled_from(["<", "<=", ">", ">="]),
        st.tuples(texts | st.integers().map(str)),
    ),
    st.builds(
        Comparison, texts.filter(bool), st.just("="), st.lists(texts, min_size=1, unique=True).map(tuple)
    ),
)


@given(st.lists(comparisons, min_size=1, max_size=4))
def test_a_filter_as_text_is_the_same_filter(found: list[Comparison]) -> None:
    wanted = KeyFilter(tuple(found))
    assert parse_key_filter(str(wanted)) == wanted


@given(st.text(max_size=30))
def test_any_text_is_a_filter_or_is_refused(text: str) -> None:
    try:
        parse_key_filter(text)
    except UsageError:
        pass


@pytest.mark.parametrize(
    ("where", "values"),
    [
        ("id = +007", "7"),
        ("small < -32768", "-32768"),
        ("\"Day\" = '0001-01-01'", "0001-01-01"),
        ("local > '2026-05-04'", "2026-05-04 00:00:00.000000"),
        ("local > '2026-05-04T12:30:01.5'", "2026-05-04 12:30:01.500000"),
        ("at = '2026-05-04 01:00:00+02'", "2026-05-03 23:00:00.000000+00:00"),
        ("at = '2026-05-04 01:00Z'", "2026-05-04 01:00:00.000000+00:00"),
        ("price = 1.5", "1.50"),
        ("price = -0", "0.00"),
        ("u = '0B5CE9B1-0D3F-4C5B-9F0E-6F3F8B1A2C3D'", "0b5ce9b1-0d3f-4c5b-9f0e-6f3f8b1a2c3d"),
        ("code = 'a'", "a  "),
        ("name >= 'Zoë'", "Zoë"),
        ("flag = 'TRUE'", "true"),
        ("domain <= 5", "5"),
    ],
)
def test_a_literal_is_brought_into_the_one_form_of_its_type(where: str, values: str) -> None:
    assert values_of(where) == [(values,)]


def test_equal_values_in_two_spellings_are_one() -> None:
    assert values_of("price in (1, 1.0, 2)") == [("1.00", "2.00")]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("note = 'x'", "column note is not one of the key of table public.t: id, small"),
        ("nothing = 1", "column nothing is not one of the key"),
        ("id = 1.5", "column id of table public.t is none of its type, bigint"),
        ("id = 9223372036854775808", "none of its type"),
        ("small = 32768", "none of its type, smallint"),
        ("\"Day\" = 'yesterday'", "none of its type, date"),
        ("\"Day\" = 'infinity'", "none of its type, date"),
        ("at = '2026-05-04 01:00:00'", "none of its type, timestamp with time zone"),
        ("at = '0001-01-01 00:00:00+02'", "none of its type"),
        ("local = '2026-05-04 01:00:00Z'", "none of its type"),
        ("price = 1.005", r"none of its type, numeric\(10,2\)"),
        ("price = 1e3", "none of its type"),
        ("price = 123456789", "none of its type"),
        ("u = 'x'", "none of its type, uuid"),
        ("code = 'abcd'", "none of its type"),
        ("name = '\ud800'", "none of its type"),
        ("flag = 1", "none of its type, boolean"),
        ("code > 'a'", "no condition but = and IN on column code"),
        ("free = 1", "no condition on column free .*: its type is numeric"),
        ("ratio = 1", "its type is double precision"),
        ("mood = 'x'", r"its type is public\.mood"),
    ],
)
def test_a_column_or_value_that_both_engines_need_not_compare_alike_is_refused(
    where: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        values_of(where)
    assert raised.value.remedy


def test_a_table_without_a_key_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="has no key") as raised:
        bound(parse_key_filter("id = 1"), RELATION, None)
    assert "snapshot request --table public.t" in raised.value.remedy


def test_a_renamed_column_is_named_as_in_postgresql() -> None:
    renamed = RelationVersion(
        7, "public", "t", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True).renamed({"id": "number"}),)
    )
    (found,) = bound(parse_key_filter("id = 1"), renamed, ("number",))
    assert (found.column.name, found.column.source_name) == ("number", "id")
    with pytest.raises(UsageError):
        bound(parse_key_filter("number = 1"), renamed, ("number",))


@pytest.mark.parametrize(
    ("columns", "first", "end", "where"),
    [
        (("id",), ("5",), ("9",), "id >= 5 and id < 9"),
        (("id",), None, ("9",), "id < 9"),
        (("id", "Day"), ("5", "2026-01-01"), ("9", "2026-02-01"), "id >= 5 and id <= 9"),
        (("at",), ("2026-05-04 12:00:00",), None, "at >= '2026-05-04 12:00:00+00:00'"),
        (("name",), ("it's",), None, "name >= 'it''s'"),
        (("id",), None, None, None),
        (("ratio",), ("1.5",), None, None),
        (("code",), ("a  ",), None, None),
        (("at",), ("1 µs from 1970",), None, None),
        (("note",), ("x",), None, None),
    ],
)
def test_the_range_that_a_verification_found_is_told_as_a_filter_where_one_can_say_it(
    columns: tuple[str, ...], first: tuple[str] | None, end: tuple[str] | None, where: str | None
) -> None:
    found = ranged_filter(RELATION, RELATION.key, columns, first, end)
    assert (None if found is None else str(found)) == where
