"""A whole erasure without Spark: log, base table and storage, killed anywhere and given again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from tests.unit.delta.test_erased_rows import LABEL, SLOT, Table, change, listed, read
from tests.unit.mirror.bases import PlainMirror
from tests.unit.sinks import test_log_shortening
from tests.unit.sinks.test_log_folds import Meanwhile
from tests.unit.storage.test_journal_file import transaction_rows, unit
from xidstream.actors.cli.erase import shown
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.manifest import base_of, read_lines
from xidstream.pipeline.erasure import kept_states
from xidstream.pipeline.erasure.erasing import ErasureSettings, SlotStores, erase, look
from xidstream.pipeline.errors import ComponentLost, PreconditionMissing, UsageError
from xidstream.pipeline.exchange import UnitEnd
from xidstream.pipeline.faultpoints import VARIABLE
from xidstream.pipeline.log_tables.erased_keys import parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.storage.envelope import now
from xidstream.pipeline.storage.erasure_record import ErasureRecord, check_id, read_erasures
from xidstream.pipeline.storage.journal_file import write_journal_file
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.storage import Storage

UPTO = Lsn(2000)
SETTINGS = ErasureSettings(timeout_s=0.0, settle_s=0.0)
LAYOUT = Layout(7, "orders", "20260101T000000-a")


class Root:
    """The tables and the storage of one slot, as a run leaves them."""

    def __init__(self, folder: Path, delivered: int = 5000) -> None:
        self.folder = folder
        self.table = Table(Location.parse(str(folder / "delta" / LABEL)))
        self.table.snapshot([{"id": 1, "body": "one"}, {"id": 2, "body": "two"}])
        self.table.commit(change("insert", 1010, id=3), change("update_postimage", 1010, 1, id=1))
        self.table.commit(change("insert", 3000, id=1), change("insert", 3000, 1, id=4))
        of_slot = CommitProperties(
            app_transactions=[Transaction(SLOT, 3000), Transaction(f"{SLOT}/owner", 3)]
        )
        told = pa.table({"commit_lsn": [3000]})
        write_deltalake(str(folder / "delta" / "_transactions"), told, commit_properties=of_slot)
        self.mirror = PlainMirror(Location.parse(str(folder / "delta")), [LABEL])
        for lsn in (1010, 3000):
            self.mirror.refresh(lsn)
        self.storage = Storage(str(folder / "storage"))
        write_progress(self.storage, LAYOUT, Lsn(delivered))

    @property
    def stores(self) -> SlotStores:
        return SlotStores(LogFrames(str(self.folder / "delta")), self.storage, LAYOUT)

    def asked(self, id_: str = "t-1") -> ErasureRecord:
        return ErasureRecord(id_, "", 0, UPTO, now(), "somebody@here", "asked for")

    def erase(
        self, key: str = "id = 1", id_: str = "t-1", settings: ErasureSettings = SETTINGS
    ) -> ErasureRecord:
        return erase(self.stores, LABEL, parse_keys([key]), self.asked(id_), settings)

    def state(self) -> Any:
        """All that matters of what is left."""
        base = DeltaTable(str(self.folder / "delta" / "current" / LABEL)).to_pyarrow_table().to_pylist()
        lines = [
            (line.slot, line.lsn)
            for line in read_lines(DeltaBases(Location.parse(str(self.folder / "delta"))))
        ]
        counts = DeltaTable(str(self.folder / "delta" / LABEL))
        return repr(
            (
                read(self.table.location),
                [(f["num_records"], f["min._commit_lsn"]) for f in listed(self.table.location)],
                sorted((row["id"], row["v"]) for row in base),
                sorted(lines),
                counts.transaction_version("erased/999"),
                counts.transaction_version(SLOT),
            )
        )

    def ids_on_disk(self) -> set[int]:
        """Of rows up to the LSN, in every file of the log's table; and in those of the base table."""
        found = set()
        for path in (self.folder / "delta").rglob("*.parquet"):
            if "_delta_log" in path.parts or not {LABEL} & set(path.parts):
                continue
            rows = pq.read_table(path, partitioning=None).to_pylist()
            found |= {row["id"] for row in rows if row.get("_commit_lsn", 0) <= UPTO}
        return found


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def test_no_row_is_left_in_the_log_and_the_base_table_and_the_record_says_so_without_a_value(
    root: Root,
) -> None:
    done = root.erase()
    assert (done.n_rows, done.n_files, done.n_behind) == (2, 2, 1)
    assert (done.base_rows, done.base_files, done.n_keys) == (2, 2, 1)
    assert [(row["_commit_lsn"], row["id"]) for row in read(root.table.location)] == [
        (999, 2),
        (1010, 3),
        (3000, 1),
        (3000, 4),
    ]
    assert {copy.where for copy in done.copies} == {"log", "base table"} and done.finished_at is None
    assert read_erasures(root.storage, LAYOUT) == [done]
    (path,) = (root.folder / "storage").rglob("t-1.json")
    assert "id = 1" not in path.read_text() and "one" not in path.read_text()
    assert "1 row of these keys came behind" in shown(done) and "copies are left" in shown(done)


