"""Segments copied into a table inside one store: the same of each kind of store, by real requests of its client,
pyarrow and deltalake. Azure's need Azurite (CONTRIBUTING.md)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.azurite import program
from tests.late_segments import late_part
from tests.unit.log_tables.copying_stores import N_ROWS, S3Store, Store, azure_store, large
from tests.unit.log_tables.test_segment_links import World, check, key
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.log_tables import segment_links
from xidstream.pipeline.log_tables.segment_links import Reach, how_segments_reach
from xidstream.pipeline.storage.storage import Storage

_WITHOUT = pytest.mark.skipif(program() is None, reason="Azurite is not here: CONTRIBUTING.md")


@pytest.fixture(scope="module", params=["s3", pytest.param("azure", marks=_WITHOUT)])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if request.param == "s3":
        s3 = S3Store()
        yield s3
        s3.server.stop()
        return
    found = program()
    assert found is not None
    with azure_store(found, tmp_path_factory.mktemp("azurite")) as azure:
        yield azure


@pytest.fixture
def world(store: Store) -> Iterator[World]:
    world = store.new_world()
    yield world
    world.links.close()


def names_of_table(world: World) -> list[str]:
    """By pyarrow: deltalake holds the interpreter's lock while it waits, and the server is in this process."""
    return Storage(world.storage.uri.replace("/storage?", "/delta?")).list_keys("public.a")


def test_small_segments_are_put_and_large_ones_copied_in_the_store(store: Store, world: World) -> None:
    assert how_segments_reach(world.root, world.storage.uri) is Reach.SERVER_SIDE_COPY
    small = world.segment(1, n_rows=10)
    parts = [late_part(large(world), 0x1000), late_part(small, 0x2000)]
    before = store.counts
    files, left = world.give(parts)
    n_requests, n_bytes = (after - then for after, then in zip(store.counts, before, strict=True))
    assert left.n_rows == 0
    # The small one's body is all that is sent, and the large one's end.
    assert n_bytes < small.n_bytes + 20_000 < parts[0].segment.n_bytes / 10
    assert n_requests <= 2 + 1 + 4
    world.commit(files)
    world.storage.delete([key(0), key(1)])
    rows = world.read()
    check(rows[:N_ROWS], 0x1000, N_ROWS)
    assert [r["_commit_lsn"] for r in rows[N_ROWS:]] == [0x2000] * 10
    assert [r["id"] for r in rows[N_ROWS:]] == list(range(10, 20))


def test_a_root_with_a_percent_in_its_uri_gets_its_files_where_deltalake_looks(world: World) -> None:
    """The copies went to ``a%20b``, and the log that named them to ``a b``: the rows were lost with the segment."""
    odd = World(world.storage.uri, f"{world.root.uri}/a%20b", world.root.storage_options)
    files, left = odd.give([late_part(large(odd), 0x1000), late_part(odd.segment(1, n_rows=10), 0x2000)])
    odd.links.close()
    assert left.n_rows == 0
    odd.commit(files)
    assert len(odd.read()) == N_ROWS + 10


def test_a_segment_with_a_long_end_is_left_to_the_executors(
    store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several row groups has all after the first in its end: the driver fetched and sent megabytes for each."""
    long, short = large(world), world.segment(1)
    monkeypatch.setattr(segment_links, "LONGEST_TAIL_BYTES", short.file.tail_bytes)
    assert long.file.tail_bytes > short.file.tail_bytes
    _, before = store.counts
    files, left = world.give([late_part(long, 0x1000), late_part(short, 0x2000)])
    assert [f.max_commit_lsn for f in files] == [0x2000] and left.n_rows == N_ROWS
    assert store.counts[1] - before < short.n_bytes + 5_000


def test_a_copy_leaves_the_segment_as_it_was(world: World) -> None:
    segment = large(world)
    before = world.storage.read_bytes(key(0))
    world.give([late_part(segment, 0x1000)])
    assert world.storage.read_bytes(key(0)) == before
    files, _ = world.give([late_part(segment, 0x1000)])
    world.commit(files)
    check(world.read(), 0x1000, N_ROWS)


@pytest.mark.parametrize(("size", "when"), [("large", "before"), ("large", "between"), ("small", "before")])
def test_a_missing_segment_is_told(
    store: Store, world: World, when: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = late_part(large(world) if size == "large" else world.segment(), 0x1000)
    if when == "before":
        world.storage.delete([key(0)])
    else:
        real = store.copies.copy

        def late(self: object, *args: object) -> None:
            world.storage.delete([key(0)])
            real(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(store.copies, "copy", late)
    with pytest.raises(SegmentCorrupt, match="missing"):
        world.give([part])


def test_a_segment_that_became_shorter_is_told(world: World) -> None:
    for number, segment in enumerate((large(world), world.segment(1))):
        whole = world.storage.read_bytes(key(number))
        for length in (len(whole) - 1, segment.file.head_bytes - 1):
            world.storage.write_bytes(key(number), whole[:length])
            with pytest.raises(SegmentCorrupt):
                world.give([late_part(segment, 0x1000)])


def test_a_store_that_refuses_copies_has_spark_write(store: Store, world: World) -> None:
    part = late_part(large(world), 0x1000)
    with store.refusing_copies(), pytest.warns(RuntimeWarning, match=store.refusal):
        files, left = world.give([part])
    assert (files, left.n_rows) == ([], N_ROWS)
    files, left = world.give([part])
    assert (files, left.n_rows) == ([], N_ROWS), "for as long as the sink lives"
    assert names_of_table(world) == [], "half a copy is in no listing"


def test_a_store_that_fails_is_a_fault_and_the_next_try_succeeds(store: Store, world: World) -> None:
    part = late_part(large(world), 0x1000)
    store.failing = True
    try:
        with pytest.raises(StorageFault):
            world.give([part])
    finally:
        store.failing = False
    files, _ = world.give([part])
    world.commit(files)
    check(world.read(), 0x1000, N_ROWS)


_GIVES = """
import json, sys
from tests.late_segments import late_part
from tests.unit.log_tables.copying_stores import large
from tests.unit.log_tables.test_segment_links import World
world = World(*json.loads(sys.argv[1]))
files, _ = world.give([late_part(large(world, i), 0x1000) for i in range(2)])
world.commit(files)
"""


@pytest.mark.parametrize("fault", ["segment_filled:kill@2", "segment_linked:kill@1"])
def test_a_kill_on_the_way_leaves_nothing_that_the_next_run_cannot_finish(world: World, fault: str) -> None:
    root = Path(__file__).parents[3]
    places = [world.storage.uri, world.root.uri, world.root.storage_options]
    killed = subprocess.run(
        [sys.executable, "-c", _GIVES, json.dumps(places)],
        env={**os.environ, "XIDSTREAM_FAULTS": fault, "PYTHONPATH": str(root)},
        cwd=root,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert [name for name in names_of_table(world) if "_delta_log" in name] == []
    world.n_jobs = 10
    files, left = world.give([late_part(large(world, i), 0x1000) for i in range(2)])
    assert left.n_rows == 0
    world.commit(files)
    rows = world.read()
    assert sorted(row["id"] for row in rows) == sorted([*range(N_ROWS), *range(N_ROWS)])
    assert {row["_commit_lsn"] for row in rows} == {0x1000}
