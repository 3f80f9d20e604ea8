"""What R and Y messages have said within one scope: an open stream's own, or that of all plain transactions.

Plain data of ``RelationBook``, which alone reads and writes it. It stands by itself because an open stream has its
scope with it (``PendingMessages``), and the book has the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RelationScope:
    """A relation is a head, its oid and name, and a tail, which is all that tables may have in common. Two
    dictionaries take less than one of pairs."""

    heads: dict[int, bytes] = field(default_factory=dict)
    """The head of each relation, by relid."""
    tails: dict[int, bytes] = field(default_factory=dict)
    """The tail of each relation, by relid."""
    arrivals: dict[int, int] = field(default_factory=dict)
    """The number of the R that declared each relation, by relid: of two, the greater came later."""
    type_names: dict[int, str] = field(default_factory=dict)
    """What Y messages said since the last R: the type's name, by oid."""
