"""Tables of every type, rows made by seed, and files of them, for the tests of late binding."""

from __future__ import annotations

import datetime
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from xidstream.pipeline.parquet import CommitStamp, RowFile, unbound, write_rows
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, rows
from xidstream.pipeline.schema.builtin_types import BY_ARRAY_OID, BY_OID
from xidstream.pipeline.schema.rows import Stamp

NUMERIC, NUMERIC_ARRAY = 1700, 1231
XID = 700
COMMIT = CommitStamp(0x1_16B3748, 1_700_000_000_123_456)
NAMES = (
    "a.b",
    "a",
    "`tick`",
    "x.list.element",
    "element",
    "key_value",
    "Größe, weird;{}()=\t\n",
    "_commit_lsn2",
    "é",
)
"""Names that a path in Parquet, or an SQL expression, may take for something else."""


def relation(*columns: tuple[str, int] | tuple[str, int, int], name: str = "t") -> RelationVersion:
    """Columns are (name, type oid) or (name, type oid, modifier)."""
    made = tuple(Column(c[0], c[1], c[2] if len(c) == 3 else -1, False) for c in columns)
    return RelationVersion(5, "public", name, ReplicaIdentity.DEFAULT, made)


def every_type() -> RelationVersion:
    """One column of each built-in type, and some numerics."""
    columns: list[Any] = [(f"c{oid}", oid) for oid in [*BY_OID, *BY_ARRAY_OID]]
    for precision, scale in ((1, 0), (9, 2), (18, 18), (38, 0), (38, 38)):
        modifier = (precision << 16 | scale) + 4
        columns += [
            (f"n{precision}_{scale}", NUMERIC, modifier),
            (f"l{precision}_{scale}", NUMERIC_ARRAY, modifier),
        ]
    return relation(*columns)


def value(arrow: pa.DataType, random_: random.Random) -> Any:
    if random_.random() < 0.2:
        return None
    if pa.types.is_list(arrow):
        return [value(arrow.value_type, random_) for _ in range(random_.choice((0, 1, 3)))]
    if pa.types.is_boolean(arrow):
        return random_.random() < 0.5
    if pa.types.is_integer(arrow):
        top = 2 ** (arrow.bit_width - 1)
        return random_.choice((0, top - 1, -top, random_.randrange(-top, top)))
    if pa.types.is_floating(arrow):
        number = random_.choice((0.0, -0.0, float("inf"), float("-inf"), 1.5e-30, random_.uniform(-1e9, 1e9)))
        return float(np.float32(number)) if arrow.bit_width == 32 else number
    if pa.types.is_decimal(arrow):
        most = 10**arrow.precision - 1
        digits = random_.choice((0, most, -most, random_.randrange(-most, most + 1)))
        return Decimal(digits).scaleb(-arrow.scale, context=_EXACT)
    if pa.types.is_date(arrow):
        return datetime.date(1, 1, 1) + datetime.timedelta(days=random_.randrange(3_000_000))
    if pa.types.is_timestamp(arrow):
        zone = datetime.timezone.utc if arrow.tz else None
        microseconds = random_.randrange(3_000_000 * 86_400 * 10**6)
        return datetime.datetime(1, 1, 1, tzinfo=zone) + datetime.timedelta(microseconds=microseconds)
    if pa.types.is_binary(arrow):
        return random_.randbytes(random_.choice((0, 1, 30)))
    return "".join(random_.choices("ab\0é世𝄞'\\", k=random_.choice((0, 1, 12))))


def _exact() -> Any:
    import decimal

    return decimal.Context(prec=60)


_EXACT = _exact()


def internal(table: RelationVersion, first: int, n: int, random_: random.Random) -> pa.RecordBatch:
    """``n`` rows in internal layout whose ordinals begin at ``first``, one apart from another table's now and then."""
    seq = first + np.cumsum([random_.choice((1, 1, 1, 2)) for _ in range(n)], dtype=np.int64) - 1
    names = [c.name for c in table.columns]
    columns = [
        pa.array([random_.randrange(5) for _ in range(n)], pa.int8()),
        pa.array([random_.randrange(3) for _ in range(n)], pa.uint32()),
        pa.array(seq, pa.int64()),
        pa.array([random_.choice((None, [], names[:2])) for _ in range(n)], pa.list_(pa.string())),
        pa.array(
            [random_.choice((None, [], [(names[0], "infinity"), ("x", "")])) for _ in range(n)],
            pa.map_(pa.string(), pa.string()),
        ),
    ]
    for field in table.arrow_fields:
        columns.append(pa.array([value(field.type, random_) for _ in range(n)], field.type))
    return pa.RecordBatch.from_arrays(columns, schema=rows.internal_schema(table))


def batches(table: RelationVersion, *sizes: int, seed: int = 1) -> list[pa.RecordBatch]:
    random_ = random.Random(seed)
    made: list[pa.RecordBatch] = []
    first = 0
    for n in sizes:
        made.append(internal(table, first, n, random_))
        first = made[-1].column(2)[n - 1].as_py() + 1 if n else first
    return made


def released(
    table: RelationVersion, internal_batches: list[pa.RecordBatch], commit: CommitStamp = COMMIT
) -> pa.Table:
    """What a handler gets of rows that were never written: the oracle."""
    stamp = Stamp.of_one(commit.commit_lsn, commit.commit_timestamp_us, XID)
    made = [rows.release(batch, table, stamp) for batch in internal_batches]
    return pa.Table.from_batches(made, rows.contract_schema(table))


def write(
    path: Path, table: RelationVersion, internal_batches: list[pa.RecordBatch], **options: Any
) -> RowFile:
    with path.open("wb") as file:
        return write_rows(file.write, table, [unbound(b, table, XID) for b in internal_batches], **options)
