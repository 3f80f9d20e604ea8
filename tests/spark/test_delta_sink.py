"""The Delta sink: what is committed, in what order, once; crashes, replays, rivals and changed tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.spark.support import (
    IDENTITY,
    INT4,
    INT8,
    TEXT,
    Transaction,
    batch_of,
    expected_rows,
    plain_messages,
    relation,
)
from tests.spark.test_frames import NATIVE, VALUES
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import ExitStatus, SegmentCorrupt, SinkDiverged, StorageFault, Superseded
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.log_tables import parquet_files
from xidstream.pipeline.log_tables.locations import encode_table
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.settings.delta_retention import DEFAULT_RETENTION
from xidstream.pipeline.sinks import log_sink, message_chunks, written_rows
from xidstream.pipeline.sinks.delta_sink import DeltaSink

pytestmark = pytest.mark.spark

A = relation("public.a", ("id", INT8), ("name", TEXT), relid=1)
B = relation("public.b", ("id", INT4), relid=2)


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"row {i}"} for i in ids]


class Root:
    """A Delta root of one test: opens sinks on it, reads it back."""

    def __init__(self, path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._spark = spark
        self._sinks: list[DeltaSink] = []
        self.n_tenures = 0

    def sink(self, **tenure: Any) -> DeltaSink:
        """Of the run that has the slot from now on."""
        sink = self.unclaimed()
        self.n_tenures += 1
        sink.claim(tenure_of(self.n_tenures, **tenure))
        return sink

    def unclaimed(self) -> DeltaSink:
        sink = DeltaSink(str(self.path), IDENTITY)
        sink.open(lambda: self._spark)
        self._sinks.append(sink)
        return sink

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def read(self, directory: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(str(self.path / directory)).to_pyarrow_table().to_pylist()
        return found

    def rows(self, directory: str) -> list[tuple[int, int, str, Any]]:
        return sorted((r["_commit_lsn"], r["_seq"], r["_change_type"], r["id"]) for r in self.read(directory))

    def transactions(self) -> list[int]:
        return sorted(r["commit_lsn"] for r in self.read("_transactions"))

    def watermark(self, directory: str) -> int | None:
        """The commit LSN up to which the table's log says that it is whole."""
        return DeltaTable(str(self.path / directory)).transaction_version(IDENTITY.application_id)

    def version(self, directory: str) -> int:
        return DeltaTable(str(self.path / directory)).version()

    def commits(self, directory: str) -> list[dict[str, Any]]:
        logs = sorted((self.path / directory / "_delta_log").glob("*.json"))
        return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


def tenure_of(
    number: int, *, wal_end: int = 10_000, timeline: int = 1, history: dict[int, Lsn] | None = None
) -> Tenure:
    return Tenure(number, f"epoch-{number}", timeline, history or {}, Lsn(wal_end))


