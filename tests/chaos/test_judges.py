"""The judges of the chaos run must be able to condemn: each is shown what it exists to find."""

from __future__ import annotations

import datetime
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from tests.chaos.chaos_round import Kill, RoundResult
from tests.chaos.judge import Verdict, judge
from tests.chaos.kills import (
    DRIVER_POINTS,
    PREPARED_POINTS,
    STREAM_POINTS,
    WHOLE,
    schedule,
    with_pauses,
)
from tests.chaos.report import Report
from tests.differential.local_pipeline import Released, Sink
from tests.feedback_spy import FeedbackSpy, Held, _Link
from tests.journal_contents import Journaled
from tests.lakes import DeltaLake, IcebergLake
from xidstream.pipeline.faultpoints import parse
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.table_metadata import TableMetadata
from xidstream.pipeline.schema import rows
from xidstream.pipeline.schema.relation import Column, RelationVersion, ReplicaIdentity

RELATION = RelationVersion(7, "s", "t", ReplicaIdentity.DEFAULT, (Column("id", 20, -1, True),))
WHEN = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def contract(commit_lsn: int, *ids: int) -> pa.Table:
    schema = rows.contract_schema(RELATION)
    values = {
        "id": list(ids),
        "_change_type": ["insert"] * len(ids),
        "_commit_lsn": [commit_lsn] * len(ids),
        "_commit_timestamp": [WHEN] * len(ids),
        "_xid": [commit_lsn] * len(ids),
        "_seq": list(range(len(ids))),
        "_unchanged": [None] * len(ids),
        "_text": [None] * len(ids),
    }
    return pa.table([pa.array(values[f.name], f.type) for f in schema], schema=schema)


def twin() -> Sink:
    sink = Sink()
    for lsn, ids in ((100, (1, 2)), (200, (3,))):
        sink.transactions.append(
            Released(
                lsn,
                lsn,
                lsn + 8,
                WHEN,
                None,
                None,
                False,
                len(ids),
                ["s.t"],
                [(RELATION, contract(lsn, *ids))],
            )
        )
    return sink


def transaction_row(t: Released) -> pa.Table:
    row = [t.xid, t.commit_lsn, t.end_lsn, WHEN, None, None, False, t.n_rows, ["s.t"]]
    columns = [pa.array([v], f.type) for v, f in zip(row, rows.TRANSACTIONS_SCHEMA, strict=True)]
    return pa.table(columns, schema=rows.TRANSACTIONS_SCHEMA)


def write_delta(folder: Path, *commits: pa.Table) -> Path:
    for part in commits:
        write_deltalake(str(folder / "s.t"), part, mode="append")
    for t in twin().transactions:
        properties = CommitProperties(app_transactions=[Transaction("slot", t.commit_lsn)])
        told = transaction_row(t)
        write_deltalake(str(folder / "_transactions"), told, mode="append", commit_properties=properties)
    DeltaTable.create(str(folder / "_messages"), schema=rows.MESSAGES_SCHEMA)
    return folder


def write_iceberg(folder: Path, *commits: pa.Table) -> IcebergLake:
    from xidstream.pipeline.iceberg.catalogs import IcebergAddress
    from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables

    lake = IcebergLake(folder)
    tables = IcebergTables(IcebergAddress.parse(lake.sink.removeprefix("iceberg:")), makes=True)

    def write(key: str, label: str, about: TableMetadata, lsn_column: str, parts: Sequence[pa.Table]) -> None:
        columns = [TableColumn(f.name, f.type, f.name) for f in parts[0].schema]
        table = tables.open_or_create(key, label, columns, about)
        for n, part in enumerate(parts):
            files = ParquetFiles(table.location, f"data-{n}", part.schema, lsn_column)
            for batch in part.to_batches():
                files.write(batch)
            lsns = part[lsn_column].to_pylist() if key == "_transactions" else []
            table.commit(files.close(), {"slot": max(lsns)} if lsns else {}, lsn_column)
            lake.holds(key)

    write(lake.name_of("s", "t"), "s.t", tables.about(RELATION), "_commit_lsn", commits)
    told = pa.concat_tables(list(map(transaction_row, twin().transactions)))
    write(
        "_transactions",
        "_transactions",
        tables.about_own("_transactions"),
        "commit_lsn",
        [told[:1], told[1:]],
    )
    nothing = rows.MESSAGES_SCHEMA.empty_table()
    write("_messages", "_messages", tables.about_own("_messages"), "lsn", [nothing])
    return lake


