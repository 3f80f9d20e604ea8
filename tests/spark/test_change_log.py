"""The change log of a Delta root that the sink itself has written: which moment, which table, which columns."""

from __future__ import annotations

import datetime
import runpy
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.snapshot_tables import commit_one, output_of
from tests.spark.support import COMMIT_US, IDENTITY, INT4, INT8, NUMERIC, TEXT, Transaction, numeric
from xidstream import ChangeLog, Mirror
from xidstream.pipeline.errors import PreconditionMissing, Unsupported, UsageError
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import (
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
    contract_schema,
)
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.spark_schemas import arrow_type

pytestmark = pytest.mark.spark

REPOSITORY = Path(__file__).parents[2]
VALID_FROM = 60
BOUNDS = SnapshotBounds(Lsn(50), Lsn(VALID_FROM), 5, 90, (70,), COMMIT_US)


def table(name: str, *columns: tuple[str, int] | tuple[str, int, int], relid: int = 1) -> RelationVersion:
    schema, _, bare = name.partition(".")
    made = tuple(Column(c[0], c[1], (*c, -1)[2], i == 0) for i, c in enumerate(columns))
    return RelationVersion(relid, schema, bare, ReplicaIdentity.DEFAULT, made)


ORDERS = table("public.orders", ("id", INT8), ("note", TEXT))


class Root:
    """A Delta root, written by the sink of one slot or of several."""

    def __init__(self, path: Path, spark: Any, make_batch: Callable[..., Any]) -> None:
        self.uri = str(path)
        self._spark = spark
        self._make_batch = make_batch
        self._sinks: dict[str, DeltaSink] = {}

    def sink(self, slot: str = IDENTITY.slot) -> DeltaSink:
        if slot not in self._sinks:
            identity = SlotIdentity(IDENTITY.system_identifier, IDENTITY.database, slot)
            sink = DeltaSink(self.uri, identity)
            sink.open(lambda: self._spark)
            sink.claim(Tenure(1, "epoch", 1, {}, Lsn(10_000)))
            self._sinks[slot] = sink
        return self._sinks[slot]

    def take(
        self,
        relation: RelationVersion,
        rows: list[dict[str, Any]],
        slot: str = IDENTITY.slot,
        number: int = 1,
        bounds: SnapshotBounds = BOUNDS,
    ) -> None:
        """A snapshot, as its readers and the log of snapshots write it."""
        log = self.sink(slot).snapshot_log()
        target = output_of(log, relation, bounds.snapshot_lsn)
        files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
        rows = [
            {**row, "_change_type": "snapshot", "_commit_lsn": int(bounds.snapshot_lsn), "_seq": i}
            for i, row in enumerate(rows)
        ]
        files.write(target.conform(pa.RecordBatch.from_pylist(rows, schema=contract_schema(relation))))
        assert commit_one(log, Generation(relation, number, bounds), files.close())

    def write(self, *transactions: Transaction, slot: str = IDENTITY.slot, proven: bool = True) -> None:
        """``proven``: the run looks at the catalog behind it, and finds every table as it was."""
        self.sink(slot).write(self._make_batch(*transactions))
        if proven:
            self.sink(slot).snapshot_log().prove(Lsn(max(each.commit_lsn for each in transactions)))

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()


@pytest.fixture
def root(tmp_path: Path, spark: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Root]:
    made = Root(tmp_path / "delta", spark, make_batch)
    yield made
    made.close()


def found(frame: Any) -> list[dict[str, Any]]:
    rows = pa.Table.from_batches(frame._collect_as_arrow(), frame_schema(frame)).to_pylist()
    return sorted(rows, key=lambda row: str(list(row.values())))


def frame_schema(frame: Any) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in frame.schema.fields])


def change(kind: int, **values: Any) -> dict[str, Any]:
    return {"_change": kind, **values}


def moment(lsn: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.timezone.utc) + datetime.timedelta(
        microseconds=COMMIT_US + lsn
    )


