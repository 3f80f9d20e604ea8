"""How many readers of snapshots work at a time: the setting ``snapshot_connections``, or a number for the machine; what
each of them may read, and what their holder asks for.

On one machine the readers and the server keep all CPUs busy. One more than there are CPUs takes its start from the
others, and room in their caches: 5,000,000 rows of pgbench's accounts took 1.9 s by two readers on two CPUs, and 2.2 s
by four (docs/performance.md). In a cluster the server has CPUs of its own, and one that is far away is read faster over
more connections. Called by the run's snapshots, and by ``check``.
"""

from __future__ import annotations

from typing import Final

_DEFAULT: Final = 4
_FEWEST: Final = 2
"""While one waits for the server, another one works."""


HOLDER_CPUS: Final = 0.05
"""What the actor that holds the tables meanwhile asks Ray for. It waits for the server."""


def most_readers(setting: int | None) -> int:
    """Wherever they run."""
    return _DEFAULT if setting is None else setting


def bytes_per_s_of_each(bytes_per_s: int, n_readers: int) -> int:
    """What one of them may read of what all may; 0 for no limit. A limit stays one, however many share it."""
    return max(bytes_per_s // max(n_readers, 1), 1) if bytes_per_s else 0


def readers_here(setting: int | None, own_cpus: int | None) -> int:
    """``own_cpus``: of the one machine that a run has for itself; None in a cluster."""
    if setting is not None or own_cpus is None:
        return most_readers(setting)
    return min(_DEFAULT, max(_FEWEST, own_cpus))
