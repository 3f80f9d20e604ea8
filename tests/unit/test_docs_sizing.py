"""docs/sizing.md has the figures of docs/performance/results.json, and counts rightly with them."""

from __future__ import annotations

import re

from tests.sizing_table import PAGE, page_with_tables, read_results, tables


def test_the_tables_are_what_was_measured() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page, read_results()) == page, "run `make docs`"


def test_the_examples_follow_from_the_tables() -> None:
    """The page's example: rows a second times CPU seconds per million rows are cores."""
    page = PAGE.read_text(encoding="utf-8")
    summed = [float(n) for n in re.findall(r"\*\*([\d.]+)\*\*", tables(read_results())["cost"])]
    examples = re.findall(
        r"([\d,]+) rows a second (?:in|of) .*?: ([\d,]+) × ([\d.]+) / 1,000,000 = ([\d.]+) cores", page
    )
    assert len(examples) == 2
    for rows, again, cost, cores in examples:
        assert rows == again and float(cost) in summed
        assert abs(int(rows.replace(",", "")) * float(cost) / 1e6 - float(cores)) < 0.01