@pytest.fixture
def orders(root: Root) -> Root:
    root.take(ORDERS, [{"id": i, "note": f"note {i}"} for i in range(1, 5)])
    root.write(
        # The snapshot has what 65 did, and not what 70 did, though both committed before it was taken.
        Transaction(52, [(ORDERS, [change(INSERT, id=1, note="note 1")])], xid=65),
        Transaction(55, [(ORDERS, [change(UPDATE_POSTIMAGE, id=2, note="by 70")])], xid=70),
        Transaction(100, [(ORDERS, [change(INSERT, id=10, note="new")])], xid=91),
        Transaction(110, [(ORDERS, [change(DELETE, id=1)])], xid=92),
        Transaction(
            120,
            [(ORDERS, [change(UPDATE_PREIMAGE, id=3), change(UPDATE_POSTIMAGE, id=30, _unchanged=["note"])])],
        ),
    )
    return root


STATES = {
    60: {1: "note 1", 2: "by 70", 3: "note 3", 4: "note 4"},
    100: {1: "note 1", 2: "by 70", 3: "note 3", 4: "note 4", 10: "new"},
    110: {2: "by 70", 3: "note 3", 4: "note 4", 10: "new"},
    120: {2: "by 70", 30: "note 3", 4: "note 4", 10: "new"},
}


def test_a_moment_is_named_by_lsn_timestamp_or_transaction(orders: Root, spark: Any) -> None:
    log = ChangeLog(orders.uri)
    assert repr(log).endswith("slot '7000000000000000001/shop/orders')")
    assert (log.tables(), log.last_commit_lsn) == (["public.orders"], Lsn(120))
    assert sorted(row["commit_lsn"] for row in found(log.transactions(spark))) == [52, 55, 100, 110, 120]
    ranges = [(52, 110), ("0/64", None), (None, 55), (120, 120)]
    assert [
        sorted(row["commit_lsn"] for row in found(log.transactions(spark, since=since, until=until)))
        for since, until in ranges
    ] == [[55, 100, 110], [110, 120], [52, 55], []]
    with pytest.raises(UsageError, match="newest complete commit"):
        log.transactions(spark, until=121)

    def state(**at: Any) -> tuple[Lsn, dict[int, str]]:
        taken = log.as_of(spark, **at)
        assert taken.tables() == ["public.orders"]
        return taken.lsn, {row["id"]: row["note"] for row in found(taken["public.orders"])}

    assert state() == (120, STATES[120])
    assert state(lsn=60) == (60, STATES[60])
    assert state(lsn=109) == (109, STATES[100])
    assert state(xid=92) == (110, STATES[110])
    named = [log.as_of(spark, lsn=lsn).lsn for lsn in ("0/64", Lsn(100), 100)]
    assert named == [log.as_of(spark, xid=91).lsn] * 3 == [100, 100, 100]
    timestamps = (moment(109), moment(110).isoformat(), moment(5_000))
    assert [log.as_of(spark, timestamp=timestamp).lsn for timestamp in timestamps] == [109, 119, 120]


def test_what_is_not_in_the_log_is_refused_and_named(orders: Root, spark: Any, tmp_path: Path) -> None:
    log = ChangeLog(orders.uri)
    for arguments, message in (
        ({"lsn": 121}, "0/79 lies beyond 0/78, the newest complete commit"),
        ({"lsn": 100, "xid": 91}, "takes one of lsn, timestamp and xid"),
        ({"timestamp": datetime.datetime(2026, 1, 1)}, "needs a time zone"),
        ({"xid": 4711}, "no transaction 4711"),
        ({"lsn": "nonsense"}, "not an LSN"),
    ):
        with pytest.raises(UsageError, match=message):
            log.as_of(spark, **arguments)
    state = log.as_of(spark, lsn=59)
    assert state.tables() == []
    with pytest.raises(PreconditionMissing, match="valid from 0/3C"):
        state["public.orders"]
    with pytest.raises(UsageError, match=r"has no table public\.nothing"):
        state["public.nothing"]
    with pytest.raises(UsageError, match="there is no change log"):
        ChangeLog(str(tmp_path / "nowhere"))
    other = table("public.other", ("id", INT8), relid=2)
    orders.write(Transaction(130, [(other, [change(INSERT, id=1)])]))
    assert log.tables() == ["public.orders", "public.other"]
    with pytest.raises(PreconditionMissing, match=r"public\.other has no snapshot"):
        log.as_of(spark)["public.other"]


