"""Random legal interleavings of everything a server may send, judged by a naive row-by-row model.

The plan is generated beside the wire: for each row that is written the model keeps a dict in a list, a rolled-back
subtransaction removes its dicts, a commit appends the list. What the pipeline's parts (cutter, decoder, open
transactions with spills, commit order, prepared book) make of the same bytes must be the same, whenever the
reader happens to flush, whatever the block size and in whatever order buffers finish. No server is needed.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.differential.compare import check_confirmations
from tests.differential.local_pipeline import Options, Sink
from tests.differential.local_stages import LocalStages
from tests.fake_libpq import events_of
from tests.journal_contents import JournalContents
from tests.pgoutput.messages import ColumnKind, Delete, Insert, Truncate, TupleColumn, TupleData, Update
from tests.wire import T0_US, Wire
from xidstream.pipeline.exchange import Opened, PrepareCover, SlotIdentity
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import (
    LogicalMessage,
    Origin,
    Relation,
    RelationColumn,
    StreamAbort,
)
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.stream import StreamCutter

UNCHANGED = object()
ABSENT = object()  # a non-key place of a K tuple
Values = dict[str, Any]


@dataclass
class Row:
    kind: str
    table: str
    values: Values
    unchanged: list[str] | None
    subxid: int


@dataclass
class Plan:
    """One transaction as the model knows it. ``versions``: relid → version declared in its scope."""

    xid: int
    streamed: bool
    rows: list[Row] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    subxids: list[int] = field(default_factory=list)
    """Of the open savepoints, from the outermost to the innermost."""
    released: dict[int, list[int]] = field(default_factory=dict)
    """What was released into each of them, children before their parents."""
    declared: dict[int, int] = field(default_factory=dict)
    origin: str | None = None
    gid: str | None = None
    prepare_end_lsn: int = 0


def columns_of(version: int) -> tuple[str, ...]:
    return ("id", *(f"c{version}_{i}" for i in range(version)))


class Generator(Wire):
    """Writes a legal stream of ``n_steps`` steps and keeps what it must become."""

    def __init__(self, choose: random.Random, *, parallel: bool) -> None:
        super().__init__()
        self.choose = choose
        self.parallel = parallel
        self.next_xid = 1000
        self.open: dict[int, Plan] = {}
        self.prepared: list[Plan] = []
        self.restreamed: set[int] = set()
        self.plain_declared: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        self.expected: list[dict[str, Any]] = []
        self.loose_messages: list[bytes] = []
        self.n_values = 0

    # -- rows ------------------------------------------------------------------------------------------

    def items(self, plan: Plan, n: int) -> None:
        for _ in range(n):
            what = self.choose.randrange(20)
            if what == 0:
                self.logical(plan)
            elif what == 1:
                self.truncate(plan)
            else:
                self.row(plan)

    def relid(self, plan: Plan) -> tuple[int, int]:
        """A relid that is declared, and its version; R is written where it is due, and sometimes needlessly."""
        relid = self.choose.randrange(1, 4)
        known = (plan.declared if plan.streamed else self.plain_declared).get(relid)
        version = self.versions.get(relid, 1) if self.choose.random() < 0.9 else self.choose.randrange(1, 4)
        if known != version or self.choose.random() < 0.05:
            self.declare(plan, relid, version)
        return relid, version

    def declare(self, plan: Plan, relid: int, version: int) -> None:
        names = columns_of(version)
        scope = Xid(plan.xid) if plan.streamed else None
        columns = tuple(RelationColumn(n == "id", n, 25, -1) for n in names)
        self.add(Relation(scope, relid, "public", f"t{relid}", "d", columns), at=0)
        if self.versions.get(relid, version) != version:
            # The table was altered: the server forgets all that it has told of it, in every scope.
            for other in (self.plain_declared, *(p.declared for p in self.open.values())):
                other.pop(relid, None)
        self.versions[relid] = version
        place = plan.declared if plan.streamed else self.plain_declared
        place[relid] = version

    def subxid(self, plan: Plan) -> int:
        if not plan.streamed:
            return 0
        if not plan.subxids or self.choose.random() < 0.15:
            self.next_xid += 1
            plan.subxids.append(self.next_xid)
        chosen = self.choose.choice([plan.xid, plan.subxids[-1], self.choose.choice(plan.subxids)])
        # Whoever writes after the rows of an inner savepoint has released it, and is rolled back with it.
        while plan.subxids and plan.subxids[-1] != chosen:
            inner = plan.subxids.pop()
            outer = plan.subxids[-1] if plan.subxids else plan.xid
            plan.released.setdefault(outer, []).extend([*plan.released.pop(inner, ()), inner])
        return chosen

    def value(self) -> str | None:
        self.n_values += 1
        return self.choose.choice((f"v{self.n_values}", f"v{self.n_values}" * 9, "", "é", None))

    def row(self, plan: Plan) -> None:
        relid, version = self.relid(plan)
        names, subxid = columns_of(version), self.subxid(plan)
        scope = Xid(subxid) if plan.streamed else None
        new: Values = {n: self.value() for n in names}
        kind = self.choose.choice("IIIIUKOD")
        table = f"public.t{relid}"

        def keep(change: str, values: Values, unchanged: list[str] | None = None) -> None:
            shown = {n: None if v is UNCHANGED or v is ABSENT else v for n, v in values.items()}
            plan.rows.append(Row(change, table, shown, unchanged, subxid))

        if kind == "I":
            self.add(Insert(scope, relid, tuple_of(new)))
            keep("insert", new)
            return
        old = {n: self.value() if kind == "O" or n == "id" else ABSENT for n in names}
        if kind == "D":
            self.add(Delete(scope, relid, tuple_of(old), None))
            keep("delete", old)
            return
        if len(names) > 1 and self.choose.random() < 0.4:
            new[names[-1]] = UNCHANGED
        if kind == "K":
            self.add(Update(scope, relid, tuple_of(old), None, tuple_of(new)))
            keep("update_preimage", old)
        elif kind == "O":
            self.add(Update(scope, relid, None, tuple_of(old), tuple_of(new)))
            keep("update_preimage", old)
            new = {n: old[n] if v is UNCHANGED else v for n, v in new.items()}
        else:
            self.add(Update(scope, relid, None, None, tuple_of(new)))
        keep("update_postimage", new, [n for n, v in new.items() if v is UNCHANGED] or None)

    def truncate(self, plan: Plan) -> None:
        relids = dict(self.relid(plan) for _ in range(self.choose.randrange(1, 3)))
        subxid = self.subxid(plan)
        scope = Xid(subxid) if plan.streamed else None
        self.add(Truncate(scope, False, False, tuple(relids)))
        for relid, version in relids.items():
            nulls = dict.fromkeys(columns_of(version))
            plan.rows.append(Row("truncate", f"public.t{relid}", nulls, None, subxid))

    def logical(self, plan: Plan | None) -> None:
        self.n_values += 1
        content = f"m{self.n_values}".encode()
        xid = Xid(plan.xid) if plan is not None and plan.streamed else None
        self.add(LogicalMessage(xid, plan is not None, Lsn(self.lsn + 8), "p", content))
        (plan.messages if plan is not None else self.loose_messages).append(content)

    # -- steps -----------------------------------------------------------------------------------------

    def step(self) -> None:
        c = self.choose
        what = c.randrange(100)
        if what < 38:
            self.block()
        elif what < 50 and self.open:
            self.abort_subtransaction()
        elif what < 58 and self.open:
            self.end_stream()
        elif what < 76:
            self.plain()
        elif what < 82:
            self.two_phase()
        elif what < 92 and self.prepared:
            self.end_prepared()
        elif what < 96:
            self.logical(None)
        elif what < 98:
            self.abort(99, 99 + c.randrange(2))  # never heard of
        else:
            self.rollback_prepared(98, "never sent", self.lsn, self.lsn + 8)

    def block(self) -> None:
        c = self.choose
        plan = c.choice(list(self.open.values())) if self.open and c.random() < 0.7 else None
        if plan is None and self.prepared and c.random() < 0.15:
            return self.stream_again()
        first = plan is None
        if plan is None:
            self.next_xid += 1
            plan = self.open[self.next_xid] = Plan(self.next_xid, True)
        self.start(plan.xid, first=first)
        if first and c.random() < 0.2:
            plan.origin = f"o{plan.xid}"
            self.add(Origin(Lsn(0), plan.origin))
        self.items(plan, c.choice((0, 1, 3, 8)))
        self.stop()

    def stream_again(self) -> None:
        """A prepared transaction that was confirmed, streamed once more before its K or r (see the cutter)."""
        again = self.choose.choice(self.prepared)
        if again.xid in self.restreamed:
            return
        self.restreamed.add(again.xid)
        self.start(again.xid, first=True)
        self.items(Plan(again.xid, True), 2)
        self.stop()

    def abort(self, xid: int, subxid: int) -> None:
        if self.parallel:
            self.add(StreamAbort(Xid(xid), Xid(subxid), Lsn(self.lsn), T0_US))
        else:
            self.stream_abort(xid, subxid)

    def abort_subtransaction(self) -> None:
        plan = self.choose.choice(list(self.open.values()))
        self.next_xid += 1
        # The last ones, inner before outer; sometimes one that was never on the wire.
        n = self.choose.randrange(0, len(plan.subxids) + 1)
        gone = [s for inner in plan.subxids[n:][::-1] for s in (*plan.released.pop(inner, ()), inner)]
        gone = gone or [self.next_xid]
        for subxid in gone:
            self.abort(plan.xid, subxid)
        plan.rows = [r for r in plan.rows if r.subxid not in gone]
        del plan.subxids[n:]
        plan.declared.clear()  # the server sends R again after it

    def end_stream(self) -> None:
        plan = self.open.pop(self.choose.choice(list(self.open)))
        how = self.choose.randrange(10)
        if how < 2:
            self.abort(plan.xid, plan.xid)
        elif how < 4:
            plan.gid = self.gid()
            lsn = self.end_lsn()
            self.stream_prepare(plan.xid, plan.gid, lsn)
            plan.prepare_end_lsn = lsn + 4
            self.prepared.append(plan)
        else:
            lsn = self.end_lsn()
            self.stream_commit(plan.xid, lsn)
            self.plain_declared.update(plan.declared)  # and no new R comes for them
            self.release(plan, lsn, plan.gid)

    def plain(self) -> None:
        self.next_xid += 1
        plan = Plan(self.next_xid, False)
        at = len(self.out)
        commit_lsn = self.lsn + 1_000_000 - self.lsn % 1_000_000  # B names it before the rows are there
        self.begin(plan.xid, commit_lsn)
        if self.choose.random() < 0.2:
            plan.origin = f"o{plan.xid}"
            self.origin(plan.origin)
        self.items(plan, self.choose.choice((0, 1, 2, 6, 25)))
        assert len(self.out) > at
        self.lsn = commit_lsn
        self.commit(commit_lsn)
        self.release(plan, commit_lsn, None)

    def two_phase(self) -> None:
        self.next_xid += 1
        plan = Plan(self.next_xid, False, gid=self.gid())
        assert plan.gid is not None
        lsn = self.lsn + 1_000_000 - self.lsn % 1_000_000
        self.begin_prepare(plan.xid, plan.gid, lsn)
        self.items(plan, self.choose.choice((0, 1, 5, 20)))
        self.lsn = lsn
        self.prepare(plan.xid, plan.gid, lsn)
        plan.prepare_end_lsn = lsn + 4
        self.prepared.append(plan)

    def end_prepared(self) -> None:
        plan = self.prepared.pop(self.choose.randrange(len(self.prepared)))
        assert plan.gid is not None
        lsn = self.end_lsn()
        if self.choose.random() < 0.3:
            self.rollback_prepared(plan.xid, plan.gid, plan.prepare_end_lsn, lsn)
        else:
            self.commit_prepared(plan.xid, plan.gid, lsn)
            self.release(plan, lsn, plan.gid)

    def end_lsn(self) -> int:
        self.lsn += 1000
        return self.lsn

    def gid(self) -> str:
        free = [g for g in ("g", "../../etc/'\"", "é" * 90) if g not in [p.gid for p in self.prepared]]
        return free[0] if free and self.choose.random() < 0.7 else f"g{self.next_xid}"

    def release(self, plan: Plan, lsn: int, gid: str | None) -> None:
        if plan.rows or plan.messages:
            self.expected.append(
                {
                    "xid": plan.xid,
                    "commit_lsn": lsn,
                    "end_lsn": lsn + 4,
                    "gid": gid,
                    "origin": plan.origin,
                    "streamed": plan.streamed,
                    "messages": plan.messages,
                    "rows": [(r.kind, r.table, r.values, r.unchanged) for r in plan.rows],
                    "seq": list(range(len(plan.rows))),
                }
            )


def tuple_of(values: Values) -> TupleData:
    def column(value: Any) -> TupleColumn:
        if value is UNCHANGED:
            return TupleColumn(ColumnKind.UNCHANGED)
        if value is None or value is ABSENT:
            return TupleColumn(ColumnKind.NULL)
        return TupleColumn(ColumnKind.TEXT, value.encode())

    return TupleData(tuple(column(v) for v in values.values()))


def released(sink: Sink) -> list[dict[str, Any]]:
    found = []
    for t in sink.transactions:
        rows = t.rows()
        own = [
            {k: v for k, v in r.items() if not k.startswith("_") and k not in ("table", "relid", "keys")}
            for r in rows
        ]
        found.append(
            {
                "xid": t.xid,
                "commit_lsn": t.commit_lsn,
                "end_lsn": t.end_lsn,
                "gid": t.gid,
                "origin": t.origin,
                "streamed": t.streamed,
                "messages": [m.content for m in t.messages],
                "rows": [
                    (r["_change_type"], r["table"], values, r["_unchanged"])
                    for r, values in zip(rows, own, strict=True)
                ],
                "seq": [r["_seq"] for r in rows],
            }
        )
    return found


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    """In memory where there is such a place: each example makes several objects durable."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="xs-", dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


