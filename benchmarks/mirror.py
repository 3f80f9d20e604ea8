"""Mirror: a refresh of a base table after some changed rows, beside deltalake's ``merge`` and a rewrite by Spark.

``python -m benchmarks.mirror --rows 10000000 --changes 1000 100000 1000000``. No server: the log is made here, in the
sink's layout, with a snapshot of the table and then commits that update rows. *Clustered* rows are neighbours by key,
*spread* ones are every n-th. For each number of changes:

- ``refresh``: all of it, from the look at the log to the line in the manifest.
- ``merge``: deltalake's, of the same changes (update where the key matches, else insert) into a table that deltalake
  wrote, in its own file sizes; ``merge_same_files``: into a copy of our base table, with our files and statistics.
- ``rewrite``: Spark reads all, leaves out the changed keys, adds the new rows and writes all (once for each size).

Seconds, CPU seconds (of Spark's JVM, too, with what it collects and compiles meanwhile), and bytes of new Parquet files
for each byte of the changed rows (as they are in the base's files). ``refresh_memory_bytes``: by how much this process
was larger at most than before. At the end each table's rows are compared by count and sum.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from tests.snapshot_tables import commit_one, output_of
from xidstream.actors.mirror import Mirror
from xidstream.actors.runtime.java import ensure_java
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.session import SPARK_CONF

IDENTITY = SlotIdentity(7, "bench", "bench")
RELATION = RelationVersion(
    16384,
    "public",
    "accounts",
    ReplicaIdentity.DEFAULT,
    (
        Column("id", 20, -1, True),
        Column("branch", 23, -1, False),
        Column("balance", 20, -1, False),
        Column("filler", 25, -1, False),
    ),
)
_PIECE = 500_000
_FILLER = pa.array([f"{i:06d}" * 14 for i in np.random.default_rng(1).integers(0, 10**6, 5_000)])


def run(rows: int, changes: Sequence[int], folder: Path) -> dict[str, Any]:
    spark = local_session(folder)
    log = MadeLog(folder / "log")
    log.snapshot(rows)
    log.update(np.arange(1), 0)
    mirror = Mirror(str(log.path))
    built_s = timed(lambda: mirror.refresh(spark))
    base = log.path / "current" / "public.accounts"
    files = DeltaTable(str(base)).get_add_actions()
    base_bytes = sum(pa.table(files)["size_bytes"].to_pylist())
    for name, source in (("merge", None), ("merge_same_files", base)):
        _table_for_merge(folder / name, source, base)
    measured: dict[str, Any] = {
        "rows": rows,
        "base_bytes": base_bytes,
        "base_files": pa.table(files).num_rows,
        "build_s": built_s,
        "load": os.getloadavg()[0],
        "refreshes": [],
    }
    number = 1
    for n in changes:
        for kind in ("clustered", "spread"):
            number += 1
            measured["refreshes"].append(
                {"changes": n, "kind": kind, **_one(spark, log, mirror, folder, rows, n, kind, number)}
            )
            print(json.dumps(measured["refreshes"][-1]), file=sys.stderr, flush=True)
    measured["equal"] = _is_equal([base, folder / "merge", folder / "merge_same_files"])
    spark.stop()
    return measured


def _one(
    spark: Any, log: MadeLog, mirror: Mirror, folder: Path, rows: int, n: int, kind: str, number: int
) -> dict[str, Any]:
    ids = np.arange(rows // 3, rows // 3 + n) if kind == "clustered" else np.arange(0, rows, rows // n)[:n]
    log.update(ids, number)
    base = log.path / "current" / "public.accounts"
    row_bytes = _size(base) / rows
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    before = _parquet(base)
    with _Growth() as growth:
        found |= _costs("refresh", lambda: mirror.refresh(spark))
    found["refresh_memory_bytes"] = growth.most_bytes
    found["refresh_bytes_per_byte"] = _new_bytes(base, before) / (n * row_bytes)
    for name in ("merge", "merge_same_files"):
        before = _parquet(folder / name)
        found |= _costs(name, lambda name=name: _merge(folder / name, values_of(ids, number)))
        found[f"{name}_bytes_per_byte"] = _new_bytes(folder / name, before) / (n * row_bytes)
    found["rewrite_s"] = timed(lambda: _rewrite(spark, folder, base, values_of(ids, number)))
    found["merge_over_refresh"] = found["merge_s"] / found["refresh_s"]
    return found


# -- the log -------------------------------------------------------------------------------------------


def values_of(ids: npt.NDArray[np.int64], number: int) -> dict[str, pa.Array]:
    return {
        "id": pa.array(ids),
        "branch": pa.array((ids % 1000).astype(np.int32)),
        "balance": pa.array(ids * 7 + number),
        "filler": pc.take(_FILLER, pa.array((ids * 7919 + number) % len(_FILLER))),
    }


class MadeLog:
    """A change log as the sink leaves it."""

    def __init__(self, path: Path, root: Location | None = None) -> None:
        """``root``: where it is instead, a store."""
        self.path = path
        self._root = root or Location.parse(str(path))
        columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
        DeltaTableWriter.open_or_create(self._root.child(locations.TRANSACTIONS), "transactions", columns)

    def snapshot(self, rows: int, relations: Sequence[RelationVersion] = (RELATION,)) -> None:
        application_id = IDENTITY.application_id
        tenure = Tenure(1, "bench", 1, {}, Lsn(1 << 40))
        log = SnapshotLog(
            DeltaTables(self._root), application_id, Ownership(application_id, "messages", "bench", tenure)
        )
        bounds = SnapshotBounds(Lsn(99), Lsn(100), 700, 700, (), 1_700_000_000_000_000)
        for relation in relations:
            target = output_of(log, relation, bounds.snapshot_lsn)
            files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
            for first in range(0, rows, _PIECE):
                ids = np.arange(first, min(rows, first + _PIECE))
                files.write(target.conform(_contract(values_of(ids, 0), "snapshot", 99, None, ids)))
            assert commit_one(log, Generation(relation, 1, bounds), files.close())

    def update(
        self, ids: npt.NDArray[np.int64], number: int, relations: Sequence[RelationVersion] = (RELATION,)
    ) -> None:
        """One transaction, as the sink commits it."""
        lsn = 1_000 + 10 * number
        values = values_of(ids, number)
        for i, relation in enumerate(relations):
            seq = np.arange(i * len(ids), (i + 1) * len(ids))
            rows = _contract(values, "update_postimage", lsn, 1_000 + number, seq)
            directory = locations.encode_table(relation.schema, relation.table)
            self._append(directory, contract_schema(relation), rows, "_commit_lsn", lsn)
        transaction = {
            "xid": 1_000 + number,
            "commit_lsn": lsn,
            "end_lsn": lsn + 8,
            "commit_timestamp": 1_700_000_000_000_000 + number,
            "streamed": False,
            "rows": len(ids) * len(relations),
            "tables": [relation.name for relation in relations],
        }
        line = pa.RecordBatch.from_pylist([transaction], schema=TRANSACTIONS_SCHEMA)
        slot = IDENTITY.application_id
        marks = {locations.proven_id(slot): lsn, f"{slot}/owner": 1}
        self._append(locations.TRANSACTIONS, TRANSACTIONS_SCHEMA, line, "commit_lsn", lsn, marks)

    def _append(
        self,
        directory: str,
        schema: pa.Schema,
        rows: pa.RecordBatch,
        column: str,
        lsn: int,
        marks: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        location = self._root.child(directory)
        writer = DeltaTableWriter.open(location, directory)
        assert writer is not None
        files = ParquetFiles(location, f"data-{lsn}", schema, column)
        for first in range(0, rows.num_rows, 1 << 17):
            files.write(rows.slice(first, 1 << 17))
        writer.commit(files.close(), {IDENTITY.application_id: lsn}, column, marks=marks)


def _contract(
    values: dict[str, pa.Array], kind: str, lsn: int, xid: int | None, seq: npt.NDArray[np.int64]
) -> pa.RecordBatch:
    n = len(seq)
    more = [
        pa.repeat(pa.scalar(kind), n),
        pa.repeat(pa.scalar(lsn, pa.int64()), n),
        pa.repeat(pa.scalar(1_700_000_000_000_000, pa.timestamp("us", tz="UTC")), n),
        pa.repeat(pa.scalar(xid, pa.int64()), n),
        pa.array(seq),
        *[pa.nulls(n, field.type) for field in CONTRACT_FIELDS[5:]],
    ]
    return pa.RecordBatch.from_arrays([*values.values(), *more], schema=contract_schema(RELATION))


# -- references ----------------------------------------------------------------------------------------


def _table_for_merge(path: Path, copied: Path | None, base: Path) -> None:
    if copied is not None:
        shutil.copytree(copied, path)
        return
    dataset = DeltaTable(str(base)).to_pyarrow_dataset()
    write_deltalake(str(path), pa.RecordBatchReader.from_batches(dataset.schema, dataset.to_batches()))


def _merge(path: Path, values: dict[str, pa.Array]) -> None:
    table = DeltaTable(str(path))
    source = pa.table(values)
    merge = table.merge(source, "t.id = s.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()


def _rewrite(spark: Any, folder: Path, base: Path, values: dict[str, pa.Array]) -> None:
    import pyarrow.parquet as pq

    changed, target = folder / "changed.parquet", folder / "rewritten"
    pq.write_table(pa.table(values), changed)
    rows = spark.read.parquet(*DeltaTable(str(base)).file_uris())
    new = spark.read.parquet(str(changed))
    rows.join(new.select("id"), "id", "left_anti").unionByName(new).write.mode("overwrite").parquet(
        str(target)
    )
    shutil.rmtree(target)


def _is_equal(tables: Sequence[Path]) -> bool:
    found = set()
    for path in tables:
        rows = DeltaTable(str(path)).to_pyarrow_dataset().to_table(columns=["id", "balance"])
        found.add((rows.num_rows, pc.sum(rows["balance"]).as_py()))
    return len(found) == 1


# -- measuring -----------------------------------------------------------------------------------------


def timed(act: Any) -> float:
    began_s = time.monotonic()
    act()
    return time.monotonic() - began_s


def _costs(name: str, act: Any) -> dict[str, float]:
    cpu_s = _cpu_s()
    seconds = timed(act)
    return {f"{name}_s": seconds, f"{name}_cpu_s": _cpu_s() - cpu_s}


def _cpu_s() -> float:
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


class _Growth:
    """Of this process's resident memory, looked at every 20 ms."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most_bytes = 0

    def __enter__(self) -> _Growth:
        self._first = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            self.most_bytes = max(self.most_bytes, self._process.memory_info().rss - self._first)


def _parquet(table: Path) -> set[Path]:
    return set(table.rglob("*.parquet")) - set(table.glob("_delta_log/*"))


def _new_bytes(table: Path, before: set[Path]) -> int:
    return sum(path.stat().st_size for path in _parquet(table) - before)


def _size(table: Path) -> int:
    return sum(os.path.getsize(path) for path in DeltaTable(str(table)).file_uris())


def local_session(folder: Path) -> Any:
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("benchmark-mirror")
    for key, value in {
        **SPARK_CONF,
        "spark.driver.memory": "2g",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(folder / "spark"),
    }.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--changes", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xs-mirror-", dir=options.folder) as folder:
        print(json.dumps(run(options.rows, options.changes, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
