"""``python -m benchmarks.huge_transaction --gb 10``: one transaction of so many gigabytes of rows, into Delta.

Rows of a kilobyte are inserted in ten statements. Some are updated and rolled back to a savepoint, and some deleted.
``commit_s`` is from BEGIN to the answer to COMMIT, ``lag_s`` from there to the last row in Delta. ``peak_mb`` is the
proportional set size of the run's processes by what they are, looked at each second from BEGIN on: the most of each,
and of all together. At the end the log's rows are counted and summed against the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pyarrow.compute as pc
from deltalake import DeltaTable

from benchmarks.slot_run import SlotRun
from benchmarks.source import PUBLICATION, Source, server

_ROW_BYTES = 1_000
_ROWS = """insert into w
    select i, md5(i::text) || repeat(md5((i * 7)::text), 14), repeat(md5((i * 3)::text), 14), i / 7.0, now()
    from generate_series({}::bigint, {}::bigint) i"""


class MemoryWatch:
    """The most that a run's parts had, looked at each second until the end of the block."""

    def __init__(self, run: SlotRun) -> None:
        self._run = run
        self.peak_mb: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1):
            try:
                found = self._run.pss_mb()
            except psutil.NoSuchProcess:  # it ended meanwhile: the next look is without it
                continue
            for part, mb in found.items():
                self.peak_mb[part] = max(mb, self.peak_mb.get(part, 0))


def measure(source: Source, folder: Path, n_rows: int) -> dict[str, object]:
    source.execute("create table w (id bigint primary key, a text, b text, c numeric, at timestamptz)")
    source.execute(f"alter publication {PUBLICATION} add table w")
    (slot,) = source.slots(1)
    found: dict[str, object] = {"rows": n_rows, "load": os.getloadavg()[0]}
    with SlotRun(source, slot, folder, snapshot="never") as run, MemoryWatch(run) as watch:
        found["idle_mb"] = run.pss_mb()["all"]
        began_s = time.monotonic()
        with source.connection.transaction():
            for part in range(10):
                source.execute(_ROWS.format(part * n_rows // 10 + 1, (part + 1) * n_rows // 10))
            source.execute("savepoint a")
            source.execute(f"update w set a = 'x' where id <= {n_rows // 100}")
            source.execute("rollback to savepoint a")
            source.execute(f"delete from w where id <= {n_rows // 10_000}")
        committed_s = time.monotonic()
        run.await_(lambda: run.n_transactions() > 0)
        found["lag_s"] = round(time.monotonic() - committed_s, 2)
        found["commit_s"] = round(committed_s - began_s)
        ((found["gb"],),) = source.execute("select round(pg_total_relation_size('w') / 1e9, 1)::float8")
    found["peak_mb"] = watch.peak_mb
    ((count, total),) = source.execute("select count(*), sum(id)::bigint from w")
    found["equal"] = (count, total) == of_log(folder / "tables" / "public.w")
    return found


def of_log(table: Path) -> tuple[int, int]:
    """The number of rows and the sum of their ids, of a log of inserts and deletes."""
    n = total = 0
    for batch in DeltaTable(table).to_pyarrow_dataset().to_batches(columns=["id", "_change_type"]):
        for kind, sign in (("insert", 1), ("delete", -1)):
            ids = batch.filter(pc.equal(batch["_change_type"], kind))["id"]
            n, total = n + sign * len(ids), total + sign * (pc.sum(ids).as_py() or 0)
    return n, total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0)
    arguments = parser.parse_args()
    with server() as publisher, tempfile.TemporaryDirectory(prefix="xidstream-huge-") as folder:
        source = Source(publisher, "huge")
        try:
            print(json.dumps(measure(source, Path(folder), int(arguments.gb * 1e9 / _ROW_BYTES))), flush=True)
        finally:
            source.close()


if __name__ == "__main__":
    main()