def test_readers_that_came_before_can_finish_and_at_once_nothing_is_left(root: Root) -> None:
    before = DeltaTable(root.table.location.uri)
    done = root.erase()
    assert sorted(before.to_pyarrow_table()["id"].to_pylist()) == [1, 1, 1, 2, 3, 4]
    assert look(root.stores, done) == done and root.ids_on_disk() == {1, 2, 3}
    done = root.erase(settings=replace(SETTINGS, at_once=True))
    assert done.copies == () and done.finished_at is not None and root.ids_on_disk() == {2, 3}
    assert "no copy is left" in shown(done)
    assert (done.n_rows, done.base_rows) == (2, 2), "of both times"
    # The mirror and its vacuum go on.
    root.mirror.refresh(4000)
    assert root.mirror.manifest.retired_lines() == []


def journal_file(root: Root, number: int, *commit_lsns: int) -> str:
    """Of transactions that left nothing: what counts is when they committed."""
    units = [unit(transaction_rows()) for _ in commit_lsns]
    ends = [UnitEnd(Lsn(lsn), Lsn(lsn), Lsn(lsn + 8), 1) for lsn in commit_lsns]
    write_journal_file(root.storage, LAYOUT, number, units, ends, lambda ref: pa.table({}))
    return LAYOUT.journal_key(number)


def test_an_erasure_is_finished_when_the_last_copy_is_gone(root: Root) -> None:
    journal, _ = journal_file(root, 3, UPTO, 4000), journal_file(root, 4, UPTO + 1)
    damaged, segment = LAYOUT.journal_key(5), LAYOUT.segment_key(Xid(8), UPTO, 0)
    batch, late = LAYOUT.handed_rows_key(1), LAYOUT.segment_key(Xid(9), Lsn(UPTO + 1), 0)
    for key in (damaged, segment, batch, late):
        root.storage.write_bytes(key, b"rows")
    done = root.erase(settings=replace(SETTINGS, at_once=True))
    assert sorted(copy.path for copy in done.copies) == sorted([journal, damaged, segment, batch])
    root.storage.delete([journal, damaged, batch])
    root.storage.write_bytes(LAYOUT.handed_rows_key(2), b"rows of a later batch")
    assert [copy.path for copy in look(root.stores, done).copies] == [segment]
    # It was in work when the tables were erased from.
    in_work = journal_file(root, 6, UPTO - 1)
    assert [copy.path for copy in root.erase().copies] == [in_work, segment]
    root.storage.delete([segment, in_work])
    looked = look(root.stores, read_erasures(root.storage, LAYOUT)[0])
    assert looked.finished_at is not None and read_erasures(root.storage, LAYOUT) == [looked]
    assert look(root.stores, looked) == looked


