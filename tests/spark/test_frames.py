"""What a user's function gets: exact schemas, whole transactions, every kind of part, several layouts."""

from __future__ import annotations

import dataclasses
import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.spark.support import (
    COMMIT_US,
    INT2,
    INT4,
    INT8,
    NUMERIC,
    TEXT,
    LocalSegments,
    Transaction,
    batch_of,
    expected_rows,
    internal,
    memory_frame,
    numeric,
    plain_messages,
    put_memory,
    read_memory,
    record_batch,
    relation,
    stream_bytes,
)
from xidstream.pipeline.errors import SegmentCorrupt, SinkFailed, UsageError
from xidstream.pipeline.exchange import MemoryPart, Sealed, SegmentPart
from xidstream.pipeline.packs import FEW_TABLES, PartsBuilder
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.pg_rules import DDL_PREFIX
from xidstream.pipeline.schema.relation import CONTRACT_COLUMNS
from xidstream.pipeline.schema.rows import (
    DELETE,
    MESSAGES_SCHEMA,
    TRANSACTIONS_SCHEMA,
    TRUNCATE,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
    Stamp,
    contract_schema,
    release,
)
from xidstream.pipeline.sinks.foreach import ForeachSink
from xidstream.pipeline.spark.frames import SinkBatch
from xidstream.pipeline.spark.spark_schemas import simple_types, spark_schema

pytestmark = pytest.mark.spark

ITEMS = relation("public.items", ("id", INT8), ("name", TEXT))


def items(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"item {i}"} for i in ids]


def collected(frame: Any, *columns: str) -> list[tuple[Any, ...]]:
    rows = [tuple(row[c] for c in columns) for row in frame.select("_commit_lsn", "_seq", *columns).collect()]
    return sorted(rows)


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "segments"])
def test_seq_is_dense_over_all_tables(make_batch: Any, spilled: bool) -> None:
    other = relation("public.other", ("id", INT4), relid=2)
    transaction = Transaction(
        100,
        [(ITEMS, items(1, 2, 3, 4)), (other, [{"id": 9}, {"id": 10}]), (ITEMS, items(5, 6))],
        spilled=spilled,
    )
    batch = make_batch(transaction)
    assert batch.tables == ["public.items", "public.other"]
    for table in batch.tables:
        wanted = [
            (lsn, seq, change, row["id"]) for lsn, seq, change, row in expected_rows([transaction], table)
        ]
        assert collected(batch.dataframe(table), "_commit_lsn", "_seq", "_change_type", "id") == wanted
    assert collected(batch.dataframe("public.items"), "_seq") == [(0,), (1,), (2,), (3,), (6,), (7,)]


def test_a_batch_without_rows_has_no_table(make_batch: Any) -> None:
    batch = make_batch(Transaction(100))
    assert batch.tables == []
    with pytest.raises(UsageError):
        batch.dataframe("public.items")


def test_memory_and_segments_of_several_transactions_are_one_frame(make_batch: Any) -> None:
    transactions = [
        Transaction(100, [(ITEMS, items(1, 2))]),
        Transaction(110, [(ITEMS, items(3, 4, 5))], spilled=True),
        Transaction(120, [(ITEMS, items(6))]),
    ]
    batch = make_batch(*transactions)
    rows = collected(batch.dataframe("public.items"), "_commit_lsn", "_seq", "_change_type", "id", "name")
    wanted = [(lsn, s, c, r["id"], r["name"]) for lsn, s, c, r in expected_rows(transactions, "public.items")]
    assert rows == wanted
    assert (batch.first_commit_lsn, batch.last_commit_lsn) == (100, 120)


