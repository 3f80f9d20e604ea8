"""``format("xidstream")``: a change log that the real sink wrote, read by Spark 4 as a batch, as a stream, by Connect.

Spark 3.5 has no Python data sources: there the file is skipped. ``make test-spark4`` runs it.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.spark.change_log_maker import DATE, INT8, TEXT, LogMaker, keyed
from tests.spark.support import INT4, NUMERIC, numeric
from xidstream import ChangeLog
from xidstream.pipeline.changelog import log_ranges
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import INSERT, UPDATE_POSTIMAGE

pytest.importorskip("pyspark.sql.datasource", reason="Spark 3.5 has no Python data sources")
HAS_LIMITS = find_spec("pyspark.sql.streaming.datasource") is not None  # of a batch; from Spark 4.2 on

pytestmark = pytest.mark.spark

REPOSITORY = Path(__file__).parents[2]
ORDERS = keyed("orders", {"id": INT8, "note": TEXT}, "id", relid=1)
ITEMS = keyed("items", {"id": INT8, "name": TEXT}, "id", relid=2)
UNKEYED = keyed("unkeyed", {"a": INT8, "b": TEXT}, relid=3)


FORMATS = pytest.mark.parametrize("log", ["delta", "iceberg"], indirect=True)


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path, spark: Any, make_batch: Any) -> Iterator[LogMaker]:
    """In Delta tables, or where a test has ``FORMATS`` in Iceberg tables as well: then those are read."""
    iceberg = f"{tmp_path}/lake/shop" if getattr(request, "param", "delta") == "iceberg" else None
    made = LogMaker(tmp_path / "log", spark, make_batch, iceberg=iceberg)
    yield made
    for sink in made.sinks:
        sink.close()


def root_of(log: LogMaker) -> str:
    return str(log.path) if log.iceberg is None else f"iceberg:{log.iceberg}"


def filled(log: LogMaker, *relations: RelationVersion, commits: int = 12) -> random.Random:
    dice = random.Random(7)
    for relation in relations:
        log.snapshot(relation, [])
    for _ in range(commits):
        log.random_commit(dice, relations)
    return dice


def source(spark: Any, log: LogMaker, table: str = "public.orders", **options: Any) -> Any:
    return spark.read.format("xidstream").option("table", table).options(**options).load(root_of(log))


def stream(spark: Any, log: LogMaker, **options: Any) -> Any:
    return spark.readStream.format("xidstream").options(**options).load(root_of(log))


def rows(frame: Any) -> list[Any]:
    return sorted((row.asDict(recursive=True) for row in frame.collect()), key=repr)


def run_to_end(frame: Any, checkpoint: Path, each: Callable[[Any, int], None], **trigger: Any) -> Any:
    query = (
        frame.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    query.awaitTermination()
    return query


@FORMATS
def test_a_batch_has_the_changes_that_the_change_log_says(log: LogMaker, spark: Any) -> None:
    filled(log, ORDERS, ITEMS, UNKEYED)
    lsns = sorted(log.states)
    change_log = ChangeLog(root_of(log))
    for table in ("public.orders", "public.items", "public.unkeyed"):
        found = source(spark, log, table)
        expected = change_log.changes(spark, table)
        assert found.schema == expected.schema
        assert rows(found) == rows(expected) and rows(found)
        for since, until in [(lsns[3], lsns[8]), (lsns[5] + 1, lsns[5] + 2), (lsns[10], lsns[11])]:
            expected = rows(change_log.changes(spark, table, since=since, until=until))
            assert rows(source(spark, log, table, since=since, until=until)) == expected
            inclusive = source(spark, log, table, startingLsn=since + 1, endingLsn=str(Lsn(until)))
            assert rows(inclusive) == expected


@FORMATS
def test_columns_that_were_added_renamed_types_and_odd_names_are_read_as_the_change_log_does(
    log: LogMaker, spark: Any
) -> None:
    def version(*columns: tuple[str, int, int]) -> RelationVersion:
        made = tuple(Column(name, oid, modifier, i == 0) for i, (name, oid, modifier) in enumerate(columns))
        return RelationVersion(1, "public", "Ödd.`t`", ReplicaIdentity.DEFAULT, made)

    first = version(("id", INT4, -1), ("price", NUMERIC, numeric(12, 8)), ("size", INT4, -1))
    wider = version(
        ("id", INT4, -1), ("price", NUMERIC, numeric(20, 8)), ("size", INT8, -1), ("day", DATE, -1)
    )
    text = version(("id", INT4, -1), ("price", NUMERIC, -1), ("size", TEXT, -1), ("Näme.`x`", TEXT, -1))
    small = [Decimal("0.00000001"), Decimal("-0.00000150"), Decimal("7.25000000"), None]
    lsns = [
        log.commit(
            (first, [{"_change": INSERT, "id": i, "price": p, "size": i} for i, p in enumerate(small)])
        ),
        log.commit(
            (wider, [{"_change": UPDATE_POSTIMAGE, "id": 1, "price": Decimal("1.5"), "size": 1 << 40}])
        ),
        log.commit((text, [{"_change": INSERT, "id": 9, "price": "1e400", "size": "XL", "Näme.`x`": "n"}])),
    ]
    for until in lsns:
        expected = ChangeLog(root_of(log)).changes(spark, ("public", "Ödd.`t`"), until=until)
        found = source(spark, log, '["public", "Ödd.`t`"]', until=until)
        assert found.schema == expected.schema
        assert rows(found) == rows(expected)


@FORMATS
def test_a_stream_that_is_stopped_anywhere_and_begun_again_delivers_each_change_once(
    log: LogMaker, spark: Any, tmp_path: Path
) -> None:
    dice = filled(log, ORDERS, commits=3)
    out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")

    def begin(**trigger: Any) -> Any:
        frame = stream(
            spark, log, table="public.orders", maxTransactionsPerTrigger=2, maxBytesPerTrigger=9000
        )
        writer = (
            frame.writeStream.format("parquet").option("path", out).option("checkpointLocation", checkpoint)
        )
        return writer.trigger(**trigger).start()

    for _ in range(4):
        query = begin(processingTime="0 seconds")
        for _ in range(4):
            log.random_commit(dice, [ORDERS])
        query.stop()
        assert query.exception() is None
    begin(availableNow=True).awaitTermination()
    assert rows(spark.read.parquet(out)) == rows(ChangeLog(root_of(log)).changes(spark, "public.orders"))


@FORMATS
def test_two_tables_of_one_query_are_never_torn(log: LogMaker, spark: Any, tmp_path: Path) -> None:
    log.snapshot(ORDERS, [])
    log.snapshot(ITEMS, [])
    batches: list[dict[str, list[int]]] = []

    def keep(batch: Any, number: int) -> None:
        seen: dict[str, list[int]] = {"public.orders": [], "public.items": []}
        for row in batch.collect():
            own, other = ("public.orders", "public.items")[:: 1 if row["_table"] == "public.orders" else -1]
            assert row[other] is None
            seen[own].append(row[own]["id"])
        batches.append(seen)

    frame = stream(spark, log, tables="public.orders,public.items", maxTransactionsPerTrigger=2)
    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.start()
    for i in range(12):
        log.commit(
            (ORDERS, [{"_change": INSERT, "id": i, "note": "n"}]),
            (ITEMS, [{"_change": INSERT, "id": i, "name": "n"}]),
        )
    query.processAllAvailable()
    query.stop()
    assert all(sorted(each["public.orders"]) == sorted(each["public.items"]) for each in batches)
    if HAS_LIMITS:
        assert max(len(each["public.orders"]) for each in batches) <= 2
    assert sorted(id_ for each in batches for id_ in each["public.items"]) == list(range(12))


@FORMATS
def test_a_table_that_changes_ends_the_query_with_its_lsn_and_the_next_goes_on(
    log: LogMaker, spark: Any, tmp_path: Path
) -> None:
    wider = keyed("orders", {"id": INT8, "note": TEXT, "more": TEXT}, "id", relid=1)
    log.snapshot(ORDERS, [])
    log.commit((ORDERS, [{"_change": INSERT, "id": 1, "note": "a"}]))
    got: list[dict[str, Any]] = []

    def keep(batch: Any, number: int) -> None:
        got.extend(row.asDict() for row in batch.collect())

    frame = stream(spark, log, table="public.orders")
    last = log.commit((ORDERS, [{"_change": INSERT, "id": 2, "note": "b"}]))
    changed = log.commit((wider, [{"_change": INSERT, "id": 3, "note": "c", "more": "m"}]))
    with pytest.raises(Exception, match=f"other columns from the commit at {Lsn(changed)} on") as failure:
        # Before Spark 4.2 availableNow has one batch, and ends after it.
        trigger: dict[str, Any] = {} if HAS_LIMITS else {"processingTime": "0 seconds"}
        run_to_end(frame, tmp_path / "checkpoint", keep, **trigger)
    assert "start the query anew with the same checkpoint" in str(failure.value)
    assert sorted(row["id"] for row in got) == [1, 2] and last < changed
    log.commit((wider, [{"_change": INSERT, "id": 4, "note": "d", "more": "m"}]))
    run_to_end(stream(spark, log, table="public.orders"), tmp_path / "checkpoint", keep)
    assert sorted((row["id"], row.get("more")) for row in got) == [(1, None), (2, None), (3, "m"), (4, "m")]


@pytest.mark.parametrize("log", ["iceberg"], indirect=True)
def test_a_column_that_iceberg_widens_in_place_ends_the_query_and_the_next_goes_on(
    log: LogMaker, spark: Any, tmp_path: Path
) -> None:
    narrow, wide = (keyed("orders", {"id": INT8, "n": type_}, "id", relid=1) for type_ in (INT4, INT8))
    log.snapshot(narrow, [])
    log.commit((narrow, [{"_change": INSERT, "id": 1, "n": 10}]))
    got: list[tuple[int, int]] = []

    def keep(batch: Any, number: int) -> None:
        got.extend((row["id"], row["n"]) for row in batch.collect())

    frame = stream(spark, log, table="public.orders")
    run_to_end(frame, tmp_path / "checkpoint", keep)
    log.commit((narrow, [{"_change": INSERT, "id": 2, "n": 20}]))
    log.commit((wide, [{"_change": INSERT, "id": 3, "n": 1 << 40}]))
    with pytest.raises(Exception, match=r"has had no layout with the columns of this query"):
        run_to_end(frame, tmp_path / "checkpoint", keep)
    assert got == [(1, 10)]
    run_to_end(stream(spark, log, table="public.orders"), tmp_path / "checkpoint", keep)
    assert got == [(1, 10), (2, 20), (3, 1 << 40)]


CONNECT = """
import sys
from pyspark.sql import SparkSession
from xidstream import ChangeLog
root, out, checkpoint = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert "connect" in type(spark).__module__
batch = spark.read.format("xidstream").option("table", "public.orders").load(root)
batch.write.parquet(out + "/batch")
stream = spark.readStream.format("xidstream").option("table", "public.orders").load(root)
query = stream.writeStream.format("parquet").option("path", out + "/stream").option("checkpointLocation", checkpoint)
query = query.trigger(availableNow=True).start()
query.awaitTermination()
assert query.exception() is None
ChangeLog(root).as_of(spark)["public.orders"].write.parquet(out + "/state")
spark.stop()
"""


@FORMATS
@pytest.mark.timeout(600)
def test_a_connect_session_reads_the_same_batch_stream_and_state(
    log: LogMaker, spark: Any, tmp_path: Path
) -> None:
    filled(log, ORDERS)
    (tmp_path / "client.py").write_text(CONNECT)
    command = [
        sys.executable,
        str(tmp_path / "client.py"),
        root_of(log),
        str(tmp_path),
        str(tmp_path / "checkpoint"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    change_log = ChangeLog(root_of(log))
    expected = rows(change_log.changes(spark, "public.orders"))
    assert rows(spark.read.parquet(str(tmp_path / "batch"))) == expected
    assert rows(spark.read.parquet(str(tmp_path / "stream"))) == expected
    assert rows(spark.read.parquet(str(tmp_path / "state"))) == rows(change_log.as_of(spark)["public.orders"])


@pytest.mark.timeout(600)
def test_a_stream_whose_process_is_killed_delivers_each_change_once(
    log: LogMaker, spark: Any, tmp_path: Path
) -> None:
    """The example of the documentation, with its JVM."""
    dice = filled(log, ORDERS, commits=30)
    out = tmp_path / "out"
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / "copy_changes.py"),
        root_of(log),
        "public.orders",
        str(out),
        str(tmp_path / "checkpoint"),
    ]

    # As in the tests' own session: for so little the second compiler tier only costs time.
    short = "--conf spark.ui.enabled=false --driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell"

    def start() -> subprocess.Popen[str]:
        environ = {**os.environ, "PYSPARK_SUBMIT_ARGS": short}
        return subprocess.Popen(
            command,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    for kills in range(2):
        log.random_commit(dice, [ORDERS])
        child = start()
        # Once its batch has begun: the log of offsets has one more than that of what is done, or about to.
        while (
            child.poll() is None and len(list((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))) <= kills
        ):
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    log.random_commit(dice, [ORDERS])
    child = start()
    said, _ = child.communicate(timeout=300)
    assert child.returncode == 0, said
    assert rows(spark.read.parquet(str(out))) == rows(ChangeLog(root_of(log)).changes(spark, "public.orders"))


def test_changes_that_were_deleted_are_an_error_and_never_passed_over(
    log: LogMaker, spark: Any, tmp_path: Path
) -> None:
    filled(log, ORDERS)
    lsns = sorted(log.states)
    counts: list[int] = []

    def count(batch: Any, number: int) -> None:
        counts.append(batch.count())

    read = stream(spark, log, table="public.orders", since=lsns[3])
    run_to_end(read, tmp_path / "checkpoint", count)
    log.insert(ORDERS, {"id": 1000, "note": "gone"})
    DeltaTable(str(log.path / locations.encode_table("public", "orders"))).delete(f"_commit_lsn <= {log.lsn}")
    log.insert(ORDERS, {"id": 1001, "note": "there"})
    lacks = r"table public\.orders lacks the rows of the commit at 0/"
    with pytest.raises(Exception, match=lacks):
        run_to_end(stream(spark, log, table="public.orders", since=lsns[3]), tmp_path / "checkpoint", count)
    with pytest.raises(Exception, match=lacks):
        source(spark, log, since=lsns[3]).collect()
    allowed = source(spark, log, since=lsns[3], failOnDataLoss="false")
    assert rows(allowed) == rows(ChangeLog(root_of(log)).changes(spark, "public.orders", since=lsns[3]))
    DeltaTable(str(log.path / locations.TRANSACTIONS)).delete(f"commit_lsn <= {lsns[5]}")
    with pytest.raises(Exception, match=r"the change log begins at 0/"):
        source(spark, log, since=lsns[3]).collect()


def test_what_is_asked_wrongly_is_told(log: LogMaker, spark: Any, tmp_path: Path) -> None:
    filled(log, ORDERS, commits=2)

    def refused(message: str, *, path: str = str(log.path), **options: Any) -> None:
        with pytest.raises(Exception, match=message):
            spark.read.format("xidstream").options(**options).load(path).collect()

    refused(r"the change log has no table public\.nope", table="public.nope")
    refused(r"'orders' is no table's name", table="orders")
    refused(r"there is no change log at .*nowhere", path=str(tmp_path / "nowhere"), table="public.orders")
    refused(r"has no option 'tabel'", tabel="public.orders")
    refused(r"needs one of the options table and tables")
    refused(r"the option since is no LSN: 'yesterday'", table="public.orders", since="yesterday")
    refused(r"lies beyond .*, the newest complete commit", table="public.orders", until=str(Lsn(log.lsn + 1)))
    refused(r"no slot other has written", table="public.orders", slot="other")
    refused(r"ChangeLog\(path\)\.as_of", table="public.orders", asOf="0/100")
    refused(r"net=True", table="public.orders", changes="net")
    refused(
        r"maxBytesPerTrigger is one of spark\.readStream alone", table="public.orders", maxBytesPerTrigger=5
    )
    refused(r"failOnDataLoss is true or false", table="public.orders", failOnDataLoss="perhaps")
    with pytest.raises(Exception, match=r"the option until is one of spark\.read alone"):
        run_to_end(
            stream(spark, log, table="public.orders", until=5), tmp_path / "c", lambda batch, number: None
        )


def test_the_example_of_two_tables_writes_each_batch_once(
    log: LogMaker, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = filled(log, ORDERS, ITEMS)
    tables, target, checkpoint = "public.orders,public.items", tmp_path / "target", tmp_path / "checkpoint"
    arguments = ["copy", root_of(log), tables, str(target), str(checkpoint)]
    monkeypatch.setattr(sys, "argv", arguments)
    example = str(REPOSITORY / "examples" / "copy_two_tables.py")
    runpy.run_path(example)
    for _ in range(3):
        log.random_commit(dice, [ORDERS, ITEMS])
    runpy.run_path(example)
    # The last batch is forgotten, as if Spark had been killed after the function: it is given again.
    for commit in sorted((checkpoint / "commits").iterdir()):
        if commit.name in ("1", ".1.crc"):
            commit.unlink()
    runpy.run_path(example)
    for table in tables.split(","):
        expected = ChangeLog(root_of(log)).changes(spark, table).select("_commit_lsn", "_seq").collect()
        copied = DeltaTable(str(target / table)).to_pyarrow_table(columns=["_commit_lsn", "_seq"]).to_pylist()
        assert sorted(map(tuple, expected)) == sorted((row["_commit_lsn"], row["_seq"]) for row in copied)


def test_a_schema_of_ones_own_names_the_columns_that_are_read(log: LogMaker, spark: Any) -> None:
    filled(log, ORDERS)
    reader = spark.read.format("xidstream").option("table", "public.orders")
    found = reader.schema("_commit_lsn bigint, note string").load(root_of(log))
    expected = ChangeLog(root_of(log)).changes(spark, "public.orders").select("_commit_lsn", "note")
    assert rows(found) == rows(expected)
    with pytest.raises(
        Exception, match=r"has had no layout with the columns of this query: struct<nope:string>"
    ):
        reader.schema("nope string").load(root_of(log)).collect()


@FORMATS
def test_large_files_are_read_in_slices_and_each_row_once(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xidstream.pipeline.changelog.spark_source import BatchReader, SourceOptions

    filled(log, ORDERS)
    expected = ChangeLog(root_of(log)).changes(spark, "public.orders")
    options = SourceOptions.parse({"path": root_of(log), "table": "public.orders"}, is_stream=False)
    monkeypatch.setattr(log_ranges, "RANGE_BYTES", 500)
    reader = BatchReader(options, expected.schema)
    parts = reader.partitions()
    assert any(part.files.n_slices > 1 for part in parts)
    found = pa.Table.from_batches(batch for part in parts for batch in reader.read(part))
    assert sorted(map(repr, found.drop(["_commit_timestamp"]).to_pylist())) == sorted(
        map(repr, pa.table(expected.drop("_commit_timestamp").toArrow()).to_pylist())
    )