def test_changes_between_two_commits_come_as_they_are_or_one_for_each_key(orders: Root, spark: Any) -> None:
    log = ChangeLog(orders.uri)
    rows = found(log.changes(spark, "public.orders", since=100, until=110))
    assert [(row["id"], row["_change_type"], row["_commit_lsn"], row["_xid"]) for row in rows] == [
        (1, "delete", 110, 92)
    ]
    assert list(rows[0])[:2] == ["id", "note"]
    assert len(found(log.changes(spark, "public.orders"))) == 6

    def net(**between: Any) -> list[tuple[Any, ...]]:
        rows = found(log.changes(spark, "public.orders", net=True, **between))
        return sorted(
            (row["_change_type"], row["id"], row["note"], row["_commit_lsn"], row["_unchanged"])
            for row in rows
        )

    last = [("delete", 3, None, 120, None), ("insert", 30, "note 3", 120, None)]
    assert net(since=110) == last
    assert net(since="0/3C") == sorted(
        [*last, ("delete", 1, None, 110, None), ("insert", 10, "new", 100, None)]
    )
    # Before the snapshot nothing is known that could fill the value in.
    assert ("insert", 30, None, 120, ["note"]) in net(since=56)


def test_net_changes_over_a_truncate_delete_what_was_there(orders: Root, spark: Any) -> None:
    orders.write(
        Transaction(130, [(ORDERS, [change(INSERT, id=40, note="gone again"), change(TRUNCATE)])]),
        Transaction(
            140, [(ORDERS, [change(INSERT, id=4, note="again"), change(INSERT, id=50, note="fifty")])]
        ),
    )
    log = ChangeLog(orders.uri)
    assert {row["id"]: row["note"] for row in found(log.as_of(spark)["public.orders"])} == {
        4: "again",
        50: "fifty",
    }
    rows = found(log.changes(spark, "public.orders", since=120, net=True))
    kinds = {row["id"]: (row["_change_type"], row["_commit_lsn"]) for row in rows}
    deleted = dict.fromkeys([2, 10, 30], ("delete", 130))
    assert kinds == {**deleted, 4: ("update", 140), 50: ("insert", 140)}


def test_a_column_that_was_added_and_one_whose_type_grew_are_read_as_they_were_at_each_commit(
    root: Root, spark: Any
) -> None:
    first = table("public.t", ("id", INT4), ("price", NUMERIC, numeric(10, 2)))
    later = table("public.t", ("id", INT4), ("price", NUMERIC, numeric(12, 4)), ("Näme.`x`", TEXT))
    root.take(first, [{"id": 1, "price": Decimal("1.50")}, {"id": 2, "price": Decimal("2.50")}])
    root.write(Transaction(100, [(first, [change(INSERT, id=3, price=Decimal("3.50"))])]))
    rows = [
        change(UPDATE_POSTIMAGE, **{"id": 1, "price": Decimal("1.2345"), "Näme.`x`": "one"}),
        change(INSERT, **{"id": 4, "price": None, "Näme.`x`": "four"}),
    ]
    root.write(Transaction(110, [(later, rows)]))
    log = ChangeLog(root.uri)
    state = log.as_of(spark)["public.t"]
    assert state.columns == ["id", "price", "Näme.`x`"]
    assert dict(state.dtypes)["price"] == "decimal(12,4)"
    values = {tuple(row.values()) for row in found(state)}
    assert values == {
        (1, Decimal("1.2345"), "one"),
        (2, Decimal("2.5000"), None),
        (3, Decimal("3.5000"), None),
        (4, None, "four"),
    }
    names = ["Näme.`x`", "price"]
    few = log.as_of(spark).table("public.t", names)
    assert few.columns == names
    assert {tuple(row.values()) for row in found(few)} == {(word, price) for _, price, word in values}
    assert (
        found(log.changes(spark, "public.t", since=100, columns=names[:1]).select("_commit_lsn"))
        == [{"_commit_lsn": 110}] * 2
    )


