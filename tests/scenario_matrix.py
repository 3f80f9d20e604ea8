"""How much of the scenarios' matrix a run takes.

A scenario is made for each protocol and mode, on each version of the server: eight pairs. ``make test`` runs each mode
on one of the versions, and on each version every second mode. ``make test-slow`` runs the other pairs.
"""

from __future__ import annotations

Pair = tuple[int, tuple[int, str]]
"""The server's major version; the protocol's version and the mode of streaming."""


def others_of(pairs: set[Pair]) -> set[Pair]:
    """Of all pairs of one test, those that need not run each time: every second one, as on a chessboard. None of a test
    that has one version or one mode."""
    versions, modes = (sorted(set(each)) for each in zip(*pairs, strict=True))
    if len(versions) == 1 or len(modes) == 1:
        return set()
    return {(v, m) for v, m in pairs if (versions.index(v) + modes.index(m)) % 2}
