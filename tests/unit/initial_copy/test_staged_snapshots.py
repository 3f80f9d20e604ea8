"""Snapshots that wait for a function: a run that has lost the slot meanwhile removes and records nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.initial_copy.test_snapshot_book import BOUNDS, LAYOUT, source_of
from xidstream.pipeline.errors import Superseded
from xidstream.pipeline.initial_copy.staged_snapshots import StagedSnapshots
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import check_owner, claim_slot
from xidstream.pipeline.storage.snapshot_record import read_told
from xidstream.pipeline.storage.storage import Storage

NEXT = Layout(LAYOUT.system_identifier, LAYOUT.slot, "next")
GENERATION = Generation(source_of(1).relation, 1, BOUNDS, None)


def staged_of(storage: Storage, layout: Layout) -> StagedSnapshots:
    return StagedSnapshots(
        storage, layout, partial(check_owner, storage, layout, claim_slot(storage, layout))
    )


def test_what_an_earlier_run_has_read_goes_and_what_the_rightful_run_reads_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stood still where it looked what there is took the folder away from under the next one's readers."""
    storage, rows = Storage(str(tmp_path)), LAYOUT.snapshot_rows_prefix
    storage.write_bytes(f"{rows}/1-earlier/0.parquet", b"rows")
    (tmp_path / rows / "1-earlier" / ".1.parquet.0123456789abcdef.tmp").write_bytes(b"half")
    stopped = staged_of(storage, LAYOUT)
    list_keys = Storage.list_keys

    def later(self: Storage, prefix: str) -> list[str]:
        monkeypatch.setattr(Storage, "list_keys", list_keys)
        staged_of(storage, NEXT).clean()
        assert not (tmp_path / rows).exists()
        storage.write_bytes(f"{rows}/1-rightful/0.parquet", b"rows")
        return self.list_keys(prefix)

    monkeypatch.setattr(Storage, "list_keys", later)
    with pytest.raises(Superseded):
        stopped.clean()
    assert storage.list_keys(rows) == [f"{rows}/1-rightful/0.parquet"]


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_the_function_was_given_by_a_run_that_lost_the_slot_is_not_recorded_as_given(
    tmp_path: Path, is_taken_over: bool
) -> None:
    """The rightful run has begun a generation of the same number, with other bounds."""
    storage = Storage(str(tmp_path))
    staged = staged_of(storage, LAYOUT)
    file = WrittenFile("1-x/0.parquet", 4, 1, 1, 1)
    storage.write_bytes(f"{LAYOUT.snapshot_rows_prefix}/{file.path}", b"rows")
    assert not staged.commit(GENERATION, [file])
    given: list[Any] = []

    def give(batch: Any) -> None:
        given.append(batch)
        if is_taken_over:
            claim_slot(storage, NEXT)
        staged.complete()

    if is_taken_over:
        with pytest.raises(Superseded):
            staged.deliver(cast(Any, None), give, lambda: False)
    else:
        staged.deliver(cast(Any, None), give, lambda: False)
    assert len(given) == 1
    assert read_told(storage, LAYOUT) == ([] if is_taken_over else [GENERATION])
