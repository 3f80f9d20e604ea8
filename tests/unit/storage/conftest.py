"""Two storages, one behaviour: a folder, and real S3 requests over HTTP to a server in this process.

moto's server knows the S3 protocol; pyarrow's own C++ client talks to it, so nothing on our side is replaced.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.s3_server import S3Server
from xidstream.pipeline.exchange import MessageFile, PreparedTransaction, Segment, SegmentPart
from xidstream.pipeline.parquet import CommitStamp
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity, rows
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.segment_file import SegmentReader, write_segment
from xidstream.pipeline.storage.storage import Storage


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_endpoint(s3_server: S3Server) -> str:
    """``host:port``."""
    return f"127.0.0.1:{s3_server.port}"


@pytest.fixture(params=["file", "s3"])
def storage_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "storage root")
    server: S3Server = request.getfixturevalue("s3_server")
    return server.uri(f"{uuid.uuid4().hex}/root")


@pytest.fixture
def storage(storage_uri: str) -> Storage:
    return Storage(storage_uri)


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "local"))


@pytest.fixture
def layout() -> Layout:
    return Layout(7_423_000_000_000_000_001, "orders", "20260101T000000-00c0ffee")


@pytest.fixture
def relation() -> RelationVersion:
    columns = (Column("id", 23, -1, True), Column("ordinal", 25, -1, False), Column("Größe", 1700, -1, False))
    return RelationVersion(16_400, "public", "../weird; table", ReplicaIdentity.DEFAULT, columns)


@pytest.fixture
def batches(relation: RelationVersion) -> list[pa.RecordBatch]:
    return [make_batch(relation, 0, 1_000), make_batch(relation, 1_000, 7)]


@pytest.fixture
def prepare(
    storage: Storage, layout: Layout, relation: RelationVersion, batches: list[pa.RecordBatch]
) -> Callable[..., PreparedTransaction]:
    """Make a prepared transaction with one real segment."""

    def make(
        xid: int = 700, *, gid: str = "gid", end: int = 0x5000, in_layout: Layout = layout
    ) -> PreparedTransaction:
        key = in_layout.segment_key(Xid(xid), Lsn(0x1000), 0)
        segment = write_segment(storage, key, relation, 700, batches)
        return prepared_of((segment,), xid=xid, gid=gid, end=end)

    return make


def prepared_of(
    segments: tuple[Segment, ...],
    *,
    xid: int = 700,
    gid: str = "gid",
    end: int = 0x5000,
    messages: tuple[MessageFile, ...] = (),
) -> PreparedTransaction:
    return PreparedTransaction(
        xid=Xid(xid),
        gid=gid,
        prepare_lsn=Lsn(end - 0x100),
        prepare_end_lsn=Lsn(end),
        streamed=True,
        origin=None,
        segments=segments,
        messages=messages,
    )


XID = 700
COMMIT = CommitStamp(0x9000, 1_700_000_000_000_000)


def read(storage: Storage, segment: Segment) -> pa.Table:
    """Its rows, committed by ``COMMIT``."""
    found = SegmentReader(storage.uri)(SegmentPart(segment, COMMIT))
    return pa.Table.from_batches(found, rows.contract_schema(segment.relation))


def released(relation: RelationVersion, batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """What ``read`` must give of them."""
    stamp = rows.Stamp.of_one(COMMIT.commit_lsn, COMMIT.commit_timestamp_us, XID)
    made = [rows.release(batch, relation, stamp) for batch in batches]
    return pa.Table.from_batches(made, rows.contract_schema(relation))


def make_batch(relation: RelationVersion, first: int, n: int) -> pa.RecordBatch:
    schema = rows.internal_schema(relation)
    ordinals = np.arange(first, first + n)
    texts = [f"row {i}" if i % 3 else None for i in ordinals]
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.zeros(n, np.int8)),
            pa.array(np.full(n, 700, np.uint32)),
            pa.array(ordinals, pa.int64()),
            pa.array([["ordinal"] if i % 5 == 0 else None for i in ordinals], schema.field(3).type),
            pa.array([[("id", "x")] if i % 7 == 0 else None for i in ordinals], schema.field(4).type),
            pa.array(ordinals % 100, pa.int32()),
            pa.array(texts, pa.string()),
            pa.array([None if t is None else t * 2 for t in texts], pa.string()),
        ],
        schema=schema,
    )


def files_below(folder: Path) -> set[str]:
    """Everything on disk, temporary files included."""
    return {
        str(Path(parent, name).relative_to(folder)) for parent, _, names in os.walk(folder) for name in names
    }
