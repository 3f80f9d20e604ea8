"""A disk without a free byte: the next run removes what is garbage there, and goes on."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.opened import opened_at
from tests.unit.storage.conftest import make_batch, prepared_of, relation
from tests.unit.storage.journals import Made
from xidstream.pipeline.commits.slot_storage import SlotStorage
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.exchange import JournalSpan, SlotIdentity
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.prepared import write_prepared
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.segment_file import write_segment
from xidstream.pipeline.storage.storage import Storage

__all__ = ["relation"]

SLOT = SlotIdentity(7001, "db", "s")


def layout(epoch: str) -> Layout:
    return Layout(SLOT.system_identifier, SLOT.slot, epoch)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    if request.param == "tmpfs":
        made = [["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]]
    else:
        image.write_bytes(b"")
        os.truncate(image, 16 << 20)
        # Without blocks that are kept for root, whose process this is.
        made = [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    for command in made:
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{command[0]} is not there, or does not work for this user: no disk to fill")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Until nothing fits, not a byte of another file either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    with pytest.raises(OSError), open(path.with_name("one byte more"), "wb", buffering=0) as file:
        file.write(b"x")
    path.with_name("one byte more").unlink()


@pytest.mark.parametrize("garbage", ["a segment of a dead epoch", "a journal file without a record"])
def test_a_disk_that_a_dead_epoch_has_filled_is_freed_by_the_next(
    disk: Path, relation: RelationVersion, garbage: str
) -> None:
    """Its record of 1 KB did not fit, and only after that it would have removed the garbage: every run failed, until a
    person had made room."""
    root = disk / "storage"
    storage, mine = Storage(str(root)), layout("a")
    first = SlotStorage(str(root), opened_at(0x100, 0x10_000, identity=SLOT), "a")
    first.take_over()
    key = mine.segment_key(Xid(700), Lsn(0x1700), 0)
    segment = write_segment(storage, key, relation, 700, [make_batch(relation, 0, 3)])
    write_prepared(storage, mine, prepared_of((segment,), end=0x1800))
    file = Made(storage, mine, relation).write(0, 0x2000, with_segment=True)
    first.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    is_segment = garbage.startswith("a segment")
    filled = mine.segment_key(Xid(701), Lsn(0x2100), 0) if is_segment else mine.journal_key(1)
    fill(root / filled)
    with pytest.raises(StorageFault, match="No space left on device"):
        first.record(Lsn(0x3000), [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    opened = dataclasses.replace(
        opened_at(int(file.end_lsn), 0x10_000, identity=SLOT), start_lsn=file.end_lsn
    )
    second = SlotStorage(str(root), opened, "b")
    taken = second.take_over()
    assert not storage.exists(filled)
    assert taken.journal == (file,) and second.load_journal(file, lambda table: "ref")
    (prepared,) = taken.prepared
    assert prepared.damage is None
    record = read_progress(storage, layout("b"))
    assert record is not None and (record.epoch, record.confirmed_lsn) == ("b", file.end_lsn)
    second.record(Lsn(0x3000), [], Lsn(0x100), [JournalSpan("a", 0, 0)])


def test_a_disk_that_others_have_filled_is_told_and_keeps_what_is_there(
    disk: Path, relation: RelationVersion
) -> None:
    root = disk / "storage"
    storage, mine = Storage(str(root)), layout("a")
    first = SlotStorage(str(root), opened_at(0x100, 0x10_000, identity=SLOT), "a")
    first.take_over()
    file = Made(storage, mine, relation).write(0, 0x2000, with_segment=True)
    first.record(file.end_lsn, [], Lsn(0x100), [JournalSpan("a", 0, 0)])
    fill(disk / "of others")
    opened = dataclasses.replace(
        opened_at(int(file.end_lsn), 0x10_000, identity=SLOT), start_lsn=file.end_lsn
    )
    for epoch in ("b", "c"):
        with pytest.raises(StorageFault, match="No space left on device"):
            SlotStorage(str(root), opened, epoch).take_over()
    (disk / "of others").unlink()
    assert SlotStorage(str(root), opened, "d").take_over().journal == (file,)
    assert len(storage.list_keys(mine.progress_prefix)) == 1, "nor does a run that failed leave anything"


def test_a_full_disk_is_named_with_its_folder_and_what_is_free(disk: Path) -> None:
    """It named the object's key alone, and nobody knew which disk was meant."""
    storage = Storage(str(disk / "storage"))
    fill(disk / "filler")
    with pytest.raises(StorageFault) as caught:
        storage.write_bytes("7001/s/object", b"x" * (1 << 20))
    assert f"the disk of {disk / 'storage'} is full (" in caught.value.message
    assert " free): cannot write '7001/s/object'" in caught.value.message