def run(choose: random.Random, folder: Path, n_steps: int) -> None:
    parallel = choose.random() < 0.5
    options = Options(
        block_bytes=choose.choice((200, 700, 5_000, 100_000)),
        pending_limit_bytes=choose.choice((300, 3_000, 100_000)),
        buffer_memory_bytes=choose.choice((1, 2_000, 10_000, 1_000_000)),
        batch_rows=choose.choice((1, 20, 1000)),
        journal=choose.random() < 0.5,
    )
    storage = Storage(str(folder))
    layout = Layout(1, "s", "0001")
    sink = Sink()
    opened = Opened(
        SlotIdentity(1, "d", "s"),
        confirmed_flush_lsn=Lsn(1),
        target_lsn=Lsn(1 << 60),
        server_version=180004,
        proto_version=4,
        streaming="parallel" if parallel else "on",
        two_phase=True,
        cover=PrepareCover(),
        timeline=1,
        history={},
    )
    spares = Spares(choose.choice((0, 1 << 20, 1 << 24)))
    journal = JournalContents(storage, layout)
    stages = LocalStages(
        options.config(folder),
        opened,
        layout.epoch,
        buffer_memory_bytes=options.buffer_memory_bytes,
        write=lambda batch: sink.write(batch, storage),
        watermark=Lsn(0),
        confirm=lambda lsn: sink.note_confirmed(lsn, journal.look()),
        spares=spares,
        bind_late=choose.random() < 0.5,
    )
    cutter = StreamCutter(
        block_bytes=options.block_bytes,
        pending_limit_bytes=options.pending_limit_bytes,
        parallel=parallel,
        spares=spares,
    )
    wire = Generator(choose, parallel=parallel)

    compiled = choose.random() < 0.5

    def take() -> None:
        if compiled:
            for events in events_of(cutter, wire.take(), options.block_bytes):
                stages.send(events)
        for data in wire.take():
            stages.send(cutter.feed(data))
            if choose.random() < 0.02:
                stages.send(cutter.flush())
            if choose.random() < 0.02:
                stages.send(cutter.flush_open())
        if choose.random() < 0.2:
            stages.send(cutter.position(Lsn(wire.lsn + 4)))  # a keepalive: all before it was sent

    for _ in range(n_steps):
        wire.step()
        take()
        if choose.random() < 0.3:
            stages.finish(choose, entirely=False)
            stages.deliver()
    while wire.open:
        wire.end_stream()
        take()
    while wire.prepared:
        wire.end_prepared()
        take()
    stages.send(cutter.position(Lsn(wire.lsn + 100)))
    stages.finish(choose)
    stages.deliver()

    got = released(sink)
    for place, (mine, theirs) in enumerate(zip(got, wire.expected, strict=False)):
        assert mine == theirs, f"transaction {place}"
    assert len(got) == len(wire.expected)
    assert [m.content for m in sink.messages if not m.transactional] == wire.loose_messages
    assert check_confirmations(sink, up_to=wire.lsn + 100) is None
    assert cutter.pending_bytes == 0 and cutter.open_transactions == 0 and stages.buffers.n_open == 0
    left = [k for k in storage.list_keys(layout.root) if not k.startswith(f"{layout.root}/progress")]
    assert left == []
    stages.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), n_steps=st.integers(1, 60))
def test_any_legal_interleaving_is_released_as_the_model_says(folders: Path, seed: int, n_steps: int) -> None:
    """The seed decides all; fewer steps of it are what hypothesis can make a failure smaller by."""
    with tempfile.TemporaryDirectory(dir=folders) as folder:
        run(random.Random(seed), Path(folder), n_steps)


@pytest.mark.parametrize("seed", range(10))
def test_a_long_interleaving_is_released_as_the_model_says(folders: Path, seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=folders) as folder:
        run(random.Random(seed), Path(folder), 300)
