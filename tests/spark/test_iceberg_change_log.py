"""``ChangeLog`` over Iceberg tables: the same rows as over the Delta tables of the same source, and what is refused.

Both sinks write the same random history, and the Delta log's answers are the oracle: those are held against a model
elsewhere (``test_change_log``, ``test_fold``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table.snapshots import Operation

from tests.spark.change_log_maker import (
    INT2,
    INT4,
    INT8,
    TEXT,
    LogMaker,
    as_rows,
    keyed,
    random_value,
)
from tests.spark.test_change_log import found
from xidstream import ChangeLog
from xidstream.actors.cli.log import tables_command
from xidstream.pipeline.errors import ConfigError, PreconditionMissing, SinkDiverged, Unsupported, UsageError
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.log_tables import small_files
from xidstream.pipeline.log_tables.small_files import SizeClass
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import INSERT, UPDATE_POSTIMAGE
from xidstream.pipeline.settings.config import Config

pytestmark = pytest.mark.spark

ORDERS = keyed("orders", {"id": INT8, "small": INT2, "n": INT4, "note": TEXT}, "id", relid=1)
PAIRS = keyed("pairs", {"a": TEXT, "b": INT8, "odd name": TEXT}, "a", "b", relid=2)
BARE = keyed("bare", {"id": INT8, "note": TEXT}, relid=3)
ADDED = keyed("orders", {"id": INT8, "small": INT2, "n": INT4, "note": TEXT, "more": TEXT}, "id", relid=1)
WIDER = keyed("orders", {"id": INT8, "small": INT2, "n": INT8, "note": TEXT, "more": TEXT}, "id", relid=1)
RENAMED = keyed("orders", {"id": INT8, "small": INT2, "n": INT8, "title": TEXT, "more": TEXT}, "id", relid=1)


class Twins(LogMaker):
    """A Delta log and an Iceberg log of one source."""

    def alter(self, relation: RelationVersion) -> None:
        """What the log's rows are behind an ALTER TABLE to this layout: a renamed column is a new one."""
        names = [c.name for c in relation.columns]
        held = self.tables[relation.name]
        held[:] = [{name: row.get(name) for name in names} for row in held]

    @property
    def logs(self) -> tuple[ChangeLog, ChangeLog]:
        return ChangeLog(str(self.path)), ChangeLog(f"iceberg:{self.iceberg}")

    def table(self, key: str) -> Any:
        catalog = IcebergAddress.parse(str(self.iceberg)).open(makes=False)
        assert catalog is not None
        return catalog.load_table(f"shop.{key}")

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


@pytest.fixture
def twins(tmp_path: Path, spark: Any, make_batch: Any) -> Iterator[Twins]:
    made = Twins(tmp_path / "delta", spark, make_batch, iceberg=f"{tmp_path}/lake/shop")
    yield made
    made.close()


def rows_of(dice: random.Random, relation: RelationVersion, n: int) -> list[dict[str, Any]]:
    return [
        {c.name: i if c.type_oid == INT8 else random_value(dice, c, 400) for c in relation.columns}
        for i in range(n)
    ]


def check_same(twins: Twins, *tables: str, lsns: list[int], changed: str) -> None:
    """The tables' states at these LSNs, and the changes of one of them between these."""
    delta, iceberg = twins.logs

    def check(asked: Callable[[ChangeLog], Any]) -> None:
        wanted = found(asked(delta))
        assert wanted and found(asked(iceberg)) == wanted

    for lsn in lsns:
        states = [log.as_of(twins.spark, lsn=lsn) for log in (delta, iceberg)]
        assert states[0].tables() == states[1].tables()
        for table in tables:
            ours, theirs = (found(state.with_text(table)) for state in states)
            assert ours == theirs, (table, lsn)
    since, until = lsns[0] if len(lsns) > 1 else None, lsns[-1]
    check(lambda log: log.changes(twins.spark, changed, since=since, until=until))
    check(lambda log: log.transactions(twins.spark, since=since, until=until))
    if find_spec("pyspark.sql.datasource") is not None:  # from Spark 4.0 on
        source = twins.spark.read.format("xidstream").option("table", changed).option("until", until)
        source = source if since is None else source.option("since", since)
        asked = source.load(f"iceberg:{twins.iceberg}")
        wanted = iceberg.changes(twins.spark, changed, since=since, until=until)
        assert asked.schema == wanted.schema and found(asked) == found(wanted)
    if since is not None:
        check(lambda log: log.changes(twins.spark, changed, since=since, until=until, net=True))


