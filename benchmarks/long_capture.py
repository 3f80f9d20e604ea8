"""``python -m benchmarks.long_capture``: a capture of days in minutes, and how long the next start takes after it.

The clock is a number. All else is as in a run: ``CommitOrder``, ``JournalPolicy`` and ``SlotStorage``, with real files
in a folder. Each simulated second brings one unit of ``--rate`` transactions of one row. A file is written when the
policy says so: without a sink one a second (``--sink-away``: as in a run whose sink takes nothing, one each 5 s). Each
is recorded, and what it absorbed is removed. Flushes are left out: they would cost time only.

A week of that is half an hour of CPU time. ``--by-sizes`` takes a minute: only which file absorbs which is decided
second by second, by the sizes that a short capture had, and the files that are left are written once, at the end.

Told at each twelfth of the time: the files, their bytes, the spans in the record. At the end the journal is copied to
an S3 store (moto's, in a process of its own, with ``--delay-ms`` before each answer). It is taken over there, and in
the folder. Then it is loaded from the folder, and all transactions are there, once, in order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import fs

from xidstream.pipeline.commits.journal import Journal
from xidstream.pipeline.commits.journal_merging import absorbed, is_small
from xidstream.pipeline.commits.journal_policy import JournalPolicy
from xidstream.pipeline.commits.journaling import FILE_BYTES, FILE_UNITS
from xidstream.pipeline.commits.order import CommitOrder
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.exchange import (
    UNIT_BYTES,
    JournalFile,
    MemoryPart,
    Opened,
    PrepareCover,
    Sealed,
    SlotIdentity,
)
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, rows
from xidstream.pipeline.storage.journal_file import load_journal_units
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.storage.stored_journal import stored_journal

SLOT = SlotIdentity(7_001, "db", "long")
RELATION = RelationVersion(
    16_400,
    "public",
    "ticks",
    ReplicaIdentity.DEFAULT,
    (Column("id", 23, -1, True), Column("v", 25, -1, False)),
)
_COMMIT_BYTES = 0x100
_DAY_S = 86_400


def opened_at(confirmed: int, asked_for: int) -> Opened:
    """The journal has all up to ``asked_for``."""
    return Opened(
        identity=SLOT,
        confirmed_flush_lsn=Lsn(confirmed),
        target_lsn=Lsn(1 << 50),
        server_version=180_004,
        proto_version=4,
        streaming="on",
        two_phase=False,
        cover=PrepareCover(),
        timeline=1,
        history={},
        start_lsn=Lsn(asked_for),
    )


class Units:
    """One for each second: transactions of one row."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.tables: dict[str, pa.Table] = {}
        schema = rows.contract_schema(RELATION)
        made = {
            "id": pa.array(range(rate), schema.field("id").type),
            "v": pa.array([f"a value of number {i}" for i in range(rate)]),
            "_change_type": pa.array(["insert"] * rate),
        }
        row = pa.Table.from_pylist(
            [{}] * rate, schema=pa.schema([field.with_nullable(True) for field in schema])
        )
        self._columns = {name: made.get(name, row.column(name)) for name in schema.names}
        self._schema = schema
        lines = pa.Table.from_pylist(
            [{"streamed": False, "rows": 1, "tables": ["public.ticks"]}] * rate, rows.TRANSACTIONS_SCHEMA
        )
        self._lines = {name: lines.column(name) for name in lines.column_names}

    def make(self, second: int, n_before: int) -> tuple[Sealed, Lsn, Lsn]:
        """``n_before``: transactions before these."""
        lsn = _COMMIT_BYTES * (1 + np.arange(n_before, n_before + self.rate, dtype=np.int64))
        stamp = pa.array(1_700_000_000_000_000 + second * 1_000_000 + np.arange(self.rate))
        xid = pa.array(1000 + np.arange(self.rate) + second * self.rate)
        of_rows = {"_commit_lsn": pa.array(lsn), "_commit_timestamp": stamp, "_xid": xid, "_seq": xid}
        columns = {**self._columns, **of_rows}
        columns["_text"] = pa.array([[]] * self.rate, self._schema.field("_text").type)
        table = pa.Table.from_arrays(
            [_cast(columns[field.name], field.type) for field in self._schema], schema=self._schema
        )
        of_lines = {
            "xid": xid,
            "commit_lsn": pa.array(lsn),
            "end_lsn": pa.array(lsn + 0x30),
            "commit_timestamp": stamp,
        }
        lines = {**self._lines, **of_lines}
        batch = pa.Table.from_arrays(
            [_cast(lines[field.name], field.type) for field in rows.TRANSACTIONS_SCHEMA],
            schema=rows.TRANSACTIONS_SCHEMA,
        ).combine_chunks()
        ref = f"behind {n_before}"
        self.tables[ref] = table
        part = MemoryPart(RELATION, self.rate, table.nbytes, int(lsn[0]), ref)
        unit = Sealed(batch.to_batches()[0], (part,), (), (), self.rate, table.nbytes)
        return unit, Lsn(lsn[0]), Lsn(lsn[-1])


