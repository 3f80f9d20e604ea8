"""How many buffers each of several slots may have, so that together they stay within one cap.

Each slot has a floor of its own, which is never taken from it. What the cap leaves above the floors goes to whoever
asks first, and is free again when those buffers have been given back. Nobody waits: a slot that gets fewer buffers than
it asked for lets its transactions share, and asks again.

Rejected: to divide the cap by the number of slots, because a slot with sixteen open transactions could not use what the
others leave idle. Also rejected: fair shares, because buffers would have to be taken away from open transactions.
"""

from __future__ import annotations


class BufferQuota:
    """``maximum``: buffers of all owners. An owner is one life of a slot's reader, with its buffers."""

    def __init__(self, maximum: int, floors: int) -> None:
        """``floors``: the minimums of all slots together, not beyond ``maximum`` (``pipeline.settings.config`` sees to
        it)."""
        self._spare = maximum - floors
        self._extra: dict[str, int] = {}
        self._gone: set[str] = set()

    def want(self, owner: str, minimum: int, n_wanted: int) -> int:
        """How many buffers ``owner`` may have now. ``n_wanted`` includes those that it has, so that none is lent twice.

        If the owner was ended while its question was under way, it gets its floor and no more: nobody would release
        what is beyond it.
        """
        if owner in self._gone:
            return minimum
        others = sum(n for other, n in self._extra.items() if other != owner)
        extra = min(max(n_wanted - minimum, 0), self._spare - others)
        self._extra[owner] = extra
        return minimum + extra

    def release(self, owner: str) -> None:
        """The owner's buffers are gone, and it will not come back under this name."""
        self._extra.pop(owner, None)
        self._gone.add(owner)
