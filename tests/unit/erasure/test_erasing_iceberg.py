"""A whole erasure from Iceberg tables without Spark: log, base table and storage, beside writers, and cut short."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from pyiceberg.table.update.snapshot import _ManifestMergeManager

from tests.spark.support import IDENTITY
from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.mirror.test_on_iceberg import (
    A,
    B,
    Log,
    answers,
    behind_glue,
    behind_rest,
    compact,
    delete_a_row,
    drop_a_column,
    filled,
    log_in,
    no_session,
    refreshed,
    rename_a_column,
    set_back,
)
from xidstream.actors.cli.erase import shown
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.manifest import ManifestWriter
from xidstream.pipeline.erasure import erasing
from xidstream.pipeline.erasure.erasing import ErasureSettings, SlotStores, erase, look
from xidstream.pipeline.errors import ComponentLost, Unsupported, UsageError
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg import expiring, staged_commits
from xidstream.pipeline.iceberg.base_table import manifests_of
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables import erased_rows
from xidstream.pipeline.log_tables.erased_keys import parse_keys
from xidstream.pipeline.mirror import erased_iceberg_base
from xidstream.pipeline.mirror import vacuum as vacuums
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.mirror.refresh import Answer, TableRefresher
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import DELETE, INSERT
from xidstream.pipeline.storage.envelope import now
from xidstream.pipeline.storage.erasure_record import ErasureRecord
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.storage import Storage

assert behind_glue and behind_rest
SETTINGS = ErasureSettings(timeout_s=0.0, settle_s=0.0)
LAYOUT = Layout(IDENTITY.system_identifier, IDENTITY.slot, "20260101T000000-a")
LABEL = "public.a"


class Erased:
    """A log with a snapshot and some changes, its base table at two moments, and the row 3 in all of it."""

    def __init__(self, log: Log, folder: Path) -> None:
        self.log = log
        log.snapshot(A, filled(200))
        log.update(A, 3, name="first")
        self.mirror: BaseTables = log.mirror()
        refreshed(self.mirror)
        log.update(A, 3, name="second")
        self.upto = Lsn(log.insert(A, {"id": 5_000, "name": "x"}))
        refreshed(self.mirror)
        self.later = log.update(A, 4, name="later")
        self.storage = Storage(str(folder / "storage"))
        write_progress(self.storage, LAYOUT, Lsn(1 << 40))

    @property
    def stores(self) -> SlotStores:
        return SlotStores(
            LogFrames(f"iceberg:{self.log.iceberg}".replace("iceberg:iceberg:", "iceberg:")),
            self.storage,
            LAYOUT,
        )

    def erase(
        self, key: str = "id = 3", settings: ErasureSettings = SETTINGS, id_: str = "t-1"
    ) -> ErasureRecord:
        asked = ErasureRecord(id_, "", 0, self.upto, now(), "somebody@here", "asked for")
        return erase(self.stores, LABEL, parse_keys([key]), asked, settings)

    def in_log(self) -> list[dict[str, Any]]:
        catalog = self.log.address.open(makes=False)
        assert catalog is not None
        rows: list[dict[str, Any]] = catalog.load_table("shop.public__a").scan().to_arrow().to_pylist()
        return sorted(rows, key=lambda row: (row["_commit_lsn"], row["_seq"]))

    def moments(self) -> dict[int, list[int]]:
        """What the manifest names."""
        found = {}
        for line in self.log.lines():
            rows = self.log.table().scan(snapshot_id=line.version).to_arrow()
            found[line.lsn] = sorted(rows["id"].to_pylist())
        return found

    def state(self) -> Any:
        now_has = sorted(self.log.table().scan().to_arrow()["id"].to_pylist())
        return self.in_log(), now_has, self.moments()

    def ids_on_disk(self) -> set[int]:
        catalog = self.log.address.open(makes=False)
        assert catalog is not None
        found = set()
        for name in ("shop.public__a", "shop_current.public__a"):
            folder = Path(catalog.load_table(name).location().removeprefix("file://"))
            for path in folder.rglob("*.parquet"):
                found |= {row["id"] for row in pq.read_table(path, partitioning=None).to_pylist()}
        return found


def naming(table: Table, paths: set[str]) -> list[str]:
    """The manifests of all snapshots that name one of these files, also as one that is gone."""
    named = manifests_of(table, table.metadata.snapshots)
    return [path for path, files in named if not paths.isdisjoint(files)]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Erased]:
    for log in log_in(tmp_path, f"{tmp_path}/lake/shop"):
        yield Erased(log, tmp_path)


def test_no_row_is_left_in_the_log_and_the_base_table_and_all_other_rows_are_as_they_were(
    made: Erased,
) -> None:
    before = made.in_log()
    reader, n_before = made.log.table(), len(made.log.table().scan().to_arrow())
    done = made.erase()
    assert (done.n_rows, done.n_behind, done.base_rows) == (3, 0, 1)
    assert made.in_log() == [row for row in before if row["id"] != 3]
    assert all(3 not in ids for ids in made.moments().values())
    # The newest moment has another version in its place, and the older one is folded from the log.
    assert set(made.moments()) == {made.upto}
    assert len(reader.scan().to_arrow()) == n_before, "who came before can finish"
    assert {copy.where for copy in done.copies} == {"log", "base table"} and "copies are left" in shown(done)
    assert "second" not in json.dumps(done.to_json())
    # Whoever counts the snapshot's rows knows how many went.
    at = LogFrames(str(made.stores.log.name)).table_at(LABEL, made.upto)
    assert at.snapshot_files()
    made.log.tables[LABEL][:] = [row for row in made.log.tables[LABEL] if row["id"] != 3]
    assert answers(refreshed(made.mirror)) == [Answer.SWAP]
    last = max(made.moments())
    assert last == made.later and len(made.moments()[last]) == 200


def test_at_once_no_file_has_the_row_and_no_metadata_its_key(made: Erased) -> None:
    assert look(made.stores, made.erase()).copies, "an hour for whoever reads"
    table = made.log.table()
    folder = Path(table.location().removeprefix("file://"))
    there = [str(path.relative_to(folder)) for path in folder.rglob("*.parquet")]
    with_row = {p for p in there if 3 in pq.read_table(folder / p, partitioning=None)["id"].to_pylist()}
    told = naming(table, with_row)
    assert with_row and told
    done = made.erase(settings=replace(SETTINGS, at_once=True))
    assert done.copies == () and done.finished_at is not None and 3 not in made.ids_on_disk()
    assert not any((folder / path).exists() for path in told), "they have the lowest and highest keys"
    assert naming(made.log.table(), with_row) == []
    refreshed(made.mirror)
    made.mirror.vacuum(0)


def test_a_file_that_no_snapshot_names_goes_now_and_what_is_in_work_is_waited_for(made: Erased) -> None:
    catalog = made.log.address.open(makes=False)
    assert catalog is not None
    table = catalog.load_table("shop.public__a")
    folder = Path(table.location().removeprefix("file://"))
    source = next(path for path in folder.rglob("snapshot-*/*.parquet"))
    failed = folder / "data-failed" / "part.parquet"
    failed.parent.mkdir()
    failed.write_bytes(source.read_bytes())
    done = made.erase(settings=replace(SETTINGS, at_once=True))
    assert done.finished_at is not None and not failed.exists()
    merged = folder / "data-merged" / "part.parquet"
    merged.parent.mkdir()
    pq.write_table(
        pq.read_table(next(folder.rglob("snapshot-*-erased/*.parquet")), partitioning=None), merged
    )
    looked = look(made.stores, replace(done, finished_at=None))
    assert [copy.path for copy in looked.copies] == ["data-merged/part.parquet"]
    merged.unlink()
    assert look(made.stores, looked).finished_at is not None


def test_a_file_that_was_replaced_within_the_hour_stays_though_the_run_has_expired_its_snapshot(
    made: Erased, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_log(done: ErasureRecord) -> set[str]:
        return {copy.path for copy in done.copies if copy.where == "log"}

    stays = of_log(made.erase())
    table = IcebergTables(made.log.address).open("public__a", LABEL)
    assert table is not None and table.expire_until(None)[0]
    assert stays and of_log(made.erase()) == stays
    monkeypatch.setattr(erasing, "_IN_USE", datetime.timedelta(0))
    assert of_log(made.erase()) == set()


@pytest.mark.slow
def test_in_a_bucket_no_object_has_the_row_either_and_readers_have_their_hour(
    behind_glue: Log, tmp_path: Path
) -> None:
    made = Erased(behind_glue, tmp_path)
    before = made.in_log()
    client = boto3.client("s3", endpoint_url=os.environ["PYICEBERG_CATALOG__PROD__S3__ENDPOINT"])
    bucket = made.log.table().location().split("/")[2]

    def with_row() -> set[str]:
        found = set()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for key in (each["Key"] for each in page["Contents"] if each["Key"].endswith(".parquet")):
                body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
                rows = pq.read_table(pa.BufferReader(body)).to_pylist()  # some files are of other tables
                if any(row.get("id") == 3 for row in rows):
                    found.add(key.split("/", 2)[2])
        return found

    there = with_row()
    assert {name.split("/")[0] for name in there} >= {"public__a"}
    done = made.erase()
    assert (done.n_rows, done.base_rows) == (3, 1)
    assert made.in_log() == [row for row in before if row["id"] != 3]
    copies = [copy.path for copy in done.copies if copy.path.endswith(".parquet")]
    assert with_row() == there and len(copies) == len(there), "an hour for whoever reads"
    done = made.erase(settings=replace(SETTINGS, at_once=True))
    assert done.copies == () and done.finished_at is not None and with_row() == set()
    refreshed(made.mirror)
    assert all(ids and 3 not in ids for ids in made.moments().values())


@pytest.mark.parametrize(
    "point", ["erasing_rows", "rows_erased", "base_written", "base_committed", "base_erased", "erasure_told"]
)
def test_one_that_ended_anywhere_is_given_again_and_ends_in_the_same_state(
    made: Erased, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = made.in_log()
    with monkeypatch.context() as armed:
        armed.setattr(faultpoints, "_plan", FaultPlan(f"{point}:error", None))
        with pytest.raises(ComponentLost):
            made.erase()
    made.erase()
    log, base, moments = made.state()
    assert log == [row for row in before if row["id"] != 3]
    assert 3 not in base and set(moments) == {made.upto} and 3 not in moments[made.upto]
    assert made.erase(settings=replace(SETTINGS, at_once=True)).finished_at is not None
    assert 3 not in made.ids_on_disk()


def test_a_commit_of_the_sink_in_between_is_kept_and_a_row_behind_the_lsn_too(
    made: Erased, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = made.log.update(A, 3, name="behind")
    n_reached = 0
    reach = faultpoints.reach

    def commits(point: str) -> None:
        nonlocal n_reached
        if point == "erasing_rows":
            n_reached += 1
            if n_reached == 1:
                made.log.insert(A, {"id": 6_000, "name": "y"})
        reach(point)

    monkeypatch.setattr(erased_rows, "reach", commits)
    done = made.erase()
    assert (done.n_rows, done.n_behind, n_reached) == (3, 1, 2)
    rows = made.in_log()
    assert [row["_commit_lsn"] for row in rows if row["id"] == 3] == [again]
    assert [row["name"] for row in rows if row["id"] == 6_000] == ["y"]


@pytest.mark.parametrize("has_opened_the_base", [False, True])
def test_a_refresh_that_had_read_the_log_before_is_done_anew(
    made: Erased, monkeypatch: pytest.MonkeyPatch, has_opened_the_base: bool
) -> None:
    made.upto = Lsn(made.log.update(A, 3, name="last"))
    step = "_new_files" if has_opened_the_base else "__init__"
    goes_on = getattr(TableRefresher, step)
    erased: list[ErasureRecord] = []

    def late(self: TableRefresher, *given: Any) -> Any:
        if not erased:
            erased.append(made.erase())
        return goes_on(self, *given)

    monkeypatch.setattr(TableRefresher, step, late)
    assert made.mirror.refresh(no_session) is not None
    assert erased and all(3 not in ids for ids in made.moments().values())
    assert 3 not in made.log.table().scan().to_arrow()["id"].to_pylist()


def test_a_key_is_found_under_the_name_that_its_column_has_now(made: Erased) -> None:
    catalog = made.log.address.open(makes=False)
    assert catalog is not None
    with catalog.load_table("shop.public__a").update_schema() as update:
        update.rename_column("id", "number")
    assert made.erase().n_rows == 3
    rows = catalog.load_table("shop.public__a").scan().to_arrow().to_pylist()
    assert 3 not in {row["number"] for row in rows} and {row["number"] for row in rows} >= {1, 2, 4, 5_000}
    with pytest.raises(UsageError, match="not one of the key"):
        made.erase("name = 'x'")


def test_it_is_so_behind_a_rest_catalog(behind_rest: Log, tmp_path: Path) -> None:
    made = Erased(behind_rest, tmp_path)
    before = made.in_log()
    assert made.erase(settings=replace(SETTINGS, at_once=True)).finished_at is not None
    assert made.in_log() == [row for row in before if row["id"] != 3] and 3 not in made.ids_on_disk()


@pytest.mark.parametrize("case", ["in the source", "deleted", "deleted and vacuumed", "mixed"])
def test_no_manifest_names_a_file_that_had_the_key_though_manifests_were_merged(
    made: Erased, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    # The lowest key of the table is a bound.
    monkeypatch.setattr(staged_commits, "MERGES_AT", 2)
    if case == "mixed":
        # As other programs write them: one has what is there and what the commit has taken away.
        monkeypatch.setattr(staged_commits.MergingOverwrite, "_process_manifests", all_in_one)
    table = made.log.table()
    folder = Path(table.location().removeprefix("file://"))
    there = [str(path.relative_to(folder)) for path in folder.rglob("*.parquet")]
    with_row = {p for p in there if 0 in pq.read_table(folder / p, partitioning=None)["id"].to_pylist()}
    if case != "in the source":
        made.log.tables[LABEL][:] = [row for row in made.log.tables[LABEL] if row["id"] != 0]
        made.upto = Lsn(made.log.commit((A, [{"id": 0, "name": None, "_change": DELETE}])))
        refreshed(made.mirror)
        assert naming(made.log.table(), with_row)
    monkeypatch.undo()
    if case == "deleted and vacuumed":
        monkeypatch.setattr(vacuums, "GRACE", datetime.timedelta(hours=-1))
        assert made.mirror.vacuum(0).n_files and naming(made.log.table(), with_row)
        assert not any((folder / path).exists() for path in with_row)
    done = made.erase("id = 0", replace(SETTINGS, at_once=True))
    assert done.finished_at is not None and 0 not in made.ids_on_disk()
    assert naming(made.log.table(), with_row) == []
    assert not any((folder / path).exists() for path in with_row)


def all_in_one(self: Any, manifests: list[Any]) -> list[Any]:
    return list(_ManifestMergeManager(1 << 20, 2, True, self).merge_manifests(manifests))


def test_a_refresh_that_names_its_version_while_the_base_table_is_erased_from_is_done_anew(
    made: Erased, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version came before the erasure's, and its line after the erasure had read the manifest."""
    append, reach = ManifestWriter.append, faultpoints.reach
    waiting: list[Callable[[], None]] = []
    erased: list[ErasureRecord] = []

    def appends(self: ManifestWriter, *given: Any) -> None:
        if erased:
            append(self, *given)
            return
        waiting.append(lambda: append(self, *given))
        erased.append(made.erase())
        for each in waiting:
            each()

    def reached(point: str) -> None:
        if point == "base_erased":
            while waiting:
                waiting.pop()()
        reach(point)

    monkeypatch.setattr(ManifestWriter, "append", appends)
    monkeypatch.setattr(erased_iceberg_base, "reach", reached)
    made.mirror.refresh(no_session)
    assert erased and not waiting
    assert all(3 not in ids for ids in made.moments().values())


