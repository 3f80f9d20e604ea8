"""States and changes over an object store, whole and in a few columns: the same rows, and fewer bytes.

Spark has no connector for it, so the executors read by pyarrow, and must be told what is wanted.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.s3_server import CountedS3, counted_s3, n_bytes_of
from tests.spark.change_log_maker import INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.test_change_log import found
from xidstream import ChangeLog, Mirror
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE, UPDATE_PREIMAGE

pytestmark = pytest.mark.spark

N_WIDE = 30
KEYED = keyed("keyed", {"a": TEXT, "id": INT8, "b": TEXT, "n": INT8}, "id", relid=1)
LOOSE = keyed("loose", {"n": INT8, "t": TEXT, "u": TEXT}, relid=2)
EVENTS = keyed("events", {"n": INT8, "t": TEXT}, relid=3)
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