@pytest.mark.parametrize("iceberg", [False, True], ids=["delta", "iceberg"])
@pytest.mark.parametrize(
    ("commits", "wrong"),
    [
        ([contract(100, 1, 2), contract(200, 3)], {}),
        ([contract(100, 1, 2)], {"lost": 1}),
        ([contract(100, 1, 2), contract(200, 3), contract(200, 3)], {"twice": 1, "disordered": 1}),
        ([contract(200, 3), contract(100, 1, 2)], {"disordered": 1}),
        ([contract(100, 1, 2), contract(200, 3), contract(300, 9)], {"alien": 1}),
        ([contract(100, 1, 2), contract(200, 4)], {"differences": 1}),
    ],
)
def test_the_judge_counts_what_is_lost_twice_alien_and_out_of_order(
    tmp_path: Path, commits: list[pa.Table], wrong: dict[str, int], iceberg: bool
) -> None:
    made = write_iceberg(tmp_path, *commits) if iceberg else DeltaLake(write_delta(tmp_path, *commits))
    verdict = judge(made, twin(), set())
    assert verdict.ok == (not wrong)
    for name in ("lost", "twice", "alien", "disordered"):
        assert getattr(verdict, name) == wrong.get(name, 0), verdict
    assert bool(verdict.differences) == bool(wrong.keys() & {"lost", "alien", "differences"})


def test_files_that_were_merged_bring_no_new_rows(tmp_path: Path) -> None:
    folder = write_delta(tmp_path, contract(100, 1, 2), contract(200, 3))
    assert DeltaTable(str(folder / "s.t")).optimize.compact()["numFilesRemoved"] == 2
    assert judge(DeltaLake(folder), twin(), set()).ok


def test_iceberg_files_that_were_merged_after_later_commits_bring_no_new_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xidstream.pipeline.iceberg.catalogs import IcebergAddress
    from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
    from xidstream.pipeline.log_tables import small_files

    first = contract(100, 1, 2)
    lake = write_iceberg(tmp_path, first[:1], first[1:], contract(200, 3))
    name = lake.name_of("s", "t")
    monkeypatch.setattr(small_files, "SIZE_CLASSES", (small_files.SizeClass(0, 16 << 10, 2),))
    tables = IcebergTables(IcebergAddress.parse(lake.sink.removeprefix("iceberg:")), makes=True)
    table = tables.open(name, "s.t")
    assert table is not None
    small = ParquetFiles(table.location, "data-told", contract(200, 3).schema, "_commit_lsn")
    small.write(contract(200, 3).to_batches()[0])
    table.merge_behind(small.close(), "_commit_lsn")
    assert len(table.paths()) == 2 and any("-merged/" in path for path in table.paths())
    assert judge(lake, twin(), set()).ok


def copy_data(payload: bytes) -> bytes:
    return b"d" + struct.pack("!i", len(payload) + 4) + payload


def sent(lsn: int, message: bytes = b"") -> bytes:
    return copy_data(b"w" + struct.pack("!qqq", lsn, lsn, 0) + (message or b"I"))


def status(flush: int) -> bytes:
    return copy_data(b"r" + struct.pack("!qqqqB", flush, flush, flush, 0, 0))


STARTUP = struct.pack("!ii", 8, 196608)


class Wire:
    def __init__(self, folder: Path) -> None:
        self.held = Held(transactions_version=1)
        self.spy = FeedbackSpy("", lambda: self.held)
        self.spy._lock = __import__("threading").Lock()
        self._delta = folder
        self.connect()

    def connect(self) -> None:
        self.spy.n_connections += 1
        self.link = _Link(self.spy, self.spy.n_connections)
        self.link.client(STARTUP)

    def problems(self) -> list[str]:
        return self.spy.problems(DeltaLake(self._delta), confirmed_before=50)


def goes_back(w: Wire) -> None:
    w.link.server(sent(400))
    w.link.client(status(110) + status(108))


def beyond_the_server(w: Wire) -> None:
    w.link.server(sent(400))
    w.link.client(status(401))


def beyond_the_sink(w: Wire) -> None:
    w.link.server(sent(400))
    w.held = Held(transactions_version=0)
    w.link.client(status(208))