NATIVE = relation(
    "Odd.name.t`x",
    ("b", 16), ("i2", INT2), ("i4", INT4), ("i8", INT8), ("o", 26), ("f4", 700), ("f8", 701),
    ("n", NUMERIC, numeric(10, 2)), ("big", NUMERIC), ("s", TEXT), ("y", 17), ("d", 1082), ("ts", 1114),
    ("tz", 1184), ("u", 2950), ("j", 3802), ("ints", 1007), ("stamps", 1115), ("nums", 1231, numeric(12, 3)),
    ("a.b`c", TEXT), ("range", 3904),
)  # fmt: skip
VALUES = {
    "b": True, "i2": -32768, "i4": 2**31 - 1, "i8": -(2**63), "o": 2**32 - 1, "f4": 1.5, "f8": 1e300,
    "n": Decimal("12345678.90"), "big": "1e5000", "s": "Straße",
    "y": b"\x00\xff",
    "d": datetime.date(1500, 2, 28),
    "ts": datetime.datetime(1492, 10, 12, 1, 2, 3, 4),
    "tz": datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
    "u": "0-0", "j": "{}", "ints": [1, None, 3], "stamps": [datetime.datetime(2024, 1, 1, 0, 0, 0, 1), None],
    "nums": [Decimal("1.250")], "a.b`c": "dots", "range": "[1,5)",
    "_unchanged": ["s", "j"], "_text": [("ts", "infinity"), ("n", "NaN")],
}  # fmt: skip


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "segments"])
def test_every_native_type_and_both_maps_arrive_exactly(
    make_batch: Any, tmp_path: Path, spilled: bool
) -> None:
    batch = make_batch(Transaction(100, [(NATIVE, [VALUES, {"_change": TRUNCATE}])], spilled=spilled))
    frame = batch.dataframe("Odd.name.t`x")
    schema = contract_schema(NATIVE)
    assert simple_types(frame.schema) == simple_types(spark_schema(schema))
    assert frame.columns[-7:] == list(CONTRACT_COLUMNS)
    assert dict(frame.dtypes)["ts"] == "timestamp_ntz"
    # PySpark's mapInArrow looks columns up unquoted: it cannot have a dot or a backtick in a name.
    got = (
        frame.toDF(*[f"c{i}" for i in range(len(frame.columns))]).mapInArrow(_as_ipc, "ipc binary").collect()
    )
    tables = [pa.ipc.open_stream(row.ipc).read_all().rename_columns(schema.names) for row in got]
    rows = sorted((r for t in tables for r in t.to_pylist()), key=lambda r: r["_seq"])
    for name, value in VALUES.items():
        if not name.startswith("_"):
            assert rows[0][name] == value, name
            assert rows[1][name] is None
    assert rows[0]["_unchanged"] == ["s", "j"]
    assert dict(rows[0]["_text"]) == {"ts": "infinity", "n": "NaN"}
    assert (rows[1]["_unchanged"], rows[1]["_text"]) == (None, None)
    assert [r["_change_type"] for r in rows] == ["insert", "truncate"]


def _as_ipc(batches: Any) -> Any:
    for batch in batches:
        stream = stream_bytes([batch], batch.schema)
        yield pa.RecordBatch.from_arrays([pa.array([stream], pa.binary())], names=["ipc"])


def test_preimage_directly_precedes_postimage(make_batch: Any) -> None:
    changes = [UPDATE_PREIMAGE, UPDATE_POSTIMAGE, DELETE]
    rows = [{"id": 1, "name": None, "_change": c} for c in changes]
    frame = make_batch(Transaction(100, [(ITEMS, rows)])).dataframe("public.items")
    assert collected(frame, "_seq", "_change_type") == [
        (0, "update_preimage"),
        (1, "update_postimage"),
        (2, "delete"),
    ]


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "segments"])
def test_ddl_inside_a_batch_gives_the_union_of_the_versions(make_batch: Any, spilled: bool) -> None:
    v1 = relation("public.t", ("id", INT4), ("price", INT4), ("gone", TEXT))
    v2 = relation("public.t", ("id", INT8), ("price", TEXT), ("New", TEXT))
    transactions = [
        Transaction(100, [(v1, [{"id": 1, "price": 5, "gone": "g"}])], spilled=spilled),
        Transaction(110, [(v2, [{"id": 2**40, "price": "five", "New": "n"}])], spilled=spilled),
    ]
    frame = make_batch(*transactions).dataframe("public.t")
    assert frame.dtypes[:5] == [
        ("id", "bigint"), ("price", "int"), ("gone", "string"), ("price__string", "string"),
        ("New", "string"),
    ]  # fmt: skip
    assert frame.columns[5:] == list(CONTRACT_COLUMNS)
    assert collected(frame, "id", "price", "gone", "price__string", "New", "_commit_lsn") == [
        (1, 5, "g", None, None, 100),
        (2**40, None, None, "five", "n", 110),
    ]


def test_tables_whose_dotted_names_coincide_are_told_apart(make_batch: Any) -> None:
    from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity

    def named(schema: str, table: str, relid: int) -> RelationVersion:
        return RelationVersion(
            relid, schema, table, ReplicaIdentity.DEFAULT, (Column("id", INT8, -1, False),)
        )

    batch = make_batch(
        Transaction(100, [(named("a.b", "c", 1), [{"id": 1}]), (named("a", "b.c", 2), [{"id": 2}])])
    )
    assert batch.tables == ['"a.b".c', 'a."b.c"']
    for first, second in (batch.tables, [("a.b", "c"), ("a", "b.c")]):
        assert collected(batch.dataframe(first), "id") == [(1,)]
        assert collected(batch.dataframe(second), "id") == [(2,)]
    with pytest.raises(UsageError):
        batch.dataframe("a.b")


