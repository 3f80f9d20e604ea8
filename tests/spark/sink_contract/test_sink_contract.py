"""What every sink keeps to, whatever it is made of: order, watermark, replay, a crash between two steps, another layout
of a table, snapshots, and what a snapshot contains.

The sinks are in ``sinks``. What differs between them is what their kind says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.snapshot_tables import commit_one, output_of
from tests.spark.sink_contract.null_sink import NULL
from tests.spark.sink_contract.sinks import SINKS, Row, Tried
from tests.spark.support import IDENTITY, INT8, TEXT, Transaction, expected_rows, relation
from xidstream.pipeline.errors import ConfigError, Superseded, XidstreamError
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.settings import sink_kinds
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.sink_kinds import Snapshots
from xidstream.pipeline.settings.slot_list import configs_of
from xidstream.pipeline.sinks import stateless
from xidstream.pipeline.sinks.sink import check_sink_spec, make_sink, sink_type
from xidstream.pipeline.sinks.sink_findings import check_of_spec
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.decision import takes_snapshots
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch

pytestmark = pytest.mark.spark

A = relation("public.a", ("id", INT8), ("name", TEXT), relid=1)
B = relation("public.b", ("id", INT8), ("name", TEXT), relid=2)
B_BEFORE = relation("public.b", ("id", INT8), relid=2)
BOUNDS = SnapshotBounds(Lsn(0x7E), Lsn(0x7F), 130, 140, (), 1_700_000_000_000_000)
"""Contains the transactions with xids below 130, up to the LSN 0x7F."""
GENERATION = Generation(A, 1, BOUNDS)


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"row {i}"} for i in ids]


TRANSACTIONS = [
    Transaction(100, [(A, rows(1, 2))]),
    Transaction(110, [(A, rows(3, 4, 5, 6)), (B, rows(1, 2))], spilled=True),
    Transaction(120, [(B, rows(3))]),
    Transaction(130, [(A, rows(7)), (B, rows(4)), (A, rows(8))]),
    Transaction(140, [(B, rows(5, 6, 7))], spilled=True),
]


def wanted(table: str, transactions: list[Transaction]) -> list[Row]:
    found = expected_rows(transactions, table)
    return sorted((lsn, seq, change, row["id"], row.get("name")) for lsn, seq, change, row in found)


@pytest.fixture(params=SINKS, ids=lambda sink: sink.__name__.lower())
def tried(
    request: pytest.FixtureRequest, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tried]:
    monkeypatch.setattr(stateless, "warm_up", lambda spark: None)
    made: Tried = request.param(tmp_path / "sink", spark, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def kind(tried: Tried) -> sink_kinds.SinkKind:
    return tried.make().kind


def check_whole(tried: Tried, transactions: list[Transaction]) -> None:
    """The sink has these transactions, each of them once."""
    assert tried.commits() == [t.commit_lsn for t in transactions]
    for table in ("public.a", "public.b"):
        assert tried.rows(table) == wanted(table, transactions)


def test_transactions_arrive_whole_and_in_their_order(tried: Tried, make_batch: Any) -> None:
    sink = tried.next_run()
    sink.write(make_batch(*TRANSACTIONS[:3]))
    sink.write(make_batch(*TRANSACTIONS[3:], number=1))
    sink.close()
    check_whole(tried, TRANSACTIONS)


def test_a_log_knows_up_to_where_and_by_whom_it_was_written_and_others_say_nothing(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any
) -> None:
    sink = tried.next_run()
    assert sink.watermark() == 0
    sink.write(make_batch(*TRANSACTIONS[:3]))
    for each in (sink, tried.make()):
        each.open(lambda: tried.spark)
        assert (each.watermark(), each.last_owner()) == ((120, 1) if kind.is_log else (0, 0))
        each.close()


def test_what_comes_again_in_other_batches_is_in_a_log_once_and_is_told_to_others_as_it_was(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any
) -> None:
    first = tried.next_run()
    first.write(make_batch(*TRANSACTIONS[:2]))
    first.write(make_batch(*TRANSACTIONS[2:4], number=1))
    first.close()
    second = tried.next_run()
    second.write(make_batch(*TRANSACTIONS[1:], number=0))
    second.close()
    if kind.is_log:
        check_whole(tried, TRANSACTIONS)
    else:
        assert tried.commits() == [100, 110, 120, 130, 110, 120, 130, 140]
        assert sorted(set(tried.rows("public.a"))) == wanted("public.a", TRANSACTIONS)
        assert sorted(set(tried.rows("public.b"))) == wanted("public.b", TRANSACTIONS)


@pytest.mark.parametrize(
    ("tried", "step"), [(sink, step) for sink in SINKS for step in sink.steps], indirect=["tried"]
)
def test_a_write_that_is_cut_off_between_two_steps_is_made_whole_by_the_next_run(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any, step: str
) -> None:
    """Whoever asks for the watermark meanwhile is never told of a transaction that is not whole."""
    first = tried.next_run()
    first.write(make_batch(*TRANSACTIONS[:1]))
    tried.fail_at(step)
    with pytest.raises(XidstreamError):
        first.write(make_batch(*TRANSACTIONS[1:4], number=1))
    first.close()
    second = tried.next_run()
    told = int(second.watermark())
    assert told in (0, 100, 130)
    if told == 130:
        check_whole(tried, TRANSACTIONS[:4])
    second.write(make_batch(*TRANSACTIONS[1:3]))
    second.write(make_batch(*TRANSACTIONS[3:], number=1))
    second.close()
    if kind.is_log:
        check_whole(tried, TRANSACTIONS)
    else:
        assert tried.commits()[-4:] == [110, 120, 130, 140]
        assert sorted(set(tried.rows("public.b"))) == wanted("public.b", TRANSACTIONS)


def test_a_run_that_has_lost_the_slot_completes_nothing_in_a_log(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any
) -> None:
    first = tried.next_run()
    first.write(make_batch(*TRANSACTIONS[:1]))
    second = tried.next_run()
    if kind.is_log:
        with pytest.raises(Superseded):
            first.write(make_batch(*TRANSACTIONS[1:2]))
        assert second.watermark() == 100
    second.write(make_batch(*TRANSACTIONS[1:]))
    for each in (first, second):
        each.close()
    check_whole(tried, TRANSACTIONS)


def test_a_column_that_is_added_in_the_middle_of_a_batch_is_null_before(
    tried: Tried, make_batch: Any
) -> None:
    transactions = [
        Transaction(100, [(B_BEFORE, [{"id": 1}])]),
        Transaction(110, [(B_BEFORE, [{"id": 2}])]),
        Transaction(120, [(B, rows(3))]),
    ]
    sink = tried.next_run()
    sink.write(make_batch(transactions[0]))
    sink.write(make_batch(*transactions[1:], number=1))
    sink.close()
    assert tried.rows("public.b") == wanted("public.b", transactions)


# -- snapshots ---------------------------------------------------------------------------------------------


def written(tables: SnapshotTables, described: RelationVersion, *ids: int) -> list[WrittenFile]:
    """Rows of a snapshot, as readers write them."""
    target = output_of(tables, described, BOUNDS.snapshot_lsn)
    files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
    place = {"_change_type": "snapshot", "_commit_lsn": int(BOUNDS.snapshot_lsn)}
    made = [{**row, **place, "_seq": seq} for seq, row in enumerate(rows(*ids))]
    files.write(target.conform(pa.RecordBatch.from_pylist(made, schema=contract_schema(described))))
    return files.close()


SNAPSHOT = [(int(BOUNDS.snapshot_lsn), seq, "snapshot", seq + 1, f"row {seq + 1}") for seq in range(2)]


def test_the_rows_from_before_are_in_the_sink_once_by_the_way_that_its_kind_names(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any, tmp_path: Path
) -> None:
    sink = tried.next_run()
    sink.write(make_batch(*TRANSACTIONS[3:]))
    if kind.snapshots is Snapshots.BESIDE:
        tables = sink.snapshot_log()
        assert tables.lines(True) == []
        files = written(tables, A, 1, 2)
        assert not tables.recover(GENERATION), "nothing names the files"
        assert all(commit_one(tables, GENERATION, files) for _ in range(2))
        later = tried.next_run().snapshot_log()
        assert later.recover(GENERATION)
        (line,) = later.lines(True)
        assert (line.table, line.number, line.snapshot_lsn, line.is_ours) == (
            "public.a",
            1,
            BOUNDS.snapshot_lsn,
            True,
        )
        later.end(line, "the table was rewritten")
        assert [each.state for each in later.lines(True)] == [GenerationState.ENDED]
        with pytest.raises(Superseded):
            commit_one(tables, Generation(B, 1, BOUNDS), written(tables, B, 1))
    else:
        assert kind.snapshots is Snapshots.FIRST
        path = tmp_path / "snapshot.parquet"
        place = {"_change_type": "snapshot", "_commit_lsn": int(BOUNDS.snapshot_lsn)}
        made = [{**row, **place, "_seq": seq} for seq, row in enumerate(rows(1, 2))]
        pq.write_table(pa.Table.from_pylist(made, contract_schema(A)), path)
        sink.write_snapshot(SnapshotBatch(tried.spark, GENERATION, [f"file://{path}"], 0))
    assert tried.rows("public.a") == sorted([*SNAPSHOT, *wanted("public.a", TRANSACTIONS[3:])])


def test_the_rows_from_before_of_two_tables_are_taken_in_one_call_once_each(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any
) -> None:
    if kind.snapshots is not Snapshots.BESIDE:
        pytest.skip("a function is given one table after the other")
    sink = tried.next_run()
    sink.write(make_batch(*TRANSACTIONS[3:]))
    tables = sink.snapshot_log()
    both = [(Generation(each, 1, BOUNDS), written(tables, each, 1, 2)) for each in (A, B)]
    assert tables.commit(both[1:]) == [True]
    assert tables.commit(both) == [True, True]
    assert [(line.table, line.number) for line in tables.lines(True)] == [("public.a", 1), ("public.b", 1)]
    for table in ("public.a", "public.b"):
        assert tried.rows(table) == sorted([*SNAPSHOT, *wanted(table, TRANSACTIONS[3:])])


def test_what_a_snapshot_contains_is_left_out_for_whoever_got_it_first_and_a_log_keeps_all(
    tried: Tried, kind: sink_kinds.SinkKind, make_batch: Any
) -> None:
    sink = tried.next_run({("public", "a"): BOUNDS})
    sink.write(make_batch(*TRANSACTIONS))
    sink.close()
    behind = [t for t in TRANSACTIONS if kind.is_log or not BOUNDS.contains(t.commit_lsn, Lsn(t.commit_lsn))]  # type: ignore[arg-type]
    assert tried.rows("public.a") == wanted("public.a", behind)
    assert tried.rows("public.b") == wanted("public.b", TRANSACTIONS)


# -- a new kind --------------------------------------------------------------------------------------------


def test_a_new_kind_is_one_entry_and_everything_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sink_kinds.KINDS, NULL.name, NULL)
    monkeypatch.chdir(tmp_path)
    config = Config(sink="null:lake", storage="segments")
    assert config.sink == check_sink_spec(config.sink) == f"null:{tmp_path}/lake"
    assert (config.sink_kind, config.sink_root) == (NULL, f"{tmp_path}/lake")
    sink = make_sink(config.sink, IDENTITY)
    sink.open(None)  # type: ignore[arg-type] - it has no use for a session
    assert sink_type(config.sink).holds(IDENTITY.application_id) == (0, 0)
    assert not sink_type(config.sink).may_take_segments("segments")
    assert [each.statement for each in check_of_spec(config.sink, "")(None)] == [f"null root {tmp_path}/lake"]
    assert takes_snapshots(None, None, creates_slot=True, sink=config.sink_kind)
    with pytest.raises(
        ConfigError,
        match=r"delta:URI, iceberg:CATALOG/namespace, console, foreach:module:function or null:URI",
    ):
        check_sink_spec("kafka:x")
    slots = [{"slot": "a", "sink": "null:lake"}, {"slot": "b", "sink": "null:lake/b"}]
    with pytest.raises(ConfigError, match="the same sink"):
        configs_of({"slots": slots}, {})
