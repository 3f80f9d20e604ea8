"""Base tables: refreshed to one LSN, named by the manifest, and right whatever a refresh was cut short by."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.spark.change_log_maker import BOOL, INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.support import IDENTITY
from tests.unit.delta.test_plain_files import delete_by_vector
from tests.unit.delta.test_small_files import s3 as s3
from xidstream import ChangeLog
from xidstream.actors.mirror import Mirror
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current
from xidstream.pipeline.changelog.manifest import ManifestLine, base_at, newest, read_lines
from xidstream.pipeline.errors import ComponentLost, Superseded
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror import base_tables, local_swap, refresh, vacuum
from xidstream.pipeline.mirror.refresh import Answer, TableRefresher
from xidstream.pipeline.mirror.table_folder import stored
from xidstream.pipeline.pg import Lsn

pytestmark = pytest.mark.spark

A = keyed("a", {"id": INT8, "name": TEXT}, "id", relid=1)
PAIRS = keyed("pairs", {"shop": TEXT, "number": INT8, "_gone": TEXT}, "shop", "number", relid=2)
LOOSE = keyed("loose", {"n": INT8, "t": TEXT}, relid=3)
TABLES = (A, PAIRS, LOOSE)
SMALL_FILES = 4 << 10


@pytest.fixture
def log(tmp_path: Path, spark: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    maker = LogMaker(tmp_path / "delta", spark, make_batch)
    yield maker
    maker.sink.close()


def lines_of(log: LogMaker) -> list[ManifestLine]:
    return read_lines(DeltaBases(Location.parse(str(log.path))), IDENTITY.application_id)


def read(log: LogMaker, line: ManifestLine) -> list[Any]:
    """By deltalake alone, as any engine would."""
    table = DeltaTable(str(log.path / "current" / line.directory), version=line.version)
    return as_rows(
        [{k: v for k, v in row.items() if k != "_text"} for row in table.to_pyarrow_table().to_pylist()]
    )


def assert_named_moments_are_right(log: LogMaker) -> None:
    for line in lines_of(log):
        assert read(log, line) == log.states[line.lsn][line.table], (line.table, line.lsn)


def filled(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"name {i}" * 5} for i in range(start, start + n)]


def files_of(log: LogMaker, directory: str = "public.a") -> set[str]:
    return set(DeltaTable(str(log.path / "current" / directory)).file_uris())


def not_small(patch: pytest.MonkeyPatch) -> None:
    """No table is written as a whole by this process."""
    patch.setattr(refresh, "small_table", lambda *whatever: None)


def by_spark(patch: pytest.MonkeyPatch) -> None:
    """The net rows are Spark's; the files are written here."""
    not_small(patch)
    patch.setattr(refresh, "net_of", lambda *whatever: None)


def by_executors(patch: pytest.MonkeyPatch) -> None:
    """All is done by Spark, as for a refresh that is too large for this process."""
    not_small(patch)
    patch.setattr(local_swap, "NET_ROWS", 0)


WAYS: list[Callable[[pytest.MonkeyPatch], None]] = [lambda patch: None, not_small, by_spark, by_executors]