@pytest.fixture
def root(tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    root = Root(tmp_path / "delta", spark, monkeypatch)
    yield root
    root.close()


def wanted(transactions: list[Transaction], table: str) -> list[tuple[int, int, str, Any]]:
    return sorted(
        (lsn, seq, change, row.get("id")) for lsn, seq, change, row in expected_rows(transactions, table)
    )


@pytest.fixture(params=["driver", "spark"])
def memory_writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes the rows that are in memory."""
    if request.param == "spark":
        monkeypatch.setattr(written_rows, "DRIVER_BYTES", -1)


def crowd() -> list[Transaction]:
    """Five transactions over two tables, in memory and spilled."""
    return [
        Transaction(100, [(A, rows(1, 2))]),
        Transaction(110, [(A, rows(3, 4, 5, 6)), (B, rows(1, 2))], spilled=True),
        Transaction(120, [(B, rows(3))]),
        Transaction(130, [(A, rows(7)), (B, rows(4)), (A, rows(8))]),
        Transaction(140, [(B, rows(5, 6, 7))], spilled=True),
    ]


def check_crowd(root: Root, transactions: list[Transaction]) -> None:
    assert root.rows("public.a") == wanted(transactions, "public.a")
    assert root.rows("public.b") == wanted(transactions, "public.b")
    assert root.transactions() == [t.commit_lsn for t in transactions]


def test_batches_arrive_whole(root: Root, make_batch: Any, memory_writer: None) -> None:
    transactions = crowd()
    sink = root.sink()
    sink.write(make_batch(*transactions[:3]))
    assert sink.watermark() == Lsn(120)
    sink.write(make_batch(*transactions[3:]))
    assert sink.watermark() == Lsn(140)
    check_crowd(root, transactions)
    table = {r["commit_lsn"]: r for r in root.read("_transactions")}
    assert table[110]["rows"] == 6
    assert table[110]["tables"] == ["public.a", "public.b"]
    assert table[110]["streamed"] is True


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "segments"])
def test_every_native_type_round_trips_through_delta(
    root: Root, make_batch: Any, spilled: bool, memory_writer: None
) -> None:
    root.sink().write(make_batch(Transaction(100, [(NATIVE, [VALUES])], spilled=spilled)))
    directory = "Odd.name~2Et~60x"
    table = DeltaTable(str(root.path / directory))
    schema = pa.schema(table.schema().to_arrow())
    assert [(f.name, f.type) for f in schema] == [(f.name, f.type) for f in contract_schema(NATIVE)]
    row = root.read(directory)[0]
    for name, value in VALUES.items():
        if not name.startswith("_"):
            assert row[name] == value, name
    assert row["_unchanged"] == ["s", "j"]
    assert dict(row["_text"]) == {"ts": "infinity", "n": "NaN"}


def test_spark_reads_the_files_as_delta_declares_them(root: Root, make_batch: Any, spark: Any) -> None:
    from xidstream.pipeline.spark.spark_schemas import simple_types, spark_schema

    batch = make_batch(Transaction(100, [(NATIVE, [VALUES])], spilled=True))
    root.sink().write(batch)
    files = [
        f"{root.path}/Odd.name~2Et~60x/{c['add']['path']}"
        for c in root.commits("Odd.name~2Et~60x")
        if "add" in c
    ]
    # Spark's own defaults, so that the files must say by themselves how their dates are meant.
    old = spark.conf.get("spark.sql.parquet.datetimeRebaseModeInRead")
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInRead", "EXCEPTION")
    try:
        frame = spark.read.parquet(*files)
        # In a segment's file the commit's two columns come last.
        assert sorted(simple_types(frame.schema)) == sorted(
            simple_types(spark_schema(contract_schema(NATIVE)))
        )
        names = ["ts", "d", "n"]
        assert frame.select(*names).collect() == batch.dataframe("Odd.name.t`x").select(*names).collect()
    finally:
        spark.conf.set("spark.sql.parquet.datetimeRebaseModeInRead", old)


# -- once --------------------------------------------------------------------------------------------------


def test_the_same_batch_again_changes_nothing(root: Root, make_batch: Any) -> None:
    transactions = crowd()
    root.sink().write(make_batch(*transactions))
    again = root.sink()
    before = [root.version(d) for d in ("public.a", "public.b", "_transactions")]
    again.write(make_batch(*transactions))
    check_crowd(root, transactions)
    assert [root.version(d) for d in ("public.a", "public.b", "_transactions")] == before


@pytest.mark.parametrize("cuts", [(2, 4), ()], ids=str)
def test_a_replay_cut_differently_completes_what_is_missing(
    root: Root, make_batch: Any, cuts: tuple[int, ...]
) -> None:
    transactions = crowd()
    root.sink().write(make_batch(*transactions[:3]))
    sink = root.sink()
    edges = [0, *cuts, 5]
    for start, end in itertools.pairwise(edges):
        sink.write(make_batch(*transactions[start:end]))
    check_crowd(root, transactions)


@pytest.mark.parametrize("dies_before", ["public.b", "_messages", "_transactions"])
def test_crash_between_commits_then_replay_keeps_each_row_once(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch, dies_before: str
) -> None:
    transactions = crowd()
    transactions[2].messages = [(115, "m", b"1")]
    sink = root.sink()
    real = DeltaTableWriter.commit

    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.label == dies_before:
            raise OSError(5, "power cut")
        real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaTableWriter, "commit", commit)
        with pytest.raises(StorageFault):
            sink.write(make_batch(*transactions[:4]))
        assert root.transactions() == []
    assert root.rows("public.a") == wanted(transactions[:4], "public.a")
    again = root.sink()
    assert again.watermark() == Lsn(0)
    assert root.watermark("public.a") == 130
    for cut in (transactions[:2], transactions[2:3], transactions[3:]):
        again.write(make_batch(*cut))
    check_crowd(root, transactions)
    assert [m["lsn"] for m in root.read("_messages")] == [115]


def test_the_same_sink_goes_on_after_a_failure(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = crowd()
    sink = root.sink()
    with monkeypatch.context() as patch:

        def lost(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            raise OSError(5, "the answer is lost, the commit is not")

        real = DeltaTableWriter.commit
        patch.setattr(DeltaTableWriter, "commit", lost)
        with pytest.raises(StorageFault):
            sink.write(make_batch(*transactions))
    sink.write(make_batch(*transactions))
    check_crowd(root, transactions)


def test_a_table_is_never_ahead_for_a_reader_bounded_by_transactions(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = DeltaTableWriter.commit

    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        order.append(self.label)
        real(self, *args, **kwargs)

    sink = root.sink()
    monkeypatch.setattr(DeltaTableWriter, "commit", commit)
    transactions = crowd()
    transactions[1].messages = [(105, "m", b"")]
    sink.write(make_batch(*transactions))
    assert sorted(order[:2]) == ["public.a", "public.b"]
    assert order[2:] == ["_messages", "_transactions"]


def test_a_batch_without_content_commits_nothing(root: Root, make_batch: Any) -> None:
    sink = root.sink()
    before = {d.name: root.version(d.name) for d in root.path.iterdir()}
    sink.write(make_batch())
    sink.write(make_batch(Transaction(100)))
    assert {d.name: root.version(d.name) for d in root.path.iterdir()} == before


def test_files_of_failed_attempts_are_not_committed(root: Root, make_batch: Any, segments: Any) -> None:
    transactions = [Transaction(100, [(A, rows(*range(50)))], spilled=True)]
    batch = make_batch(*transactions)
    path = Path(segments.root) / "100" / "0.parquet"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(SegmentCorrupt):
        root.sink().write(batch)
    leftover = root.path / "public.a" / "data-dead-0-1"
    leftover.mkdir()
    (leftover / "part-00000.parquet").write_bytes(b"a crash left this")
    path.write_bytes(good)
    root.sink().write(make_batch(*transactions))
    assert root.rows("public.a") == wanted(transactions, "public.a")
    gone = DeltaTable(str(root.path / "public.a")).vacuum(
        0, dry_run=False, enforce_retention_duration=False, full=True
    )
    assert any("data-dead-0-1" in path for path in gone)
    assert root.rows("public.a") == wanted(transactions, "public.a")


def test_a_retried_task_commits_its_second_attempts_files_only(
    root: Root, spark: Any, segments: Any, tmp_path: Path
) -> None:
    from tests.spark.support import memory_frame, put_memory, read_memory
    from xidstream.pipeline.spark.frames import SinkBatch

    transactions = [Transaction(100, [(A, rows(*range(10)))], spilled=True)]
    flaky = FailsOnce(segments, str(tmp_path / "failed"))
    root.sink().write(
        SinkBatch(
            batch_of(transactions, segments), lambda: spark, memory_frame, flaky, read_memory, put_memory
        )
    )
    assert (tmp_path / "failed").exists()
    assert root.rows("public.a") == wanted(transactions, "public.a")
    assert len([c for c in root.commits("public.a") if "add" in c]) == 1


class FailsOnce:
    """A ``read_segment`` whose first use breaks off after a record batch."""

    def __init__(self, segments: Any, marker: str) -> None:
        self._segments = segments
        self._marker = marker

    def __call__(self, segment: Any) -> Any:
        for batch in self._segments(segment):
            yield batch
            if not Path(self._marker).exists():
                Path(self._marker).touch()
                raise OSError(5, "storage hiccup")


def test_one_task_that_runs_several_writers_keeps_the_files_of_each(
    root: Root, make_batch: Any, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Spark 4.1 on a union of one-partition frames is one partition; here any Spark makes it one."""
    frame = type(spark.range(1))
    union = frame.unionAll
    monkeypatch.setattr(frame, "unionAll", lambda left, right: union(left, right).coalesce(1))
    monkeypatch.setattr(written_rows, "DRIVER_BYTES", -1)
    wider = relation("public.a", ("id", INT8), ("name", TEXT), ("more", TEXT), relid=1)
    transactions = [
        Transaction(100, [(A, rows(1, 2))]),
        Transaction(110, [(wider, [{"id": 3, "name": "row 3", "more": "m"}])]),
        Transaction(120, [(A, rows(4, 5, 6))], spilled=True),
    ]
    root.sink().write(make_batch(*transactions))
    assert root.rows("public.a") == wanted(transactions, "public.a")


# -- rivals ------------------------------------------------------------------------------------------------


def test_a_run_that_was_taken_over_from_yields_and_the_rightful_one_goes_on(
    root: Root, make_batch: Any
) -> None:
    transactions = crowd()
    ghost = root.sink()
    ghost.write(make_batch(*transactions[:2]))
    rightful = root.sink()
    with pytest.raises(Superseded, match="taken over"):
        ghost.write(make_batch(*transactions[2:4]))
    rightful.write(make_batch(*transactions[1:3]))
    with pytest.raises(Superseded):
        ghost.write(make_batch(*transactions[2:]))
    rightful.write(make_batch(*transactions[3:]))
    check_crowd(root, transactions)
    with pytest.raises(Superseded):
        root.unclaimed().claim(tenure_of(1))
    assert root.unclaimed().last_owner() == 2


def test_a_ghost_that_commits_a_table_during_the_rightful_runs_job_does_not_stop_it(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came second was fenced, with status 4: here the rightful run."""
    transactions = [Transaction(100, [(A, rows(1))]), Transaction(110, [(A, rows(2))])]
    root.sink().write(make_batch(Transaction(90, [(A, rows(0))])))
    ghost = root.sink()
    ghost._writer("public.a", "public.a")  # It has the table open, as of before the other run.
    rightful = root.sink()
    real = log_sink.write_rows

    def slow(*args: Any) -> Any:
        files = real(*args)
        monkeypatch.setattr(log_sink, "write_rows", real)
        with pytest.raises(Superseded):
            ghost.write(make_batch(*transactions[:1]))
        return files

    monkeypatch.setattr(log_sink, "write_rows", slow)
    rightful.write(make_batch(*transactions))
    assert root.version("public.a") == 3, "the ghost committed, too"
    assert [r[0] for r in root.rows("public.a")] == [90, 100, 110]
    assert root.transactions() == [90, 100, 110]


def test_a_commit_of_our_own_whose_answer_was_lost_is_not_taken_for_anothers(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What deltalake does where the object store applies the commit and its answer is lost (test_delta_table)."""
    transactions = crowd()
    real = DeltaTable.create_write_transaction

    def twice(self: DeltaTable, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        real(self, *args, **kwargs)

    sink = root.sink()
    monkeypatch.setattr(DeltaTable, "create_write_transaction", twice)
    sink.write(make_batch(*transactions[:3]))
    sink.write(make_batch(*transactions[3:]))
    check_crowd(root, transactions)


# -- a server that was restored ----------------------------------------------------------------------------


@pytest.mark.parametrize("left_ahead", ["_transactions", "public.a"])
def test_a_sink_ahead_of_the_servers_wal_is_refused_and_its_root_named(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch, left_ahead: str
) -> None:
    """All that the restored server commits below the watermark was skipped and confirmed, never stored."""
    sink = root.sink()
    sink.write(make_batch(Transaction(100, [(A, rows(1))])))
    if left_ahead == "public.a":
        with monkeypatch.context() as patch:
            patch.setattr(DeltaSink, "_transactions_of", _power_cut)
            with pytest.raises(StorageFault):
                sink.write(make_batch(Transaction(200, [(A, rows(2))])))
    else:
        sink.write(make_batch(Transaction(200, [(A, rows(2))])))
    with pytest.raises(SinkDiverged, match="0/96") as refused:
        root.sink(wal_end=150).write(make_batch(Transaction(120, [(A, rows(3))])))
    assert refused.value.policy.exit_status is ExitStatus.TERMINAL
    assert str(root.path) in refused.value.remedy and "another root" in refused.value.remedy
    assert [r[3] for r in root.rows("public.a")] == [1, 2]
    root.sink(wal_end=201).write(make_batch(Transaction(210, [(A, rows(4))])))
    assert [r[3] for r in root.rows("public.a")] == [1, 2, 4]


def test_messages_ahead_of_the_servers_wal_are_refused(root: Root, make_batch: Any) -> None:
    root.sink().write(make_batch(plain_messages((200, "m", b""))))
    with pytest.raises(SinkDiverged, match="_messages"):
        root.sink(wal_end=199)
    root.sink(wal_end=200)


@pytest.mark.parametrize(
    ("tenure", "says"),
    [
        ({"timeline": 2, "history": {1: Lsn(200)}}, "beyond 0/C8"),  # a commit record that begins there
        ({"timeline": 4, "history": {1: Lsn(150), 3: Lsn(9000)}}, "beyond 0/96"),
        ({"timeline": 3, "history": {2: Lsn(9000)}}, "does not come"),
        ({"timeline": 2, "history": {1: Lsn(201)}}, None),
        ({"timeline": 1}, None),
    ],
    ids=str,
)
def test_a_sink_beyond_the_branch_point_of_a_failover_is_refused_though_the_wal_has_grown_past_it(
    root: Root, make_batch: Any, tenure: dict[str, Any], says: str | None
) -> None:
    root.sink().write(make_batch(Transaction(200, [(A, rows(1))])))
    if says is not None:
        with pytest.raises(SinkDiverged, match=says):
            root.sink(**tenure)
        return
    root.sink(**tenure).write(make_batch(Transaction(300, [(A, rows(2))])))
    assert root.transactions() == [200, 300]
    # What was written on the new timeline is judged by that one.
    timeline = tenure["timeline"]
    with pytest.raises(SinkDiverged, match="beyond 0/12C"):
        root.sink(timeline=timeline + 1, history={timeline: Lsn(300)})


def test_a_transaction_of_another_history_below_the_watermark_is_not_dropped_as_a_repetition(
    root: Root, make_batch: Any
) -> None:
    """A snapshot of the server's disk, on the same timeline, whose WAL has grown past the record again."""
    transactions = crowd()
    root.sink().write(make_batch(*transactions))
    sink = root.sink()
    sink.write(make_batch(*transactions[1:]))
    for other in (
        Transaction(125, [(A, rows(99))]),
        Transaction(120, [(A, rows(99))], xid=4711),
        Transaction(120, [(B, rows(3))], xid=4711, spilled=True),
    ):
        with pytest.raises(SinkDiverged, match=f"transaction {other.xid or other.commit_lsn}") as refused:
            root.sink().write(make_batch(other, Transaction(200, [(A, rows(100))])))
        assert str(root.path) in refused.value.remedy
    check_crowd(root, transactions)


def test_a_transaction_of_another_history_is_not_dropped_by_a_table_that_a_crash_left_ahead(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = root.sink()
    sink.write(make_batch(Transaction(100, [(A, rows(1))])))
    ahead = [Transaction(200, [(A, rows(2, 3))]), Transaction(210, [(A, rows(4))], spilled=True)]
    with monkeypatch.context() as patch:
        patch.setattr(DeltaSink, "_transactions_of", _power_cut)
        with pytest.raises(StorageFault):
            sink.write(make_batch(*ahead))
    with pytest.raises(SinkDiverged, match=r"public\.a"):
        root.sink().write(make_batch(Transaction(205, [(A, rows(5))]), Transaction(300, [(B, rows(1))])))
    root.sink().write(make_batch(*ahead, Transaction(300, [(B, rows(1))])))
    assert [r[3] for r in root.rows("public.a")] == [1, 2, 3, 4]
    assert root.transactions() == [100, 200, 210, 300]


def test_a_transaction_that_left_messages_alone_may_come_only_with_the_replay(
    root: Root, make_batch: Any
) -> None:
    """Those of a rolled-back subtransaction are there or not, depending on whether it was streamed."""
    root.sink().write(make_batch(*crowd()))
    root.sink().write(make_batch(Transaction(135, messages=[(133, "m", b"1")])))
    check_crowd(root, crowd())


def _power_cut(*_: Any) -> None:
    raise OSError(5, "power cut")


def test_a_column_added_by_somebody_else_is_taken_in_stride(root: Root, make_batch: Any) -> None:
    from deltalake import Field
    from deltalake.schema import PrimitiveType

    sink = root.sink()
    sink.write(make_batch(Transaction(100, [(A, rows(1))])))
    DeltaTable(str(root.path / "public.a")).alter.add_columns([Field("note", PrimitiveType("string"))])
    sink.write(make_batch(Transaction(110, [(A, rows(2))])))
    assert [r["id"] for r in sorted(root.read("public.a"), key=lambda r: r["id"])] == [1, 2]


def test_compaction_and_vacuum_beside_an_open_sink_lose_nothing_and_repeat_nothing(
    root: Root, make_batch: Any
) -> None:
    sink = root.sink()
    batches = [make_batch(Transaction(100 + 10 * n, [(A, rows(n))]), number=n) for n in range(4)]
    for n in (0, 1):
        sink.write(batches[n])
    for directory in ("public.a", "_transactions"):
        table = DeltaTable(str(root.path / directory))
        assert table.optimize.compact()["numFilesRemoved"] == 2
        assert table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    sink.write(batches[2])
    # Another run repeats what this one held, and goes on.
    for directory in ("public.a", "_transactions"):
        DeltaTable(str(root.path / directory)).optimize.compact()
    other = root.sink()
    for n in (2, 3):
        other.write(batches[n])
    assert [r[3] for r in root.rows("public.a")] == [0, 1, 2, 3]
    assert root.transactions() == [100, 110, 120, 130]


# -- names, and many columns -------------------------------------------------------------------------------


def named(schema: str, table: str, *columns: str, relid: int = 1) -> RelationVersion:
    own = tuple(Column(name, INT8, -1, False) for name in columns)
    return RelationVersion(relid, schema, table, ReplicaIdentity.DEFAULT, own)


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "segments"])
def test_names_with_dots_quotes_and_all_of_unicode_go_through_spark_verbatim(
    root: Root, make_batch: Any, spilled: bool
) -> None:
    columns = (
        "id",
        "a.b`c",
        'quo"ted',
        "it's",
        "sp ace",
        "Größe",
        "列",
        "emoji😀",
        "back\\slash",
        "a,b;{}()=",
    )
    tables = [
        named("we.ird", 'or"der`s', *columns, relid=1),
        named("we", 'ird.or"der`s', *columns, relid=2),
        named("ж" * 31, "ж" * 31, *columns, relid=3),
        named("ж" * 31, "ж" * 30 + "x", *columns, relid=4),
    ]
    row = {name: i for i, name in enumerate(columns)}
    sink = root.sink()
    contents = [(table, [{**row, "id": table.relid}]) for table in tables]
    batch = make_batch(Transaction(100, contents, spilled=spilled))
    sink.write(batch)
    for table in tables:
        directory = encode_table(table.schema, table.table)
        assert len(directory) <= 255
        (found,) = root.read(directory)
        assert {name: found[name] for name in columns} == {**row, "id": table.relid}
        frame = batch.dataframe((table.schema, table.table))
        assert [c for c in frame.columns if not c.startswith("_")] == list(columns)
        assert frame.select("`a.b``c`").collect()[0][0] == 1


def test_1600_columns_go_through_spark_whole(root: Root, make_batch: Any) -> None:
    columns = [f"c{i}" for i in range(1600)]
    wide = named("public", "wide", *columns)
    row = {name: i for i, name in enumerate(columns)}
    root.sink().write(
        make_batch(Transaction(100, [(wide, [row])]), Transaction(110, [(wide, [row])], spilled=True))
    )
    found = root.read("public.wide")
    assert len(found) == 2 and all(r[name] == i for r in found for i, name in enumerate(columns))


# -- changed tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spilled", [False, True], ids=["memory", "segments"])
def test_added_dropped_and_changed_columns(
    root: Root, make_batch: Any, spilled: bool, memory_writer: None
) -> None:
    v1 = relation("public.t", ("id", INT8), ("price", INT4), ("gone", TEXT))
    v2 = relation("public.t", ("id", INT4), ("price", TEXT), ("New", TEXT))
    v3 = relation("public.t", ("ID", INT8), ("price", INT4), ("new", TEXT))
    first = [Transaction(100, [(v1, [{"id": 1, "price": 5, "gone": "g"}])], spilled=spilled)]
    old, new = {"id": 2, "price": 6, "gone": "h"}, {"id": 3, "price": "x", "New": "n"}
    second = [
        Transaction(110, [(v1, [old]), (v2, [new])], spilled=spilled),
        Transaction(120, [(v3, [{"ID": 4, "price": 7, "new": "m"}])], spilled=spilled),
    ]  # fmt: skip
    root.sink().write(make_batch(*first))
    root.sink().write(make_batch(*second))
    table = DeltaTable(str(root.path / "public.t"))
    names = [f.name for f in table.schema().fields]
    assert names[:3] == ["id", "price", "gone"]
    assert names[-2:] == ["price__string", "New"]
    picked = [(r["id"], r["price"], r["gone"], r["price__string"], r["New"]) for r in root.read("public.t")]
    assert sorted(picked) == [
        (1, 5, "g", None, None),
        (2, 6, "h", None, None),
        (3, None, None, "x", "n"),
        (4, 7, None, None, "m"),
    ]


def test_the_table_is_widened_before_the_rows_that_need_it(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = relation("public.a", ("id", INT8), ("name", TEXT), ("extra", TEXT), relid=1)
    root.sink().write(make_batch(Transaction(100, [(A, rows(1))])))
    transaction = Transaction(110, [(wider, [{"id": 2, "extra": "e"}])])

    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(5, "dies after widening")

    sink = root.sink()
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTableWriter, "commit", commit)
        with pytest.raises(StorageFault):
            sink.write(make_batch(transaction))
    assert [f.name for f in DeltaTable(str(root.path / "public.a")).schema().fields][-1] == "extra"
    root.sink().write(make_batch(transaction))
    assert sorted((r["id"], r["extra"]) for r in root.read("public.a")) == [(1, None), (2, "e")]


# -- messages ----------------------------------------------------------------------------------------------


def test_a_table_tells_its_source_and_follows_an_alter_that_leaves_its_columns(
    root: Root, make_batch: Any
) -> None:
    """An ALTER of the key, or of a type within its Arrow type, gives no new column: one commit more, once."""
    key = Column("id", INT8, -1, is_key=True)
    before = dataclasses.replace(A, columns=(key, Column("name", TEXT, -1, is_key=False)))
    after = dataclasses.replace(
        before,
        replica_identity=ReplicaIdentity.FULL,
        columns=(key, Column("name", 1043, 24, is_key=True)),
    )
    sink = root.sink()
    versions = []
    for lsn, layout in ((100, before), (110, before), (120, after), (130, after)):
        sink.write(make_batch(Transaction(lsn, [(layout, rows(lsn))])))
        versions.append(root.version("public.a"))
    assert versions == [1, 2, 4, 5], "a table is made, and rows committed; an ALTER is one commit more"
    properties = dict(DeltaTable(str(root.path / "public.a")).metadata().configuration)
    assert [
        (v["since"], v["key"], v["replica_identity"])
        for v in json.loads(properties.pop("xidstream.versions"))
    ] == [(100, ["id"], "default"), (120, None, "full")]
    assert {k.removeprefix("xidstream."): v for k, v in properties.items() if k.startswith("xidstream.")} == {
        "source": "public.a",
        "key": '["id", "name"]',
        "replica_identity": "full",
        "types": '{"id": "bigint", "name": "character varying(20)"}',
        "retention": json.dumps(dict(DEFAULT_RETENTION.properties)),
    }
    assert [r["id"] for r in sorted(root.read("public.a"), key=lambda r: r["id"])] == [100, 110, 120, 130]


def test_versions_are_recorded_exactly_however_a_replay_is_cut(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch has rows from before and after an ALTER, and the run dies between their record and the rows."""
    after = relation("public.a", ("id", TEXT), ("name", TEXT), relid=1)
    history = [
        Transaction(100, [(A, rows(1))]),
        Transaction(110, [(A, rows(2))], spilled=True),
        Transaction(120, [(after, [{"id": "3"}])], spilled=True),
        Transaction(130, [(after, [{"id": "4"}])]),
    ]

    def commit(self: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(5, "dies before its rows")

    sink = root.sink()
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTableWriter, "commit", commit)
        with pytest.raises(StorageFault):
            sink.write(make_batch(*history[:3]))
    said = DeltaTable(str(root.path / "public.a")).metadata().configuration["xidstream.versions"]
    sink = root.sink()
    for part in (history[:1], history[1:2], history[2:]):
        sink.write(make_batch(*part))
    assert DeltaTable(str(root.path / "public.a")).metadata().configuration["xidstream.versions"] == said
    assert [(v["since"], v["columns"]["id"]) for v in json.loads(said)] == [
        (100, {"type": "bigint", "column": "id"}),
        (120, {"type": "text", "column": "id__string"}),
    ]


def test_messages_of_both_kinds_are_kept_once_over_restarts(root: Root, make_batch: Any) -> None:
    units = [
        plain_messages((50, "n", b"1")),
        Transaction(100, [(A, rows(1))], messages=[(60, "t", b"2")]),
        plain_messages((105, "n", b"3"), (106, "n", b"4")),
        Transaction(120, messages=[(70, "t", b"5")]),
        plain_messages((130, "n", b"6")),
    ]
    for cut in ([0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4]):
        root.sink().write(make_batch(*[units[i] for i in cut]))
    found = root.read("_messages")
    assert sorted(m["lsn"] for m in found) == [50, 60, 70, 105, 106, 130]
    assert {m["lsn"]: m["commit_lsn"] for m in found if m["transactional"]} == {60: 100, 70: 120}
    assert root.transactions() == [100, 120]


def test_messages_from_everywhere_are_written_in_chunks_and_committed_together(
    root: Root, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_chunks, "MESSAGE_CHUNK_BYTES", 3_000)
    monkeypatch.setattr(parquet_files, "ROW_GROUP_BYTES", 3_000)
    monkeypatch.setattr(parquet_files, "FILE_BYTES", 3_000)
    content = random.Random(1).randbytes(500)
    units = []
    for i in range(8):
        lsn = 1000 * (i + 1)
        where = ("storage", "memory", "line")[i % 3]
        transactional = [(lsn + j, "t", content) for j in range(10)]
        units.append(Transaction(lsn + 500, messages=transactional, messages_in=where))
        units.append(plain_messages(*[(lsn + 600 + j, "n", content) for j in range(10)]))
    wanted_lsns = sorted(
        1000 * (i + 1) + first + j for i in range(8) for first in (0, 600) for j in range(10)
    )
    root.sink().write(make_batch(*units[:9]))
    before = root.version("_messages")
    root.sink().write(make_batch(*units))
    assert root.version("_messages") == before + 1
    found = root.read("_messages")
    assert sorted(m["lsn"] for m in found) == wanted_lsns
    assert {m["content"] for m in found} == {content}
    assert all(m["commit_lsn"] == m["lsn"] // 1000 * 1000 + 500 for m in found if m["transactional"])
    assert root.transactions() == [1000 * (i + 1) + 500 for i in range(8)]
    files = DeltaTable(str(root.path / "_messages")).file_uris()
    assert len(files) > 4


def test_a_batch_of_messages_alone_leaves_transactions_as_they_are(root: Root, make_batch: Any) -> None:
    sink = root.sink()
    before = root.version("_transactions")
    sink.write(make_batch(plain_messages((50, "n", b"1"))))
    assert root.version("_transactions") == before
    assert [m["lsn"] for m in root.read("_messages")] == [50]


def test_own_tables_have_the_schemas_of_the_contract(root: Root, make_batch: Any) -> None:
    root.sink()
    for directory, schema in (("_transactions", TRANSACTIONS_SCHEMA), ("_messages", MESSAGES_SCHEMA)):
        found = pa.schema(DeltaTable(str(root.path / directory)).schema().to_arrow())
        assert [(f.name, f.type) for f in found] == [(f.name, f.type) for f in schema]


def test_more_tables_than_threads(root: Root, make_batch: Any) -> None:
    tables = [relation(f"public.t{i}", ("id", INT8), relid=i) for i in range(7)]
    root.sink().write(make_batch(Transaction(100, [(t, [{"id": i}]) for i, t in enumerate(tables)])))
    assert [root.rows(f"public.t{i}") for i in range(7)] == [[(100, i, "insert", i)] for i in range(7)]
