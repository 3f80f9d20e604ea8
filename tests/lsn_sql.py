"""LSNs in both forms, and the formulas of docs/python.md that turn one into the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

NUMBERS: Final = (0, 23803720, 1 << 32, (1 << 63) - 1)
TEXTS: Final = ("0/0", "0/16B3748", "1/0", "7FFFFFFF/FFFFFFFF")


def formulas(dialect: str) -> tuple[str, str]:
    """A query over ``numbers(lsn)`` that gives texts, and one over ``texts(text)`` that gives numbers."""
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    to_text, to_number = re.findall(rf"^<!-- {dialect} -->\n```sql\n(.*?)^```", page, re.S | re.M)
    return to_text, to_number