def test_files_that_no_commit_names_go_now_but_for_those_of_others(root: Root) -> None:
    rows = [change("insert", 1015, id=1)]
    ours = root.table.written(rows, "data-failed")[0].path
    theirs = root.table.written(rows, "backup")[0].path
    other = root.table.written([change("insert", 1015, id=9)], "data-other")[0].path
    half = Path(root.table.location.uri, "data-half/part-00000.parquet")
    half.parent.mkdir()
    half.write_bytes(b"PAR1")
    left = {copy.path for copy in root.erase().copies if copy.where == "log"}
    assert {theirs, "data-half/part-00000.parquet"} <= left and not {ours, other} & left
    there = [Path(root.table.location.uri, path).exists() for path in (ours, theirs, other)]
    assert there == [False, True, True]


def test_what_was_in_work_and_has_its_file_later_is_waited_for_without_the_keys(root: Root) -> None:
    """A merge or a snapshot that had read the table, and a refresh that had read the log: all are refused."""
    known = root.table.written([change("insert", 1015, id=9)], "data-failed")[0].path
    done = root.erase(settings=replace(SETTINGS, at_once=True))
    assert done.finished_at is not None and [copy.path for copy in done.cleared] == [known]
    done = replace(done, finished_at=None)
    merged = root.table.written([change("insert", 1015, id=1)], "data-merged")[0].path
    later = root.table.written([change("insert", UPTO + 1, id=1)], "data-batch")[0].path
    refresh = root.mirror.begin(4000, LABEL)
    looked = look(root.stores, done)
    assert {copy.path for copy in looked.copies} == {
        merged,
        os.path.relpath(refresh.path, refresh.base.location.uri),
    }
    assert later not in {copy.path for copy in looked.copies} and looked.finished_at is None
    refresh.commit()
    assert [copy.path for copy in look(root.stores, looked).copies] == [merged]
    Path(root.table.location.uri, merged).unlink()
    assert look(root.stores, looked).finished_at is not None


def test_nothing_is_changed_before_the_sink_has_all_up_to_the_lsn(tmp_path: Path) -> None:
    root = Root(tmp_path, delivered=1500)
    before = root.state()
    with pytest.raises(PreconditionMissing, match="0/5DC, and 0/7D0 is asked for"):
        root.erase()
    assert root.state() == before
    (record,) = read_erasures(root.storage, LAYOUT)
    assert record.erased_at is None and "give the command again" in shown(record)
    timer = threading.Timer(0.5, lambda: write_progress(root.storage, LAYOUT, Lsn(2000)))
    timer.start()
    assert root.erase(settings=replace(SETTINGS, timeout_s=60)).n_rows == 2
    timer.join()


def test_an_erasure_keeps_its_keys_its_table_and_its_lsn(root: Root) -> None:
    root.erase()
    with pytest.raises(UsageError, match="one of 1 keys"):
        root.erase("id in (1, 2)")
    root.table.writer.refresh()
    root.table.commit(change("insert", 4000, id=1))
    again = erase(
        root.stores,
        LABEL,
        parse_keys(["id = 1"]),
        replace(root.asked(), upto_lsn=Lsn(4500)),
        SETTINGS,
    )
    assert (again.upto_lsn, again.n_behind) == (UPTO, 2)
    anew = replace(root.asked("t-2"), upto_lsn=Lsn(4500))
    assert erase(root.stores, LABEL, parse_keys(["id = 1"]), anew, SETTINGS).n_rows == 2


def test_what_is_wrong_is_told_before_anything_is_recorded(root: Root) -> None:
    for table, key in (("public.nobody", "id = 1"), (LABEL, "body = 'one'")):
        with pytest.raises(UsageError):
            erase(root.stores, table, parse_keys([key]), root.asked(), SETTINGS)
    other = replace(root.stores, layout=Layout(8, "orders", "e"))
    with pytest.raises(PreconditionMissing, match="server 7"):
        erase(other, LABEL, parse_keys(["id = 1"]), root.asked(), SETTINGS)
    assert read_erasures(root.storage, LAYOUT) == []
    for id_ in ("", "../x", "a/b", "-x", "x" * 65):
        with pytest.raises(UsageError):
            check_id(id_)


