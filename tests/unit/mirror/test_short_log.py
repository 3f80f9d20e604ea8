"""The logs of base tables and of their manifest go as far as no version is read from them that somebody may ask for."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tests.unit.mirror.bases import SLOT, TABLE, PlainMirror, lost_files, table_of
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current
from xidstream.pipeline.changelog.manifest import MANIFEST, ManifestLine, base_at, base_of, read_lines
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.vacuum import vacuum

DAY = datetime.timedelta(days=1)
AT_ONCE = datetime.timedelta(0)
EVERY = 5
"""Commits between two checkpoints."""


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path))


@pytest.fixture
def mirror(root: Location) -> PlainMirror:
    """With a base table and a manifest that have been refreshed 30 times, an hour ago as the file system says."""
    made = PlainMirror(root)
    made.refresh(1)
    for directory in (TABLE, MANIFEST):
        properties = {"delta.checkpointInterval": str(EVERY)}
        DeltaTable(current(root).child(directory).uri).alter.set_table_properties(properties)
    for lsn in range(2, 31):
        made.refresh(lsn)
    aged(root)
    return made


def aged(root: Location) -> None:
    for path in Path(current(root).uri).rglob("*"):
        os.utime(path, (time.time() - 3600,) * 2)


def log_of(root: Location, directory: str) -> list[int]:
    folder = Path(current(root).child(directory).uri, "_delta_log")
    return sorted(int(path.name[:20]) for path in folder.glob("*.json") if path.name[:20].isdigit())


def test_log_begins_at_the_checkpoint_that_the_oldest_named_version_is_read_from(
    root: Location, mirror: PlainMirror
) -> None:
    lines = read_lines(DeltaBases(root), SLOT)
    mirror.manifest.forget(lines[-12].refreshed_at + datetime.timedelta(microseconds=1))
    named = read_lines(DeltaBases(root), SLOT)
    assert 5 < len(named) < 15
    rows = {line.version: table_of(root, version=line.version).to_pyarrow_table() for line in named}
    vacuum(root, SLOT, mirror.manifest, DAY)
    oldest = min(rows)
    assert 0 < oldest - EVERY <= log_of(root, TABLE)[0] <= oldest
    for version, there in rows.items():
        assert table_of(root, version=version).to_pyarrow_table() == there
    assert not lost_files(root) and read_lines(DeltaBases(root), SLOT) == named
    with pytest.raises(DeltaError):
        table_of(root, version=log_of(root, TABLE)[0] - 1)


def test_version_that_is_gone_counts_for_no_base_table(root: Location, mirror: PlainMirror) -> None:
    """A reader that has looked at the manifest before the vacuum folds the log instead."""
    old = read_lines(DeltaBases(root), SLOT)[3]
    assert base_of(DeltaBases(root), old) is not None
    vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert base_of(DeltaBases(root), old) is None
    assert (
        base_at(DeltaBases(root), SLOT, TABLE, 1, 30) is not None
        and base_at(DeltaBases(root), SLOT, TABLE, 1, 29) is None
    )


def test_log_that_is_damaged_in_the_middle_is_no_version_that_is_gone(
    root: Location, mirror: PlainMirror
) -> None:
    line: ManifestLine = read_lines(DeltaBases(root), SLOT)[-1]
    for path in Path(table_of(root).table_uri.removeprefix("file://"), "_delta_log").glob("*.parquet"):
        path.write_bytes(b"no checkpoint")
    with pytest.raises(DeltaError):
        base_of(DeltaBases(root), line)


def test_logs_stay_as_short_as_they_are_while_the_mirror_goes_on(root: Location, mirror: PlainMirror) -> None:
    lengths = []
    for lsn in range(31, 91):
        mirror.refresh(lsn)
        if lsn % 10 == 0:
            aged(root)
            vacuum(root, SLOT, mirror.manifest, AT_ONCE)
            lengths.append((len(log_of(root, TABLE)), len(log_of(root, MANIFEST))))
    assert max(max(each) for each in lengths) <= 3 * EVERY, lengths
    assert [line.lsn for line in read_lines(DeltaBases(root), SLOT)] == [90] and not lost_files(root)
    assert newest_value(root) == 90
    after = PlainMirror(root)
    after.refresh(100)
    vacuum(root, SLOT, after.manifest, AT_ONCE)
    assert [line.lsn for line in read_lines(DeltaBases(root), SLOT)] == [100]


def test_checkpoint_that_another_machine_may_not_see_yet_shortens_nothing(
    root: Location, mirror: PlainMirror
) -> None:
    for path in Path(current(root).uri).rglob("*.checkpoint.parquet"):
        os.utime(path, (time.time() - 60,) * 2)
    vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert log_of(root, TABLE)[0] == 0


@pytest.mark.parametrize("n_files", [1, 10])
def test_vacuum_that_is_given_up_midway_leaves_a_log_that_begins_later(
    root: Location, mirror: PlainMirror, monkeypatch: pytest.MonkeyPatch, n_files: int
) -> None:
    removed: list[str] = []
    unlink = os.unlink

    def note(path: str) -> None:
        removed.append(path)
        unlink(path)

    def check() -> None:
        if sum("_delta_log" in path for path in removed) == n_files:
            raise ComponentLost("the mirror was stopped")

    monkeypatch.setattr(os, "unlink", note)
    with pytest.raises(ComponentLost):
        vacuum(root, SLOT, mirror.manifest, AT_ONCE, check)
    versions = log_of(root, TABLE)
    assert versions[0] > 0 and versions == list(range(versions[0], versions[-1] + 1))
    assert newest_value(root) == 30 and not lost_files(root)
    vacuum(root, SLOT, mirror.manifest, AT_ONCE)
    assert log_of(root, TABLE)[0] > versions[0]


def newest_value(root: Location) -> int:
    return max(table_of(root).to_pyarrow_table()["v"].to_pylist())