def test_a_delete_that_does_not_name_its_row_is_told_and_not_left_out(root: Root, spark: Any) -> None:
    """A partition whose replica identity is another than its root's sends null for the root's key."""
    root.take(ORDERS, [{"id": 1, "note": "a"}, {"id": 2, "note": "b"}])
    root.write(Transaction(100, [(ORDERS, [change(TRUNCATE)])]))
    root.write(Transaction(110, [(ORDERS, [change(INSERT, id=1, note="a")])]))
    log = ChangeLog(root.uri)
    assert [row["id"] for row in found(log.as_of(spark)["public.orders"])] == [1]
    root.write(Transaction(120, [(ORDERS, [change(DELETE, note="a")])]))
    with pytest.raises(Unsupported, match=r"1 changes of table public\.orders do not name their row"):
        log.as_of(spark)["public.orders"]
    assert [row["id"] for row in found(log.as_of(spark, lsn=110)["public.orders"])] == [1]


@pytest.mark.parametrize("is_ansi", ["false", "true"])
@pytest.mark.parametrize("identity", [ReplicaIdentity.FULL, ReplicaIdentity.DEFAULT])
def test_small_numerics_keep_their_digits_and_find_their_rows_after_an_alter_to_numeric(
    root: Root, spark: Any, identity: ReplicaIdentity, is_ansi: str
) -> None:
    """ALTER COLUMN x TYPE numeric writes no row anew, and the server's old tuples have all digits."""

    def version(modifier: int) -> RelationVersion:
        is_full = identity is ReplicaIdentity.FULL
        columns = (Column("x", NUMERIC, modifier, True), Column("n", INT4, -1, is_full))
        return RelationVersion(1, "public", "small", identity, columns)

    before, after = version(numeric(12, 8)), version(-1)
    texts = ["0.00000001", "-0.00000150", "0.00000000", "1.50000000", "-7.25000000"]
    root.take(before, [{"x": Decimal(text), "n": i} for i, text in enumerate(texts)])
    old = {"n": 0} if identity is ReplicaIdentity.FULL else {}
    root.write(Transaction(110, [(after, [change(DELETE, x=texts[0], **old)])]))
    spark.conf.set("spark.sql.ansi.enabled", is_ansi)
    try:
        rows = found(ChangeLog(root.uri).as_of(spark)["public.small"])
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")
    assert {row["n"]: row["x"] for row in rows} == dict(enumerate(texts[1:], 1))