def test_transactions_and_messages_are_frames(make_batch: Any) -> None:
    batch = make_batch(
        Transaction(100, [(ITEMS, items(1, 2))], spilled=True),
        plain_messages((105, "p", b"\x00")),
        Transaction(110, messages=[(101, "q", b"x")]),
    )
    assert simple_types(batch.transactions.schema) == simple_types(spark_schema(TRANSACTIONS_SCHEMA))
    rows = batch.transactions.orderBy("commit_lsn").collect()
    assert [(r.commit_lsn, r.rows, r.streamed, r.tables) for r in rows] == [
        (100, 2, True, ["public.items"]),
        (110, 0, False, []),
    ]
    assert simple_types(batch.messages.schema) == simple_types(spark_schema(MESSAGES_SCHEMA))
    assert [(r.commit_lsn, r.lsn, r.prefix, bytes(r.content)) for r in batch.messages.collect()] == [
        (None, 105, "p", b"\x00"),
        (110, 101, "q", b"x"),
    ]


def test_messages_by_value_by_reference_and_in_storage_are_one_lazy_frame(
    make_batch: Any, segments: LocalSegments
) -> None:
    batch = make_batch(
        *[
            Transaction(
                100 + i,
                messages=[(50 + i, "p", bytes([i])), (55 + i, DDL_PREFIX, b"told"), (60 + i, "p", b"")],
                messages_in=where,
                xid=i + 1,
            )
            for i, where in enumerate(("storage", "memory", "line", "storage"))
        ]
    )
    expected = [(100 + i, lsn + i, i + 1, c) for i in range(4) for lsn, c in ((50, bytes([i])), (60, b""))]
    frame = batch.messages
    assert simple_types(frame.schema) == simple_types(spark_schema(MESSAGES_SCHEMA))
    assert sorted((r.commit_lsn, r.lsn, r.xid, bytes(r.content)) for r in frame.collect()) == expected
    ddl: list[pa.RecordBatch] = []
    on_driver = [row for part in batch.message_batches(ddl.append) for row in part.to_pylist()]
    assert [(row["lsn"], row["content"]) for part in ddl for row in part.to_pylist()] == [
        (55 + i, b"told") for i in range(4)
    ], "they tell of DDL, and are for the snapshots alone"
    assert [(r["commit_lsn"], r["lsn"], r["xid"], r["content"]) for r in on_driver] == expected
    (Path(segments.root) / "100" / "messages.arrow").write_bytes(b"damaged")
    again = make_batch()
    again.content = batch.content
    lazy = again.messages
    with pytest.raises(Exception, match="SegmentCorrupt"):
        lazy.collect()


def test_a_batch_without_rows_has_empty_frames(make_batch: Any) -> None:
    batch = make_batch()
    assert batch.tables == []
    assert batch.transactions.count() == 0
    assert batch.messages.count() == 0


def test_a_memory_frame_of_another_schema_is_refused(spark: Any, segments: LocalSegments) -> None:
    def reordered(session: Any, schema: pa.Schema, refs: Any) -> Any:
        frame = memory_frame(session, schema, refs)
        return frame.select(*reversed(frame.columns))

    batch = SinkBatch(
        batch_of([Transaction(100, [(ITEMS, items(1))])]),
        lambda: spark,
        reordered,
        segments,
        read_memory,
        put_memory,
    )
    with pytest.raises(SinkFailed, match=r"public\.items"):
        batch.dataframe("public.items")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_segment_stops_the_users_function_as_corrupt(
    make_batch: Any, segments: LocalSegments, damage: str
) -> None:
    batch = make_batch(Transaction(100, [(ITEMS, items(1, 2, 3))], spilled=True))
    path = Path(segments.root) / "100" / "0.parquet"
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        del data[-1]
    else:
        column = pq.read_metadata(path).row_group(0).column(0)
        data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SegmentCorrupt, match=r"100/0\.parquet"):
        ForeachSink(lambda b: b.dataframe("public.items").collect()).write(batch)


