"""The fold as Spark's plan: random logs against what the table held, and each rule by itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from tests.fold import folded
from tests.random_log import COLUMNS, CONTRACT, Change, RandomLog, Row, values_of
from xidstream.pipeline.state.fold import fold, net_changes
from xidstream.pipeline.state.shape import ColumnShape, TableShape

pytestmark = pytest.mark.spark


def shape_of(key: tuple[str, ...] | None, columns: dict[str, str] | None = None) -> TableShape:
    from pyspark.sql.types import _parse_datatype_string

    types = (columns or COLUMNS).items()
    return TableShape("public.t", {n: ColumnShape(_parse_datatype_string(t), (n,)) for n, t in types}, key)


def frame(spark: Any, rows: list[Change], columns: dict[str, str]) -> Any:
    schema = ", ".join(f"`{name}` {type_}" for name, type_ in columns.items())
    return spark.createDataFrame([tuple(row.get(name) for name in columns) for row in rows], schema)


def base_frame(spark: Any, rows: list[Change]) -> Any:
    return frame(spark, rows, {**COLUMNS, "_text": CONTRACT["_text"]})


def tail_frame(spark: Any, rows: list[Change]) -> Any:
    return frame(spark, rows, {**CONTRACT, **COLUMNS})


def dicts(found: Any) -> list[Change]:
    batches = found._collect_as_arrow()
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def counted(found: Any) -> Counter[Row]:
    return Counter(values_of(row) for row in dicts(found))


LOGS = [
    {"seed": seed, "key": key, "is_full": full, "truncates": seed % 3 == 0, "n_keys": n_keys}
    for seed, (key, full, n_keys) in enumerate(
        [
            (("id",), False, 12),
            (("id",), False, 6),
            (("Part", "id"), False, 8),
            (("id",), False, 12),
            (("id",), False, 4),
            (("id",), False, 40),
            (("id",), True, 8),
            (("id", "Part"), True, 8),
            (None, True, 8),
            (None, True, 8),
            (None, True, 3),
        ]
    )
]


@pytest.mark.parametrize("arguments", LOGS, ids=lambda a: f"seed{a['seed']}")
def test_a_random_log_folds_to_what_the_table_held(spark: Any, arguments: dict[str, Any]) -> None:
    log = RandomLog(**arguments)
    shape = shape_of(log.key)
    for at in (len(log.states) // 3, len(log.states) // 2, -1):
        lsn, state = log.states[at]
        changes = [change for change in log.changes if change["_commit_lsn"] <= lsn]
        oracle = folded(
            [*COLUMNS, "_text"],
            None if log.key is None else list(log.key),
            map(frozen, log.base),
            map(frozen, changes),
        )
        assert Counter(row[:-1] for row in oracle.elements()) == Counter(
            tuple(None if isinstance(v, tuple) and v[:1] == ("text",) else v for v in row)
            for row in state.elements()
        ), "the generator and the oracle agree"
        # In another order than the log's: order is what the columns say.
        found = fold(base_frame(spark, log.base), tail_frame(spark, changes[::-1]), shape)
        assert found.columns == [*COLUMNS, "_text"]
        assert counted(found) == state, arguments


def frozen(row: Change) -> Change:
    """As the oracle wants values: hashable, and NaN equal to itself."""
    texts = row.get("_text")
    return {
        **dict(zip(COLUMNS, values_of({**row, "_text": None}), strict=True)),
        **{name: row.get(name) for name in CONTRACT},
        "_text": None if texts is None else tuple(sorted(texts.items())),
    }


@pytest.mark.parametrize("seed", [20, 21, 22])
def test_net_changes_of_a_random_log_take_a_base_to_the_tables_state(spark: Any, seed: int) -> None:
    log = RandomLog(seed, truncates=seed == 21, n_keys=10)
    state = {values_of(row)[0]: values_of(row) for row in log.base}
    changes = dicts(
        net_changes(base_frame(spark, log.base), tail_frame(spark, log.changes), shape_of(log.key))
    )
    touched = [row["id"] for row in changes]
    assert len(touched) == len(set(touched)), "one row for each key"
    for row in changes:
        state.pop(row["id"], None)
        if not row["_gone"]:
            state[row["id"]] = values_of(row)
    assert Counter(state.values()) == log.states[-1][1], f"seed {seed}"
