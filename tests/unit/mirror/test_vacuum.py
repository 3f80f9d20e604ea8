"""A vacuum takes what nobody needs, and nothing else, whoever else is at work at whatever moment."""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.unit.delta.test_upkeep import SetForward
from tests.unit.mirror.bases import SLOT, TABLE, PlainMirror, files_below, lost_files, table_of
from xidstream.pipeline.changelog.delta_bases import DeltaBase, DeltaBases, current
from xidstream.pipeline.changelog.manifest import MANIFEST, ManifestWriter, read_lines
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.table_handle import TableHandle
from xidstream.pipeline.errors import ComponentLost, StorageFault, Superseded
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.watched_clock import WatchedClock, steady_s
from xidstream.pipeline.mirror import vacuum as vacuums
from xidstream.pipeline.mirror.base_table import BaseTable, MirrorMarks
from xidstream.pipeline.mirror.vacuum import Vacuumed, vacuum

HOUR = datetime.timedelta(hours=1)
DAY = 24 * HOUR
AT_ONCE = datetime.timedelta(0)
"""As a retention: what the newest lines of the manifest do not name is old."""


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path))


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files are old enough, also those that come during the vacuum."""
    monkeypatch.setattr(vacuums, "GRACE", -HOUR, raising=False)


def left_over(root: Location, path: str = "refresh-x/part.parquet", age: datetime.timedelta = DAY) -> str:
    """A file of an attempt that failed, and its folder."""
    file = Path(current(root).child(TABLE).uri, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"four")
    for each in (file, file.parent):
        os.utime(each, (time.time() - age.total_seconds(),) * 2)
    return str(file)


# -- what is taken --------------------------------------------------------------------------------------


def test_the_files_of_versions_that_are_named_stay_until_their_lines_are_old(
    root: Location, no_grace: None
) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20, 30, 40):
        mirror.refresh(lsn)
    before = files_below(root)
    assert vacuum(root, SLOT, mirror.manifest, DAY) == Vacuumed() and files_below(root) == before
    assert vacuum(root, SLOT, mirror.manifest, AT_ONCE).n_files == 2
    assert files_below(root) == set(table_of(root).file_uris())
    assert [line.lsn for line in read_lines(DeltaBases(root))] == [40] and not lost_files(root)


def test_a_file_of_versions_that_were_never_named_goes_though_older_and_newer_ones_are_named(
    root: Location, no_grace: None
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    attempts = []
    for lsn in (20, 30, 40):  # each of them dies ahead of the manifest
        attempts.append(mirror.begin(lsn))
        attempts[-1].commit()
    mirror.refresh(50)
    assert vacuum(root, SLOT, mirror.manifest, DAY).n_files == 2
    assert [os.path.exists(attempt.path) for attempt in attempts] == [False, False, True]
    assert not lost_files(root)


def test_what_a_failed_attempt_left_goes_with_its_folders_and_checksums_when_it_is_old(
    root: Location,
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    old = left_over(root, "net-x/part.parquet"), left_over(root, "net-x/.part.parquet.crc")
    young = left_over(root, "net-y/part.parquet", age=datetime.timedelta(seconds=5))
    making = Path(current(root).child(TABLE).uri, "refresh-z")
    making.mkdir()
    assert vacuum(root, SLOT, mirror.manifest, DAY) == Vacuumed(1, 8)
    assert not any(map(os.path.exists, [*old, os.path.dirname(old[0])]))
    assert os.path.exists(young) and making.exists()
    later = (time.time() - DAY.total_seconds(),) * 2
    for path in (young, os.path.dirname(young), making):
        os.utime(path, later)
    assert vacuum(root, SLOT, mirror.manifest, DAY) == Vacuumed(1, 4)
    assert not os.path.exists(os.path.dirname(young)) and not making.exists()


def test_ages_are_those_of_the_file_system_whatever_the_hosts_clock_says(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    young = left_over(root, age=AT_ONCE)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + DAY.total_seconds())
    assert vacuum(root, SLOT, mirror.manifest, DAY) == Vacuumed() and os.path.exists(young)


def test_lines_of_a_machine_that_is_an_hour_behind_stay_for_the_retention_beside_those_of_others(
    root: Location, no_grace: None
) -> None:
    """Two machines refresh in turn, and the other one's clock is behind by more than the retention."""
    lived_s = [-2 * HOUR.total_seconds()]
    ages = WatchedClock(lambda: time.time() + lived_s[0], lambda: steady_s() + lived_s[0])
    lived_s[0] = 0.0
    now = datetime.datetime.now(datetime.timezone.utc)
    minute = datetime.timedelta(minutes=1)
    mirror = PlainMirror(root)
    for lsn, true_age in ((10, 50), (20, 20), (30, 15), (40, 10), (50, 5)):
        is_behind = lsn in (30, 50)
        mirror.refresh(lsn, now - true_age * minute - (HOUR if is_behind else AT_ONCE))
    vacuum(root, SLOT, mirror.manifest, 30 * minute, ages=ages)
    assert [line.lsn for line in read_lines(DeltaBases(root))] == [10, 20, 30, 40, 50], (
        "10 was the newest 30 minutes ago"
    )
    vacuum(root, SLOT, mirror.manifest, 12 * minute, ages=ages)
    assert [line.lsn for line in read_lines(DeltaBases(root))] == [30, 40, 50]
    assert not lost_files(root)


