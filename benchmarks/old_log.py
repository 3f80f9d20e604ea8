"""``python -m benchmarks.old_log``: what it costs to ask a change log for one commit, as the log grows old.

For each size a root with ``_transactions`` alone is made, one transaction a second, in files as the upkeep leaves them:
of some 400,000 transactions each, a few smaller ones, and 31 of a single transaction. Commit timestamps go back a
little now and then, and each ten thousandth transaction was open for an hour.

*Before* is the question as an earlier xidstream asked it, with its columns and its filters, of a log as it wrote it.
Two of them it asked by Spark: here pyarrow reads, which leaves out row groups by their statistics as Spark does. *Now*
is ``ChangeLog``.

Each question is asked of a moment in the middle of the log, in a process that has asked for another moment before. It
has the seconds, the files of rows that it opened, and the megabytes that it read, opening the log included. *stream* is
the next batch of 1,000 transactions of a stream that has read half of the log.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.log_root import DeltaRoot
from xidstream.pipeline.changelog.moment import moment_of
from xidstream.pipeline.changelog.transactions_table import TransactionsTable
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.table_metadata import OF_OWN_TABLES, STATISTICS, TableMetadata
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

_SLOT: Final = "7/shop/orders"
_BEGUN: Final = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
_ABOUT_BEFORE: Final = TableMetadata("", {STATISTICS: "commit_lsn"}, {})
_LARGE: Final = 400_000
"""The transactions of a file of some 8 MB."""
_PIECE: Final = 100_000
_WAL: Final = 200
"""Bytes of WAL from one commit to the next."""


def transactions(first: int, n: int, wal_bytes: int = _WAL) -> pa.RecordBatch:
    """``n`` lines of ``_transactions``, the first of them number ``first``. ``wal_bytes``: from commit to commit."""
    i = np.arange(first, first + n, dtype=np.int64)
    jitter = np.random.default_rng(first).integers(-300_000, 300_000, n)
    micros = int(_BEGUN.timestamp()) * 1_000_000 + i * 1_000_000 + jitter
    xid = 1_000 + i - np.where(i % 10_000 == 0, 3_600, 0)
    lsn = i * wal_bytes
    tables = pa.ListArray.from_arrays(
        pa.array(np.arange(n + 1, dtype=np.int32)), pa.repeat("public.orders", n)
    )
    columns = {
        "xid": pa.array(xid),
        "commit_lsn": pa.array(lsn),
        "end_lsn": pa.array(lsn + 48),
        "commit_timestamp": pa.array(micros).cast(pa.timestamp("us", tz="UTC")),
        "gid": pa.nulls(n, pa.string()),
        "origin": pa.nulls(n, pa.string()),
        "streamed": pa.repeat(False, n),
        "rows": pa.array(1 + i % 7),
        "tables": tables,
    }
    return pa.RecordBatch.from_arrays(
        [columns[name] for name in TRANSACTIONS_SCHEMA.names], schema=TRANSACTIONS_SCHEMA
    )


def file_sizes(n_transactions: int) -> list[int]:
    """The rows of each file, as the merges of a run leave them."""
    small = [20_000, 20_000, 2_000, 2_000, *[1] * 31]
    left = n_transactions - sum(small)
    if left < 0:
        return [n_transactions - 31, *[1] * 31]
    return [*[_LARGE] * (left // _LARGE), left % _LARGE, *small]


def made(root: Location, n_transactions: int, about: TableMetadata) -> int:
    """Write the log, and return the bytes of its files."""
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    table = root.child(locations.TRANSACTIONS)
    writer = DeltaTableWriter.open_or_create(table, locations.TRANSACTIONS, columns, about)
    files: list[WrittenFile] = []
    first = 1
    for n_rows in file_sizes(n_transactions):
        parquet = ParquetFiles(
            table, f"data-{len(files):06d}", TRANSACTIONS_SCHEMA, "commit_lsn", writer.ranged
        )
        for start in range(first, first + n_rows, _PIECE):
            parquet.write(transactions(start, min(_PIECE, first + n_rows - start)))
        files += parquet.close()
        first += n_rows
    last = files[-1].max_commit_lsn
    marks = {f"{_SLOT}/owner": 1, f"{_SLOT}/proven": last}
    writer.commit(files, {_SLOT: last}, "commit_lsn", marks=marks, merges=False)
    return sum(file.size for file in files)


# -- the questions ---------------------------------------------------------------------------------------


def _read(root: Location, names: list[str], filters: Any = None) -> pa.Table:
    table = DeltaTable(root.child(locations.TRANSACTIONS).uri)
    return table.to_pyarrow_table(columns=names, filters=filters)


def _moment_before(root: Location, middle: int) -> Any:
    rows = _read(root, ["commit_lsn", "commit_timestamp"])
    moment = pa.scalar(_at(middle), pa.timestamp("us", tz="UTC"))
    later = rows.filter(pc.greater(rows["commit_timestamp"], moment))
    return pc.min(later["commit_lsn"]).as_py() - 1


def _xid_before(root: Location, middle: int) -> Any:
    return _read(root, ["commit_lsn"], [[("xid", "=", 1_000 + middle)]])["commit_lsn"][0].as_py()


def _batch_before(root: Location, middle: int) -> Any:
    return min(_read(root, ["commit_lsn", "tables"], [[("commit_lsn", ">", middle * _WAL)]]).num_rows, 1_000)


def _verify_before(root: Location, middle: int) -> Any:
    place = middle * _WAL
    upto = ("commit_lsn", "<=", place + 40)
    filters = [[("commit_lsn", ">", place), upto], [("xid", "in", [1_000 + middle]), upto]]
    return _read(root, ["xid", "commit_lsn", "tables"], filters).num_rows


def _at(middle: int) -> datetime.datetime:
    return _BEGUN + datetime.timedelta(seconds=middle)


def _moment(root: Location, middle: int) -> Any:
    return int(LogFrames(root.uri).as_of(None, timestamp=_at(middle)).lsn)  # type: ignore[arg-type]


def _xid(root: Location, middle: int) -> Any:
    return int(LogFrames(root.uri).as_of(None, xid=1_000 + middle).lsn)  # type: ignore[arg-type]


def _batch(root: Location, middle: int) -> Any:
    last = int(LogFrames(root.uri).last_commit_lsn)
    return TransactionsTable(DeltaRoot(root)).between(middle * _WAL, last, at_most=1_000).num_rows


def _verify(root: Location, middle: int) -> Any:
    place = middle * _WAL
    bounds = SnapshotBounds(
        Lsn(place), Lsn(place + 40), 1_000 + middle, 1_001 + middle, (1_000 + middle,), 0, Lsn(0)
    )
    return len(moment_of(LogFrames(root.uri), "public.orders", bounds).unseen_lsns)


def _bounds(root: Location, middle: int) -> Any:
    return int(LogFrames(root.uri).readable_lsn)


_QUESTIONS: Final[dict[str, tuple[Callable[[Location, int], Any] | None, Callable[[Location, int], Any]]]] = {
    "watermarks": (None, _bounds),
    "as_of(timestamp)": (_moment_before, _moment),
    "as_of(xid)": (_xid_before, _xid),
    "stream": (_batch_before, _batch),
    "verify": (_verify_before, _verify),
}


def _asked(uri: str, name: str, is_now: bool, middle: int) -> dict[str, Any]:
    """In a process of its own. What it imports was read before."""
    ask = _QUESTIONS[name][is_now]
    assert ask is not None
    opened: list[str] = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, path: str) -> Any:
            opened.append(path)
            return real(first, path)

        return call

    by_us = patch.object(Location, "open", noted(Location.open))
    by_deltalake = patch.object(
        DeltaStorageHandler, "open_input_file", noted(DeltaStorageHandler.open_input_file)
    )
    with by_us, by_deltalake:
        read_before, started_s = _read_bytes(), time.monotonic()
        found = ask(Location.parse(uri), middle)
        seconds, n_bytes = time.monotonic() - started_s, _read_bytes() - read_before
    return {
        "answer": found,
        "seconds": round(seconds, 3),
        "files": sum("_delta_log" not in path for path in opened),
        "read_mb": round(n_bytes / 1e6, 2),
    }


def _read_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.old_log", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000], help="transactions")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(prefix="xs-bench-") as folder:
            roots = [Location.parse(os.path.join(folder, name)) for name in ("before", "now")]
            for root, about in zip(
                roots, (_ABOUT_BEFORE, OF_OWN_TABLES[locations.TRANSACTIONS]), strict=True
            ):
                n_bytes = made(root, size, about)
            print(
                size, json.dumps({"files": len(file_sizes(size)), "mb": round(n_bytes / 1e6, 1)}), flush=True
            )
            for name, (before, _) in _QUESTIONS.items():
                for is_now in (False, True):
                    if before is None and not is_now:
                        continue
                    uri = roots[is_now].uri
                    with context.Pool(1) as pool:
                        pool.apply(_asked, (uri, name, is_now, size // 4 + 7))  # imports
                        found = pool.apply(_asked, (uri, name, is_now, size // 2 + 7))
                    print(size, name, "now" if is_now else "before", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