def test_two_slots_below_one_root_are_told_apart_and_their_tables_are_not_mixed(
    root: Root, spark: Any
) -> None:
    theirs = table("public.theirs", ("id", INT8), relid=3)
    root.take(ORDERS, [{"id": 1, "note": "ours"}])
    root.take(theirs, [{"id": 7}], slot="other")
    root.write(Transaction(100, [(ORDERS, [change(INSERT, id=2, note="new")])]))
    root.write(Transaction(5000, [(theirs, [change(INSERT, id=8)])]), slot="other")
    with pytest.raises(UsageError, match="no common order") as raised:
        ChangeLog(root.uri)
    assert "7000000000000000001/shop/orders, 7000000000000000001/shop/other" in raised.value.remedy
    with pytest.raises(UsageError, match="no slot third"):
        ChangeLog(root.uri, slot="third")
    ours, others = (
        ChangeLog(root.uri, slot="orders"),
        ChangeLog(root.uri, slot="7000000000000000001/shop/other"),
    )
    assert (ours.last_commit_lsn, others.last_commit_lsn) == (100, 5000)
    assert [row["id"] for row in found(ours.as_of(spark)["public.orders"])] == [1, 2]
    assert [row["id"] for row in found(others.as_of(spark)["public.theirs"])] == [7, 8]
    with pytest.raises(Unsupported, match="does not record whose a transaction is"):
        ours.transactions(spark)
    root.write(Transaction(5010, [(ORDERS, [change(INSERT, id=2, note="theirs")])]), slot="other")
    with pytest.raises(Unsupported, match="rows of more than one slot"):
        ours.as_of(spark)["public.orders"]


# -- the examples --------------------------------------------------------------------------------------------


def example(name: str, *arguments: str) -> Any:
    return runpy.run_path(str(REPOSITORY / "examples" / f"{name}.py"))["main"](*arguments)


