"""How many requests to an object store a look and a refresh of base tables make: the store bills each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.s3_server import CountedS3, counted_s3
from tests.spark.change_log_maker import INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.support import IDENTITY, LocalSegments, batch_of, memory_frame, put_memory, read_memory
from tests.unit.mirror.test_on_s3 import no_session, rows_at
from xidstream.pipeline.changelog.delta_bases import DeltaBases
from xidstream.pipeline.changelog.manifest import newest, read_lines
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.mirror.refresh import Answer
from xidstream.pipeline.spark.frames import SinkBatch

TABLES = [keyed(f"t{i}", {"id": INT8, "name": TEXT}, "id", relid=i) for i in range(10)]
FIRST = TABLES[0]


@pytest.fixture
def s3() -> Iterator[CountedS3]:
    with counted_s3() as made:
        yield made


@pytest.fixture
def log(s3: CountedS3, tmp_path: Path) -> Iterator[LogMaker]:
    segments = LocalSegments(str(tmp_path / "segments"))

    def make_batch(*units: Any, number: int = 0) -> SinkBatch:
        batch = batch_of(units, segments, number)
        return SinkBatch(batch, no_session, memory_frame, segments, read_memory, put_memory, segments.storage)

    maker = LogMaker(f"{s3.uri}/shop", None, make_batch, storage_options=s3.options)
    for table in TABLES:
        maker.snapshot(table, [{"id": i, "name": f"name {i}"} for i in range(20)])
    maker.insert(FIRST, *({"id": i, "name": "x"} for i in range(100, 103)))
    yield maker
    maker.sink.close()


def test_a_look_that_finds_nothing_is_eight_requests_and_a_refresh_reads_no_log_from_its_beginning(
    s3: CountedS3, log: LogMaker
) -> None:
    root = Location.parse(f"{s3.uri}/shop", s3.options)
    tables = BaseTables(root.uri, None, 1 << 20, root.storage_options)
    refreshed = tables.refresh(no_session)
    assert refreshed is not None and len(refreshed.tables) == len(TABLES)
    for most in (10, 8):  # the first one looks at what the refresh itself has committed
        s3.asked()
        assert tables.refresh(no_session) is None
        assert len(s3.asked()) <= most
    for turn in range(3):
        log.insert(FIRST, {"id": 1_000 + turn, "name": "new"})
        s3.asked()
        refreshed = tables.refresh(no_session)
        asked = s3.asked()
        assert refreshed is not None
        assert [each.answer for each in refreshed.tables] == [Answer.SWAP] + [Answer.KEEP] * 9
        # It was 488 and 65 more with each turn. Of ten tables one is a listing and one a look for a commit each.
        assert len(asked) <= 170, turn
    for line in newest(read_lines(DeltaBases(root), IDENTITY.application_id)):
        assert line.lsn == log.lsn
        assert as_rows(rows_at(root, line)) == log.states[line.lsn][line.table]


def test_each_small_file_of_the_log_is_one_request(s3: CountedS3, log: LogMaker) -> None:
    root = Location.parse(f"{s3.uri}/shop", s3.options)
    tables = BaseTables(root.uri, None, 1 << 20, root.storage_options)
    assert tables.refresh(no_session) is not None
    for turn in range(10):
        log.insert(FIRST, {"id": 1_000 + turn, "name": "new"})
    n_commits = DeltaTable(f"{root.uri}/_transactions", storage_options=root.storage_options).version()
    s3.asked()
    assert tables.refresh(no_session) is not None
    # It was five: a look and the footer, and then these again with the rows. The table's log tells how long they are.
    asked = s3.asked()
    assert len([each for each in asked if "/shop/public.t0/" in each.what and ".parquet" in each.what]) == 10
    # Beside deltalake this process reads a commit of the log itself: once, with a look for its size. It was twice.
    commit = f"/shop/_transactions/_delta_log/{n_commits - 3:020d}.json"
    looks = [each.what for each in asked if each.what.startswith("HEAD") and commit in each.what]
    assert len(looks) == 1
    lines = newest(read_lines(DeltaBases(root), IDENTITY.application_id))
    (line,) = (line for line in lines if line.table == "public.t0")
    assert as_rows(rows_at(root, line)) == log.states[log.lsn]["public.t0"]