def test_a_snapshot_that_is_committed_beside_an_erasure_without_a_row_is_looked_at_too(
    made: Erased, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = faultpoints.reach
    taken: list[int] = []

    def commits(point: str) -> None:
        if point == "erasing_rows" and not taken:
            taken.append(0)
            made.log.snapshot(A, [*filled(5), {"id": 7_777, "name": "late"}])
        reach(point)

    monkeypatch.setattr(erased_rows, "reach", commits)
    made.upto = Lsn(made.upto + (1 << 30))
    made.erase("id = 7777")
    assert taken and 7_777 not in {row["id"] for row in made.in_log()}


def test_its_commit_leaves_old_snapshots_to_the_run_which_removes_their_files(
    made: Erased, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiring, "KEPT_SNAPSHOTS", 1)
    monkeypatch.setattr(expiring, "EXPIRES_EVERY", 1)
    table = IcebergTables(made.log.address).open("public__a", LABEL)
    assert table is not None
    n_before = len(table.loaded.metadata.snapshots)
    made.erase()
    table.refresh()
    assert len(table.loaded.metadata.snapshots) == n_before + 1 > 2


def test_who_reads_what_another_erasure_has_replaced_just_now_can_finish(made: Erased) -> None:
    """A run expires snapshots within a minute; nothing tells then that somebody may be reading their files."""
    catalog = made.log.address.open(makes=False)
    assert catalog is not None
    reader = catalog.load_table("shop.public__a").scan()
    n_rows = len(reader.to_arrow())
    files = list(reader.plan_files())
    made.erase("id = 4")
    table = IcebergTables(made.log.address).open("public__a", LABEL)
    assert table is not None and table.expire_until(None)[0]
    done = made.erase(id_="t-2")
    assert [each for each in files if not Path(each.file.file_path.removeprefix("file://")).exists()] == []
    assert n_rows and done.finished_at is None


@pytest.mark.parametrize("change", [delete_a_row, compact, rename_a_column, drop_a_column, set_back])
def test_rows_of_a_base_table_that_another_program_has_changed_are_not_said_to_be_erased(
    made: Erased, change: Callable[[Log], None]
) -> None:
    change(made.log)
    with pytest.raises(Unsupported, match="changed by another program"):
        made.erase()
    assert 3 not in {row["id"] for row in made.in_log()}
    refreshed(made.mirror)
    done = made.erase(settings=replace(SETTINGS, at_once=True))
    assert done.finished_at is not None and 3 not in made.ids_on_disk()


@pytest.mark.parametrize("where", ["made", pytest.param("behind_rest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", ["stage", "stage_replacement"])
def test_a_batch_and_a_merge_in_hand_are_made_again_and_no_row_comes_back_or_twice(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, step: str
) -> None:
    given = request.getfixturevalue(where)
    made: Erased = given if where == "made" else Erased(given, tmp_path)
    made.log.snapshot(B, filled(2))
    before = [row for row in made.in_log() if row["id"] != 3]
    begun: list[int] = []
    erased: list[ErasureRecord] = []
    stages = getattr(IcebergTableWriter, step)

    def meanwhile(table: IcebergTableWriter, *args: Any) -> Any:
        staged = stages(table, *args)
        if table.label == LABEL and not begun:
            begun.append(1)
            erased.append(made.erase())
        return staged

    monkeypatch.setattr(IcebergTableWriter, step, meanwhile)
    n = 0
    while n < 40 and not (erased and n > 1):
        made.log.commit(*((t, [{"id": 9_000 + n, "name": "z", "_change": INSERT}]) for t in (A, B)))
        n += 1
    assert erased and erased[0].n_rows == 3
    rows = made.in_log()
    assert [row for row in rows if row["id"] < 9_000] == before
    assert [row["id"] for row in rows if row["id"] >= 9_000] == list(range(9_000, 9_000 + n))
    catalog = made.log.address.open(makes=False)
    assert catalog is not None
    other = catalog.load_table("shop.public__b").scan().to_arrow()["id"].to_pylist()
    assert sorted(other) == [0, 1, *range(9_000, 9_000 + n)]
