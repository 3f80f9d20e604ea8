"""What a DDL message of the stream says, and which generations of a table it ends by itself.

The event triggers of ``slot.ddl_trigger`` write the messages. They are transactional, so each has the commit LSN of its
DDL, and none comes of DDL that was rolled back (but for a subtransaction's that was streamed before its rollback: it
ends a generation too many).

Most DDL is harmless, and a look at the catalog decides whether it is (``generations``). Some of it is decided here,
because it may be gone by the next look, and its traces may pass for something harmless:

- The table was UNLOGGED, or was written anew on its way from or to that. What an unlogged table gets is in no stream.
- Its rows were written anew by ALTER TYPE, perhaps with USING and to the same type.
- It had another name, or another schema: rows came under that name, or were not published.
- It was dropped.

All of these lock the table against readers, so none lies between a snapshot's place and its lock.

Anybody may write a message with our prefix. What cannot be read is left aside, and what can ends a generation at worst.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.pg import Lsn

_PERSISTENCE: Final = 1
_COLUMN: Final = 4
"""AT_REWRITE_ALTER_PERSISTENCE and AT_REWRITE_COLUMN_REWRITE of ``event_trigger.h``."""
_UNLOGGED: Final = (
    "the table was set to UNLOGGED or LOGGED, and what an unlogged table gets is not in the stream"
)


@dataclass(frozen=True)
class AlteredTable:
    """``above``: itself and its partitioned ancestors; empty where it is neither partition nor partitioned.
    ``rewritten``: the reasons of ``table_rewrite``, 0 for none. ``is_unlogged``: behind the command. ``name``:
    ``schema.table`` behind the command, None where the message is not about that."""

    relid: int
    above: tuple[int, ...] = ()
    rewritten: int = 0
    is_unlogged: bool = False
    name: str | None = None
    is_dropped: bool = False

    def reason(self, relid: int, name: str) -> str | None:
        """Why a generation of the published table ``name`` ends here; None if this does not say that it does."""
        if relid != self.relid and relid not in self.above:
            return None
        if self.is_unlogged or self.rewritten & _PERSISTENCE:
            return _UNLOGGED
        if self.rewritten & _COLUMN:
            return "the type of a column was altered, and its rows were written anew"
        if relid == self.relid and self.is_dropped:
            return "the table was dropped"
        if relid == self.relid and self.name not in (None, name):
            return f"the table was renamed to {self.name}"
        return None


@dataclass(frozen=True)
class Ddl:
    """``mark``: of the triggers that wrote it (``slot.ddl_trigger``); None where it has none."""

    commit_lsn: Lsn
    tag: str
    tables: tuple[AlteredTable, ...] = ()
    mark: int | None = None

    def reason(self, relid: int, name: str) -> str | None:
        """See ``AlteredTable.reason``."""
        return next((why for table in self.tables if (why := table.reason(relid, name)) is not None), None)


def read_ddl(commit_lsn: int, content: bytes) -> Ddl | None:
    """None for what the event triggers did not write, or a later version of them did."""
    try:
        value = json.loads(content)
        if value["version"] != 1:
            return None
        mark = None if value["mark"] is None else int(value["mark"])
        tables = tuple(_table(each) for each in value["tables"])
        return Ddl(Lsn(commit_lsn), str(value["tag"]), tables, mark)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _table(value: dict[str, Any]) -> AlteredTable:
    return AlteredTable(
        int(value["relid"]),
        tuple(int(relid) for relid in value.get("above", ())),
        int(value.get("rewritten", 0)),
        value.get("persistence") == "u",
        f"{value['schema']}.{value['table']}" if "table" in value else None,
        bool(value.get("dropped", False)),
    )
