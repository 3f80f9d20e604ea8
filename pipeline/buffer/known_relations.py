"""Which relation versions a buffer still has: in the buffer itself, and as the reader's account of it.

A block names its versions by number, and a call brings those that the buffer does not have. Neither side asks the
other: both give the numbers of each call, in the order of the calls, to a ``KnownRelations``, and so both remember and
forget the same. If a call is lost, the two no longer agree, and the buffer raises for the version that it misses: a
number never means another version, so no row is decoded by a wrong one.

Rejected: to tell a buffer all versions of a scope, because a buffer mostly needs a few of ten thousand; and never to
forget, because 100,000 tables may be made and dropped within one connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import RelationMap
from xidstream.pipeline.relations import RelationVersion, Remembered

REMEMBERED_COLUMNS: Final = 16 << 10
"""Of the versions used last; a column takes about 600 bytes where rows are decoded: 10 MiB."""


class KnownRelations:
    def __init__(self, remembered_columns: int = REMEMBERED_COLUMNS) -> None:
        self._versions: Remembered[int, RelationVersion] = Remembered(remembered_columns)

    def call(
        self, numbers: Iterable[int], brought: Mapping[int, RelationVersion]
    ) -> dict[int, RelationVersion]:
        """Take note of a call whose blocks are of ``numbers``; returns what was not known before it, from ``brought``.

        What the call needs stays until the next one, whatever the limit. Raises ComponentLost for a version that is
        neither known nor brought.
        """
        self._versions.shrink()
        new: dict[int, RelationVersion] = {}
        for number in numbers:
            if self._versions.use(number) is None:
                version = brought.get(number)
                if version is None:
                    raise ComponentLost(
                        f"the call that told a buffer of relation version {number} did not come"
                    )
                self._versions.add(number, version, version.weight)
                new[number] = version
        return new

    def relations(self, numbers: Iterable[int]) -> RelationMap:
        """By relid, the versions of one block of the last call."""
        versions = [self._versions[number] for number in numbers]
        return {version.relid: version for version in versions}
