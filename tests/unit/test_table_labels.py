"""A table's name as one text: as it always was where nothing can be mistaken, and never that of two tables."""

from __future__ import annotations

from itertools import product

import pytest

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.pg_rules import labelled_table, renamed_columns, table_label
from xidstream.pipeline.settings.config import Config

PARTS = ("a", "b", "A b", "a.b", ".", ".....", '"', '"a"', '"a".b', 'a"', '""', "new\nline", "a.")


def test_a_label_is_one_tables_alone_and_says_which() -> None:
    pairs = list(product(PARTS, PARTS))
    labels = [table_label(*pair) for pair in pairs]
    assert len(set(labels)) == len(pairs) and [labelled_table(label) for label in labels] == pairs


@pytest.mark.parametrize(
    ("schema", "table", "label"),
    [
        ("public", "orders", "public.orders"),
        ("Sales", "Order lines", "Sales.Order lines"),
        ("public", 'we"ird', 'public.we"ird'),
        ("a.b", "c", '"a.b".c'),
        ("a", "b.c", 'a."b.c"'),
        ("public", ".....", 'public."....."'),
        ("public", '"q"', 'public."""q"""'),
    ],
)
def test_only_a_name_that_could_be_mistaken_is_quoted(schema: str, table: str, label: str) -> None:
    assert table_label(schema, table) == label


def test_what_a_person_types_without_quotes_ends_the_schema_at_the_first_dot() -> None:
    assert labelled_table("public.v1.2") == ("public", "v1.2")
    assert [labelled_table(text) for text in ("orders", "", ".", "a.", ".b")] == [None] * 5


def test_columns_that_are_had_under_another_name_are_told_by_table_and_column() -> None:
    entries = (
        "public.orders._xid=source_xid",
        '"a.b".c.x=y=z',
        "public.orders.Total sum=total",
        'a."b.c".d.e=f',
    )
    assert renamed_columns(entries) == {
        ("public", "orders"): {"_xid": "source_xid", "Total sum": "total"},
        ("a.b", "c"): {"x=y": "z"},
        ("a", "b.c"): {"d.e": "f"},
    }
    assert Config.of({"column_names": "public.t.a=b, public.t.A=c"}).column_names == (
        "public.t.a=b",
        "public.t.A=c",
    )
    for wrong in ("orders.a=b", "public.orders.a", "public.orders.a=", "=b"):
        with pytest.raises(ConfigError, match="no column and its new name"):
            Config.of({"column_names": [wrong]})
    with pytest.raises(ConfigError, match="twice"):
        renamed_columns(["public.t.a=b", "public.t.a=c"])
    with pytest.raises(ConfigError, match="string or a list"):
        Config.of({"column_names": [5]})
