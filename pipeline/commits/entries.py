"""The entries of the commit order: what has a place in it, and which steps each may take.

    unit:      WAITING -> READY -> TAKEN -> DONE      (TAKEN -> READY where the sink that took it is lost)
    hold:      WAITING -> DONE
    position:  DONE

A unit with a transaction that cannot be delivered becomes STUCK instead of DONE. An illegal step raises
IllegalTransition, with the entry's story, and changes nothing. ``order`` and ``journal`` keep entries; nobody else
changes one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.commits.parking import ParkedRows
from xidstream.pipeline.errors import IllegalTransition
from xidstream.pipeline.exchange import Sealed, UnitEnd
from xidstream.pipeline.pg import Lsn, Xid


class EntryState(enum.Enum):
    WAITING = "waiting"
    READY = "ready"
    TAKEN = "taken"
    DONE = "done"
    STUCK = "stuck"


class EntryKind(enum.Enum):
    UNIT = "unit"
    HOLD = "hold"
    POSITION = "position"


_LEGAL: Final[dict[tuple[EntryKind, EntryState], frozenset[EntryState]]] = {
    (EntryKind.UNIT, EntryState.WAITING): frozenset({EntryState.READY}),
    (EntryKind.UNIT, EntryState.READY): frozenset({EntryState.TAKEN, EntryState.STUCK}),
    (EntryKind.UNIT, EntryState.TAKEN): frozenset({EntryState.DONE, EntryState.STUCK, EntryState.READY}),
    (EntryKind.HOLD, EntryState.WAITING): frozenset({EntryState.DONE}),
}

NO_TICKET: Final = -1
"""The ticket of an entry that was loaded from the journal. Its own ticket belonged to an earlier epoch."""


@dataclass(eq=False)
class Entry:
    """``content`` is None before a unit is ready, after it is done, and while the journal alone has it.

    ``ready_s``: when it became ready, on the caller's clock. ``parked_rows``: its rows of parked tables. ``message`` is
    what the server sent of it, and ``xid`` the transaction's; None where it may be several.
    """

    ticket: int
    kind: EntryKind
    end: UnitEnd
    state: EntryState = EntryState.WAITING
    content: Sealed | None = None
    batch_number: int | None = None
    ready_s: float = 0.0
    parked_rows: tuple[ParkedRows, ...] = ()
    message: str = "COMMIT"
    xid: Xid | None = None

    def __repr__(self) -> str:
        return (
            f"<{self.kind.value} {self.ticket}: {self.state.value}, commits {self.end.first_commit_lsn} to "
            f"{self.last_commit_lsn}, end {self.end_lsn}, batch {self.batch_number}>"
        )

    @property
    def last_commit_lsn(self) -> Lsn:
        return self.end.last_commit_lsn

    @property
    def end_lsn(self) -> Lsn:
        return self.end.end_lsn

    @property
    def is_stuck_behind(self) -> bool:
        """Whether its content ends before the unit does: nothing after it is ever released."""
        return self.content is not None and self.content.undeliverable is not None

    @property
    def memory_bytes(self) -> int:
        """The bytes of its content that is not in the storage."""
        return 0 if self.content is None else self.content.memory_bytes

    def move(self, state: EntryState) -> None:
        if state not in _LEGAL.get((self.kind, self.state), frozenset()):
            raise IllegalTransition(f"{self!r} cannot become {state.value}")
        self.state = state


@dataclass(frozen=True)
class Head:
    """The first entry that is not done, as the account tells it.

    ``state`` is that of ``EntryState``, or *journaled*: the unit is in the storage alone, and nobody has asked for it.
    ``message`` says *journaled* as long as it is in the storage alone.
    """

    ticket: int
    kind: EntryKind
    state: str
    message: str
    xid: Xid | None
    first_commit_lsn: Lsn
    last_commit_lsn: Lsn
    end_lsn: Lsn
    n_transactions: int


JOURNALED: Final = "journaled"


def head_of(entry: Entry) -> Head:
    end = entry.end
    return Head(
        entry.ticket,
        entry.kind,
        entry.state.value,
        entry.message,
        entry.xid,
        end.first_commit_lsn,
        end.last_commit_lsn,
        end.end_lsn,
        end.n_transactions,
    )
