"""The fold of a small table without Spark: random logs against what the table held, and what is left to Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from tests.fold import folded as by_contract
from tests.random_log import COLUMNS, Change, RandomLog
from tests.unit.mirror.test_tail_rows import FIELDS, change, log_of
from xidstream.pipeline.changelog import small_fold
from xidstream.pipeline.changelog.shape import ColumnShape
from xidstream.pipeline.changelog.small_fold import folded, small_table

LOG_FIELDS = [
    pa.field("id", pa.int32()),
    pa.field("Part", pa.string()),
    pa.field("n", pa.float64()),
    pa.field("body", pa.string()),
    pa.field("tags", pa.list_(pa.int32())),
    pa.field("at", pa.timestamp("us")),
    pa.field("c0", pa.decimal128(10, 2)),
]
SCHEMA = small_fold._schema(LOG_FIELDS)
LOGS = [
    ({"key": key, "n_keys": n_keys, "moves": moves, "row_filter": row_filter, "is_full": full}, texts)
    for key, n_keys, moves, row_filter, full, texts in [
        (("id",), 12, False, False, False, False),
        (("id",), 5, False, True, False, False),
        (("Part", "id"), 8, False, False, False, False),
        (("id",), 8, True, False, True, True),
        (("id", "Part"), 12, True, False, True, True),
    ]
]


def frozen(row: Change) -> Change:
    """Hashable; NaN equal to itself, -0.0 another than 0.0."""
    values: Change = {}
    for name, value in row.items():
        if isinstance(value, float):
            value = repr(value)
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, dict):
            value = tuple(sorted(value.items()))
        values[name] = value or None if name == "_text" else value
    return values


def as_snapshot(row: Change) -> Change:
    return {**row, "_change_type": "snapshot", "_commit_lsn": 1_000_000, "_seq": 0}


@pytest.mark.parametrize("arguments", LOGS, ids=lambda a: "-".join(map(str, a[0].values())))
def test_random_logs_fold_to_what_the_table_held_in_whatever_order_their_rows_are_read(
    arguments: tuple[dict[str, Any], bool],
) -> None:
    keywords, with_texts = arguments
    n_lacking = n_truncated = 0
    for seed in range(60):
        log = RandomLog(seed, truncates=seed % 3 == 0, n_transactions=30, **keywords)
        if not with_texts:
            for row in (*log.base, *log.changes):
                row["_text"] = None
        key = list(log.key or ())
        before, changes = map(frozen, log.base), [frozen(row) for row in log.changes]
        expected = by_contract([*COLUMNS, "_text"], key, before, changes)
        rows = [*log.changes[::-1], *map(as_snapshot, log.base)]
        found = folded(pa.Table.from_pylist(rows, SCHEMA), LOG_FIELDS, key)
        assert found is not None, f"seed {seed}"
        there = found.to_pylist()
        for row in there:
            row["_text"] = dict(row.get("_text") or ())
        found_rows = Counter(tuple(frozen(row)[name] for name in (*COLUMNS, "_text")) for row in there)
        assert found_rows == expected, f"seed {seed}"
        n_lacking += any(row["_unchanged"] for row in changes)
        n_truncated += any(row["_change_type"] == "truncate" for row in changes)
    assert n_truncated and (n_lacking or keywords["is_full"])


def test_a_table_without_a_key_is_all_its_rows_as_long_as_rows_are_inserted_alone() -> None:
    log = RandomLog(7, key=None, only_inserts=True, truncates=False)
    rows = [*map(as_snapshot, log.base), *log.changes]
    found = folded(pa.Table.from_pylist(rows, SCHEMA), LOG_FIELDS, None)
    assert found is not None and found.num_rows == log.states[-1][1].total()
    changed = [*rows, {**log.changes[0], "_change_type": "delete"}]
    assert folded(pa.Table.from_pylist(changed, SCHEMA), LOG_FIELDS, None) is None


def test_what_this_process_cannot_decide_is_left_to_spark(tmp_path: Path) -> None:
    big = {"_unchanged": ["v"]}
    for number, changes in enumerate(
        [
            [change(150, 0, 1, _change_type="update_preimage"), change(150, 1, 2, **big)],
            [change(150, 0, 1, **big), change(151, 0, 3, "x", _text={"v": "text"})],
            [change(150, 0, None, "a key that its column cannot hold")],
        ]
    ):
        log = log_of(tmp_path / f"{number}", [change(99, 0, 1, "a", _change_type="snapshot"), *changes])
        assert small_table(log, FIELDS, ["n"]) is None, changes


def test_the_snapshots_own_rows_and_the_transactions_that_it_does_not_contain_count_up_to_the_lsn(
    tmp_path: Path,
) -> None:
    """The snapshot, whose rows have 99, is valid from 100, and contains the transactions below 5 (``log_of``)."""
    of_former = change(90, 0, 7, "of a former generation", _change_type="snapshot")
    snapshot = [change(99, i, i, "before", _change_type="snapshot") for i in range(4)]
    seen = [change(80, 0, 1, "seen"), change(100, 0, 2, _change_type="delete")]
    unseen = [change(98, 0, 2, "open then", _xid=6), change(98, 1, 9, "new", _xid=6)]
    behind = [change(300, 0, 3, "at the LSN", _xid=2), change(301, 0, 3, "too late")]
    log = log_of(tmp_path, [*behind, of_former], [*unseen, *seen], snapshot)
    found = small_table(log, FIELDS, ["n"])
    assert found is not None and [tuple(row.values()) for row in found.rows.to_pylist()] == [
        (0, "before"),
        (1, "before"),
        (2, "open then"),
        (3, "at the LSN"),
        (9, "new"),
    ]


def test_a_table_that_is_not_small_is_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path, [change(99, i, i, "a", _change_type="snapshot") for i in range(10)])
    assert small_table(log, FIELDS, ["n"]) is not None
    for name in ("SMALL_BYTES", "SMALL_ROWS"):
        with monkeypatch.context() as patch:
            patch.setattr(small_fold, name, 5)
            assert small_table(log, FIELDS, ["n"]) is None


def test_a_value_that_was_not_sent_is_never_another_rows(tmp_path: Path) -> None:
    """Neither that of the row before it in the order of keys, nor of a former row with its key."""
    lacks = {"_unchanged": ["v"]}
    snapshot = [change(99, i, i, "of another row", _change_type="snapshot") for i in (1, 3)]
    behind = [
        change(150, 0, 2, **lacks),
        change(151, 0, 3, "of the old tuple", _change_type="delete"),
        change(151, 1, 3, _change_type="insert", **lacks),
        change(152, 0, 1, **lacks),
    ]
    found = small_table(log_of(tmp_path, snapshot, behind), FIELDS, ["n"])
    assert found is not None
    assert [tuple(row.values()) for row in found.rows.to_pylist()] == [
        (1, "of another row"),
        (2, None),
        (3, None),
    ]


def test_rows_that_do_not_count_may_have_values_that_the_columns_type_cannot_hold(tmp_path: Path) -> None:
    """An earlier column of the name was text, and the log holds both in one column of text."""
    held = {name: ColumnShape(t.LongType(), (name,)) for name in ("n", "v")}
    of_earlier = [change(90, 0, 1, "no number", _change_type="snapshot"), change(95, 0, 2, "none either")]
    snapshot = [change(99, 0, 1, "10", _change_type="snapshot")]
    log = log_of(
        tmp_path, of_earlier, [*snapshot, change(150, 0, 2, "20"), change(301, 0, 2, "too late")], held=held
    )
    found = small_table(log, [pa.field("n", pa.int64()), pa.field("v", pa.int64())], ["n"])
    assert found is not None
    assert [tuple(row.values()) for row in found.rows.to_pylist()] == [(1, 10), (2, 20)]
