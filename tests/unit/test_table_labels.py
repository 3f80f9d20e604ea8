"""A table's name as one text: as it always was where nothing can be mistaken, and never that of two tables."""

from __future__ import annotations

from itertools import product

import pytest

from xidstream.pipeline.pg_rules import labelled_table, table_label

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
