"""What a run knows of the sink's ``_snapshots``: the lines that it read once, and those that it had written since.

Nobody else writes lines of this slot while the run owns the sink, so they are not read again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine, SnapshotTables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.snapshot.generation import Generation, GenerationState


class SnapshotLines:
    """One thread changes it. ``last_number`` may be asked on any."""

    def __init__(self, lines: Iterable[GenerationLine]) -> None:
        self._lines = list(lines)
        self._reached = self._awaited = Lsn(0)

    def __iter__(self) -> Iterator[GenerationLine]:
        return iter(self._lines)

    def last_number(self, table: str) -> int:
        """The last number of the table's generations; 0 for none."""
        return max((line.number for line in self._lines if line.table == table), default=0)

    def end(self, line: GenerationLine) -> None:
        """The generation does not stand any more."""
        ended = dataclasses.replace(line, state=GenerationState.ENDED)
        self._lines = [ended if each == line else each for each in self._lines]

    def finish(self, generation: Generation) -> None:
        """The generation is in the sink. It is the one of its table that counts."""
        finished = GenerationLine(
            generation.name,
            generation.relid,
            generation.number,
            int(generation.bounds.snapshot_lsn),
            int(generation.bounds.valid_from),
            GenerationState.FINISHED,
            is_ours=True,
        )
        self._lines = [
            dataclasses.replace(line, is_ours=False) if line.table == generation.name else line
            for line in self._lines
        ] + [finished]

    @property
    def valid_from(self) -> Lsn:
        """From here on the state of all tables with a snapshot is known; 0 if there is none."""
        standing = (line for line in self._lines if line.is_ours and line.state is GenerationState.FINISHED)
        return Lsn(max((self._awaited, *(line.valid_from for line in standing))))

    def await_(self, valid_from: Lsn) -> None:
        """A repair, which is to be valid from there, can go on when the log is whole up to there."""
        self._awaited = max(self._awaited, valid_from)

    @property
    def is_awaited(self) -> bool:
        """Whether a repair waits, as far as the sink was told."""
        return self._awaited > self._reached

    def is_reached(self) -> bool:
        """Whether the sink was told that its log is whole up to ``valid_from``."""
        return self.valid_from <= self._reached

    def may_reach(self, delivered_lsn: Lsn) -> bool:
        """Whether the sink's log is whole up to ``valid_from``.

        The sink has every commit whose record ends at or below what is delivered. (What is confirmed beyond that is in
        the journal alone.) The records before the first one after the snapshots are all that there is to wait for: an
        idle server never writes that one.
        """
        return delivered_lsn >= self.valid_from.next_record.record_end

    def reach(self) -> None:
        """The sink was told."""
        self._reached = self.valid_from

    @property
    def reached_lsn(self) -> Lsn:
        """What the sink was told that its log is whole up to; 0 for nothing."""
        return self._reached


def recovered(tables: SnapshotTables, book: SnapshotBook, *, makes: bool) -> SnapshotLines:
    """The sink's lines, with those of rows that an earlier run named and did not come to tell."""
    lines = SnapshotLines(tables.lines(makes))
    unfinished = book.unfinished(lines)
    for generation in unfinished:
        if tables.recover(generation):
            book.finish(generation)
        else:
            book.give_up(generation)
    return SnapshotLines(tables.lines(makes)) if unfinished else lines
