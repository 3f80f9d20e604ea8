"""States and changes over an object store, whole and in a few columns: the same rows, and fewer bytes.

Spark has no connector for it, so the executors read by pyarrow, and must be told what is wanted.
"""

from __future__ import annotations

import datetime
import random
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.s3_server import CountedS3, counted_s3, n_bytes_of
from tests.spark.change_log_maker import DATE, INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.test_change_log import found
from xidstream import ChangeLog, Mirror
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.mirror import refresh
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.mirror.refresh import Answer
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE, UPDATE_PREIMAGE

pytestmark = pytest.mark.spark

N_WIDE = 30
KEYED = keyed("keyed", {"a": TEXT, "id": INT8, "b": TEXT, "n": INT8}, "id", relid=1)
LOOSE = keyed("loose", {"n": INT8, "t": TEXT, "u": TEXT}, relid=2)
EVENTS = keyed("events", {"n": INT8, "t": TEXT}, relid=3)
TIMESTAMPTZ = 1184
PLACED = keyed(
    "placed", {"name": TEXT, "day": DATE, "at": TIMESTAMPTZ, "n": INT8}, "name", "day", "at", relid=5
)
WIDE = keyed("wide", {"id": INT8, **{f"c{i}": TEXT for i in range(1, N_WIDE)}}, "id", relid=4)
CONTRACT = ["_change_type", "_commit_lsn", "_commit_timestamp", "_xid", "_seq", "_unchanged", "_text"]


@pytest.fixture(scope="module")
def s3() -> Iterator[CountedS3]:
    with counted_s3() as made:
        yield made


@pytest.fixture
def log(s3: CountedS3, spark: Any, make_batch: Any) -> Iterator[LogMaker]:
    root = f"{s3.uri}/{secrets.token_hex(4)}"
    maker = LogMaker(root, spark, make_batch, storage_options=s3.options)
    yield maker
    maker.sink.close()


def opened(log: LogMaker) -> ChangeLog:
    return ChangeLog(str(log.path), storage_options=log.storage_options)


def projected(rows: list[Any], names: list[str]) -> list[Any]:
    return as_rows([{name: dict(row)[name] for name in names} for row in rows])


@pytest.mark.slow
def test_a_few_columns_of_a_state_are_those_of_the_source_in_the_order_asked(
    log: LogMaker, spark: Any
) -> None:
    dice = random.Random(37)
    log.snapshot(KEYED, [{"a": f"a{i}", "id": i, "b": f"b{i}" * 9, "n": i} for i in range(200)])
    log.snapshot(LOOSE, [{"n": i % 5, "t": "t", "u": f"u{i % 2}"} for i in range(50)])
    log.snapshot(EVENTS, [{"n": i, "t": "t"} for i in range(50)])
    log.random_commit(dice, [KEYED, LOOSE])
    log.insert(EVENTS, {"n": 50, "t": "new"})
    # A key that changes while a value is not sent: that of its row before.
    moved = next(row for row in log.tables["public.keyed"] if row["id"] < 200)
    new = {**moved, "id": 9_000, "a": "moved"}
    sent = [{"id": moved["id"], "_change": UPDATE_PREIMAGE}]
    sent.append({**new, "b": None, "_unchanged": ["b"], "_change": UPDATE_POSTIMAGE})
    moved.update(new)
    middle = log.commit((KEYED, sent))
    log.truncate(LOOSE)
    last = log.random_commit(dice, [LOOSE])
    asked = ((middle, KEYED, "n a"), (middle, KEYED, "b"), (last, LOOSE, "u"), (last, EVENTS, "t"))
    for lsn, relation, words in asked:
        names, state = words.split(), opened(log).as_of(spark, lsn=lsn)
        frame = state.table(relation.name, names)
        assert frame.columns == names
        assert state.with_text(relation.name, names).columns == [*names, "_text"]
        assert as_rows(found(frame)) == projected(log.states[lsn][relation.name], names), (lsn, names)
    for names, message in (
        (["a", "z"], "no column z"),
        ("nothing", "no column nothing"),
        ([], "names no column"),
        (["a", "a"], "twice"),
    ):
        with pytest.raises(UsageError, match=message):
            opened(log).as_of(spark).table("public.keyed", names)


@pytest.mark.slow
def test_changes_in_a_few_columns_are_the_same_changes(log: LogMaker, spark: Any) -> None:
    dice = random.Random(38)
    log.snapshot(KEYED, [{"a": f"a{i}", "id": i, "b": f"b{i}" * 9, "n": i} for i in range(60)])
    since = log.random_commit(dice, [KEYED])
    touched = log.tables["public.keyed"][7]
    touched["a"] = "new"
    log.commit((KEYED, [{**touched, "b": None, "_unchanged": ["b"], "_change": UPDATE_POSTIMAGE}]))
    log.random_commit(dice, [KEYED])
    read = opened(log)
    for net in (False, True):
        whole = found(read.changes(spark, "public.keyed", since=since, net=net))
        assert len(whole) > 3
        for names in (["b"], ["n", "a"]):
            frame = read.changes(spark, "public.keyed", since=since, net=net, columns=names)
            assert (
                sorted(frame.columns[len(names) :]) == sorted(CONTRACT)
                and frame.columns[: len(names)] == names
            )
            wanted = [{name: row[name] for name in [*names, *CONTRACT]} for row in whole]
            assert as_rows(found(frame)) == as_rows(wanted), (net, names)
    with pytest.raises(UsageError, match="no column z"):
        read.changes(spark, "public.keyed", columns=["z"])


