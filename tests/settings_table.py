"""The table of all settings in docs/settings.md, made from ``Config``: ``make docs`` writes it, a test compares it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.times import time_text

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
BEGIN, END = "<!-- made by `make docs` -->\n", "<!-- end -->\n"


def table() -> str:
    lines = ["| setting | default | |\n", "| --- | --- | --- |\n"]
    for f in dataclasses.fields(Config):
        text = str(f.metadata["help"]).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{f.name}` | {_default(f)} | {text} |\n")
    return "".join(lines)


def page_with_table(page: str) -> str:
    """The page with its table renewed. ValueError where the marks are missing."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _default(f: dataclasses.Field[object]) -> str:
    if f.default in ("", (), None) or f.default is dataclasses.MISSING:
        return ""
    if isinstance(f.default, bool):
        return "`true`" if f.default else "`false`"
    if f.metadata.get("size"):
        return f"`{int(str(f.default)) >> 20}MB`"
    if f.metadata.get("time"):
        return f"`{time_text(float(str(f.default)), f.name)}`"
    return f"`{f.default}`"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
