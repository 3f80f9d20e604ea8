"""Segments copied into a table inside an S3 store: real requests of boto3, pyarrow and deltalake to moto's server."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator

import pytest

from tests.late_segments import late_part
from tests.s3_server import S3Server
from tests.unit.log_tables.test_segment_links import A, World, check, key
from xidstream.pipeline.errors import SegmentCorrupt, StorageFault
from xidstream.pipeline.log_tables import s3_copies, segment_links
from xidstream.pipeline.log_tables.s3_copies import SMALLEST_PART_BYTES, S3Copies, _ranges
from xidstream.pipeline.log_tables.segment_links import Reach, how_segments_reach


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def world(server: S3Server) -> Iterator[World]:
    below = uuid.uuid4().hex
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    world = World(server.uri(f"{below}/storage"), f"s3://{server.bucket}/{below}/delta", options)
    yield world
    world.links.close()


def large(world: World, number: int = 0) -> object:
    """A segment with more than a part's least bytes in front of its end."""
    from tests.late_segments import late_segment

    noise = random.Random(number)
    rows = [{"id": i, "name": noise.randbytes(400).hex()} for i in range(9_000)]
    segment = late_segment(world.storage, key(number), A, rows)
    assert segment.file is not None and segment.file.head_bytes > SMALLEST_PART_BYTES
    return segment


def test_small_segments_are_put_and_large_ones_copied_in_the_store(server: S3Server, world: World) -> None:
    assert how_segments_reach(world.root, world.storage.uri) is Reach.SERVER_SIDE_COPY
    small = world.segment(1, n_rows=10)
    parts = [late_part(large(world), 0x1000), late_part(small, 0x2000)]
    before = server.n_requests, server.n_received_bytes
    files, left = world.give(parts)
    n_requests, n_bytes = server.n_requests - before[0], server.n_received_bytes - before[1]
    assert left.n_rows == 0
    # The small one's body is all that is sent, and the large one's end.
    assert n_bytes < small.n_bytes + 20_000 < parts[0].segment.n_bytes / 10
    assert n_requests <= 2 * 2 + 2 + 4
    world.commit(files)
    world.storage.delete([key(0), key(1)])
    rows = world.read()
    check(rows[:9_000], 0x1000, 9_000)
    assert [r["_commit_lsn"] for r in rows[9_000:]] == [0x2000] * 10
    assert [r["id"] for r in rows[9_000:]] == list(range(10, 20))


def test_a_segment_with_a_long_end_is_left_to_the_executors(
    server: S3Server, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several row groups has all after the first in its end: the driver fetched and sent megabytes for each."""
    long, short = large(world), world.segment(1)
    monkeypatch.setattr(segment_links, "LONGEST_TAIL_BYTES", short.file.tail_bytes)
    assert long.file.tail_bytes > short.file.tail_bytes  # type: ignore[attr-defined]
    before = server.n_received_bytes
    files, left = world.give([late_part(long, 0x1000), late_part(short, 0x2000)])  # type: ignore[arg-type]
    assert [f.max_commit_lsn for f in files] == [0x2000] and left.n_rows == 9_000
    assert server.n_received_bytes - before < short.n_bytes + 5_000


def test_a_copy_leaves_the_segment_as_it_was(world: World) -> None:
    segment = large(world)
    before = world.storage.read_bytes(key(0))
    world.give([late_part(segment, 0x1000)])
    assert world.storage.read_bytes(key(0)) == before
    files, _ = world.give([late_part(segment, 0x1000)])
    world.commit(files)
    check(world.read(), 0x1000, 9_000)


def test_a_storage_whose_prefix_needs_percent_signs_is_found(server: S3Server, world: World) -> None:
    encoded = World(
        server.uri(f"{uuid.uuid4().hex}/a%20store"), world.root.uri, dict(world.root.storage_options or {})
    )
    files, left = encoded.give([late_part(large(encoded), 0x1000), late_part(encoded.segment(1), 0x2000)])
    encoded.links.close()
    assert (len(files), left.n_rows) == (2, 0)


def test_keys_in_the_storages_uri_are_no_part_of_the_bucket(server: S3Server, world: World) -> None:
    copies = S3Copies(server.uri("p").replace("s3://", "s3://KEY:SECRET@"), world.root)
    assert copies._bucket == server.bucket


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_missing_segment_is_told(world: World, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = late_part(large(world), 0x1000)
    if when == "before":
        world.storage.delete([key(0)])
    else:
        real = s3_copies.S3Copies.copy

        def late(self: s3_copies.S3Copies, *args: object) -> None:
            world.storage.delete([key(0)])
            real(self, *args)

        monkeypatch.setattr(s3_copies.S3Copies, "copy", late)
    with pytest.raises(SegmentCorrupt, match="missing"):
        world.give([part])


def test_a_store_that_refuses_copies_has_spark_write(server: S3Server, world: World) -> None:
    part = late_part(large(world), 0x1000)
    with server.refusing("uploads"), pytest.warns(RuntimeWarning, match="AccessDenied"):
        files, left = world.give([part])
    assert (files, left.n_rows) == ([], 9_000)
    files, left = world.give([part])
    assert (files, left.n_rows) == ([], 9_000), "for as long as the sink lives"


def test_a_store_that_fails_is_a_fault_and_the_next_try_succeeds(server: S3Server, world: World) -> None:
    part = late_part(large(world), 0x1000)
    server.failing = True
    try:
        with pytest.raises(StorageFault):
            world.give([part])
    finally:
        server.failing = False
    files, _ = world.give([part])
    world.commit(files)
    check(world.read(), 0x1000, 9_000)


def test_parts_are_within_the_stores_bounds() -> None:
    for n_bytes in (SMALLEST_PART_BYTES, (5 << 30) - 1, 5 << 30, (5 << 30) + 1, 23 << 30):
        parts = list(_ranges(n_bytes))
        assert parts[0][0] == 0 and parts[-1][1] == n_bytes - 1
        assert all(end + 1 == start for (_, end), (start, _) in itertools.pairwise(parts))
        assert all(SMALLEST_PART_BYTES <= b - a + 1 <= 5 << 30 for a, b in parts)
