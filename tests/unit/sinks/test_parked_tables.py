"""Parked tables and the Delta sink: batches without their rows, written again after a crash. And a batch right after
a snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.snapshot_tables import commit_one, output_of
from xidstream.pipeline.errors import SinkDiverged
from xidstream.pipeline.exchange import Batch, MemoryPart, Sealed, SlotIdentity, Tenure
from xidstream.pipeline.initial_copy.snapshot_lines import SnapshotLines
from xidstream.pipeline.log_tables.log_table import TableCommit
from xidstream.pipeline.log_tables.snapshot_tables import GenerationLine
from xidstream.pipeline.parked import ParkedTable, SkippedTransaction
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import Column, ReplicaIdentity
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation, GenerationState
from xidstream.pipeline.spark.frames import SinkBatch

PARKED_RELATION = RelationVersion(5, "public", "p", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),))
MADE_AGAIN = dataclasses.replace(PARKED_RELATION, relid=9)
PARKED = ParkedTable(5, "public.p", Lsn(200), Xid(2000), "why")
NOTHING: Any = None


def read_memory(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    yield rows


def unit(relation: RelationVersion, *commits: tuple[int, bool]) -> Sealed:
    """Transactions that each changed one row of ``public.p``: LSN, and whether that row is here. The xid is ten times
    the LSN."""
    lines = [
        {"xid": 10 * lsn, "commit_lsn": lsn, "end_lsn": lsn + 4, "commit_timestamp": lsn, "streamed": False}
        | {"rows": 1, "tables": ["public.p"]}
        for lsn, _ in commits
    ]
    here = [lsn for lsn, is_here in commits if is_here]
    rows = pa.RecordBatch.from_pylist(
        [
            {"id": lsn, "_change_type": "insert", "_commit_lsn": lsn, "_seq": 0, "_xid": 10 * lsn}
            | {"_commit_timestamp": lsn}
            for lsn in here
        ],
        schema=contract_schema(relation),
    )
    memory = (MemoryPart(relation, len(here), rows.nbytes, here[0], rows),) if here else ()
    transactions = pa.RecordBatch.from_pylist(lines, schema=TRANSACTIONS_SCHEMA)
    return Sealed(transactions, memory, (), (), len(here), rows.nbytes)


def batch_of(parked: ParkedTable, *units: Sealed) -> SinkBatch:
    lsns = [lsn for each in units for lsn in each.transactions["commit_lsn"].to_pylist()]
    content = Batch(
        0, units, Lsn(lsns[0]), Lsn(lsns[-1]), Lsn(lsns[-1] + 4), len(lsns), 1, 1, parked=(parked,)
    )
    return SinkBatch(content, NOTHING, NOTHING, NOTHING, read_memory, NOTHING)


def sink_of(root: Path, number: int, *parked: ParkedTable) -> DeltaSink:
    """As a run's with this hold on the slot."""
    sink = DeltaSink(str(root), SlotIdentity(7, "shop", "orders"))
    sink.claim(Tenure(number, f"epoch-{number}", 1, {}, Lsn(10**9), parked=parked))
    sink._threads = ThreadPoolExecutor(1)
    return sink


