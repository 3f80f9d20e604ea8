"""The rows of a fold as they are stored: as a snapshot's, in the Delta columns, with texts and all values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as t

from tests.unit.mirror.test_tail_rows import SCHEMA, change, log_of
from xidstream.pipeline.changelog import small_fold
from xidstream.pipeline.changelog.folding import new_directory, write_fold
from xidstream.pipeline.changelog.shape import ColumnShape
from xidstream.pipeline.pg import Lsn

HELD = {"n": ColumnShape(t.LongType(), ("n",)), "was renamed": ColumnShape(t.StringType(), ("v",))}
TEXT = [("was renamed", "infinity")]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (change(160, 0, 2, None, _text=TEXT), (None, TEXT)),
        (change(160, 0, 2, None, _unchanged=["was renamed"]), ("2", None)),
    ],
    ids=["text", "not_sent"],
)
def test_the_rows_have_the_columns_of_the_table_their_texts_and_values_that_were_not_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    second: dict[str, Any],
    expected: tuple[str | None, list[tuple[str, str]] | None],
) -> None:
    snapshot = [change(99, i, i, f"{i}", _change_type="snapshot") for i in range(4)]
    behind = [change(150, 0, 1, "new"), second, change(170, 0, 3, _change_type="delete")]
    log = log_of(tmp_path, snapshot, [*behind, change(280, 0, 0, "too late")], held=HELD)
    at = replace(log, lsn=Lsn(269))
    directory = new_directory()
    files = write_fold(at, directory, ())
    assert files is not None and len(files) == 1
    assert files[0].path.startswith(directory)
    assert (files[0].n_rows, files[0].min_commit_lsn, files[0].max_commit_lsn) == (3, 269, 269)
    stored = pq.read_table(tmp_path / files[0].path, partitioning=None)
    assert stored.schema.names == SCHEMA.names
    rows = stored.to_pylist()
    found = {row["n"]: (row["v"], row["_text"]) for row in rows}
    assert found == {0: ("0", None), 1: ("new", None), 2: expected}
    told = {(row["_change_type"], row["_commit_lsn"], row["_xid"], row["_unchanged"]) for row in rows}
    assert told == {("snapshot", 269, None, None)} and sorted(row["_seq"] for row in rows) == [0, 1, 2]
    monkeypatch.setattr(small_fold, "SMALL_ROWS", 5)
    assert write_fold(at, new_directory(), ()) is None, "there is no Spark"
