"""The tables of docs/metrics.md, made from the table of metrics: ``make docs`` writes them, a test compares them."""

from __future__ import annotations

from pathlib import Path

from tests.settings_table import BEGIN, END
from xidstream.pipeline.account.metric_table import SECTIONS, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def tables() -> str:
    return "\n".join(f"### {title}\n\n{_table(metrics)}" for title, metrics in SECTIONS.items())


def page_with_tables(page: str) -> str:
    """The page with its tables renewed. ValueError where the marks are missing."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def _table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| metric | type | unit | labels | |\n", "| --- | --- | --- | --- | --- |\n"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        text = metric.help.replace("|", "\\|")
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {labels} | {text} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
