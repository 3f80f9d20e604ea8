"""When a table gets a checkpoint: with every hundredth commit, as deltalake has it, and in a folder in between.

In a folder deltalake lists the log after the last checkpoint for each commit, and once more for the snapshot with it,
and asks for each file there. With a hundred commits that takes ten times as long as the rest of a commit (measured:
4 ms of CPU time grow to 33). An object store lists them in one request: there this gains nothing.

A checkpoint costs, too: it names each file of the table, and each that was removed in the last day. So the next one is
due when the listings since the last have cost about as much as that one took. With ``c`` seconds for a checkpoint, and
``FILE_S`` more for each commit than for the one before it, that is after the square root of ``2 c / FILE_S`` commits.
And the log is kept for an hour or longer, so checkpoints may take no more of the disk than the commits between them,
each of which has a block there. Where all this says a hundred, every hundredth commit is enough.

A checkpoint that could not be written (a full disk) is due again some commits later: each try may cost as much as one
that succeeds.

A writer may come and go with each commit: a refresh of a base table does. So it goes on from the checkpoint that it
finds (``found``), whose bytes alone tell when the next one is due. Else none of these writers would live for ten
commits, and each would read up to a hundred to open the table.

Several slots may commit to one table, as to ``_transactions``. A writer that was overtaken since its commit makes no
checkpoint in between, but it makes the one of a hundred that nobody has made: where all overtake each other all the
time, there would be none else.

Rejected: to set ``delta.checkpointInterval``, which is the table's, and a person's to set. Where it is set, it holds.
Also rejected: deltalake's own checkpoints, which it writes within the call that commits. One that fails makes that call
fail, whose commit was made.

Called by ``delta_table``. Plain numbers; no clock.
"""

from __future__ import annotations

import math
from typing import Final

FILE_S: Final = 200e-6
"""The time that one more file of the log adds to a commit and its snapshot, measured on two cores."""
COMMIT_BYTES: Final = 4 << 10
"""The bytes that a small commit takes of a disk."""
LEAST: Final = 10
"""Commits between two checkpoints at least. Spark writes one every ten, too."""


class CheckpointPace:
    """``version``: the table's, when it was opened. ``most``: the commits between two checkpoints at most.
    ``may_more``: in between there may be some, too."""

    def __init__(self, version: int, most: int, *, may_more: bool = True) -> None:
        self._version = version
        self._most = most
        self._may_more = may_more
        self._commits = LEAST
        self._not_before = version

    def is_due(self, version: int, *, is_overtaken: bool = False) -> bool:
        """Whether this version is to have one. With 100 at most, version 99 is, for it is the hundredth.
        ``is_overtaken``: there are others' commits since the last one of the writer's."""
        if version < self._not_before:
            return False
        if (version + 1) // self._most > (self._version + 1) // self._most:
            return True
        may_more = self._may_more and not is_overtaken
        return may_more and self._commits < self._most and version - self._version >= self._commits

    def found(self, version: int, n_bytes: int) -> None:
        """The last one, which a writer before this one has made."""
        self._version = version
        self._commits = max(LEAST, _commits_of(n_bytes))

    def failed(self, version: int) -> None:
        """The one of this version could not be written."""
        self._not_before = version + LEAST

    def made_by_another(self, version: int) -> None:
        """Another writer has made the one of this version."""
        self._version = max(version, self._version)

    def made(self, version: int, took_s: float, n_bytes: int) -> None:
        """It has one of ``n_bytes``. ``took_s``: to write it, and to open the table at it."""
        self._version = version
        self._commits = max(LEAST, math.ceil(math.sqrt(2 * took_s / FILE_S)), _commits_of(n_bytes))


def _commits_of(n_bytes: int) -> int:
    """So many commits take as much of the disk as a checkpoint of ``n_bytes``."""
    return -(-n_bytes // COMMIT_BYTES)
