"""docs/deployment.md has the version of each kind of document: who upgrades compares two such tables."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

from xidstream.pipeline import storage
from xidstream.pipeline.storage.envelope import Document

PAGE = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text(encoding="utf-8")


def documents() -> dict[str, int]:
    """Format → version, of all documents of the storage's modules."""
    found: dict[str, int] = {}
    for module in pkgutil.iter_modules(storage.__path__, f"{storage.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Document):
                found[value.format] = value.version
    return found


def test_the_page_has_each_kind_of_document_and_its_version() -> None:
    table = re.findall(r"^\| `(xidstream\.[\w-]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert {name: int(version) for name, version in table} == documents()
    assert len(table) > 5
