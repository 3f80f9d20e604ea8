"""The stairs of layers are written in pyproject.toml. CONTRIBUTING.md and the package's header quote them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import xidstream.pipeline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def stair(contract: str) -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (found,) = [c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == contract]
    return [re.sub(r"[()]", "", layer) for layer in found["layers"] if layer != "__main__"]


def quoted(lines: list[str]) -> list[str]:
    """The steps of a list: a room with its job, or several rooms, and their jobs in the lines below."""
    steps = []
    for line in lines:
        if not line.startswith(" "):
            steps.append(line if "|" in line else line.split()[0])
    return steps


@pytest.mark.parametrize(("contract", "index"), [("layers", 0), ("rooms", 1)])
def test_contributing_quotes_the_stair_of_pyproject(contract: str, index: int) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", page[page.index("A *room* is") :], re.M | re.S)
    assert quoted(blocks[index].splitlines()) == stair(contract)


def test_the_header_of_pipeline_quotes_the_stair_of_pyproject() -> None:
    text = xidstream.pipeline.__doc__ or ""
    lines = [line[4:] for line in text[text.index("::") :].splitlines()[1:] if line.strip()]
    assert quoted(lines) == stair("layers")
