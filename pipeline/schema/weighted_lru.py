"""The values that were used last, up to a limit: how much a process keeps of what it can be told again.

A limit on the number of relation versions would not limit their memory, because a table has between one column and
1,600. So each value has a weight, and the sum of the weights is limited.

Two of these agree: given the same calls in the same order, they hold the same keys. The reader relies on it. It keeps
one beside each buffer, which mirrors the buffer's own, and so knows without asking which versions the buffer still has.
For that reason values go in ``shrink`` alone, and not in the middle of a call that still needs them.

Not safe for several threads.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class WeightedLru(Generic[_Key, _Value]):
    """``limit`` is a sum of weights, in the caller's unit; one value may exceed it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[_Key, tuple[_Value, int]] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def __getitem__(self, key: _Key) -> _Value:
        """A remembered value, without using it. Raises KeyError."""
        return self._values[key][0]

    @property
    def weight(self) -> int:
        """The sum over all values."""
        return self._weight

    def use(self, key: _Key) -> _Value | None:
        """The value, which is the one used last from now on; None where it is not remembered."""
        found = self._values.pop(key, None)
        if found is None:
            return None
        self._values[key] = found
        return found[0]

    def add(self, key: _Key, value: _Value, weight: int) -> None:
        """Remember a value that is not there yet, as the one used last. May exceed the limit until ``shrink``."""
        assert key not in self._values, key
        self._values[key] = (value, weight)
        self._weight += weight

    def shrink(self) -> None:
        """Forget those that have not been used for the longest time, until the limit holds."""
        while self._weight > self._limit:
            _, weight = self._values.pop(next(iter(self._values)))
            self._weight -= weight