def test_a_segment_with_other_rows_than_recorded_is_corrupt(spark: Any, segments: LocalSegments) -> None:
    segment = segments.write("s.parquet", ITEMS, [internal(ITEMS, items(1, 2))])
    wrong = dataclasses.replace(segment, file=dataclasses.replace(segment.file, n_rows=1))
    part = SegmentPart(wrong, CommitStamp(100, COMMIT_US))
    unit = Sealed(record_batch([], TRANSACTIONS_SCHEMA), (), (part,), (), 1, 0)
    batch = SinkBatch(
        batch_of([unit], segments), lambda: spark, memory_frame, segments, read_memory, put_memory
    )
    with pytest.raises(SegmentCorrupt):
        ForeachSink(lambda b: b.dataframe("public.items").collect()).write(batch)


def test_many_small_memory_parts_share_tasks(spark: Any, segments: LocalSegments) -> None:
    stamp = Stamp.of_one(100, COMMIT_US, 1)
    outs = [release(internal(ITEMS, items(i), i), ITEMS, stamp) for i in range(20)]
    memory = tuple(MemoryPart(ITEMS, 1, 1000, 100, stream_bytes([o], o.schema)) for o in outs)
    unit = Sealed(record_batch([], TRANSACTIONS_SCHEMA), memory, (), None, 20, 0)
    frame = SinkBatch(
        batch_of([unit], segments), lambda: spark, memory_frame, segments, read_memory, put_memory
    ).dataframe("public.items")
    assert frame.rdd.getNumPartitions() == 2
    assert collected(frame, "id") == [(i,) for i in range(20)]


def test_parts_of_packs_of_several_units_and_layouts_arrive_exactly(
    spark: Any, segments: LocalSegments
) -> None:
    """The driver takes them out: of each layout one object, whatever the number of units."""
    other = relation("Odd.name.t`x", ("b", TEXT), ("i2", INT2))
    fillers = [relation(f"public.filler_{n}", ("id", INT8), relid=100 + n) for n in range(FEW_TABLES)]
    units, wanted = [], []
    for n, (version, row) in enumerate([(NATIVE, VALUES), (other, {"b": "text", "i2": 7}), (NATIVE, VALUES)]):
        lsn = 100 + n
        parts = PartsBuilder(put_memory, FEW_TABLES + 1)
        for filler in fillers:
            parts.add(filler, pa.Table.from_batches([_released(filler, [{"id": lsn}], lsn)]))
        parts.add(version, pa.Table.from_batches([_released(version, [row, {"_change": TRUNCATE}], lsn)]))
        memory = parts.finish()
        assert {part.pack_index for part in memory} == set(range(FEW_TABLES + 1))
        units.append(Sealed(record_batch([], TRANSACTIONS_SCHEMA), memory, (), (), FEW_TABLES + 2, 0))
        wanted += [(lsn, 0), (lsn, 1)]
    objects: list[bytes] = []

    def put(table: pa.Table) -> bytes:
        objects.append(put_memory(table))
        return objects[-1]

    batch = SinkBatch(batch_of(units, segments), lambda: spark, memory_frame, segments, read_memory, put)
    frame = batch.dataframe("Odd.name.t`x")
    assert len(objects) == 2, "one for each layout, where three units have rows"
    assert collected(frame, "_commit_lsn", "_seq") == wanted
    rows = {r["_commit_lsn"]: r.asDict() for r in frame.collect() if r["_seq"] == 0}
    for name, value in VALUES.items():
        if name == "tz":
            assert rows[100][name].timestamp() == value.timestamp()
        elif not name.startswith("_") and name != "b":
            assert rows[100][name] == rows[102][name] == value, name
    # Two layouts have different types for b: each has a column of its own.
    assert (rows[100]["b"], rows[100]["b__string"], rows[101]["b"], rows[101]["b__string"]) == (
        True,
        None,
        None,
        "text",
    )
    assert (rows[101]["i2"], rows[101]["n"], rows[101]["_text"]) == (7, None, None)
    assert (rows[102]["_unchanged"], dict(rows[102]["_text"])) == (["s", "j"], {"ts": "infinity", "n": "NaN"})
    small = batch.dataframe("public.filler_3")
    assert (len(objects), small.rdd.getNumPartitions()) == (3, 1)
    assert collected(small, "_commit_lsn", "_seq", "id") == [(lsn, 0, lsn) for lsn in (100, 101, 102)]


def _released(version: Any, rows: list[dict[str, Any]], lsn: int) -> pa.RecordBatch:
    return release(internal(version, rows), version, Stamp.of_one(lsn, COMMIT_US, 1))
