"""``python -m tests.snapshots.observed_run LOG RANGE_BYTES run …``: the command line, which notes each range that is
read. Ranges can be smaller than a run's, so that small tables have several.

Each line of LOG is a JSON object: what began, was done or was lost (``what``), of which ``table``, under which snapshot
(its ``place``), the range's ``number``, and its ``rows``.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from typing import Any

from xidstream.actors.cli.main import main
from xidstream.actors.snapshots import held_tables, steps
from xidstream.actors.snapshots.actors import SnapshotActors
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.snapshot.tables import plan_ranges


def observe(path: str, range_bytes: int) -> None:
    lock, read = threading.Lock(), SnapshotActors.read

    def note(what: str, task: Any, bounds: Any, rows: int = 0) -> None:
        line = {"what": what, "table": task.source.relation.table, "place": int(bounds.snapshot_lsn)}
        with lock, open(path, "a") as file:
            file.write(json.dumps({**line, "number": task.range.number, "rows": rows}) + "\n")

    def noted(self: SnapshotActors, tasks: Any, bounds: Any, targets: Any) -> Any:
        if len(tasks) > 1:  # small tables, of one range each
            return read(self, tasks, bounds, targets)
        note("begun", tasks[0], bounds)
        try:
            (found,) = read(self, tasks, bounds, targets)
        except BaseException:
            note("lost", tasks[0], bounds)
            raise
        if isinstance(found, XidstreamError):
            note("lost", tasks[0], bounds)
        else:
            note("done", tasks[0], bounds, found[1])
        return [found]

    SnapshotActors.read = noted  # type: ignore[method-assign]
    for module in (held_tables, steps):  # which plans them, and which counts them
        module.plan_ranges = functools.partial(plan_ranges, range_bytes=range_bytes)


if __name__ == "__main__":
    log, size, *rest = sys.argv[1:]
    observe(log, int(size))
    sys.argv[1:] = rest
    main()
