"""What a table of the log says of the erasures that it went through: numbers beside its watermarks.

``erased_rows`` writes them, in the commit that takes the rows. Whoever counts rows, or has read rows before, asks for
them: a snapshot that is committed, a stream of changes, a refresh of base tables.
"""

from __future__ import annotations

from typing import Final

UPTO: Final = "erased/upto"
"""The commit LSN up to which rows of some keys were erased."""
ERASURES: Final = "erased/count"
"""How many erasures there were."""


def erased_id(snapshot_lsn: int) -> str:
    """How many rows the snapshot at ``snapshot_lsn`` has lost."""
    return f"erased/{snapshot_lsn}"
