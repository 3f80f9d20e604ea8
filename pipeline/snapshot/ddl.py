"""What a DDL message of the stream says, and which generations of a table it ends by itself.

The event triggers of ``postgres.ddl_trigger`` write the messages. They are transactional, so each has the commit LSN of
its DDL, and none comes of DDL that was rolled back (but for a subtransaction's that was streamed before its rollback:
it ends a generation too many).

Most DDL is harmless, and a look at the catalog decides whether it is (``generations``). Some of it is decided here,
because it may be gone by the next look, and its traces may pass for something harmless:

- The table was UNLOGGED, or was written anew on its way from or to that. What an unlogged table gets is in no stream.
- Its rows were written anew by ALTER TYPE, perhaps with USING and to the same type.
- It had another name, or another schema: rows came under that name, or were not published.
- It was dropped.

All of these lock the table against readers, so none lies between a snapshot's place and its lock.

A message also tells up to where an ended generation stands, to the very LSN (``KnownDdl.stands_until``). That needs
more: that whatever ended the generation left a message. So the triggers must have been on all the while, which their
*mark* shows (``Marks``): the same one in a look before the generation was last proven, in the first message after
that, and in the look that comes with the end. And the table must be one of which nothing happens that has no message: a
TRUNCATE that is in no stream, of a partition or where the publication leaves it out, has none.

Rejected: to take what is proven for the newest commit as long as no message came, without a look. A look after it
would still be needed, to know that the triggers were on; and TRUNCATE of a partition fires none.

Anybody may write a message with our prefix. What cannot be read is left aside, and what can ends a generation at worst.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion, ReplicaIdentity

MOST: Final = 1000
_XIDS: Final = 1 << 32
_PERSISTENCE: Final = 1
_COLUMN: Final = 4
"""AT_REWRITE_ALTER_PERSISTENCE and AT_REWRITE_COLUMN_REWRITE of ``event_trigger.h``."""
_UNLOGGED: Final = (
    "the table was set to UNLOGGED or LOGGED, and what an unlogged table gets is not in the stream"
)


@dataclass(frozen=True)
class AlteredTable:
    """``above``: itself and its partitioned ancestors; empty where it is neither partition nor partitioned.
    ``rewritten``: the reasons of ``table_rewrite``, 0 for none. ``is_unlogged``: after the command. ``name``:
    ``schema.table`` after the command, None where the message is not about that."""

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
    """``mark``: of the triggers that wrote it (``postgres.ddl_trigger``); None where it has none. ``xid``: of its
    transaction."""

    commit_lsn: Lsn
    tag: str
    tables: tuple[AlteredTable, ...] = ()
    mark: int | None = None
    xid: Xid | None = None

    @property
    def relids(self) -> frozenset[int]:
        return frozenset(relid for table in self.tables for relid in (table.relid, *table.above))

    def reason(self, relid: int, name: str) -> str | None:
        """See ``AlteredTable.reason``."""
        return next((why for table in self.tables if (why := table.reason(relid, name)) is not None), None)


@dataclass(frozen=True)
class Witnessed:
    """The triggers with this ``mark`` have been on since before the WAL ended at ``since``, and still are."""

    mark: int
    since: Lsn


class Marks:
    """What looks at the catalog have found of the triggers; one for a run."""

    def __init__(self) -> None:
        self._mark: int | None = None
        self._since: Lsn | None = None

    def note(self, mark: int | None, lsn: Lsn) -> Witnessed | None:
        """Note a look for which the WAL ended at ``lsn``, and which then found ``mark``. It proves something if an
        earlier look found the same one: what a look finds was there since after its own position."""
        if mark != self._mark:
            self._mark, self._since = mark, None
            return None
        if mark is None:
            return None
        if self._since is None:
            self._since = lsn
        return Witnessed(mark, self._since)


class KnownDdl:
    """The DDL of the stream behind ``begins_at``, as far as the sink has got; the last ``MOST`` of it."""

    def __init__(self, begins_at: Lsn) -> None:
        self._whole_from = begins_at
        self._ddl: deque[Ddl] = deque()

    def __iter__(self) -> Iterator[Ddl]:
        return iter(self._ddl)

    def add(self, ddl: Iterable[Ddl]) -> list[Ddl]:
        """In commit order, whole transactions. Returns what was not known: a batch may come again."""
        last = self._ddl[-1].commit_lsn if self._ddl else self._whole_from
        new = [each for each in ddl if each.commit_lsn > last]
        self._ddl.extend(new)
        while len(self._ddl) > MOST:
            self._whole_from = self._ddl.popleft().commit_lsn
        return new

    def proves(self, lsn: Lsn, snapshot: str | None) -> Lsn:
        """What of ``lsn`` is proven by a look that took ``snapshot`` (``pg_current_snapshot``; None: nobody knows).
        That is up to before DDL that it did not see yet, because its COMMIT still waits for a standby."""
        if snapshot is None:
            return lsn
        _, xmax, open_xids = snapshot.split(":")
        hidden = {int(xid) % _XIDS for xid in open_xids.split(",") if xid}
        for each in self._ddl:
            # The stream's xids have 32 bits, and go round.
            if each.xid is not None and (each.xid in hidden or (each.xid - int(xmax)) % _XIDS < _XIDS // 2):
                return min(lsn, each.commit_lsn.before)
        return lsn

    def stands_until(self, proven: int, witnessed: Witnessed | None) -> int:
        """Up to where a generation that ended stands, if it stood at ``proven`` and nothing happens to its table that
        leaves no message: up to before the first DDL after that."""
        if witnessed is None or proven < max(witnessed.since, self._whole_from):
            return proven
        first = next((each for each in self._ddl if each.commit_lsn > proven), None)
        if first is None or first.mark != witnessed.mark:
            return proven
        return int(first.commit_lsn) - 1

    def altered(
        self, relid: int, since: int, until: int, witnessed: Witnessed | None
    ) -> tuple[Lsn, Lsn] | None:
        """The first and the last DDL of the table after ``since`` and up to ``until``; None where none left a message,
        or where some may have left none."""
        if witnessed is None or since < max(witnessed.since, self._whole_from):
            return None
        between = [each for each in self._ddl if since < each.commit_lsn <= until]
        if any(each.mark != witnessed.mark for each in between):
            return None
        own = [each.commit_lsn for each in between if relid in each.relids]
        return (own[0], own[-1]) if own else None


def read_ddl(commit_lsn: int, content: bytes, xid: int | None = None) -> Ddl | None:
    """``xid``: what the stream says of the message. None for what the event triggers did not write, or a later version
    of them did."""
    try:
        value = json.loads(content)
        if value["version"] != 1:
            return None
        mark = None if value["mark"] is None else int(value["mark"])
        tables = tuple(_table(each) for each in value["tables"])
        return Ddl(Lsn(commit_lsn), str(value["tag"]), tables, mark, None if xid is None else Xid(xid))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _table(value: dict[str, Any]) -> AlteredTable:
    return AlteredTable(
        int(value["relid"]),
        tuple(int(relid) for relid in value.get("above", ())),
        int(value.get("rewritten", 0)),
        value.get("persistence") == "u",
        _name(value) if "table" in value else None,
        bool(value.get("dropped", False)),
    )


def _name(value: dict[str, Any]) -> str:
    """The name as a generation's line has it."""
    schema, table = str(value["schema"]), str(value["table"])
    return RelationVersion(int(value["relid"]), schema, table, ReplicaIdentity.DEFAULT, ()).name
