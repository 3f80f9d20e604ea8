"""Current state: ``as_of`` over a snapshot and a tail of changes, beside a scan of the same snapshot alone.

The log is made as a run makes it (files, commits, a line of ``_snapshots``), without a server. The tail updates,
deletes and inserts rows that are spread over the whole table. Three of four updates leave a large value unchanged, so
the state must fill it in. The reference reads the snapshot's files and nothing else. Both go to Spark's ``noop`` sink,
and both are counted as well: a scan's count needs no column of the table, a state's needs the key. So there is the sum
of a column, too (``sum``). ``plan_s``: until ``as_of`` has its DataFrame, which is before any row is read.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.results import median, ratio
from tests.snapshot_tables import commit_one, output_of
from xidstream.actors.runtime.java import ensure_java
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import Conform, TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.log_tables.table_metadata import OF_OWN_TABLES
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.session import SPARK_CONF

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SLOT: Final = "7/bench/current"
_PLACE, _VALID_FROM, _COMMIT = 100, 200, 1000
_TIME_US: Final = 1_700_000_000_000_000
_TABLE: Final = RelationVersion(
    16384,
    "public",
    "accounts",
    ReplicaIdentity.DEFAULT,
    (
        Column("id", 20, -1, True),
        Column("branch", 23, -1, False),
        Column("balance", 1700, (12 << 16 | 2) + 4, False),
        Column("note", 25, -1, False),
        Column("body", 25, -1, False),
    ),
)
_BLOCK_ROWS: Final = 500_000


def run(rows: int, tail_rows: int, repeats: int) -> dict[str, Any]:
    """``rows``: of the snapshot."""
    with tempfile.TemporaryDirectory(prefix="xs-state-") as folder:
        _make_log(Location.parse(folder), rows, tail_rows)
        spark = _session()
        try:
            return {
                "rows": rows,
                "tail_rows": tail_rows,
                "repeats": repeats,
                **_measured(spark, folder, repeats),
            }
        finally:
            spark.stop()


def _measured(spark: SparkSession, folder: str, repeats: int) -> dict[str, Any]:
    log = LogFrames(folder)

    def scan() -> Any:
        base = log.table_at(_TABLE.name, log.last_commit_lsn).snapshot(spark).frame
        return base.select(*[column.name for column in _TABLE.columns])

    def state() -> Any:
        return log.as_of(spark)[_TABLE.name]

    found: dict[str, Any] = {}
    ways: dict[str, Callable[[Any], Any]] = {
        "noop": lambda frame: frame.write.format("noop").mode("overwrite").save(),
        "count": lambda frame: frame.count(),
        "sum": lambda frame: frame.agg({"id": "sum"}).collect(),
    }
    for way, use in ways.items():
        found[way] = _beside(scan, state, use, repeats)
    found["plan_s"] = median([_seconds(state) for _ in range(repeats)])
    return found


def _beside(
    scan: Callable[[], Any], state: Callable[[], Any], use: Callable[[Any], Any], repeats: int
) -> dict[str, Any]:
    scan_s, state_s = [], []
    for _ in range(repeats + 1):  # the first pair warms up
        scan_s.append(_seconds(lambda: use(scan())))
        state_s.append(_seconds(lambda: use(state())))
    scan_s, state_s = scan_s[1:], state_s[1:]
    return {"scan_s": scan_s, "as_of_s": state_s, "as_of_to_scan": ratio(state_s, scan_s)}


def _seconds(act: Callable[[], Any]) -> float:
    started_s = time.monotonic()
    act()
    return time.monotonic() - started_s


def _session() -> SparkSession:
    from pyspark.sql import SparkSession

    ensure_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").appName("current-state")
    for key, value in {**SPARK_CONF, "spark.driver.memory": "2g", "spark.driver.host": "127.0.0.1"}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


# -- the log -------------------------------------------------------------------------------------------


def _make_log(root: Location, rows: int, tail_rows: int) -> None:
    owner = Ownership(_SLOT, f"{_SLOT}/messages", root.uri, Tenure(1, "epoch", 1, {}, Lsn(1 << 40)))
    log = SnapshotLog(DeltaTables(root), _SLOT, owner)
    target = output_of(log, _TABLE, Lsn(_PLACE))
    files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
    for first in range(0, rows, _BLOCK_ROWS):
        ids = np.arange(first, min(first + _BLOCK_ROWS, rows))
        files.write(target.conform(_rows(ids, "snapshot", _PLACE, None)))
    bounds = SnapshotBounds(Lsn(_PLACE), Lsn(_VALID_FROM), 5, 10, (), _TIME_US)
    assert commit_one(log, Generation(_TABLE, 1, bounds), files.close())
    _append_tail(target.table, target.conform, owner, rows, tail_rows)
    _append_transaction(root, owner, tail_rows)


def _append_tail(table: Location, conform: Conform, owner: Ownership, rows: int, tail_rows: int) -> None:
    chance = np.random.default_rng(7)
    ids = chance.choice(rows, tail_rows, replace=False)
    n_updated, n_deleted = tail_rows * 8 // 10, tail_rows // 10
    files = ParquetFiles(table, "data-tail", conform.schema, "_commit_lsn")
    parts = [
        _rows(ids[:n_updated], "update_postimage", _COMMIT, "body", first_seq=0),
        _rows(ids[n_updated : n_updated + n_deleted], "delete", _COMMIT, None, first_seq=n_updated),
        _rows(
            np.arange(rows, rows + tail_rows - n_updated - n_deleted), "insert", _COMMIT, None, first_seq=rows
        ),
    ]
    for part in parts:
        files.write(conform(part))
    writer = DeltaTableWriter.open(table, _TABLE.name)
    assert writer is not None
    writer.commit(files.close(), {_SLOT: _COMMIT}, marks=owner.marks)


def _append_transaction(root: Location, owner: Ownership, tail_rows: int) -> None:
    location = root.child(locations.TRANSACTIONS)
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    about = OF_OWN_TABLES[locations.TRANSACTIONS]
    writer = DeltaTableWriter.open_or_create(location, locations.TRANSACTIONS, columns, about)
    files = ParquetFiles(location, "data-tail", TRANSACTIONS_SCHEMA, "commit_lsn")
    row = {
        "xid": 11,
        "commit_lsn": _COMMIT,
        "end_lsn": _COMMIT + 8,
        "rows": tail_rows,
        "tables": [_TABLE.name],
    }
    files.write(pa.RecordBatch.from_pylist([row], schema=TRANSACTIONS_SCHEMA))
    versions = {_SLOT: _COMMIT, locations.proven_id(_SLOT): _COMMIT}
    writer.commit(files.close(), versions, "commit_lsn", marks=owner.marks)


def _rows(ids: Any, kind: str, lsn: int, lacking: str | None, first_seq: int = 0) -> pa.RecordBatch:
    """``lacking``: the column that three of four rows do not have."""
    n = len(ids)
    texts = pa.array(ids).cast(pa.string())
    lacks = np.arange(n) % 4 != 0 if lacking else np.zeros(n, bool)
    body = pc.binary_join_element_wise("the body of row number ", texts, ", some forty bytes of it", "")
    columns = {
        "id": pa.array(ids, pa.int64()),
        "branch": pa.array(ids % 1000, pa.int32()),
        "balance": pa.array(ids * 100 + 25, pa.int64()).cast(pa.decimal128(21, 0)).cast(pa.decimal128(12, 2)),
        "note": texts,
        "body": pc.if_else(pa.array(lacks), pa.scalar(None, pa.string()), body),
        "_change_type": pa.repeat(pa.scalar(kind), n),
        "_commit_lsn": pa.repeat(pa.scalar(lsn, pa.int64()), n),
        "_commit_timestamp": pa.repeat(pa.scalar(_TIME_US, pa.timestamp("us", tz="UTC")), n),
        "_xid": pa.repeat(pa.scalar(11, pa.int64()), n),
        "_seq": pa.array(np.arange(first_seq, first_seq + n), pa.int64()),
        "_unchanged": pa.array([[lacking] if lack else None for lack in lacks], pa.list_(pa.string())),
        "_text": pa.nulls(n, pa.map_(pa.string(), pa.string())),
    }
    schema = contract_schema(_TABLE)
    arrays = [columns[field.name].cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