def erase_in_a_process(folder: str) -> None:
    root = Root.__new__(Root)
    root.folder, root.storage = Path(folder), Storage(str(Path(folder, "storage")))
    root.erase()


@pytest.mark.parametrize(
    "point", ["erasing_rows", "rows_erased", "base_written", "base_erased", "erasure_told"]
)
def test_one_that_was_killed_anywhere_is_given_again_and_ends_in_the_same_state(
    tmp_path: Path, point: str
) -> None:
    whole, killed = Root(tmp_path / "whole"), Root(tmp_path / "killed")
    whole.erase()
    program = (
        f"from {erase_in_a_process.__module__} import erase_in_a_process as e; e({str(killed.folder)!r})"
    )
    died = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env={**os.environ, VARIABLE: f"{point}:kill"},
        timeout=120,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    done = killed.erase()
    assert killed.state() == whole.state()
    assert done.erased_at is not None and json.dumps(done.to_json())
    killed.erase(settings=replace(SETTINGS, at_once=True))
    assert killed.ids_on_disk() == {2, 3}


@pytest.mark.parametrize("point", ["", "keeping_states", "states_kept", "rows_erased", "base_erased"])
def test_all_states_that_a_cut_log_had_from_older_base_tables_are_answered_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    made, mirror = cut_log(tmp_path)
    assert made.log.oldest_lsn(test_log_shortening.TABLE) == 800
    if point:
        with monkeypatch.context() as armed:
            armed.setattr(faultpoints, "_plan", faultpoints.FaultPlan(f"{point}:error", None))
            with pytest.raises(ComponentLost):
                erase_from(made, tmp_path)
    lost = erase_from(made, tmp_path)
    assert lost == []
    check_states(made, 800, 1)
    assert made.lsns().count(805) == 4, "the fold stands where no commit can"
    before = DeltaTable(made.table.location.uri).version()
    # Another key later, with the fold as the oldest start.
    assert erase_from(made, tmp_path, "id = 2", "t-2") == []
    check_states(made, 800, 1, 2)
    assert made.lsns().count(805) == 3 and DeltaTable(made.table.location.uri).version() == before + 1
    # And the log is cut further as ever.
    mirror.refresh(2000, values=without(2000, 1, 2))
    made.shorten("2h")
    assert made.log.oldest_lsn(test_log_shortening.TABLE) == 1200 and 805 not in made.lsns()


def test_a_state_that_the_source_had_deleted_from_is_taken_back_and_folded_too(tmp_path: Path) -> None:
    """The newest version has not the row any more, and older ones have it."""
    made, mirror = cut_log(tmp_path)
    made.put({2100: ("delete", 1, None)})
    made.prove(2100)
    mirror.refresh(2100, values=without(2000, 1))
    assert erase_from(made, tmp_path, upto=2100) == []
    versions = {line.lsn: line for line in read_lines(DeltaBases(made.root), SLOT)}
    assert set(versions) == {2100}
    check_states(made, 800, 1)


def test_a_fold_that_cannot_be_is_told_with_the_states_that_go(tmp_path: Path) -> None:
    made, _ = cut_log(tmp_path)
    made.snapshot(2, 806, 800, test_log_shortening.truth(800))  # it has the fold's place
    (text,) = erase_from(made, tmp_path)
    assert "its states from 0/320 on" in text and text.endswith("what can be read now: from 0/326 on")


def test_a_version_that_has_lost_a_file_keeps_nobody_from_erasing_and_its_states_are_told_to_go(
    tmp_path: Path,
) -> None:
    """Nobody can read such a version, and no later attempt could either."""
    made, _ = cut_log(tmp_path)
    older, _newest = read_lines(DeltaBases(made.root), SLOT)
    base = base_of(DeltaBases(made.root), older)
    assert base is not None
    for path in base.at.files:
        os.remove(path)
    (text,) = erase_from(made, tmp_path)
    assert "its states from 0/320 on" in text and text.endswith("what can be read now: from 0/4B0 on")
    folder = Path(made.root.uri) / "current" / test_log_shortening.TABLE
    rows = DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["v"] for row in rows} == without(1200, 1)