def crash_before_transactions(root: Path, batch: SinkBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables have the batch, and ``_transactions`` does not."""
    sink = sink_of(root, 1)
    with monkeypatch.context() as patch:
        patch.setattr(sink, "_transactions_of", lambda rows: 1 / 0)
        with pytest.raises(Exception, match="_transactions"):
            sink.write(batch)
    sink.close()


def delivered(root: Path, batch: SinkBatch) -> tuple[list[int], list[int]]:
    """After a run has written the batch: the commits of ``public.p``, and those of ``_transactions``."""
    sink = sink_of(root, 2)
    try:
        sink.write(batch)
    finally:
        sink.close()
    rows = DeltaTable(str(root / "public.p")).to_pyarrow_table()
    transactions = DeltaTable(str(root / "_transactions")).to_pyarrow_table()
    return sorted(rows["_commit_lsn"].to_pylist()), sorted(transactions["commit_lsn"].to_pylist())


def test_a_batch_with_a_parked_table_and_one_made_again_under_its_name_is_written_again_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry missed the rows that were left out, and took the server for a restored one."""
    batch = batch_of(PARKED, unit(MADE_AGAIN, (210, False), (230, True)))
    crash_before_transactions(tmp_path, batch, monkeypatch)
    assert delivered(tmp_path, batch) == ([230], [210, 230])


def test_a_batch_from_before_and_behind_a_resume_is_written_again_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the journal held when the table was resumed has none of its rows."""
    resumed = dataclasses.replace(PARKED, until_lsn=Lsn(300))
    batch = batch_of(resumed, unit(PARKED_RELATION, (210, False)), unit(PARKED_RELATION, (310, True)))
    crash_before_transactions(tmp_path, batch, monkeypatch)
    assert delivered(tmp_path, batch) == ([310], [210, 310])


@pytest.mark.parametrize("lsn", [190, 230])
def test_another_transaction_at_the_place_of_a_written_one_is_still_found_beside_a_parked_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lsn: int
) -> None:
    first = [unit(MADE_AGAIN, (lsn, True)), unit(MADE_AGAIN, (240, True))]
    crash_before_transactions(tmp_path, batch_of(PARKED, *first), monkeypatch)
    other = [unit(MADE_AGAIN, (lsn + 1, True)), unit(MADE_AGAIN, (240, True))]
    with pytest.raises(SinkDiverged, match=f"transaction {10 * (lsn + 1)}"):
        delivered(tmp_path, batch_of(PARKED, *other))


@pytest.mark.parametrize("runs", [1, 2])
def test_a_commit_that_begins_right_where_the_wal_ended_behind_a_snapshot_is_delivered(
    tmp_path: Path, runs: int
) -> None:
    """The WAL ended at 304. The commit's transaction was lost, and the next run ended: the sink was ahead of it."""
    line = GenerationLine("public.q", 1, 1, 302, 303, GenerationState.FINISHED, is_ours=True)
    lines, sink = SnapshotLines([line]), sink_of(tmp_path, 1)
    sink.snapshot_log().reach(lines.valid_from)
    assert DeltaTable(str(tmp_path / "_transactions")).transaction_version("7/shop/orders") == 303
    commit = batch_of(PARKED, unit(MADE_AGAIN, (304, True)))
    if runs == 1:
        sink.write(commit)
    sink.close()
    assert delivered(tmp_path, commit) == ([304], [304])


@pytest.mark.parametrize("relids", [(5,), (5, 77), None], ids=["its table", "its tables", "tables not known"])
def test_a_transaction_that_was_given_up_ends_the_generations_of_its_tables_before_anybody_reads_behind_it(
    tmp_path: Path, relids: tuple[int, ...] | None
) -> None:
    sink = sink_of(tmp_path, 1)
    other = dataclasses.replace(PARKED_RELATION, relid=6, table="other")
    bounds = SnapshotBounds(Lsn(102), Lsn(111), 700, 700, (), 0)
    log = sink.snapshot_log()
    for relation in (PARKED_RELATION, other):
        output_of(log, relation, bounds.snapshot_lsn)
        assert commit_one(log, Generation(relation, 1, bounds), [])
    log.prove(Lsn(260))
    met = dataclasses.replace(
        unit(other, (250, True)), skipped=(SkippedTransaction(Xid(9), Lsn(240), relids),)
    )
    states: list[list[tuple[str, str]]] = []
    transactions_of = sink._transactions_of

    def told(rows: pa.Table) -> TableCommit | None:
        states.append([(line.table, line.state.value) for line in log.lines(True)])
        return transactions_of(rows)

    sink._transactions_of = told  # type: ignore[method-assign]
    nobody = dataclasses.replace(PARKED, relid=99)
    sink.write(batch_of(nobody, met))
    is_of_all = relids is None
    assert states[0] == [("public.other", "ended" if is_of_all else "finished"), ("public.p", "ended")]
    rows = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    ended = [(row["table"], row["until"], row["reason"]) for row in rows if row["state"] == "ended"]
    why = "transaction 9, with its commit at 0/F0, was given up (`xidstream slot skip`)"
    assert sorted(ended) == [(name, 239, why) for name in ["public.other"] * is_of_all + ["public.p"]]
    # A snapshot that was being taken meanwhile, and one that was taken after it.
    for number, snapshot_lsn in ((2, 230), (3, 300)):
        later = Generation(
            PARKED_RELATION,
            number,
            dataclasses.replace(bounds, snapshot_lsn=Lsn(snapshot_lsn), valid_from=Lsn(310)),
        )
        output_of(log, PARKED_RELATION, later.bounds.snapshot_lsn)
        assert commit_one(log, later, [])
    found = {line.number: line.state for line in log.lines(True) if line.table == "public.p"}
    assert found[2] is GenerationState.ENDED and found[3] is GenerationState.FINISHED
    sink.close()


@pytest.mark.parametrize("was_told", [False, True])
def test_a_snapshot_that_is_committed_after_a_new_claim_ends_for_a_park_that_the_sink_had_before(
    tmp_path: Path, was_told: bool
) -> None:
    """The log had forgotten the park, and until the next batch or look a reader took the rest for the whole table."""
    first = sink_of(tmp_path, 1)
    bounds = SnapshotBounds(Lsn(102), Lsn(111), 700, 700, (), 0)
    generation = Generation(PARKED_RELATION, 1, bounds)
    output_of(first.snapshot_log(), PARKED_RELATION, bounds.snapshot_lsn)
    if was_told:
        assert commit_one(first.snapshot_log(), generation, [])
    first.close()
    second = sink_of(tmp_path, 2, PARKED)
    assert commit_one(second.snapshot_log(), generation, [])
    second.close()
    rows = DeltaTable(str(tmp_path / "_snapshots")).to_pyarrow_table().to_pylist()
    assert sorted((row["state"], row["reason"]) for row in rows) == [
        ("ended", PARKED.why_no_snapshot_stands),
        ("finished", None),
    ]
