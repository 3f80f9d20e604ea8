"""What S3 alone has of copies inside a store: URIs, and the bounds of parts. The rest is in test_store_copies."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

import pytest

from tests.late_segments import late_part
from tests.s3_server import S3Server
from tests.unit.log_tables.copying_stores import S3Store, large
from tests.unit.log_tables.test_segment_links import World
from xidstream.pipeline.log_tables.s3_copies import S3Copies, _ranges
from xidstream.pipeline.log_tables.store_copies import SMALLEST_COPY_BYTES


@pytest.fixture(scope="module")
def store() -> Iterator[S3Store]:
    store = S3Store()
    yield store
    store.server.stop()


@pytest.fixture
def server(store: S3Store) -> S3Server:
    return store.server


@pytest.fixture
def world(store: S3Store) -> Iterator[World]:
    world = store.new_world()
    yield world
    world.links.close()


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


def test_parts_are_within_the_stores_bounds() -> None:
    for n_bytes in (SMALLEST_COPY_BYTES, (5 << 30) - 1, 5 << 30, (5 << 30) + 1, 23 << 30):
        parts = list(_ranges(n_bytes))
        assert parts[0][0] == 0 and parts[-1][1] == n_bytes - 1
        assert all(end + 1 == start for (_, end), (start, _) in itertools.pairwise(parts))
        assert all(SMALLEST_COPY_BYTES <= b - a + 1 <= 5 << 30 for a, b in parts)