def test_a_machine_that_is_an_hour_ahead_removes_no_line_of_others_sooner(
    root: Location, no_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    mirror.refresh(20)

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Ahead:
            return cls.fromtimestamp(time.time() + 3600, tz)

    monkeypatch.setattr(vacuums.datetime, "datetime", Ahead)
    vacuum(root, SLOT, mirror.manifest, HOUR / 2)
    assert [line.lsn for line in read_lines(DeltaBases(root))] == [10, 20] and not lost_files(root)


@pytest.mark.parametrize("is_set_meanwhile", [True, False], ids=["meanwhile", "before"])
def test_nothing_goes_because_the_clock_was_set_forward_by_more_than_the_retention(
    root: Location, is_set_meanwhile: bool
) -> None:
    """While the mirror runs, or before it began: all is a day older at once, by the manifest and by the disk."""
    clock = SetForward((DAY + HOUR).total_seconds())
    ages = WatchedClock(clock.wall_s)
    mirror = PlainMirror(root)
    for lsn in (10, 20, 30):
        mirror.refresh(lsn, datetime.datetime.fromtimestamp(clock.wall_s(), datetime.timezone.utc))
    left_over(root, age=DAY + HOUR)
    clock.stamped(current(root))
    before = files_below(root)
    clock.sets()
    if not is_set_meanwhile:
        ages = WatchedClock()
    mirror.refresh(40)
    assert vacuum(root, SLOT, mirror.manifest, DAY, ages=ages) == Vacuumed()
    assert files_below(root) >= before and len(read_lines(DeltaBases(root))) == 4
    # By ages alone what the last two refreshes do not need would have gone.
    assert vacuum(root, SLOT, mirror.manifest, DAY).n_files == 2


def test_a_file_that_is_named_and_not_there_keeps_a_vacuum_from_removing_anything(
    root: Location, no_grace: None
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    other = left_over(root)
    (file,) = table_of(root).file_uris()
    os.rename(file, f"{file}.elsewhere")
    with pytest.raises(StorageFault, match="1 files that are needed are missing"):
        vacuum(root, SLOT, mirror.manifest, DAY)
    assert os.path.exists(other)


def test_a_folder_that_is_no_table_and_the_table_of_another_slot_are_left_alone(
    root: Location, no_grace: None
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    theirs = [left_over(root, f"../{folder}/part.parquet") for folder in ("notes", "public.theirs")]
    DeltaTable.create(os.path.dirname(theirs[1]), schema=table_of(root).schema())
    assert vacuum(root, SLOT, mirror.manifest, DAY) == Vacuumed()
    assert all(map(os.path.exists, theirs))


def test_a_base_table_that_is_left_out_goes_as_a_whole_after_the_retention_and_no_other_does(
    root: Location, no_grace: None
) -> None:
    """One of a table that was renamed stayed for ever with its last rows."""
    mirror = PlainMirror(root, (TABLE, "public.gone", "public.back"))
    mirror.refresh(10)
    mirror.tables = (TABLE,)
    mirror.refresh(20)
    for table in ("public.gone", "public.back"):
        base = BaseTable.open(DeltaBases(root), table, table, MirrorMarks(SLOT, mirror.manifest.owner))
        assert base is not None
        base.leave_out("the table was renamed to public.clients")
        if table == "public.back":
            base.leave_out(None)
    there = files_below(root, "public.gone")
    assert vacuum(root, SLOT, mirror.manifest, DAY) == Vacuumed()
    assert files_below(root, "public.gone") == there
    vacuumed = vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert vacuumed.n_files >= len(there)
    assert not os.path.exists(current(root).child("public.gone").uri)
    assert sorted(os.listdir(current(root).uri)) == ["_manifest", TABLE, "public.back"]
    assert not lost_files(root)


def test_what_a_vacuum_that_died_left_of_such_a_table_goes_with_the_next(
    root: Location, no_grace: None
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    half = Path(current(root).uri, "_gone-0a0b", "part.parquet")
    half.parent.mkdir()
    half.write_bytes(b"x")
    vacuum(root, SLOT, mirror.manifest, DAY)
    assert not half.parent.exists()


# -- others at work -------------------------------------------------------------------------------------


class Moments:
    """The calls by which a vacuum touches what others see. Ahead of one of them, ``act`` is called."""

    CALLS: tuple[tuple[Any, str], ...] = (
        (os, "walk"),
        (os, "unlink"),
        (os, "rmdir"),
        (DeltaTable, "__init__"),
        (DeltaTableWriter, "swap"),
        (ManifestWriter, "check"),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int, act: Callable[[], None]) -> None:
        self.has_acted = self._is_acting = False
        self._left, self._act = n, act
        for owner, name in self.CALLS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self._left -= 0 if self._is_acting else 1
            if self._left == 0 and not self.has_acted:
                self.has_acted = self._is_acting = True
                self._act()
                self._is_acting = False
            return real(*args, **more)

        return call


def at_every_moment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepared: Callable[[Location], tuple[PlainMirror, Callable[[], None]]],
) -> None:
    """Have the other one act at each moment of a vacuum, and look each time whether a file is lost.

    ``prepared``: a mirror that has not been overtaken, and what the other one does, in a root with four refreshes.
    """
    template = tmp_path / "template"
    first = PlainMirror(Location.parse(str(template)))
    for lsn in (10, 20, 30, 40):
        first.refresh(lsn)
    for n in itertools.count(1):
        root = Location.parse(str(shutil.copytree(template, tmp_path / str(n))))
        mirror, act = prepared(root)
        left_over(root)
        vacuumed = None
        with monkeypatch.context() as patch:
            moments = Moments(patch, n, act)
            with suppress(Superseded, SnapshotOutdated):
                vacuumed = vacuum(root, SLOT, mirror.manifest, AT_ONCE)
        assert not lost_files(root), f"lost at moment {n}"
        if not moments.has_acted:
            assert n > 10 and vacuumed is not None and vacuumed.n_files > 1
            return


def test_whenever_a_later_mirror_takes_over_and_refreshes_all_that_it_names_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_grace: None
) -> None:
    def prepared(root: Location) -> tuple[PlainMirror, Callable[[], None]]:
        return PlainMirror(root, number=1), lambda: PlainMirror(root).refresh(50)

    at_every_moment(tmp_path, monkeypatch, prepared)


def test_whenever_an_earlier_mirror_commits_what_it_has_in_hand_that_is_there_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_grace: None
) -> None:
    def prepared(root: Location) -> tuple[PlainMirror, Callable[[], None]]:
        attempt = PlainMirror(root, number=1).begin(50)

        def commit() -> None:
            with suppress(SnapshotOutdated):
                attempt.commit()

        return PlainMirror(root), commit

    at_every_moment(tmp_path, monkeypatch, prepared)


def test_a_file_of_a_mirror_whose_commits_are_not_seen_yet_stays(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    old = left_over(root)
    seen = table_of(root).version()
    later = PlainMirror(root)
    later.refresh(20)
    # What a machine sees whose file system shows it an older listing of the logs.
    real = DeltaBase.open

    def opened(location: Location, label: str, *kept: Any) -> DeltaBase | None:
        if label != TABLE:
            return real(location, label, *kept)
        return DeltaBase(TableHandle(location, seen), location, label)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaBase, "open", opened)
        patch.setattr(ManifestWriter, "check", lambda self: None)
        patch.setattr(ManifestWriter, "forget", lambda self, before: None)
        patch.setattr(ManifestWriter, "lines", lambda self: read_lines(DeltaBases(root))[:1])
        assert vacuum(root, SLOT, mirror.manifest, AT_ONCE).n_files == 1
    assert not lost_files(root) and not os.path.exists(old)


def test_a_mirror_that_was_overtaken_removes_nothing(root: Location, no_grace: None) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    other = left_over(root)
    PlainMirror(root)
    with pytest.raises(Superseded):
        vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert os.path.exists(other)


# -- what it costs, and when it ends --------------------------------------------------------------------


def test_no_more_tables_are_opened_for_many_versions_than_for_few(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = PlainMirror(root)
    n_opened: list[int] = []
    real = DeltaTable.__init__

    def counted(self: DeltaTable, *args: Any, **more: Any) -> None:
        n_opened[-1] += 1
        real(self, *args, **more)

    for lsn in range(10, 110, 10):
        mirror.refresh(lsn)
        if lsn in (20, 100):
            n_opened.append(0)
            with monkeypatch.context() as patch:
                patch.setattr(DeltaTable, "__init__", counted)
                vacuum(root, SLOT, mirror.manifest, DAY)
    assert len(read_lines(DeltaBases(root))) == 10 and n_opened[0] == n_opened[1], n_opened


@pytest.mark.parametrize("n_left", [1, 2, 3])
def test_a_vacuum_that_is_given_up_ends_between_tables_and_between_files(
    root: Location, no_grace: None, n_left: int
) -> None:
    mirror = PlainMirror(root, [TABLE, "public.b"])
    mirror.refresh(10)
    files = [left_over(root, f"{folder}refresh-x/{i}") for folder in ("", "../public.b/") for i in range(2)]

    def check() -> None:
        if sum(map(os.path.exists, files)) == n_left:
            raise ComponentLost("given up")

    with pytest.raises(ComponentLost, match="given up"):
        vacuum(root, SLOT, mirror.manifest, DAY, check)
    assert sum(map(os.path.exists, files)) == n_left and not lost_files(root)
    vacuum(root, SLOT, mirror.manifest, DAY)
    assert not any(map(os.path.exists, files)) and not lost_files(root)


# -- the manifest ---------------------------------------------------------------------------------------


def manifest_files(root: Location) -> int:
    return sum(path.endswith(".parquet") for path in files_below(root, MANIFEST))


def test_who_has_opened_the_manifest_can_read_it_for_a_while_after_lines_were_removed(root: Location) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20, 30):
        mirror.refresh(lsn)
    reader = DeltaTable(current(root).child(MANIFEST).uri)
    make_older(root, HOUR)
    vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert [line.lsn for line in read_lines(DeltaBases(root))] == [30]
    assert sorted(reader.to_pyarrow_table()["lsn"].to_pylist()) == [10, 20, 30]
    make_older(root, HOUR)
    vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert manifest_files(root) == 1 and [line.lsn for line in read_lines(DeltaBases(root))] == [30]


def test_a_file_that_another_slots_mirror_is_about_to_name_stays_for_the_retention(root: Location) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    mine = left_over(root, f"../{MANIFEST}/data-x/part.parquet", age=HOUR)
    vacuum(root, SLOT, mirror.manifest, 2 * HOUR)
    assert os.path.exists(mine)
    vacuum(root, SLOT, mirror.manifest, HOUR)
    assert not os.path.exists(mine)


def make_older(root: Location, by: datetime.timedelta) -> None:
    for folder, _, names in os.walk(current(root).uri):
        for name in names:
            path = os.path.join(folder, name)
            os.utime(path, (os.path.getmtime(path) - by.total_seconds(),) * 2)