@pytest.mark.slow
def test_a_random_history_has_the_states_and_changes_that_the_delta_log_has(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its small files are merged all the while, over changes of the layout, too."""
    monkeypatch.setattr(small_files, "SIZE_CLASSES", (SizeClass(0, 1 << 20, 3),))
    dice = random.Random(11)
    orders = ORDERS
    for relation in (ORDERS, PAIRS, BARE):
        twins.snapshot(relation, rows_of(dice, relation, 30))
    lsns = []
    for layout in (ADDED, WIDER, RENAMED):
        for _ in range(dice.randint(2, 4)):
            twins.random_commit(dice, [orders, PAIRS, BARE], n_keys=40)
        orders = layout
        twins.alter(layout)
        if layout is WIDER:
            lsns.append(twins.lsn)
            twins.insert(layout, {**rows_of(dice, layout, 1)[0], "id": 1000, "n": 1 << 40})
            twins.truncate(PAIRS)
            twins.insert(PAIRS, *rows_of(dice, PAIRS, 3))
    twins.snapshot(BARE, twins.tables["public.bare"])
    for _ in range(3):
        twins.random_commit(dice, [orders, PAIRS, BARE], n_keys=40)
    lsns.append(twins.lsn)
    delta, iceberg = twins.logs
    assert (iceberg.last_commit_lsn, iceberg.proven_lsn, iceberg.readable_lsn) == (
        delta.last_commit_lsn,
        delta.proven_lsn,
        delta.readable_lsn,
    )
    assert iceberg.wait() == delta.last_commit_lsn
    assert iceberg.tables() == delta.tables() == ["public.bare", "public.orders", "public.pairs"]
    assert [iceberg.oldest_lsn(t) for t in iceberg.tables()] == [delta.oldest_lsn(t) for t in delta.tables()]
    check_same(twins, *iceberg.tables(), lsns=lsns, changed="public.orders")
    state = iceberg.as_of(twins.spark)
    for name, wanted in twins.state().items():
        assert as_rows(found(state[name])) == wanted, name
    for key in ("public__orders", "public__bare", "_transactions"):
        assert Operation.REPLACE in {each.summary.operation for each in twins.table(key).snapshots()}, key
    by_xid = [log.as_of(twins.spark, xid=lsns[0] * 10).lsn for log in (delta, iceberg)]
    at = found(iceberg.transactions(twins.spark, until=lsns[0]))[-1]["commit_timestamp"]
    by_time = [log.as_of(twins.spark, timestamp=at).lsn for log in (delta, iceberg)]
    assert by_xid == [lsns[0]] * 2 and by_time[0] == by_time[1]


@pytest.mark.slow
def test_columns_that_users_rename_or_drop_in_iceberg_stay_those_that_the_source_fills(twins: Twins) -> None:
    twins.snapshot(ORDERS, [{"id": 1, "small": 7, "n": 5, "note": "before"}])
    twins.insert(ORDERS, {"id": 2, "small": 8, "n": 6, "note": "also"})
    with twins.table("public__orders").update_schema() as update:
        update.rename_column("note", "label")
        update.delete_column("n")
    twins.sinks[1].claim(_next_tenure())
    row = twins.tables["public.orders"][0]
    row.update(note="after", n=50)
    twins.commit((ORDERS, [{**row, "_change": UPDATE_POSTIMAGE}]))
    twins.insert(ORDERS, {"id": 3, "small": None, "n": 9, "note": "new"})
    names = [field.name for field in twins.table("public__orders").schema().fields]
    assert "label" in names and "note" not in names and "n" in names
    check_same(twins, "public.orders", lsns=[twins.lsn - 20, twins.lsn], changed="public.orders")
    with twins.table("public__orders").update_schema() as update:
        from pyiceberg.types import StringType

        update.add_column("note", StringType())
    with pytest.raises(
        Unsupported, match=r"column .* of Iceberg table public__orders has a name that another"
    ):
        twins.logs[1].as_of(twins.spark)["public.orders"]


def _next_tenure() -> Any:
    from xidstream.pipeline.exchange import Tenure
    from xidstream.pipeline.pg import Lsn

    return Tenure(2, "epoch", 1, {}, Lsn(10**12))


def test_what_another_program_has_compacted_is_read_by_field_ids(twins: Twins) -> None:
    dice = random.Random(5)
    twins.snapshot(PAIRS, rows_of(dice, PAIRS, 10))
    for _ in range(4):
        twins.random_commit(dice, [PAIRS], n_keys=20)
    table = twins.table("public__pairs")
    table.overwrite(table.scan().to_arrow())
    paths = [task.file.file_path for task in table.scan().plan_files()]
    assert len(paths) == 1 and "/data/" in paths[0]
    assert "odd_x20name" in pa.parquet.read_schema(paths[0].removeprefix("file://")).names
    check_same(twins, "public.pairs", lsns=[twins.lsn], changed="public.pairs")


def test_a_snapshot_whose_rows_another_program_has_removed_is_no_smaller_table(twins: Twins) -> None:
    twins.snapshot(ORDERS, [{"id": i, "small": 1, "n": 1, "note": None} for i in range(3)])
    twins.insert(ORDERS, {"id": 10, "small": 1, "n": 1, "note": None})
    twins.table("public__orders").delete("id = 1")
    with pytest.raises(PreconditionMissing, match="its Iceberg table has 2 of them"):
        twins.logs[1].as_of(twins.spark)["public.orders"]


def test_a_table_that_was_set_back_is_not_read(twins: Twins) -> None:
    twins.snapshot(ORDERS, [{"id": 1, "small": 1, "n": 1, "note": None}])
    twins.insert(ORDERS, {"id": 9, "small": 1, "n": 1, "note": None})
    before = twins.table("public__orders").current_snapshot().snapshot_id
    twins.insert(ORDERS, {"id": 10, "small": 1, "n": 1, "note": None})
    twins.table("public__orders").manage_snapshots().rollback_to_snapshot(before).commit()
    with pytest.raises(SinkDiverged, match="was set back to an older snapshot"):
        twins.logs[1].as_of(twins.spark)["public.orders"]


def test_what_stands_beside_delta_tables_alone_is_refused_with_a_sentence(
    twins: Twins, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twins.commit((ORDERS, [{"id": 1, "small": 1, "n": 1, "note": None, "_change": INSERT}]))
    log = twins.logs[1]
    assert repr(log) == f"ChangeLog(iceberg:{tmp_path}/lake/shop, slot '7000000000000000001/shop/orders')"
    for refused in (lambda: log.consumer("c"), log.consumers, lambda: log.root):
        with pytest.raises(Unsupported, match="a change log in Delta tables, and iceberg:"):
            refused()  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="storage_options are for a log in Delta tables"):
        ChangeLog(f"iceberg:{tmp_path}/lake/shop", storage_options={"AWS_REGION": "x"})
    with pytest.raises(UsageError, match=r"there is no change log at iceberg:.*it has no Iceberg table"):
        ChangeLog(f"iceberg:{tmp_path}/lake/other")
    with pytest.raises(UsageError, match=r"has no table public\.nothing"):
        log.changes(twins.spark, "public.nothing")
    assert ChangeLog(f"delta:{twins.path}").tables() == ["public.orders"]
    tables_command(Config(sink=f"iceberg:{tmp_path}/lake/shop"), as_json=False)
    listed = capsys.readouterr().out.splitlines()
    assert listed[1].split() == ["public.orders", "none", "can", "be", "read", "all", "there", "are"]
    assert listed[-1] == f"up to {log.readable_lsn} states can be read, up to {log.last_commit_lsn} changes"