def prepared_without_a_record(w: Wire) -> None:
    w.link.server(sent(80, b"P" + struct.pack("!Bqqqi", 0, 80, 90, 0, 5) + b"g\0"))
    w.link.client(status(90))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (goes_back, "went back"),
        (beyond_the_server, "beyond what the server had sent"),
        (beyond_the_sink, "the sink held commits up to 0/64 only, not 0/C8"),
        (prepared_without_a_record, "prepared transaction 5 (0/5A) was not durable"),
    ],
)
def test_the_spy_catches_a_position_that_is_confirmed_too_early(
    tmp_path: Path, wrong: Callable[[Wire], None], says: str
) -> None:
    wire = Wire(write_delta(tmp_path, contract(100, 1, 2), contract(200, 3)))
    wrong(wire)
    (problem,) = wire.problems()
    assert says in problem


def test_the_spy_takes_a_prepared_transaction_that_the_recorded_journal_has_for_durable(
    tmp_path: Path,
) -> None:
    """The sink stands still: the COMMIT PREPARED is journaled, so its manifest is gone before the sink has it."""
    wire = Wire(write_delta(tmp_path, contract(100, 1, 2), contract(200, 3)))
    prepare = sent(80, b"P" + struct.pack("!Bqqqi", 0, 80, 90, 0, 5) + b"g\0")
    committed = sent(200, b"K" + struct.pack("!Bqqqi", 0, 200, 208, 0, 5) + b"g\0")
    wire.link.server(prepare + committed)
    wire.held = Held(transactions_version=0, journaled=Journaled(200, 208))
    wire.link.client(status(208))
    assert wire.problems() == []
    wire.held = Held(transactions_version=0, journaled=Journaled(300, 400))
    wire.link.client(status(208))
    assert any("prepared transaction 5 (0/5A) was not durable" in problem for problem in wire.problems())


def test_the_spy_has_nothing_against_an_honest_run_whatever_the_packets_are_cut_into(tmp_path: Path) -> None:
    wire = Wire(write_delta(tmp_path, contract(100, 1, 2), contract(200, 3)))
    wire.held = Held(1, 0, frozenset({"5-000000000000005A.epoch.json"}))
    # An empty one that is committed leaves neither a record nor a transaction.
    empty = sent(60, b"P" + struct.pack("!Bqqqi", 0, 60, 70, 0, 6) + b"g\0")
    empty += sent(72, b"K" + struct.pack("!Bqqqi", 0, 72, 76, 0, 6) + b"g\0")
    prepare = empty + sent(80, b"P" + struct.pack("!Bqqqi", 0, 80, 90, 0, 5) + b"g\0")
    for data, see in (
        (prepare + sent(100) + sent(400), "server"),
        (status(90) + status(108) + status(208), "client"),
    ):
        for i in range(0, len(data), 7):
            getattr(wire.link, see)(data[i : i + 7])
    wire.connect()
    wire.link.client(status(208))
    assert [s.flush for s in wire.spy.statuses] == [90, 108, 208, 208]
    assert wire.problems() == []


@pytest.mark.parametrize(
    ("n_seeds", "n_kills", "driver_share"), [(4, 50, 0.18), (8, 25, 0.2), (2, 100, 0.18)]
)
def test_two_hundred_kills_strike_every_point_at_least_three_times_whatever_the_rounds(
    n_seeds: int, n_kills: int, driver_share: float
) -> None:
    struck: Counter[str] = Counter()
    for seed in range(1, n_seeds + 1):
        two_phase = seed % 2 == 0
        groups = schedule(seed, n_kills, two_phase=two_phase, driver_share=driver_share, together=4)
        points = [fault.split(":")[0] for group in groups for fault in group.split(",")]
        assert len(points) == n_kills
        assert two_phase or not PREPARED_POINTS & set(points)
        assert all(len(group.split(",")) == 1 for group in groups if DRIVER_POINTS & {group.split(":")[0]})
        struck.update(points)
    assert set(struck) == set(STREAM_POINTS)
    assert min(struck.values()) >= 3, struck


def test_a_schedule_is_its_seeds_alone_so_that_a_round_can_be_repeated() -> None:
    def made(seed: int) -> list[str]:
        return schedule(seed, 25, two_phase=True, driver_share=0.1, together=3)

    assert made(3) == made(3) != made(4)