def _cast(column: Any, wanted: pa.DataType) -> Any:
    return column if column.type == wanted else column.cast(wanted)


def capture(folder: Path, days: float, rate: int, *, has_sink: bool, limit_s: float) -> dict[str, Any]:
    """Simulate, and print how it goes."""
    Storage.sync = lambda self, keys: None  # type: ignore[method-assign]
    storage = SlotStorage(str(folder), opened_at(0x10, 0x10), "20260101T000000-0000000a")
    storage.take_over()
    order = CommitOrder(batch_rows=10**6, batch_bytes=64 << 20, journal=Journal(horizon_bytes=0))
    if has_sink:
        order.journal._horizon_bytes = 64 << 20
    policy = JournalPolicy(64 << 20, 5.0, 64 << 30, has_sink)
    units = Units(rate)
    n_seconds = int(days * _DAY_S)
    began_s, last_file_s, n_written, most, number = time.monotonic(), None, 0, 0, 0
    for second in range(n_seconds):
        now_s = float(second)
        unit, first, last = units.make(second, second * rate)
        order.add_unit(second, first, last, Lsn(last + 0x30), rate)
        order.content_arrived(second, unit, now_s)
        now_s += 0.99
        due_in_s = policy.due_in_s(
            now_s,
            order.oldest_ready_s,
            order.waiting_bytes,
            order.unconfirmed_wal_bytes,
            order.journal.n_bytes,
            is_ending=second == n_seconds - 1,
            last_file_s=last_file_s,
        )
        if due_in_s is not None and due_in_s < 0.05:
            last_file_s = now_s
            entries = order.to_write(FILE_BYTES, FILE_UNITS)
            found = [(entry.end, entry.content) for entry in entries if entry.content is not None]
            absorbed = order.journal.to_absorb(sum(entry.memory_bytes for entry in entries))
            file = storage.write_journal(number, found, units.tables.__getitem__, absorbed, policy.most_rows)
            assert isinstance(file, JournalFile)
            order.written(file, entries, absorbed)
            removed = order.journal.take_removed()
            storage.record(order.confirmed_lsn, [], order.delivered_lsn, order.journal.spans)
            storage.remove_journal(removed)
            units.tables.clear()
            number, n_written, most = number + 1, n_written + 1, max(most, len(order.journal.files))
        if second % max(1, n_seconds // 12) == 0 or second == n_seconds - 1:
            _tell(second, order, n_written, most, began_s)
        if time.monotonic() - began_s > limit_s:
            print(f"stopped after {limit_s:.0f} s of real time", flush=True)
            _tell(second, order, n_written, most, began_s)
            break
    return {
        "simulated_hours": round((second + 1) / 3600, 2),
        "n_transactions": (second + 1) * rate,
        "files_written": n_written,
        "most_files": most,
        "files": len(order.journal.files),
        "spans": len(order.journal.spans),
        "bytes": order.journal.n_bytes,
        "end_lsn": int(order.confirmed_lsn),
        "real_s": round(time.monotonic() - began_s, 1),
    }


def capture_by_sizes(folder: Path, days: float, rate: int) -> dict[str, Any]:
    """The same without the files that are absorbed. Sizes are a straight line through those of a short capture."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as short:
        capture(Path(short), 40 / _DAY_S, rate, has_sink=False, limit_s=float("inf"))
        journal = stored(Path(short))
    file = max(journal, key=lambda file: file.n_transactions)
    least = min(journal, key=lambda file: file.n_transactions)
    assert file.n_transactions > least.n_transactions
    slope = (file.file_bytes - least.file_bytes) / (file.n_transactions - least.n_transactions)
    rest = max(0.0, least.file_bytes - slope * least.n_transactions)
    memory_bytes = file.memory_bytes / file.n_transactions
    n_seconds, most = int(days * _DAY_S), 0
    files: list[JournalFile] = []
    for second in range(n_seconds):
        tail = list(takewhile(is_small, reversed(files)))[::-1]
        taken = absorbed(tail, sum(map(is_small, files)), int(rate * memory_bytes) + UNIT_BYTES)
        del files[len(files) - len(taken) :]
        n = rate + sum(each.n_transactions for each in taken)
        sizes = {"file_bytes": int(rest + slope * n), "memory_bytes": int(memory_bytes * n)}
        files.append(replace(least, number=second, n_transactions=n, n_units=-(-n // 1000), **sizes))
        most = max(most, len(files))
        if second % max(1, n_seconds // 12) == 0:
            print(f"{second / 3600:7.1f} h: {len(files)} files (at most {most})", flush=True)
    found = _written(folder, files)
    return {
        **found,
        "simulated_hours": round(n_seconds / 3600, 2),
        "files_written": n_seconds,
        "most_files": most,
    }


def _written(folder: Path, files: list[JournalFile]) -> dict[str, Any]:
    """Files of so many transactions each."""
    storage = SlotStorage(str(folder), opened_at(0x10, 0x10), "20260101T000000-0000000a")
    storage.take_over()
    order = CommitOrder(batch_rows=10**6, batch_bytes=1 << 40, journal=Journal(horizon_bytes=0))
    n, ticket, full = 0, 0, Units(1000)
    for planned in files:
        n_left, tables = planned.n_transactions, {}
        while n_left:
            units = full if n_left >= full.rate else Units(n_left)
            unit, first, last = units.make(0, n)
            order.add_unit(ticket, first, last, Lsn(last + 0x30), units.rate)
            order.content_arrived(ticket, unit, 0.0)
            tables.update(units.tables)
            units.tables.clear()
            n, n_left, ticket = n + units.rate, n_left - units.rate, ticket + 1
        entries = order.to_write(1 << 40, 1 << 40)
        found = [(entry.end, entry.content) for entry in entries if entry.content is not None]
        file = storage.write_journal(planned.number, found, tables.__getitem__)
        assert isinstance(file, JournalFile)
        order.written(file, entries)
    storage.record(order.confirmed_lsn, [], order.delivered_lsn, order.journal.spans)
    return {
        "n_transactions": n,
        "files": len(files),
        "spans": len(order.journal.spans),
        "bytes": order.journal.n_bytes,
        "end_lsn": int(order.confirmed_lsn),
    }


def stored(folder: Path) -> list[JournalFile]:
    layout = Layout(SLOT.system_identifier, SLOT.slot, "look")
    journal = stored_journal(Storage(str(folder)), layout, verify=False)
    assert journal is not None
    return list(journal.readable)


def _tell(second: int, order: CommitOrder, n_written: int, most: int, began_s: float) -> None:
    journal = order.journal
    print(
        f"{second / 3600:7.1f} h: {n_written} files written, {len(journal.files)} there (at most {most}), "
        f"{journal.n_bytes / 1e6:.1f} MB, {len(journal.spans)} spans; {time.monotonic() - began_s:.0f} s of real time",
        flush=True,
    )


def start(uri: str, end_lsn: int, label: str) -> tuple[float, int]:
    began_s = time.monotonic()
    taken = SlotStorage(uri, opened_at(0x10, end_lsn), f"20260109T000000-{label}").take_over()
    seconds = time.monotonic() - began_s
    print(f"take-over of {len(taken.journal)} files, {label}: {seconds:.2f} s", flush=True)
    return round(seconds, 2), len(taken.journal)


def _serve(answers: Connection, delay_s: float) -> None:
    from tests.s3_server import S3Server

    server = S3Server()
    answers.send((server.uri("long"), server.bucket, server.port))
    answers.recv()
    server.delay_s = delay_s
    answers.send(None)
    answers.recv()


@contextmanager
def store_with(folder: Path, delay_s: float) -> Iterator[str]:
    """An S3 store with the folder's content; from then on slow."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "testing")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, delay_s), daemon=True)
    process.start()
    uri, bucket, port = ours.recv()
    store = fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{port}", scheme="http", region="us-east-1", request_timeout=600
    )
    fs.copy_files(str(folder), f"{bucket}/long", destination_filesystem=store, use_threads=False)
    ours.send(None)
    ours.recv()
    try:
        yield uri
    finally:
        ours.send(None)
        process.join()