def test_two_of_thirty_columns_cost_a_tenth_of_the_bytes_with_a_base_table_too(
    log: LogMaker, s3: CountedS3, spark: Any
) -> None:
    def row(i: int) -> dict[str, Any]:
        return {"id": i, **{f"c{c}": secrets.token_hex(60) for c in range(1, N_WIDE)}}

    log.snapshot(WIDE, [row(i) for i in range(1_000)])
    log.tables["public.wide"][3]["c2"] = "new"
    log.commit((WIDE, [{**log.tables["public.wide"][3], "_change": UPDATE_POSTIMAGE}]))
    names = ["c2", "c5"]

    def cost(columns: list[str] | None) -> tuple[int, int]:
        s3.asked()
        frame = opened(log).as_of(spark).table("public.wide", columns)
        wanted = columns or [column.name for column in WIDE.columns]
        assert as_rows(found(frame)) == projected(log.states[log.lsn]["public.wide"], wanted)
        asked = s3.asked(".parquet")
        return n_bytes_of(asked), len(asked)

    for _ in range(2):
        all_bytes, _ = cost(None)
        few_bytes, n_requests = cost(names)
        assert few_bytes < all_bytes / 9
        # Of the snapshot or base four; of the tail's file, three reads: its facts, its keys and its rows.
        assert n_requests <= 22
        Mirror(str(log.path), storage_options=log.storage_options).refresh(spark)