def test_pauses_come_among_the_kills_and_beside_some_of_them_as_the_seed_decides() -> None:
    def made(seed: int) -> list[str]:
        kills = schedule(seed, 25, two_phase=True, driver_share=0.1, together=3)
        return with_pauses(kills, seed, schedule(seed, 12, two_phase=True, driver_share=0.1))

    groups = made(3)
    assert groups == made(3) != made(4)
    faults = [fault for group in groups for fault in parse(group)]
    assert Counter(fault.action for fault in faults) == {"kill": 25, "stop": 12}
    assert len({fault.token for fault in faults}) == len(faults)
    assert sum(fault.tag.startswith(WHOLE) for fault in faults) == 8
    assert any(":stop" in group and ":kill" in group for group in groups)
    assert all(group.count(":stop") <= 1 for group in groups)


def round_result(seed: int, kills: list[Kill], *, judged: bool = True) -> RoundResult:
    verdict = Verdict(n_transactions=5, n_rows=50) if judged else None
    return RoundResult(seed, "on", kills=kills, verdict=verdict, n_statuses=7)


def test_a_report_counts_kills_of_judged_rounds_alone_and_adds_up_with_others(tmp_path: Path) -> None:
    one = Report.of([round_result(1, [Kill("sealed", None), Kill("sealed", 4.0)])], [2.0], 10.0)
    broken = round_result(2, [Kill("recorded", 1.0)], judged=False)
    two = Report.of([round_result(3, [Kill("sealed", 6.0), Kill("connection", 2.0)]), broken], [4.0], 20.0)
    for name, report in (("1", one), ("2", two)):
        report.write(tmp_path / name)
    pauses = [Kill("recorded", 3.0, is_pause=True), Kill("sealed", None, is_pause=True)]
    Report.of([round_result(4, pauses)], [], 5.0).write(tmp_path / "3")
    paused = Report.read(tmp_path / "3")
    assert "0 kills at 0 of" in str(paused) and "fault points and 2 pauses at 2 in 1 judged" in str(paused)
    whole = Report.read(tmp_path / "1")
    whole.add(Report.read(tmp_path / "2"))
    assert whole.points["sealed"].kills == 3 and whole.points["sealed"].recoveries_s == [4.0, 6.0]
    assert "recorded" not in whole.points
    assert f"4 kills at 1 of {len(STREAM_POINTS)} fault points in 2 judged rounds (1 broke off), 30 s" in str(
        whole
    )
    assert "0 lost, 0 twice, 0 alien, 0 disordered" in str(whole)
    assert "load: median 3.0, max 4.0" in str(whole)
    assert whole.failures() == ["seed 2 failed"]


def test_a_run_with_too_few_kills_at_a_point_or_an_accusing_spy_is_a_failure() -> None:
    kills = [Kill(point, 1.0) for point in STREAM_POINTS]
    report = Report.of([round_result(1, kills)], [], 1.0)
    assert report.failures(least=1) == []
    (short,) = report.failures(least=2)
    assert short.startswith("less than 2 kills at: ") and "parquet_written (1)" in short
    accused = round_result(2, kills)
    accused.accusations.append("status 0/1 went back")
    assert Report.of([accused], [], 1.0).failures() == ["seed 2 failed"]
    assert Report.of([], [], 1.0).failures() == ["no round was run"]


def test_the_log_of_a_table_is_read_version_by_version(tmp_path: Path) -> None:
    write_delta(tmp_path, contract(100, 1, 2))
    entry: Any = json.loads(
        (tmp_path / "_transactions/_delta_log" / f"{1:020}.json").read_text().splitlines()[0]
    )
    assert entry
    held_at = DeltaLake(tmp_path).watermarks("_transactions")
    assert [held_at(version, last=False) for version in (-1, 0, 1)] == [0, 100, 200]


def test_what_an_iceberg_table_held_is_known_by_the_look(tmp_path: Path) -> None:
    lake = write_iceberg(tmp_path, contract(100, 1, 2), contract(200, 3))
    assert [lake.watermarks("_transactions")(n, last=False) for n in (-1, 0, 1)] == [0, 100, 200]
    assert (lake.holds("_transactions"), lake.holds("_messages"), lake.holds("elsewhere")) == (1, 0, -1)