def test_an_erasure_that_takes_nothing_from_a_base_table_folds_nothing(tmp_path: Path) -> None:
    made, _ = cut_log(tmp_path)
    assert erase_from(made, tmp_path, "id = 77") == []
    assert 805 not in made.lsns()
    assert [line.lsn for line in read_lines(DeltaBases(made.root), SLOT)] == [800, 1200]


def test_a_cut_that_comes_in_between_has_the_fold_written_again_from_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mirror = cut_log(tmp_path)
    mirror.refresh(1600, values=test_log_shortening.truth(1600))
    between = Meanwhile("keeping_states", lambda: made.shorten("7h"))
    monkeypatch.setattr(kept_states, "reach", between.reach)
    erase_from(made, tmp_path)
    assert between.is_done
    assert made.log.cut_lsn(test_log_shortening.TABLE) == 1200
    check_states(made, 1200, 1)
    folds = [name for name in os.listdir(made.table.location.uri) if name.endswith("-fold")]
    assert len(folds) == 1, "what no commit names is removed"


def test_states_of_a_whole_log_are_folded_from_it_and_nothing_is_told(tmp_path: Path) -> None:
    made, _ = cut_log(tmp_path, retention="")
    assert erase_from(made, tmp_path) == [] and made.log.oldest_lsn(test_log_shortening.TABLE) == 100
    assert 805 not in made.lsns()


def cut_log(folder: Path, retention: str = "base") -> tuple[test_log_shortening.Root, PlainMirror]:
    """A log that is cut at its oldest base table, of 800; another one is of 1,200."""
    made = test_log_shortening.Root(Location.parse(str(folder / "delta")))
    made.snapshot(1, 100, 40, test_log_shortening.truth(0))
    for lsn in range(100, 2_001, 100):
        made.commit(lsn)
    made.prove(2_000)
    mirror = PlainMirror(made.root, [test_log_shortening.TABLE])
    for lsn in (800, 1200):
        mirror.refresh(lsn, values=test_log_shortening.truth(lsn))
    made.shorten(retention)
    write_progress(Storage(str(folder / "storage")), LAYOUT, Lsn(5000))
    return made, mirror


def erase_from(
    made: test_log_shortening.Root, folder: Path, key: str = "id = 1", id_: str = "t-1", upto: int = UPTO
) -> list[str]:
    """What is told of states that go."""
    told: list[str] = []
    stores = SlotStores(made.log, Storage(str(folder / "storage")), LAYOUT)
    asked = ErasureRecord(id_, "", 0, Lsn(upto), now(), "somebody@here", "asked for")
    settings = replace(SETTINGS, tell=told.append)
    erase(stores, test_log_shortening.TABLE, parse_keys([key]), asked, settings)
    return [text for text in told if "older versions of the base table" in text]


def without(lsn: int, *keys: int) -> dict[int, int]:
    return {key: value for key, value in test_log_shortening.truth(lsn).items() if key not in keys}


def check_states(made: test_log_shortening.Root, first: int, *keys: int) -> None:
    """Each state from ``first`` on is the table's without these keys, whatever it is read from."""
    table = test_log_shortening.TABLE
    assert made.log.oldest_lsn(table) == first
    for lsn in (first, first + 3, *range(first + 100, 2_001, 100)):
        assert made.state(lsn) == without(lsn, *keys)
        base = made.log.table_at(table, Lsn(lsn)).find_base()
        if base is not None:
            read_ = DeltaTable(base.at.location.uri, version=base.version).to_pyarrow_table().to_pylist()
            assert {row["id"]: row["v"] for row in read_} == without(base.lsn, *keys)
    with pytest.raises(PreconditionMissing, match="shortened up to"):
        made.state(first - 1)
