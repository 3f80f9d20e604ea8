"""``python -m benchmarks.store_requests``: what a commit, and a file of a large transaction, ask of an object store.

The stores are moto's S3, in a process of its own, and Azurite where it is (``XIDSTREAM_AZURITE``). The sink is the real
one, and so is the storage. Requests are counted by the stores themselves, or by what stands before them, in the
classes that the stores bill: writes, lists, reads, and others of Azure's (a look at a blob's properties). Deletions
cost nothing. Prices are those of ``PRICES``, for a thousand requests. It prints one line of JSON for each case:

- ``small``: a transaction of one row. It and ``ten tables`` (a row in each) are means over 32 commits in a row, in
  which the small files of each table are merged once.
- ``segment``: a file of some megabytes of a large transaction, written to the storage while the transaction is open.
- ``copy``: the same file becomes the table's at COMMIT. The commit itself comes on top, once for each table.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.azurite import azurite, program
from tests.late_segments import late_part
from tests.s3_server import S3Server, counted_s3
from tests.spark.change_log_maker import INT8, TEXT, LogMaker, keyed
from tests.spark.support import (
    LocalSegments,
    Transaction,
    batch_of,
    memory_frame,
    put_memory,
    read_memory,
)
from tests.unit.log_tables.copying_stores import azure_store, large
from tests.unit.log_tables.test_segment_links import World
from xidstream.pipeline.spark.frames import SinkBatch

N_COMMITS: Final = 32
TABLES: Final = [keyed(f"t{i}", {"id": INT8, "name": TEXT}, "id", relid=i + 1) for i in range(10)]
PRICES: Final = {
    "s3": {"write": 0.005, "list": 0.005, "read": 0.0004, "other": 0.0004},
    "azure": {"write": 0.0055, "list": 0.0055, "read": 0.00044, "other": 0.00044},
}
"""Dollars for a thousand requests (docs/delta.md says where, and when, they were read)."""
_WRITES: Final = ("PUT", "POST")


def kind_of(what: str) -> str | None:
    """``what``: method and path with its query; None for what costs nothing."""
    method, path = what.split(" ", 1)
    if method == "DELETE":
        return None
    if method in _WRITES:
        return "write"
    if "comp=list" in path or re.fullmatch(r"/[^/?]+/?(\?.*)?", path):
        return "list"
    return "other" if method == "HEAD" else "read"


def told(store: str, case: str, asked: list[str], n: int) -> None:
    kinds = Counter(kind for what in asked if (kind := kind_of(what)) is not None)
    dollars = sum(PRICES[store][kind] * count for kind, count in kinds.items()) / n
    each = {kind: round(kinds[kind] / n, 1) for kind in ("write", "list", "read", "other")}
    print(json.dumps({"store": store, "case": case, **each, "dollars_a_thousand": round(dollars, 4)}))
    sys.stdout.flush()


def commits(store: str, root: str, options: dict[str, str], asked: Callable[[], list[str]]) -> None:
    with tempfile.TemporaryDirectory(prefix="xs-requests-") as folder:
        segments = LocalSegments(folder)

        def batch(*units: Any, number: int = 0) -> SinkBatch:
            content = batch_of(units, segments, number)
            return SinkBatch(
                content, _no_session, memory_frame, segments, read_memory, put_memory, segments.storage
            )

        log = LogMaker(root, None, batch, storage_options=options)

        def write(tables: list[Any]) -> None:
            log.lsn += 10
            changes = [(table, [{"id": log.lsn, "name": "x"}]) for table in tables]
            log.sink.write(batch(Transaction(log.lsn, changes, xid=log.lsn * 10)))

        for case, tables in (("small", TABLES[:1]), ("ten tables", TABLES)):
            write(tables)  # it makes them
            asked()
            for _ in range(N_COMMITS):
                write(tables)
            told(store, case, asked(), N_COMMITS)
        log.sink.close()


def files(store: str, world: World, asked: Callable[[], list[str]]) -> None:
    world.storage.write_bytes("first", b"")  # some clients look at a store first
    world.give([late_part(world.segment(9), 0x1000)])
    asked()
    part = late_part(large(world), 0x2000)
    told(store, "segment", asked(), 1)
    given, left = world.give([part])
    assert len(given) == 1 and not left.n_rows
    told(store, "copy", asked(), 1)
    part = late_part(world.segment(1), 0x2000)
    asked()
    world.give([part])
    told(store, "copy, less than 5 MiB", asked(), 1)
    world.links.close()


def _no_session() -> Any:
    raise AssertionError("nothing here is for Spark")


def _since(all_of_them: Callable[[], list[str]]) -> Callable[[], list[str]]:
    n_known = 0

    def new() -> list[str]:
        nonlocal n_known
        time.sleep(0.2)  # a log is written behind the answer
        found = all_of_them()
        n_known, begin = len(found), n_known
        return found[begin:]

    return new


@contextmanager
def _aws() -> Iterator[None]:
    given = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    os.environ.update(dict.fromkeys(given, "testing"))
    try:
        yield
    finally:
        for name, value in given.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main() -> None:
    with _aws():
        with counted_s3() as s3:
            commits("s3", f"{s3.uri}/shop", s3.options, lambda: [each.what for each in s3.asked()])
        from tests.unit.log_tables.copying_stores import S3Store

        store = S3Store()
        server: S3Server = store.server
        files("s3", store.new_world(), _since(lambda: [each.what for each in server.asked]))
        server.stop()
    found = program()
    if found is None:
        return
    with tempfile.TemporaryDirectory(prefix="xs-requests-") as folder:
        with azurite(found, Path(folder)) as store:
            commits("azure", f"{store.uri}/shop", store.options, _late(store.asked))
        with azure_store(found, Path(folder)) as behind:
            passed = behind.proxy.passed
            files("azure", behind.new_world(), _since(lambda: [each.what for each in passed]))


def _late(asked: Callable[[], list[str]]) -> Callable[[], list[str]]:
    def later() -> list[str]:
        time.sleep(0.5)  # Azurite writes its log behind the answer
        return asked()

    return later


if __name__ == "__main__":
    main()