@pytest.mark.slow
def test_the_example_of_the_current_state_shows_it(orders: Root, capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(example("current_state", orders.uri, "public.orders"))
    assert {row["id"]: row["note"] for row in rows} == STATES[120]
    rows = found(example("current_state", orders.uri, "public.orders", "0/64"))
    assert {row["id"]: row["note"] for row in rows} == STATES[100]
    assert "public.orders at 0/64:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_an_audit_shows_what_a_transaction_did(
    orders: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    orders.write(Transaction(130, [(ORDERS, [change(UPDATE_POSTIMAGE, id=4, note="audited")])], xid=99))
    before, after, changes = (found(rows) for rows in example("audit", orders.uri, "99")["public.orders"])
    assert before == [{"id": 4, "note": "note 4"}]
    assert after == [{"id": 4, "note": "audited"}]
    assert [row["_change_type"] for row in changes] == ["update_postimage"]
    assert "transaction 99 committed at 0/82" in capsys.readouterr().out


def test_the_example_of_a_history_has_every_version_of_each_row(orders: Root) -> None:
    orders.write(
        Transaction(
            130, [(ORDERS, [change(UPDATE_POSTIMAGE, id=4, note=note) for note in ("lost", "kept")])]
        ),
        Transaction(140, [(ORDERS, [change(UPDATE_POSTIMAGE, id=4, _unchanged=["note"])])]),
    )
    rows = found(example("history", orders.uri, "public.orders", "id", "0/6E"))
    versions = {(row["id"], row["note"], _lsn(row["valid_from"]), _lsn(row["valid_to"])) for row in rows}
    assert versions == {
        (2, "by 70", None, None),
        (3, "note 3", None, 120),
        (4, "note 4", None, 130),
        (4, "kept", 130, 140),
        (4, "kept", 140, None),
        (10, "new", None, None),
        (30, None, 120, None),
    }


def _lsn(at: datetime.datetime | None) -> int | None:
    return None if at is None else round((at - moment(0)) / datetime.timedelta(microseconds=1))


def test_a_state_is_read_as_far_as_it_is_proven_and_below_the_end_of_its_generation(
    orders: Root, spark: Any
) -> None:
    log = ChangeLog(orders.uri)
    orders.write(
        Transaction(130, [(ORDERS, [change(INSERT, id=50, note="behind a DDL")])], xid=95), proven=False
    )
    assert (log.last_commit_lsn, log.proven_lsn, log.readable_lsn) == (130, 120, 120)

    def notes(**at: Any) -> dict[int, str]:
        return {row["id"]: row["note"] for row in found(log.as_of(spark, **at)["public.orders"])}

    assert notes() == STATES[120], "the newest that can be read"
    assert len(found(log.changes(spark, "public.orders", since=120))) == 1, "changes need no proof"
    for ask in (
        lambda: log.as_of(spark, lsn=130),
        lambda: log.as_of(spark, xid=95),
        lambda: log.changes(spark, "public.orders", since=110, until=130, net=True),
        lambda: log.wait(timeout_s=0.2),
    ):
        with pytest.raises(PreconditionMissing, match=r"not known yet|was not readable at 0/82"):
            ask()
    told = orders.sink().snapshot_log()
    (line,) = told.lines(True)
    told.end(line, "column n was added with a default")
    told.prove(Lsn(130))
    assert log.wait() == 130
    assert [notes(lsn=lsn) for lsn in (100, 120)] == [STATES[100], STATES[120]], "history stays"
    with pytest.raises(PreconditionMissing, match=r"is valid up to 0/78 .column n was added with a default"):
        notes()


def test_a_new_snapshot_of_a_log_older_than_half_of_all_xids_brings_no_old_row_back(
    root: Root, spark: Any
) -> None:
    first, epoch = 2_000_000_000, 1 << 32
    root.take(
        ORDERS, [{"id": 1, "note": "one"}], bounds=SnapshotBounds(Lsn(50), Lsn(60), first, first, (), 0)
    )
    root.write(
        Transaction(100, [(ORDERS, [change(UPDATE_POSTIMAGE, id=1, note="old")])], xid=first + 10),
        Transaction(110, [(ORDERS, [change(INSERT, id=9, note="to be deleted")])], xid=first + 20),
    )
    last = first + (1 << 31) + (1 << 26)
    root.write(
        Transaction(500, [(ORDERS, [change(UPDATE_POSTIMAGE, id=1, note="new")])], xid=(last - 50) % epoch),
        Transaction(510, [(ORDERS, [change(DELETE, id=9)])], xid=(last - 40) % epoch),
    )
    taken = SnapshotBounds(Lsn(600), Lsn(610), last, last, (), 0, contained_upto=Lsn(505))
    root.take(ORDERS, [{"id": 1, "note": "new"}], number=2, bounds=taken)
    root.write(Transaction(700, [(ORDERS, [change(INSERT, id=2, note="behind")])], xid=(last + 1) % epoch))
    log = ChangeLog(root.uri)
    expected = [{"id": 1, "note": "new"}, {"id": 2, "note": "behind"}]
    assert found(log.as_of(spark)["public.orders"].select("id", "note")) == expected
    assert found(log.as_of(spark, lsn=110)["public.orders"].select("id", "note")) == [
        {"id": 1, "note": "old"},
        {"id": 9, "note": "to be deleted"},
    ]
    at = log.table_at("public.orders", Lsn(700))
    assert {file.min_lsn for file in at.tail_files(taken.contained_upto)} == {500, 700}, "read from there"
    Mirror(root.uri).refresh(spark)
    base = DeltaTable(f"{root.uri}/current/public.orders").to_pyarrow_table(columns=["id", "note"])
    assert sorted(base.to_pylist(), key=lambda row: int(row["id"])) == expected


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_snapshot_whose_rows_another_tool_has_removed_is_no_smaller_table(
    orders: Root, spark: Any, is_compacted: bool
) -> None:
    log, table = ChangeLog(orders.uri), DeltaTable(f"{orders.uri}/public.orders")
    if is_compacted:
        table.optimize.compact()
        assert {row["id"]: row["note"] for row in found(log.as_of(spark)["public.orders"])} == STATES[120]
    table.delete("_change_type = 'snapshot' AND id > 2")
    told = r"its snapshot of 0/3C had 4 rows, and its Delta table has 2 of them"
    for lsn in (60, 120):
        with pytest.raises(PreconditionMissing, match=told):
            log.as_of(spark, lsn=lsn)["public.orders"]
    with pytest.raises(PreconditionMissing, match=told):
        Mirror(orders.uri).refresh(spark)
