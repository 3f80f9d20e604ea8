"""Which catalog the setting ``mirror_catalog`` names: ``glue:DATABASE``, or none where it is empty.

Only the text is judged here, in any process. What the catalog needs (boto3, an address, credentials) is asked for where
it is opened (``pipeline.mirror.glue_catalog``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.errors import ConfigError

GLUE: Final = "glue"
_DATABASE: Final = re.compile(r"[a-z0-9_-]{1,255}")
"""Glue takes more, and turns capitals into small letters. Athena takes these."""


@dataclass(frozen=True)
class CatalogName:
    """``kind`` is ``GLUE``, the only one there is."""

    kind: str
    database: str

    @classmethod
    def parse(cls, text: str) -> CatalogName | None:
        """The catalog that the text names; None for an empty text. Raises ConfigError."""
        if not text:
            return None
        kind, _, database = text.partition(":")
        if kind != GLUE or not _DATABASE.fullmatch(database):
            raise ConfigError(
                f"mirror_catalog: {text!r} names no catalog",
                remedy="give glue:DATABASE, where DATABASE has small letters, digits, _ and -",
            )
        return cls(kind, database)

    def __str__(self) -> str:
        return f"{self.kind}:{self.database}"