@pytest.mark.slow
def test_refreshes_at_random_moments_name_what_the_source_held_then_whoever_writes_them(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(18)
    log.snapshot(A, filled(300))
    log.snapshot(PAIRS, [{"shop": f"s{i % 7}", "number": i, "_gone": "n" * 40} for i in range(300)])
    log.snapshot(LOOSE, [{"n": i % 5, "t": "t"} for i in range(50)])
    mirror = Mirror(str(log.path), file_bytes=2 * SMALL_FILES)
    answers = set()
    for way in (WAYS[0], *WAYS):
        for _ in range(dice.randint(2, 4)):
            log.random_commit(dice, TABLES)
        with monkeypatch.context() as patch:
            way(patch)
            refreshed = mirror.refresh(spark)
        assert refreshed is not None and refreshed.lsn == log.lsn and not refreshed.left_out
        answers |= {table.answer for table in refreshed.tables}
        assert len(newest(lines_of(log))) == len(TABLES)
    assert mirror.refresh(spark) is None, "there is nothing new"
    assert_named_moments_are_right(log)
    assert answers >= {Answer.BUILD, Answer.SWAP, Answer.REWRITE}


@pytest.mark.slow
def test_what_spark_writes_and_swaps_in_a_store_is_what_the_source_held(
    s3: tuple[Location, Connection], spark: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark has no connector for it: pyarrow reads and writes in the executors."""
    dice = random.Random(37)
    location, _ = s3
    root = Location(f"{location.uri.rpartition('/')[0]}/log", location.storage_options)
    log = LogMaker(root.uri, spark, make_batch, storage_options=root.storage_options)
    log.snapshot(A, filled(300))
    log.snapshot(LOOSE, [{"n": i % 5, "t": "t"} for i in range(50)])
    log.random_commit(dice, [A, LOOSE])
    mirror = Mirror(root.uri, file_bytes=2 * SMALL_FILES, storage_options=root.storage_options)
    answers = []
    for way in (not_small, by_executors, by_spark):
        with monkeypatch.context() as patch:
            way(patch)
            refreshed = mirror.refresh(spark)
        assert refreshed is not None and refreshed.lsn == log.lsn and not refreshed.left_out
        answers.append({table.answer for table in refreshed.tables})
        log.truncate(LOOSE)
        log.random_commit(dice, [A])
        log.insert(A, {"id": 10_000 + len(answers), "name": "x"})
    log.sink.close()
    assert answers[0] == {Answer.BUILD} and all(each == {Answer.SWAP, Answer.REWRITE} for each in answers[1:])
    state = ChangeLog(root.uri, storage_options=root.storage_options).as_of(spark)
    assert as_rows([row.asDict() for row in state["public.a"].collect()]) == log.states[log.lsn]["public.a"]
    lines = read_lines(DeltaBases(root), IDENTITY.application_id)
    assert len(lines) == 6
    for line in lines:
        table = current(root).child(line.directory)
        found = DeltaTable(table.uri, version=line.version, storage_options=table.storage_options)
        rows = [
            {k: v for k, v in row.items() if k != "_text"} for row in found.to_pyarrow_table().to_pylist()
        ]
        assert as_rows(rows) == log.states[line.lsn][line.table], (line.table, line.lsn)
        assert not any("net-" in path for path in stored(table, ""))


def test_tables_whose_names_have_dots_are_told_apart_and_one_without_columns_stops_no_other(
    log: LogMaker, spark: Any
) -> None:
    dotted = [
        dataclasses.replace(A, relid=10 + i, schema=schema, table=table)
        for i, (schema, table) in enumerate([("a.b", "c"), ("a", "b.c"), (".....", "."), ("..", '"q".')])
    ]
    for i, relation in enumerate(dotted):
        log.snapshot(relation, [{"id": i, "name": relation.name}])
    bare = keyed("bare", {}, relid=20)
    log.snapshot(bare, [{}, {}])
    log.snapshot(A, filled(3))
    lsn = log.insert(A, {"id": 5_000, "name": "x"})
    assert [each.name for each in dotted] == ['"a.b".c', 'a."b.c"', '"....."."."', '".."."""q""."']
    state = ChangeLog(str(log.path)).as_of(spark)
    assert set(state.tables()) == {*(each.name for each in dotted), "public.a", "public.bare"}
    for i, relation in enumerate(dotted):
        for named in (relation.name, (relation.schema, relation.table)):
            assert [tuple(row) for row in state[named].collect()] == [(i, relation.name)]
    assert state["public.bare"].count() == 2
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and refreshed.left_out == {"public.bare": "table public.bare has no columns"}
    assert {line.table for line in lines_of(log)} == {*(each.name for each in dotted), "public.a"}
    assert {line.lsn for line in lines_of(log)} == {lsn}
    assert_named_moments_are_right(log)
    # A table that loses its last column is left out from then on.
    log.snapshot(dataclasses.replace(dotted[0], columns=()), [{}])
    log.insert(A, {"id": 5_001, "name": "x"})
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and set(refreshed.left_out) == {"public.bare", '"a.b".c'}
    assert_named_moments_are_right(log)


def test_entries_that_are_no_tables_and_a_table_that_another_tool_damaged_stop_no_other(
    log: LogMaker, spark: Any
) -> None:
    log.snapshot(A, filled(5))
    log.snapshot(PAIRS, [{"shop": "s", "number": 1, "_gone": "n"}])
    log.insert(A, {"id": 5_000, "name": "x"})
    for folder in (".snapshot", "backup.2024"):
        (log.path / folder).mkdir()
    (log.path / "notes.txt").touch()
    shutil.copytree(log.path / "public.a", log.path / "public.a.bak")
    shutil.copytree(log.path / "public.a", log.path / "backup.a")
    delete_by_vector(log.path / "public.pairs", row=0)
    mirror = Mirror(str(log.path))
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and [table.table for table in refreshed.tables] == ["public.a"]
    assert refreshed.left_out.keys() == {"public.pairs", "backup.a"}
    assert "deletion vectors" in refreshed.left_out["public.pairs"]
    assert "one of public.a: somebody has copied" in refreshed.left_out["backup.a"]


def test_only_touched_files_are_written_and_an_untouched_table_has_no_commit(
    log: LogMaker, spark: Any
) -> None:
    log.snapshot(A, filled(2_000))
    log.snapshot(PAIRS, [{"shop": "s", "number": 1, "_gone": "x"}])
    log.insert(A, {"id": 5_000, "name": "x"})
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    mirror.refresh(spark)
    before, version = files_of(log), {line.table: line.version for line in lines_of(log)}
    assert len(before) > 5
    log.tables["public.a"][700]["name"] = "new"
    log.commit((A, [{"id": 700, "name": "new", "_change": 2}]))
    refreshed = mirror.refresh(spark)
    assert refreshed is not None
    assert [table.answer for table in refreshed.tables] == [Answer.SWAP, Answer.KEEP]
    assert len(before - files_of(log)) == 1 and len(files_of(log) - before) == 1
    last = {line.table: line.version for line in newest(lines_of(log))}
    assert last["public.pairs"] == version["public.pairs"] and last["public.a"] > version["public.a"]
    assert_named_moments_are_right(log)


def test_columns_that_no_transaction_has_brought_are_the_base_tables_from_the_next_refresh_on(
    log: LogMaker, spark: Any
) -> None:
    for relation in (A, PAIRS):
        log.snapshot(relation, [])
    log.insert(A, *filled(3))
    mirror = Mirror(str(log.path))
    mirror.refresh(spark)
    grown = keyed(
        "pairs", {"shop": TEXT, "number": INT8, "_gone": TEXT, "note": TEXT}, "shop", "number", relid=2
    )
    log.sink.snapshot_log().lay_out([(grown, Lsn(log.lsn + 5))])
    log.insert(A, {"id": 10, "name": "x"})
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and refreshed.left_out == {}
    (line,) = [each for each in newest(lines_of(log)) if each.table == "public.pairs"]
    base = DeltaTable(str(log.path / "current" / line.directory), version=line.version)
    assert {"shop", "number", "_gone", "note"} <= {field.name for field in base.schema().fields}


def test_only_tables_that_a_transaction_has_rows_of_are_opened_and_the_manifest_names_the_newest_version_of_all(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Noted(TableRefresher):
        def __init__(self, root: Location, marks: Any, table: Any, *more: Any) -> None:
            opened.append(table.shape.table)
            super().__init__(root, marks, table, *more)

    monkeypatch.setattr(base_tables, "TableRefresher", Noted)
    for relation in (A, PAIRS):
        log.snapshot(relation, [])
    log.insert(A, *filled(3))
    log.insert(PAIRS, {"shop": "s", "number": 1, "_gone": "x"})
    mirror = Mirror(str(log.path))
    mirror.refresh(spark)
    assert sorted(opened) == ["public.a", "public.pairs"]
    opened.clear()
    log.insert(A, {"id": 10, "name": "x"})
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and opened == ["public.a"]
    assert [table.answer for table in refreshed.tables] == [Answer.SWAP, Answer.KEEP]
    # A vacuum of the next mirror marks each table with its number: the version that was named is no longer the newest.
    other = Mirror(str(log.path))
    other.vacuum("1s")
    opened.clear()
    log.insert(A, {"id": 11, "name": "x"})
    refreshed = other.refresh(spark)
    assert refreshed is not None and sorted(opened) == ["public.a", "public.pairs"]
    for line in newest(lines_of(log)):
        assert line.version == DeltaTable(str(log.path / "current" / line.directory)).version()
    assert_named_moments_are_right(log)


def test_a_truncate_a_new_generation_and_an_added_column_are_followed(log: LogMaker, spark: Any) -> None:
    log.snapshot(A, filled(100))
    log.insert(A, *filled(5, 1_000))
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    mirror.refresh(spark)
    log.truncate(A)
    log.insert(A, *filled(3, 2_000))
    mirror.refresh(spark)
    wide = keyed("a", {"id": INT8, "name": TEXT, "more": TEXT}, "id", relid=1)
    for row in log.tables["public.a"]:
        row["more"] = None
    log.insert(wide, {"id": 7, "name": "seven", "more": "m"})
    mirror.refresh(spark)
    log.snapshot(wide, [{"id": i, "name": "again", "more": None} for i in range(50)])
    log.insert(wide, {"id": 70, "name": "x", "more": None})
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and [table.answer for table in refreshed.tables] == [Answer.BUILD]
    assert_named_moments_are_right(log)
    assert {line.generation for line in lines_of(log)} == {1, 2}


def test_a_text_that_the_column_cannot_hold_brings_the_column_for_texts_and_nothing_else_does(
    log: LogMaker, spark: Any
) -> None:
    dated = keyed("dated", {"id": INT8, "day": 1082}, "id", relid=4)
    log.snapshot(dated, [{"id": i, "day": None} for i in range(50)])
    log.insert(dated, {"id": 100, "day": None})
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    mirror.refresh(spark)
    table = str(log.path / "current" / "public.dated")
    assert [f.name for f in DeltaTable(table).schema().fields] == ["id", "day"]
    log.tables["public.dated"].append({"id": 101, "day": None})
    log.commit((dated, [{"id": 101, "day": None, "_text": {"day": "infinity"}}]))
    mirror.refresh(spark)
    rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert [row["_text"] for row in rows if row["id"] == 101] == [[("day", "infinity")]]
    assert len(rows) == 52 and all(row["_text"] is None for row in rows if row["id"] != 101)
    assert_named_moments_are_right(log)


def test_a_text_outside_of_the_key_is_kept_where_spark_writes_the_whole_table(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts of the tail are of the key alone, and told of no text: the base table had no column for it."""
    dated = keyed("dated", {"id": INT8, "day": 1082}, "id", relid=4)
    log.snapshot(dated, [{"id": i, "day": None} for i in range(50)])
    log.tables["public.dated"].append({"id": 101, "day": None})
    log.commit((dated, [{"id": 101, "day": None, "_text": {"day": "infinity"}}]))
    with monkeypatch.context() as patch:
        by_spark(patch)
        refreshed = Mirror(str(log.path), file_bytes=SMALL_FILES).refresh(spark)
    assert refreshed is not None and [table.answer for table in refreshed.tables] == [Answer.BUILD]
    rows = DeltaTable(str(log.path / "current" / "public.dated")).to_pyarrow_table().to_pylist()
    assert [row["_text"] for row in rows if row["_text"] is not None] == [[("day", "infinity")]]
    assert_named_moments_are_right(log)


def test_a_part_of_a_key_that_its_column_cannot_hold_is_one_row_all_the_same(
    log: LogMaker, spark: Any
) -> None:
    dated = keyed("days", {"id": INT8, "day": 1082, "n": INT8}, "id", "day", relid=5)
    log.snapshot(dated, [{"id": i, "day": None, "n": 0} for i in range(1, 3)])
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    for n in range(3):
        row = {"id": 7, "day": None, "n": n}
        log.tables["public.days"] = [r for r in log.tables["public.days"] if r["id"] != 7] + [row]
        log.commit((dated, [{**row, "_text": {"day": "infinity"}, "_change": 0 if n == 0 else 2}]))
        mirror.refresh(spark)
    assert_named_moments_are_right(log)


@pytest.mark.parametrize("way", [pytest.param(by_spark, marks=pytest.mark.slow), by_executors])
def test_values_that_the_server_did_not_send_again_are_those_of_the_base_table(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None]
) -> None:
    wide = keyed("a", {"id": INT8, "name": TEXT, "n": INT8}, "id", relid=1)
    log.snapshot(wide, [{**row, "n": 0} for row in filled(300)])
    log.insert(wide, {"id": 5_000, "name": "inserted", "n": 0})
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    mirror.refresh(spark)
    rows = {row["id"]: row for row in log.tables["public.a"]}
    rows[7]["n"] = rows[8]["n"] = rows[5_000]["n"] = 1
    rows[9] |= {"id": 6_000, "n": 1}
    rows[10] |= {"name": "sent, then unchanged", "n": 2}
    lacking = {"name": None, "_unchanged": ["name"], "_change": 2, "n": 1}
    log.commit(
        (wide, [{**lacking, "id": i} for i in (7, 8, 5_000)]),
        (wide, [{"id": 9, "_change": 1}, {**lacking, "id": 6_000}]),
        (wide, [{**rows[10], "_change": 2}, {**lacking, "id": 10, "n": 2}]),
    )
    with monkeypatch.context() as patch:
        way(patch)
        refreshed = mirror.refresh(spark)
    assert refreshed is not None and [table.answer for table in refreshed.tables] == [Answer.SWAP]
    assert_named_moments_are_right(log)


def test_a_column_that_was_dropped_and_added_again_with_another_type_has_none_of_its_former_values(
    log: LogMaker, spark: Any
) -> None:
    log.snapshot(A, [{"id": i, "name": f"{i}"} for i in range(50)])
    log.insert(A, {"id": 100, "name": "100"})
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    mirror.refresh(spark)
    other = keyed("a", {"id": INT8, "name": INT8}, "id", relid=1)
    for row in log.tables["public.a"]:
        row["name"] = None
    log.insert(other, {"id": 101, "name": 101})
    refreshed = mirror.refresh(spark)
    assert refreshed is not None and [table.answer for table in refreshed.tables] == [Answer.REWRITE]
    assert_named_moments_are_right(log)


def test_files_of_a_table_whose_key_begins_with_a_column_without_ranges_have_ranges_of_their_own(
    log: LogMaker, spark: Any
) -> None:
    table = keyed("priced", {"flag": BOOL, "n": INT8, "t": TEXT}, "flag", "n", relid=6)
    dice = random.Random(18)
    log.snapshot(table, [{"flag": dice.random() < 0.5, "n": n, "t": "t" * 40} for n in range(900)])
    log.insert(table, {"flag": True, "n": 1_000, "t": "t"})
    Mirror(str(log.path), file_bytes=SMALL_FILES).refresh(spark)
    files = DeltaTable(str(log.path / "current" / "public.priced")).get_add_actions(flatten=True)
    found = pa.table(files)
    ranges = sorted(zip(found["min.n"].to_pylist(), found["max.n"].to_pylist(), strict=True))
    assert len(ranges) > 2 and all(high < low for (_, high), (low, _) in pairwise(ranges))
    assert_named_moments_are_right(log)


POINTS = ["writing_base", "base_written", "base_committed", "committing_manifest", "manifest_committed"]


@pytest.mark.parametrize("point", POINTS)
def test_a_refresh_that_dies_anywhere_is_taken_up_by_the_next_mirror(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    dice = random.Random(point)
    log.snapshot(A, filled(300))
    log.snapshot(PAIRS, [{"shop": f"s{i % 7}", "number": i, "_gone": "n" * 40} for i in range(300)])
    log.random_commit(dice, (A, PAIRS))
    if point != "writing_base":  # then the very first refresh dies
        Mirror(str(log.path), file_bytes=SMALL_FILES).refresh(spark)
    log.random_commit(dice, (A, PAIRS))
    log.insert(A, {"id": 9_000, "name": "x"})
    log.insert(PAIRS, {"shop": "x", "number": 9_000, "_gone": "x"})
    named = {(line.table, line.lsn) for line in lines_of(log)}
    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "_plan", FaultPlan(f"{point}:error", None))
        with pytest.raises(ComponentLost):
            Mirror(str(log.path), file_bytes=SMALL_FILES).refresh(spark)
    if point != "manifest_committed":
        assert {(line.table, line.lsn) for line in lines_of(log)} == named
    assert_named_moments_are_right(log)
    if point != "base_written":  # else the log has nothing more, and the same LSN is reached again
        log.random_commit(dice, (A, PAIRS))
    Mirror(str(log.path), file_bytes=SMALL_FILES).refresh(spark)
    assert {line.lsn for line in newest(lines_of(log))} == {log.lsn}
    assert_named_moments_are_right(log)


def test_a_mirror_that_was_overtaken_ends_and_names_nothing_more(log: LogMaker, spark: Any) -> None:
    log.snapshot(A, filled(100))
    log.insert(A, {"id": 1_000, "name": "x"})
    older, newer = (Mirror(str(log.path), file_bytes=SMALL_FILES) for _ in range(2))
    older.refresh(spark)
    log.insert(A, {"id": 1_001, "name": "x"})
    newer.refresh(spark)
    log.insert(A, {"id": 1_002, "name": "x"})
    with pytest.raises(Superseded, match="another mirror of slot orders has taken over"):
        older.refresh(spark)
    newer.refresh(spark)
    assert_named_moments_are_right(log)


@pytest.mark.parametrize("point", POINTS[:4])
def test_a_mirror_that_is_overtaken_in_the_middle_of_a_refresh_tears_nothing(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    log.snapshot(A, filled(100))
    log.snapshot(PAIRS, [{"shop": "s", "number": 1, "_gone": "x"}])
    log.insert(A, {"id": 1_000, "name": "x"})
    older, newer = (Mirror(str(log.path), file_bytes=SMALL_FILES) for _ in range(2))
    older.refresh(spark)
    log.insert(A, {"id": 1_001, "name": "x"})
    log.insert(PAIRS, {"shop": "t", "number": 2, "_gone": "x"})
    with monkeypatch.context() as patch:
        patch.setattr(faultpoints, "_plan", _Between(point, lambda: newer.refresh(spark)))
        with pytest.raises(Superseded):
            older.refresh(spark)
    log.insert(A, {"id": 1_002, "name": "x"})
    newer.refresh(spark)
    assert {line.lsn for line in newest(lines_of(log))} == {log.lsn}
    assert_named_moments_are_right(log)


class _Between:
    """Does something when a point is reached for the first time."""

    def __init__(self, point: str, act: Callable[[], object]) -> None:
        self._point, self._act, self._done = point, act, False

    def reach(self, point: str) -> None:
        if point == self._point and not self._done:
            self._done = True
            self._act()


def test_a_vacuum_leaves_what_the_manifest_names_and_takes_the_rest(
    log: LogMaker, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vacuum, "GRACE", datetime.timedelta(0))
    log.snapshot(A, filled(300))
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    for i in range(4):
        log.insert(A, {"id": 1_000 + i, "name": "x"})
        mirror.refresh(spark)
    with monkeypatch.context() as patch:  # what an attempt leaves that failed
        patch.setattr(faultpoints, "_plan", FaultPlan("base_written:error", None))
        log.insert(A, {"id": 2_000, "name": "x"})
        with pytest.raises(ComponentLost):
            mirror.refresh(spark)
    on_disk = set(map(str, (log.path / "current" / "public.a").rglob("*.parquet")))
    vacuumed = mirror.vacuum("24h")
    assert vacuumed.n_files == 1 and len(lines_of(log)) == 4, "all refreshes are of the last 24 hours"
    assert_named_moments_are_right(log)
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=2)
    monkeypatch.setattr(vacuum, "_now", lambda root: later)
    vacuumed = mirror.vacuum("24h")
    assert vacuumed.n_files >= 1 and len(lines_of(log)) == 1
    assert_named_moments_are_right(log)
    left = set(map(str, (log.path / "current" / "public.a").rglob("*.parquet")))
    assert left == files_of(log) and left < on_disk
    mirror.refresh(spark)
    assert_named_moments_are_right(log)


def test_the_newest_base_at_or_below_an_lsn_is_found(log: LogMaker, spark: Any) -> None:
    log.snapshot(A, filled(10))
    mirror = Mirror(str(log.path))
    lsns = []
    for i in range(3):
        lsns.append(log.insert(A, {"id": 1_000 + i, "name": "x"}))
        mirror.refresh(spark)
    root = Location.parse(str(log.path))

    def base(lsn: int, generation: int = 1) -> int | None:
        found = base_at(DeltaBases(root), IDENTITY.application_id, "public.a", generation, lsn)
        return None if found is None else found.lsn

    asked = (lsns[0] - 1, lsns[0], lsns[2] - 1, lsns[2] + 100)
    assert [base(lsn) for lsn in asked] == [None, lsns[0], lsns[1], lsns[2]]
    assert base(lsns[2], generation=2) is None


def test_a_base_table_that_is_not_kept_up_any_more_says_so_itself_until_it_is_again(
    log: LogMaker, spark: Any
) -> None:
    """A reader of one table saw old rows without any sign: no manifest names it, and such a reader looks at none."""
    other = keyed("b", {"id": INT8, "name": TEXT}, "id", relid=5)
    log.snapshot(A, filled(3))
    log.snapshot(other, filled(3))
    log.insert(A, *filled(1, 1_000))
    mirror = Mirror(str(log.path), file_bytes=SMALL_FILES)
    mirror.refresh(spark)
    before = log.lsn

    def said() -> str:
        table = DeltaTable(str(log.path / "current" / "public.a"))
        return table.metadata().configuration.get("xidstream.left_out") or ""

    assert said() == ""
    snapshots = log.sink.snapshot_log()
    snapshots.end(
        next(line for line in snapshots.lines(True) if line.table == "public.a"), "it was renamed to public.x"
    )
    for start in (2_000, 3_000):
        log.insert(other, *filled(1, start))
        refreshed = mirror.refresh(spark)
        assert refreshed is not None
        (reason,) = refreshed.left_out.values()
        assert "not known at" not in reason and reason.endswith("(it was renamed to public.x)")
        told = json.loads(said())
        assert (told["lsn"], told["reason"]) == (str(Lsn(before)), reason)
    assert "public.a" not in {line.table for line in newest(lines_of(log))}
    log.snapshot(A, filled(5))
    log.insert(A, *filled(1, 9_000))
    mirror.refresh(spark)
    assert said() == ""
    assert {line.table for line in lines_of(log) if line.lsn == log.lsn} == {"public.a", "public.b"}
