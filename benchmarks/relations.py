"""What a relation costs the reader's and a buffer's own code, without a server, Ray or Spark.

``python -m benchmarks.relations N``, as the case ``tables`` calls it.
N tables are declared, each with one row in a transaction of its own, and each transaction is a block. For the reader a
table that was dropped is like one that is never written again, so this is also N times CREATE and DROP. One process for
each N, because its growth is what is measured.
"""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from tests.pgoutput import writer
from tests.pgoutput.messages import ColumnKind, Insert, Message, TupleColumn, TupleData
from xidstream.pipeline.decode import decode_plain_block, warm_up
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import Begin, Commit, Relation, RelationColumn
from xidstream.pipeline.stream import PlainBlock, StreamCutter
from xidstream.pipeline.transactions.relation_cache import RelationCache

_COLUMNS = (("id", 20), ("k", 23), ("note", 25), ("amount", 1700), ("at", 1184), ("score", 701), ("flag", 16))
_VALUES = (b"1", b"1", b"a note", b"1.5", b"2024-01-01 00:00:00+00", b"0.5", b"t")
_ROW = TupleData(tuple(TupleColumn(ColumnKind.TEXT, value) for value in _VALUES))
_FIRST_RELID = 100_000


def run(n: int) -> dict[str, float]:
    """In a process of its own."""
    command = [sys.executable, "-m", "benchmarks.relations", str(n)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure(n: int) -> dict[str, float]:
    warm_up()
    cutter = StreamCutter(block_bytes=4 << 20, pending_limit_bytes=32 << 20, parallel=False)
    pool, buffer = RelationCache(), RelationCache()
    reader_s = buffer_s = told_bytes = 0.0
    before = _private_bytes()
    for i in range(n):
        messages = list(_transaction(i))
        start_s = time.process_time()
        for message in messages:
            cutter.feed(message)
        (event,) = cutter.flush()
        assert isinstance(event, PlainBlock) and event.block is not None
        versions = event.block.relations.versions
        told = pickle.dumps(pool.exchange(versions, versions))
        between_s = time.process_time()
        buffer.exchange(versions, pickle.loads(told))
        decode_plain_block(event.block.payload, event.block.lengths, buffer.relations(versions))
        reader_s, buffer_s = reader_s + between_s - start_s, buffer_s + time.process_time() - between_s
        told_bytes += len(told)
    return {
        "growth_mb": (_private_bytes() - before) / 2**20,
        "reader_ms_per_table": reader_s / n * 1e3,
        "buffer_ms_per_block": buffer_s / n * 1e3,
        "told_mb": told_bytes / 2**20,
    }


def _transaction(i: int) -> Iterator[bytes]:
    relid, lsn = _FIRST_RELID + i, Lsn(0x1000 + 64 * i)
    columns = tuple(RelationColumn(n == 0, name, oid, -1) for n, (name, oid) in enumerate(_COLUMNS))
    messages: tuple[Message, ...] = (
        Begin(lsn, 0, Xid(700 + i)),
        Relation(None, relid, "public", f"table_{i}", "d", columns),
        Insert(None, relid, _ROW),
        Commit(lsn, Lsn(lsn + 4), 0),
    )
    return (writer.xlog_data(lsn, writer.write(message)) for message in messages)


def _private_bytes() -> int:
    gc.collect()
    memory: Any = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
