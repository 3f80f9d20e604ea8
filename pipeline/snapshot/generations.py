"""Scratch: replaced by the helper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xidstream.pipeline.snapshot.tables import PublishedSource


def signature_of(source: PublishedSource) -> dict[str, Any]:
    return {"columns": [[c.name, c.type_oid, c.type_modifier] for c in source.relation.columns]}


def reason_it_ended(then: Mapping[str, Any], now: PublishedSource) -> str | None:
    return None if then == signature_of(now) else "the columns changed"
