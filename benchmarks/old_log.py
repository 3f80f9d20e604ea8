"""``python -m benchmarks.old_log``: what it costs to ask a change log for one commit, as the log grows old.

For each size a root with ``_transactions`` alone is made, one transaction a second, in files as the upkeep leaves them:
of some 400,000 transactions each, a few smaller ones, and 31 of a single transaction. Commit timestamps go back a
little now and then, and each ten thousandth transaction was open for an hour.

*Before* is what reading all of it costs: the same questions as an earlier xidstream asked them, of the columns that the
answer needs, by pyarrow. *Now* is ``ChangeLog``. Each question is asked of a moment in the middle of the log, in a
process that has asked for another moment before. It has the seconds, and the megabytes that it read from files, opening
the log included. The range is of 1,000 transactions.
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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.changelog.change_log import ChangeLog
from xidstream.pipeline.changelog.log_ranges import Commits
from xidstream.pipeline.changelog.log_table import LogTable
from xidstream.pipeline.delta import locations
from xidstream.pipeline.delta.columns import DeltaColumn
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.locations import Location
from xidstream.pipeline.delta.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.delta.table_metadata import OF_OWN_TABLES
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.verify.moment import moment_of

_SLOT: Final = "7/shop/orders"
_BEGUN: Final = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
_LARGE: Final = 400_000
"""The transactions of a file of some 8 MB."""
_PIECE: Final = 100_000
_WAL: Final = 200
"""Bytes of WAL from one commit to the next."""


def _piece(first: int, n: int) -> pa.RecordBatch:
    i = np.arange(first, first + n, dtype=np.int64)
    jitter = np.random.default_rng(first).integers(-300_000, 300_000, n)
    micros = int(_BEGUN.timestamp()) * 1_000_000 + i * 1_000_000 + jitter
    xid = 1_000 + i - np.where(i % 10_000 == 0, 3_600, 0)
    lsn = i * _WAL
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


def _sizes(n_transactions: int) -> list[int]:
    small = [20_000, 20_000, 2_000, 2_000, *[1] * 31]
    left = n_transactions - sum(small)
    return [*[_LARGE] * (left // _LARGE), left % _LARGE, *small]


def made(root: Location, n_transactions: int) -> int:
    """Write the log, and return the bytes of its files."""
    columns = [DeltaColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    about = OF_OWN_TABLES[locations.TRANSACTIONS]
    table = root.child(locations.TRANSACTIONS)
    writer = DeltaTableWriter.open_or_create(table, locations.TRANSACTIONS, columns, about)
    files: list[WrittenFile] = []
    first = 1
    for n_rows in _sizes(n_transactions):
        parquet = ParquetFiles(
            table, f"data-{len(files):06d}", TRANSACTIONS_SCHEMA, "commit_lsn", writer.ranged
        )
        for start in range(first, first + n_rows, _PIECE):
            parquet.write(_piece(start, min(_PIECE, first + n_rows - start)))
        files += parquet.close()
        first += n_rows
    last = files[-1].max_commit_lsn
    marks = {f"{_SLOT}/owner": 1, f"{_SLOT}/proven": last}
    writer.commit(files, {_SLOT: last}, "commit_lsn", marks=marks, merges=False)
    return sum(file.size for file in files)


# -- the questions ---------------------------------------------------------------------------------------


def _all(root: Location, *names: str) -> pa.Table:
    return LogTable(root.child(locations.TRANSACTIONS)).read(names)


def _moment_before(root: Location, middle: int) -> Any:
    rows = _all(root, "commit_lsn", "commit_timestamp")
    later = rows.filter(
        pc.greater(rows["commit_timestamp"], pa.scalar(_at(middle), pa.timestamp("us", tz="UTC")))
    )
    return pc.min(later["commit_lsn"]).as_py() - 1


def _xid_before(root: Location, middle: int) -> Any:
    rows = _all(root, "commit_lsn", "xid")
    return rows.filter(pc.equal(rows["xid"], 1_000 + middle))["commit_lsn"][0].as_py()


def _range_before(root: Location, middle: int) -> Any:
    return _all(root, "commit_lsn", "tables").num_rows  # `transactions` gave all, and the caller chose


def _verify_before(root: Location, middle: int) -> Any:
    rows = _all(root, "xid", "commit_lsn")
    return rows.filter(pc.is_in(rows["xid"], pa.array([1_000 + middle]))).num_rows


def _at(middle: int) -> datetime.datetime:
    return _BEGUN + datetime.timedelta(seconds=middle)


def _moment(root: Location, middle: int) -> Any:
    return int(ChangeLog(root.uri).as_of(None, timestamp=_at(middle)).lsn)  # type: ignore[arg-type]


def _xid(root: Location, middle: int) -> Any:
    return int(ChangeLog(root.uri).as_of(None, xid=1_000 + middle).lsn)  # type: ignore[arg-type]


def _range(root: Location, middle: int) -> Any:
    return len(Commits(ChangeLog(root.uri), middle * _WAL, (middle + 1_000) * _WAL).lsns)


def _verify(root: Location, middle: int) -> Any:
    place = middle * _WAL
    bounds = SnapshotBounds(
        Lsn(place), Lsn(place + 40), 1_000 + middle, 1_001 + middle, (1_000 + middle,), 0, Lsn(0)
    )
    return len(moment_of(ChangeLog(root.uri), "public.orders", bounds).left_out)


def _bounds(root: Location, middle: int) -> Any:
    return int(ChangeLog(root.uri).readable_lsn)


_QUESTIONS: Final[dict[str, tuple[Callable[[Location, int], Any] | None, Callable[[Location, int], Any]]]] = {
    "watermarks": (None, _bounds),
    "as_of(timestamp)": (_moment_before, _moment),
    "as_of(xid)": (_xid_before, _xid),
    "1,000 transactions": (_range_before, _range),
    "verify": (_verify_before, _verify),
}


def _asked(uri: str, name: str, is_now: bool, middle: int) -> dict[str, Any]:
    """In a process of its own. What it imports was read before."""
    ask = _QUESTIONS[name][is_now]
    assert ask is not None
    read_before, started_s = _read_bytes(), time.monotonic()
    found = ask(Location.parse(uri), middle)
    return {
        "answer": found,
        "seconds": round(time.monotonic() - started_s, 3),
        "read_mb": round((_read_bytes() - read_before) / 1e6, 2),
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
            root = Location.parse(os.path.join(folder, "log"))
            n_bytes = made(root, size)
            print(size, json.dumps({"files": len(_sizes(size)), "mb": round(n_bytes / 1e6, 1)}), flush=True)
            for name, (before, _) in _QUESTIONS.items():
                for is_now in (False, True):
                    if before is None and not is_now:
                        continue
                    with context.Pool(1) as pool:
                        pool.apply(_asked, (root.uri, name, is_now, size // 4 + 7))  # imports
                        found = pool.apply(_asked, (root.uri, name, is_now, size // 2 + 7))
                    print(size, name, "now" if is_now else "before", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