def check(folder: Path, n_transactions: int) -> int:
    """All transactions are there, once and in order. Returns the units that they are in."""
    storage, layout = Storage(str(folder)), Layout(SLOT.system_identifier, SLOT.slot, "look")
    record = read_progress(storage, layout)
    assert record is not None
    opened = replace(opened_at(0x10, record.confirmed_lsn))
    owner = SlotStorage(str(folder), opened, "20260109T000001-check")
    n, n_units = 0, 0
    for file in owner.take_over().journal:
        assert isinstance(file, JournalFile)
        tables: dict[str, pa.Table] = {}
        units = load_journal_units(storage, layout, file, partial(_put, tables))
        n_units += len(units)
        for _, unit in units:
            found = unit.transactions.column("commit_lsn").to_numpy()
            assert (found == _COMMIT_BYTES * (1 + np.arange(n, n + len(found)))).all()
            of_rows = np.concatenate(
                [tables[part.ref].column("_commit_lsn").to_numpy() for part in unit.memory]
            )
            assert (of_rows == found).all()
            n += len(found)
    assert n == n_transactions, (n, n_transactions)
    return n_units


def _put(tables: dict[str, pa.Table], table: pa.Table) -> str:
    ref = f"ref {len(tables)}"
    tables[ref] = table
    return ref


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.long_capture")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--rate", type=int, default=10, help="transactions a second")
    parser.add_argument("--sink-away", action="store_true", help="as in a run whose sink takes nothing")
    parser.add_argument("--delay-ms", type=float, default=15.0, help="of the store, before each answer")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="of real time; it ends earlier then"
    )
    parser.add_argument("--folder", type=Path, help="for the storage; removed afterwards")
    parser.add_argument(
        "--by-sizes", action="store_true", help="decide by sizes, and write the last files only"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="long-capture-", dir=given.folder))
    try:
        if given.by_sizes:
            found = capture_by_sizes(folder, given.days, given.rate)
        else:
            found = capture(folder, given.days, given.rate, has_sink=given.sink_away, limit_s=given.limit_s)
        with store_with(folder, given.delay_ms / 1000) as uri:
            found["store_start_s"], _ = start(uri, found["end_lsn"], "store")
        found["folder_start_s"], _ = start(str(folder), found["end_lsn"], "folder")
        found["n_units_loaded"] = check(folder, found["n_transactions"])
        json.dump(found, sys.stdout, indent=2)
        print()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
