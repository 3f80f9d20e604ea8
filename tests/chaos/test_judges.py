"""The judges of the chaos run must be able to condemn: each is shown what it exists to find."""

from __future__ import annotations

import datetime
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pipeline import rows
from pipeline.relations.relation import Column, RelationVersion, ReplicaIdentity
from tests.chaos.judge import judge
from tests.chaos.kills import schedule
from tests.differential.local_pipeline import Released, Sink
from tests.feedback_spy import FeedbackSpy, Held, _Link

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


def write_delta(folder: Path, *commits: pa.Table) -> Path:
    for part in commits:
        write_deltalake(str(folder / "s.t"), part, mode="append")
    for t in twin().transactions:
        row = [t.xid, t.commit_lsn, t.end_lsn, WHEN, None, None, False, t.n_rows, ["s.t"]]
        table = pa.table([pa.array([v], f.type) for v, f in zip(row, rows.TRANSACTIONS_SCHEMA, strict=True)],
                         schema=rows.TRANSACTIONS_SCHEMA)  # fmt: skip
        properties = CommitProperties(app_transactions=[Transaction("slot", t.commit_lsn)])
        write_deltalake(str(folder / "_transactions"), table, mode="append", commit_properties=properties)
    DeltaTable.create(str(folder / "_messages"), schema=rows.MESSAGES_SCHEMA)
    return folder


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
    tmp_path: Path, commits: list[pa.Table], wrong: dict[str, int]
) -> None:
    verdict = judge(write_delta(tmp_path, *commits), twin(), set())
    assert verdict.ok == (not wrong)
    for name in ("lost", "twice", "alien", "disordered"):
        assert getattr(verdict, name) == wrong.get(name, 0), verdict
    assert bool(verdict.differences) == bool(wrong.keys() & {"lost", "alien", "differences"})


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
        return self.spy.problems(self._delta, confirmed_before=50)


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


def test_a_schedule_is_its_seeds_and_covers_all_points_over_the_seeds() -> None:
    from pipeline.faultpoints import POINTS

    def points(seed: int) -> list[str]:
        return [f.split(":")[0] for f in schedule(seed, 25, two_phase=seed % 2 == 0, driver_share=0.1)]

    assert schedule(3, 25, two_phase=True, driver_share=0.1) == schedule(
        3, 25, two_phase=True, driver_share=0.1
    )
    assert {p for seed in range(1, 9) for p in points(seed)} == set(POINTS)


def test_the_log_of_a_table_is_read_version_by_version(tmp_path: Path) -> None:
    write_delta(tmp_path, contract(100, 1, 2))
    entry: Any = json.loads(
        (tmp_path / "_transactions/_delta_log" / f"{1:020}.json").read_text().splitlines()[0]
    )
    assert entry
    from tests.feedback_spy import _Versions

    versions = _Versions(tmp_path / "_transactions")
    assert [versions.watermark(v, last=False) for v in (-1, 0, 1)] == [0, 100, 200]
