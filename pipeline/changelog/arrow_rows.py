"""Rows of a table in Arrow, as small folds and refreshes of base tables have them: their extra columns, and keys.

Plain pyarrow. Called by ``small_fold``, and by most modules of ``pipeline.mirror``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.types as pt

from xidstream.pipeline.schema.rows import CHANGE_TYPES, DELETE, UPDATE_PREIMAGE

CHANGE: Final = "_change_type"
"""The column that says what the last word on a row's key is."""
TAKE_AWAY: Final = (CHANGE_TYPES[DELETE], CHANGE_TYPES[UPDATE_PREIMAGE])
"""With one of these as the last word on it, a key has no row."""
TEXT: Final = "_text"


def is_comparable(key: Iterable[str], types: Mapping[str, pa.DataType]) -> bool:
    """Whether Arrow's equality of such keys is PostgreSQL's."""
    return not any(pt.is_floating(types[name]) or pt.is_nested(types[name]) for name in key)
