"""The query of docs/snapshots.md gives a table's state of now, where its snapshot stands, and else no row."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tests.fold import Row, bounds_of, folded
from xidstream.pipeline.changelog.generations import generation_at, generations_of
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.log_tables.generation_lines import SNAPSHOTS_SCHEMA
from xidstream.pipeline.pg import Lsn, Xid

PAGE = Path(__file__).parents[2] / "docs" / "snapshots.md"
TABLE = "public.orders"
NEWEST = 300
EPOCH = 3 << 32
"""Of the 64-bit xids; ``_xid`` has their lower half."""

LOG_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("n", pa.int64()),
        ("_change_type", pa.string()),
        ("_commit_lsn", pa.int64()),
        ("_seq", pa.int64()),
        ("_xid", pa.int64()),
    ]
)


def line(number: int, state: str = "finished", table: str = TABLE) -> dict[str, Any]:
    return {
        "table": table,
        "relid": 16384,
        "generation": number,
        "place": 100 * number - 1,
        "valid_from": 100 * number + 20,
        "xmin": EPOCH + 100 * number,
        "xmax": EPOCH + 100 * number + 10,
        "xip": [EPOCH + 100 * number + 5],
        "key": ["id"],
        "state": state,
        "reason": None if state == "finished" else "its replica identity changed",
        "until": None if state == "finished" else 0,
    }


def rows_of_log() -> list[dict[str, Any]]:
    """Two snapshots, and between and after them transactions that they contain or not."""
    changes = [
        ("snapshot", 99, None, [(1, 10), (2, 20), (3, 30)]),
        ("update_postimage", 90, 104, [(1, 10)]),  # the first snapshot contains it
        ("insert", 115, 105, [(4, 40)]),  # was open when the first snapshot was taken
        ("insert", 118, 111, [(5, 50)]),  # began after it, and committed before its valid_from
        ("delete", 150, 120, [(2, None)]),
        ("snapshot", 199, None, [(1, 10), (3, 30), (4, 40), (5, 50)]),
        ("insert", 219, 205, [(6, 60)]),
        ("update_preimage", 250, 230, [(3, None)]),
        ("update_postimage", 250, 230, [(7, 31)]),
        ("update_postimage", 260, 231, [(1, 11)]),
    ]
    found: list[dict[str, Any]] = []
    for kind, lsn, xid, rows in changes:
        for row_id, n in rows:
            about = {"_change_type": kind, "_commit_lsn": lsn, "_seq": len(found), "_xid": xid}
            found.append({"id": row_id, "n": n, **about})
    return found


def by_the_page(lines: list[dict[str, Any]], *more: dict[str, Any]) -> Counter[Row]:
    (query,) = re.findall(r"^```sql\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    with duckdb.connect() as connection:
        connection.register("_snapshots", pa.Table.from_pylist(lines, SNAPSHOTS_SCHEMA))
        connection.register("orders", pa.Table.from_pylist([*rows_of_log(), *more], LOG_SCHEMA))
        return Counter(connection.sql(query).select("id", "n").fetchall())


def by_the_rule(lines: list[dict[str, Any]]) -> Counter[Row]:
    try:
        generation = generation_at(TABLE, generations_of(lines).get(TABLE, []), Lsn(NEWEST))
    except PreconditionMissing:
        return Counter()
    bounds = bounds_of(next(each for each in lines if each["place"] == generation.bounds.snapshot_lsn))
    log = [{**row, "_unchanged": None} for row in rows_of_log()]
    before = [
        row for row in log if row["_change_type"] == "snapshot" and row["_commit_lsn"] == bounds.snapshot_lsn
    ]
    changes = (row for row in log if row["_change_type"] != "snapshot")
    behind = (row for row in changes if not bounds.contains(Xid(row["_xid"]), Lsn(row["_commit_lsn"])))
    return folded(["id", "n"], ["id"], before, behind)


OF_NOW = Counter([(1, 11), (4, 40), (5, 50), (6, 60), (7, 31)])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([line(1)], OF_NOW, id="one snapshot"),
        pytest.param([line(2), line(1)], OF_NOW, id="a second snapshot"),
        pytest.param([line(1), line(1, "ended"), line(2)], OF_NOW, id="the first has ended"),
        pytest.param(
            [line(1), line(2), line(2, "ended", "public.other")], OF_NOW, id="another table's has ended"
        ),
        pytest.param([line(1, "ended"), line(1)], Counter(), id="the only one has ended"),
        pytest.param(
            [line(1), line(2), line(2, "ended")], Counter(), id="the newest has ended, the former has not"
        ),
        pytest.param([line(1), line(1, "ended"), line(2), line(2, "ended")], Counter(), id="both have ended"),
        pytest.param([line(1, table="public.other")], Counter(), id="no snapshot"),
    ],
)
def test_the_query_of_the_page_takes_the_newest_snapshot_and_gives_no_row_if_it_has_ended(
    lines: list[dict[str, Any]], expected: Counter[Row]
) -> None:
    assert by_the_rule(lines) == expected
    assert by_the_page(lines) == expected


def test_the_query_of_the_page_brings_no_row_back_that_is_half_of_all_xids_old() -> None:
    """Its xid is nearer to those that are to come."""
    old = {"id": 8, "n": 80, "_change_type": "insert", "_commit_lsn": 80, "_seq": 0, "_xid": (1 << 31) + 205}
    assert by_the_page([line(2)], old) == OF_NOW + Counter([(8, 80)]), "in a log of an earlier xidstream"
    assert by_the_page([{**line(2), "contained_upto": 80}], old) == OF_NOW
