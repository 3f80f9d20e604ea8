"""The tables of docs/sizing.md, made from results.json: ``make docs`` writes them, a test compares them.

So the page has no figure of its own that was not measured, and ``make bench`` does not leave it behind.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, Final

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RESULTS = DOCS / "sizing.md", DOCS / "performance" / "results.json"
END: Final = "<!-- end -->\n"
_CASES: Final = {
    "large": "one of 2,000,000 rows",
    "small_1000": "of 1,000 rows",
    "small_10": "of 10 rows",
    "small_1": "of 1 row",
}
_PARTS: Final = {
    "reader": "slot reader",
    "buffers": "xid buffers",
    "sequencer": "commit sequencer",
    "ray": "Ray itself",
    "driver": "Spark driver's Python",
    "spark": "Spark, with an action on every row",
}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """By the name in the page's marks."""
    drain = results["drain"]
    return {
        "cost": _table(
            ["CPU s per million rows, in transactions", *_CASES.values()],
            [
                [title, *(f"{_cost(drain, case, part):.2f}" for case in _CASES)]
                for part, title in _PARTS.items()
            ]
            + [["**all without Spark**", *(f"**{_sum(drain, case):.2f}**" for case in _CASES)]],
        ),
        "limit": _table(
            ["rows a second, in transactions", *_CASES.values()],
            [
                ["to a function", *(f"{_rate(drain, case, 'handler'):,.0f}" for case in _CASES)],
                ["to an action on every row", *(f"{_rate(drain, case, 'spark'):,.0f}" for case in _CASES)],
            ],
        ),
        "stored": _table(
            ["rows of the transaction", "bytes in storage for each row"],
            [
                [f"{int(rows):,}", f"{one['stored_bytes_per_row']['median']:.0f}"]
                for rows, one in results["delta"]["plain"].items()
                if one["stored_bytes_per_row"]["median"]
            ],
        ),
    }


def page_with_tables(page: str, results: dict[str, Any]) -> str:
    """The page with its tables renewed. ValueError where the marks are missing."""
    for name, table in tables(results).items():
        begin = f"<!-- {name}: made by `make docs` -->\n"
        before, rest = page.split(begin)
        _, after = rest.split(END, 1)
        page = f"{before}{begin}{table}{END}{after}"
    return page


def _cost(drain: Any, case: str, part: str) -> float:
    return float(statistics.median(one["cpu_s_per_million_rows"][part] for one in drain[case]["cost"]))


def _sum(drain: Any, case: str) -> float:
    return sum(_cost(drain, case, part) for part in _PARTS if part != "spark")


def _rate(drain: Any, case: str, to: str) -> float:
    """The large case calls the way to the handler by what it leaves: segments."""
    rates = drain[case]["rows_per_s"]
    return float(rates["segments" if case == "large" and to == "handler" else to])


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "".join(
        f"| {' | '.join(line)} |\n" for line in [head, ["---"] + ["--:"] * (len(head) - 1), *lines]
    )


def read_results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")
