"""Changes that cannot be delivered: noted where they are found, judged where their transaction ends.

Blocks are decoded while their transaction is open, and what is open may be rolled back, in part or as a whole. So a
value that cannot be decoded is no error yet. The decoder notes the rows (``BadRows``), the buffer keeps the notes with
the transaction, and only a commit that keeps one of these rows turns it into an error. That error takes the
transaction's place in the order of commits (``exchange.Undeliverable``): all that committed before is delivered and
confirmed first.

``Skips`` names the transactions of ``xidstream slot skip``. All of their rows are dropped where their content would be
released.

Of the rows of one owner only the first is noted, because one is enough to say that the owner cannot be delivered: a
million bad rows cost some bytes for each subtransaction that holds any. Rejected: to raise at once and to read the
transaction again without its rolled-back parts, because the server would have to send it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from xidstream.pipeline.errors import ColumnNameClash, PoisonedChange, XidstreamError
from xidstream.pipeline.pg import Lsn, Xid

Skips = frozenset[tuple[Xid, Lsn]]
"""Top-level xid and commit LSN."""

NO_SKIPS: Skips = frozenset()

_ERRORS: dict[str, type[XidstreamError]] = {e.__name__: e for e in (PoisonedChange, ColumnNameClash)}


@dataclass(frozen=True)
class BadRows:
    """Rows of one table in one block that cannot be delivered, all for one reason: the first row of each owner.

    ``what`` names table and column and never a value. ``owner: uint32[k]`` is a subxid, or in a plain block the index
    of a transaction, ascending; ``lsn: int64[k]`` are the LSNs of the changes. ``is_table``: no row of the table can be
    delivered, so none of the block is decoded; ``n_rows: int64[k]`` is how many.
    """

    relid: int
    table: str
    what: str
    error: type[XidstreamError]
    owner: npt.NDArray[np.uint32]
    lsn: npt.NDArray[np.int64]
    n_rows: npt.NDArray[np.int64]
    is_table: bool = False


@dataclass(frozen=True)
class Poison:
    """The first change of a transaction that cannot be delivered."""

    lsn: Lsn
    what: str
    error: type[XidstreamError] = PoisonedChange

    @property
    def parks_always(self) -> bool:
        """Whether no row of its table can be delivered. Such a table is parked whatever ``on_poison`` says: to end the
        run and to begin it again would help nobody."""
        return self.error is ColumnNameClash

    def of(self, xid: Xid, commit_lsn: Lsn) -> XidstreamError:
        """The error, with the command that gives this transaction up."""
        remedy = self.error("").remedy.replace("XID", str(xid)).replace("LSN", str(commit_lsn))
        facts: dict[str, str | int] = {"xid": int(xid), "lsn": str(self.lsn), "commit_lsn": str(commit_lsn)}
        text = f"xid {xid}, LSN {self.lsn}: {self.what} (commit LSN {commit_lsn})"
        return self.error(text, remedy=remedy, facts=facts)

    def to_json(self) -> dict[str, str]:
        return {"lsn": str(self.lsn), "what": self.what, "error": self.error.__name__}

    @classmethod
    def from_json(cls, value: dict[str, str]) -> Poison:
        """Raises KeyError, TypeError or UsageError for what ``to_json`` never writes."""
        return cls(Lsn.parse(value["lsn"]), value["what"], _ERRORS[value["error"]])


def first_poison(notes: Iterable[BadRows]) -> Poison | None:
    """The first bad row; None where there is none."""
    found: Poison | None = None
    for note in notes:
        if found is None or note.lsn.min() < found.lsn:
            found = Poison(Lsn(int(note.lsn.min())), note.what, note.error)
    return found


def kept_notes(notes: Iterable[BadRows], rolled_back: npt.NDArray[np.uint32]) -> list[BadRows]:
    """What is left of ``notes`` when these owners are gone."""
    kept = []
    for note in notes:
        stays = ~np.isin(note.owner, rolled_back)
        if stays.any():
            kept.append(
                replace(note, owner=note.owner[stays], lsn=note.lsn[stays], n_rows=note.n_rows[stays])
            )
    return kept


def notes_by_table(notes: Iterable[BadRows]) -> dict[int, list[BadRows]]:
    """By relid."""
    found: dict[int, list[BadRows]] = {}
    for note in notes:
        found.setdefault(note.relid, []).append(note)
    return found


def skipped_among(
    skips: Skips, xid: npt.NDArray[np.int64], commit_lsn: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which of the transactions (arrays of one length) are skipped."""
    mask = np.zeros(len(xid), np.bool_)
    for one_xid, one_lsn in skips:
        mask |= (commit_lsn == int(one_lsn)) & (xid == int(one_xid))
    return mask
