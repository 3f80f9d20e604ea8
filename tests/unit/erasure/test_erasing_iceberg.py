"""A whole erasure from Iceberg tables without Spark: log, base table and storage, beside writers, and cut short."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.spark.support import IDENTITY
from tests.unit.mirror.test_on_iceberg import (
    A,
    Log,
    answers,
    behind_rest,
    filled,
    log_in,
    no_session,
    refreshed,
)
from xidstream.actors.cli.erase import shown
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.change_log import ChangeLog
from xidstream.pipeline.erasure import erasing
from xidstream.pipeline.erasure.erasing import ErasureSettings, SlotStores, erase, look
from xidstream.pipeline.errors import ComponentLost, UsageError
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg.base_table import manifests_of
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables import erased_rows
from xidstream.pipeline.log_tables.erased_keys import parse_keys
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.mirror.refresh import Answer, TableRefresher
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.storage.envelope import now
from xidstream.pipeline.storage.erasure_record import ErasureRecord
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.storage import Storage

assert behind_rest
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
    def places(self) -> SlotStores:
        return SlotStores(
            ChangeLog(f"iceberg:{self.log.iceberg}".replace("iceberg:iceberg:", "iceberg:")),
            self.storage,
            LAYOUT,
        )

    def erase(self, key: str = "id = 3", settings: ErasureSettings = SETTINGS) -> ErasureRecord:
        asked = ErasureRecord("t-1", "", 0, self.upto, now(), "somebody@here", "asked for")
        return erase(self.places, LABEL, parse_keys([key]), asked, settings)

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
    at = ChangeLog(str(made.places.log.name)).table_at(LABEL, made.upto)
    assert at.snapshot_files()
    made.log.tables[LABEL][:] = [row for row in made.log.tables[LABEL] if row["id"] != 3]
    assert answers(refreshed(made.mirror)) == [Answer.SWAP]
    last = max(made.moments())
    assert last == made.later and len(made.moments()[last]) == 200


def test_at_once_no_file_has_the_row_and_no_metadata_its_key(made: Erased) -> None:
    assert look(made.places, made.erase()).copies, "an hour for whoever reads"
    table = made.log.table()
    folder = Path(table.location().removeprefix("file://"))
    there = [str(path.relative_to(folder)) for path in folder.rglob("*.parquet")]
    with_row = {p for p in there if 3 in pq.read_table(folder / p, partitioning=None)["id"].to_pylist()}
    told = manifests_of(table, with_row)
    assert with_row and told
    done = made.erase(settings=replace(SETTINGS, at_once=True))
    assert done.copies == () and done.finished_at is not None and 3 not in made.ids_on_disk()
    assert not any((folder / path).exists() for path in told), "they have the lowest and highest keys"
    assert manifests_of(made.log.table(), with_row) == []
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
    looked = look(made.places, replace(done, finished_at=None))
    assert [copy.path for copy in looked.copies] == ["data-merged/part.parquet"]
    merged.unlink()
    assert look(made.places, looked).finished_at is not None


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


@pytest.mark.parametrize(
    "point", ["erasing_rows", "rows_erased", "base_written", "base_erased", "erasure_told"]
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
