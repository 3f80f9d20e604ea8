"""Base tables of a log that needs no server and no Spark, with a column of each kind that engines read differently.

``orders`` has one row with all values and one with nulls in all but the key. ``lines`` is there for readers of several
tables, and for its name. Called by the tests of docs/recipes.md.
"""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any, Final

from tests.spark.change_log_maker import INT8, LogMaker, keyed
from tests.spark.support import LocalSegments, batch_of, memory_frame, put_memory, read_memory
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.spark.frames import SinkBatch

_NUMERIC_12_2: Final = (12 << 16 | 2) + 4
"""PostgreSQL's type modifier."""
_COLUMNS: Final = {
    "id": (20, -1),
    "price": (1700, _NUMERIC_12_2),
    "amount": (1700, -1),
    "ordered_at": (1184, -1),
    "local_time": (1114, -1),
    "day": (1082, -1),
    "tags": (1009, -1),
    "counts": (1016, -1),
    "document": (3802, -1),
    "uid": (2950, -1),
    "raw": (17, -1),
    "is_paid": (16, -1),
    "n_small": (21, -1),
    "n_large": (20, -1),
    "ratio": (701, -1),
    "Two words": (25, -1),
}
ORDERS: Final = RelationVersion(
    1,
    "public",
    "orders",
    ReplicaIdentity.DEFAULT,
    tuple(Column(name, oid, mod, name == "id") for name, (oid, mod) in _COLUMNS.items()),
)
ROW: Final[dict[str, Any]] = {
    "id": 1,
    "price": decimal.Decimal("1234567890.50"),
    "amount": "0.1234567890123456789012345678901234567890",
    "ordered_at": datetime.datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=datetime.timezone.utc),
    "local_time": datetime.datetime(2026, 3, 29, 2, 30, 0, 123456),
    "day": datetime.date(2026, 3, 29),
    "tags": ["a", None, ""],
    "counts": [2**53 + 1, -1],
    "document": '{"key": [1, null]}',
    "uid": "2b6f0cc9-04d1-4b13-8c3f-0b1f6a1f8f6d",
    "raw": b"\x00\xff",
    "is_paid": True,
    "n_small": -7,
    "n_large": 2**53 + 1,
    "ratio": 0.1,
    "Two words": "Straße",
}
"""As Python has PostgreSQL's values; what Delta has no type for is PostgreSQL's text (docs/rows.md)."""
ROWS: Final = [ROW, {**dict.fromkeys(ROW), "id": 2}]
LINES: Final = [{"id": 1, "total": 5}, {"id": 2, "total": 6}]


def make_base_tables(root: Path, segments: Path) -> None:
    """Below ``root``: the log, and base tables of two moments, of which the later has the second line."""
    stored = LocalSegments(str(segments))

    def no_session() -> Any:
        raise AssertionError("nothing here is for Spark")

    def make_batch(*units: Any, number: int = 0) -> SinkBatch:
        batch = batch_of(units, stored, number)
        return SinkBatch(batch, no_session, memory_frame, stored, read_memory, put_memory, stored.storage)

    lines = keyed("order lines", {"id": INT8, "total": INT8}, "id", relid=2)
    log = LogMaker(root, None, make_batch)
    log.snapshot(ORDERS, ROWS)
    log.snapshot(lines, [])
    tables = BaseTables(str(root), None, 32 << 20)
    for line in LINES:
        log.insert(lines, line)
        assert tables.refresh(no_session) is not None
    log.sink.close()
