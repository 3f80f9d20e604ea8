"""The relation versions that a buffer still has: one cache is in the buffer itself, its twin in the reader.

A block names its versions by number, and a call brings those that the buffer does not have. Neither side asks the
other. Both give the numbers of each call, in the order of the calls, to a ``RelationCache``, and so both remember and
forget the same versions. If a call is lost, the two no longer agree, and the buffer raises an error for the version
that it lacks. A number never means another version, so no row is decoded with a wrong one.

Rejected: to tell a buffer all versions of a scope, because it mostly needs a few of ten thousand. Also rejected: never
to forget, because 100,000 tables may be created and dropped within one connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import RelationMap
from xidstream.pipeline.schema import RelationVersion, WeightedLru

REMEMBERED_COLUMNS: Final = 16 << 10
"""The columns of the versions used last. A column takes about 600 bytes in a buffer: 10 MiB."""


class RelationCache:
    def __init__(self, remembered_columns: int = REMEMBERED_COLUMNS) -> None:
        self._versions: WeightedLru[int, RelationVersion] = WeightedLru(remembered_columns)

    def exchange(
        self, numbers: Iterable[int], brought: Mapping[int, RelationVersion]
    ) -> dict[int, RelationVersion]:
        """Note a call whose blocks have the versions ``numbers``. Returns those of ``brought`` that were not known.

        The versions that the call needs stay until the next one, whatever the limit. Raises ComponentLost for a version
        that is neither known nor brought.
        """
        self._versions.shrink()
        new: dict[int, RelationVersion] = {}
        for number in numbers:
            if self._versions.use(number) is None:
                version = brought.get(number)
                if version is None:
                    raise ComponentLost(
                        f"a buffer has not got version {number} of a relation, which its rows refer to"
                    )
                self._versions.add(number, version, version.weight)
                new[number] = version
        return new

    def relations(self, numbers: Iterable[int]) -> RelationMap:
        """The versions of one block of the last call, by relid."""
        versions = [self._versions[number] for number in numbers]
        return {version.relid: version for version in versions}