def test_a_refresh_by_spark_reads_the_wide_columns_of_a_tail_once(
    log: LogMaker, s3: CountedS3, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its rows a tail has facts, and the bounds of its keys, where it lacks values: of the key alone. And of the
    base only the column that a change lacks is read for it."""

    def row(i: int) -> dict[str, Any]:
        return {"id": i, **{f"c{c}": secrets.token_hex(60) for c in range(1, N_WIDE)}}

    log.snapshot(WIDE, [row(i) for i in range(600)])
    monkeypatch.setattr(refresh, "small_table", lambda *whatever: None)
    monkeypatch.setattr(refresh, "net_of", lambda *whatever: None)
    mirror = Mirror(str(log.path), storage_options=log.storage_options)

    def size_of(table: str, begin: str) -> int:
        """The bytes of the largest such file."""
        added = DeltaTable(f"{log.path}/{table}", storage_options=log.storage_options).get_add_actions()
        files = zip(added["path"].to_pylist(), added["size_bytes"].to_pylist(), strict=True)
        return max(size for path, size in files if path.startswith(begin))

    def cost(answer: Answer) -> tuple[int, int]:
        """The bytes of the log's files, and of the base's, that were read."""
        s3.asked()
        refreshed = mirror.refresh(spark)
        assert refreshed is not None and [each.answer for each in refreshed.tables] == [answer]
        asked = s3.asked(".parquet")
        of_base = [each for each in asked if "/current/" in each.what]
        of_log = [each for each in asked if each not in of_base and "/public.wide/" in each.what]
        return n_bytes_of(of_log), n_bytes_of(of_base)

    log.insert(WIDE, row(600))
    of_log, _ = cost(Answer.BUILD)
    assert of_log < 1.2 * size_of("public.wide", "snapshot-"), "it was twice as much"
    for i in range(300):
        kept = log.tables["public.wide"][i]["c7"]
        log.tables["public.wide"][i] = {**row(i), "c7": kept}
    sent = [{**held, "c7": None, "_unchanged": ["c7"]} for held in log.tables["public.wide"][:300]]
    log.commit((WIDE, [{**each, "_change": UPDATE_POSTIMAGE} for each in sent]))
    n_tail, of_one = size_of("public.wide", "data-"), size_of("current/public.wide", "refresh-")
    of_log, of_base = cost(Answer.SWAP)
    # The keys of rows that lack a value are found by their history, so the tail is read for them once more. It was four
    # times. The base's file is copied, and the net rows are read.
    assert of_log < 2.5 * n_tail
    assert of_base < 2 * of_one
    state = opened(log).as_of(spark)
    assert as_rows(found(state["public.wide"])) == log.states[log.lsn]["public.wide"]


def within(rows: list[Any], keys: dict[str, tuple[Any, Any]]) -> list[Any]:
    def is_in(row: dict[str, Any]) -> bool:
        return all(
            row[name] is not None
            and (low is None or row[name] >= low)
            and (high is None or row[name] <= high)
            for name, (low, high) in keys.items()
        )

    return as_rows([row for row in map(dict, rows) if is_in(row)])


def test_a_range_of_keys_has_the_rows_of_a_filter_whatever_became_of_them(log: LogMaker, spark: Any) -> None:
    dice = random.Random(39)
    log.snapshot(KEYED, [{"a": f"a{i}", "id": i, "b": f"b{i}" * 9, "n": i} for i in range(200)])
    log.snapshot(LOOSE, [{"n": i, "t": "t", "u": "u"} for i in range(3)])
    lsns = [log.random_commit(dice, [KEYED])]
    # A row comes into the range from outside, without a value that only its former key has.
    moved = next(row for row in log.tables["public.keyed"] if row["id"] < 50)
    new = {**moved, "id": 9_000, "a": "moved"}
    sent = [{"id": moved["id"], "_change": UPDATE_PREIMAGE}]
    sent.append({**new, "b": None, "_unchanged": ["b"], "_change": UPDATE_POSTIMAGE})
    moved.update(new)
    lsns.append(log.commit((KEYED, sent)))
    log.truncate(KEYED)
    lsns.append(log.insert(KEYED, *({"a": "x", "id": i, "b": "y", "n": 1} for i in range(60, 70))))
    asked: list[tuple[int, dict[str, tuple[Any, Any]]]] = [
        (lsns[0], {"id": (60, 65)}),
        (lsns[1], {"id": (8_000, None)}),
        (lsns[2], {"id": (None, 65)}),
    ]
    for lsn, keys in asked:
        state = opened(log).as_of(spark, lsn=lsn)
        wanted = within([dict(row) for row in log.states[lsn]["public.keyed"]], keys)
        assert wanted and as_rows(found(state.table("public.keyed", ["b"], keys))) == projected(wanted, ["b"])
    state = opened(log).as_of(spark)
    for table, wrong, message in (
        ("public.keyed", {"n": (1, 2)}, r"keys names 'n', and table public.keyed has the key \(id\)"),
        ("public.keyed", {"id": ("a", None)}, "no int64"),
        ("public.keyed", {"id": 7}, "no pair|not a pair"),
        ("public.loose", {"n": (1, 2)}, "has no key"),
    ):
        with pytest.raises(UsageError, match=message):
            state.table(table, keys=wrong)


@pytest.mark.slow
def test_the_changes_of_a_range_of_keys_are_those_of_a_filter_and_every_truncate(
    log: LogMaker, spark: Any
) -> None:
    dice = random.Random(40)
    log.snapshot(KEYED, [{"a": f"a{i}", "id": i, "b": f"b{i}" * 9, "n": i} for i in range(60)])
    for _ in range(3):
        since = log.random_commit(dice, [KEYED], n_keys=80)
    log.random_commit(dice, [KEYED], n_keys=80)
    log.truncate(KEYED)
    log.insert(KEYED, *({"a": "x", "id": i, "b": "y", "n": 1} for i in range(30, 60)))
    read, keys = opened(log), {"id": (25, 40)}
    for net in (False, True):
        whole = [dict(row) for row in found(read.changes(spark, "public.keyed", since=since, net=net))]
        wanted = [row for row in whole if (row["id"] is None and not net) or row["id"] in range(25, 41)]
        assert len(whole) > len(wanted) > 10
        assert net or any(row["_change_type"] == "truncate" for row in wanted)
        frame = read.changes(spark, "public.keyed", since=since, net=net, keys=keys)
        assert as_rows(found(frame)) == as_rows(wanted), net
        few = found(read.changes(spark, "public.keyed", since=since, net=net, keys=keys, columns=["a"]))
        assert as_rows(few) == as_rows([{n: row[n] for n in ["a", *CONTRACT]} for row in wanted]), net


def test_a_key_of_text_date_and_timestamp_has_ranges_and_files_without_them_are_not_opened(
    log: LogMaker, s3: CountedS3, spark: Any
) -> None:
    zone, day, at = datetime.timezone.utc, datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1, 12)
    rows = [
        {
            "name": f"n{i:04d}",
            "day": day + datetime.timedelta(days=i // 9),
            "at": (at + datetime.timedelta(hours=i, microseconds=i)).replace(tzinfo=zone),
            "n": i,
        }
        for i in range(2_000)
    ]
    log.snapshot(PLACED, rows)
    log.insert(PLACED, {**rows[0], "name": "new"})
    tables = BaseTables(str(log.path), None, 4 << 10, log.storage_options)
    assert tables.refresh(lambda: spark) is not None
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    east = datetime.timezone(datetime.timedelta(hours=9))
    cases: list[tuple[dict[str, tuple[Any, Any]] | None, int]] = [
        (None, 2_001),
        ({"at": (rows[1_010]["at"], rows[1_019]["at"].astimezone(east))}, 10),
        ({"day": (day, day), "name": ("n", None)}, 10),
        ({"name": ("n1090", "n1095"), "day": (None, rows[1_094]["day"])}, 6),
    ]
    n_files = []
    try:
        state = opened(log).as_of(spark)
        for keys, n_rows in cases:
            s3.asked()
            assert state.table("public.placed", ["n"], keys).count() == n_rows, keys
            n_files.append(len({each.what for each in s3.asked("/refresh-")}))
        with pytest.raises(UsageError, match="a time zone"):
            state.table("public.placed", keys={"at": (at, None)})
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert max(n_files[1:]) < n_files[0] / 2, n_files
