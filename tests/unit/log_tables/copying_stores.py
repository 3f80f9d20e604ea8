"""Stores that copy segments on their own side, as tests see them: moto's S3, and Azurite behind a proxy that counts."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.azurite import Azurite, azurite
from tests.counting_proxy import CountingProxy
from tests.late_segments import late_segment
from tests.s3_server import S3Server
from tests.unit.log_tables.test_segment_links import A, World, key
from xidstream.pipeline.log_tables.s3_copies import S3Copies
from xidstream.pipeline.log_tables.store_copies import SMALLEST_COPY_BYTES, StoreCopies

N_ROWS = 9_000


class Store(Protocol):
    """``copies``: the class that copies there. ``refusal``: what is told where the store refuses a copy.

    ``failing``: answers 500 to everything, while it is true."""

    copies: type[StoreCopies]
    refusal: str
    failing: bool

    @property
    def counts(self) -> tuple[int, int]:
        """The requests that came so far, and the bytes that they brought."""
        ...

    def refusing_copies(self) -> AbstractContextManager[None]: ...

    def new_world(self) -> World:
        """A storage and a root that nobody else has."""
        ...


class S3Store:
    refusal = "AccessDenied"
    copies: type[StoreCopies] = S3Copies

    def __init__(self) -> None:
        self.server = S3Server()

    @property
    def failing(self) -> bool:
        return self.server.failing

    @failing.setter
    def failing(self, value: bool) -> None:
        self.server.failing = value

    @property
    def counts(self) -> tuple[int, int]:
        return self.server.n_requests, self.server.n_received_bytes

    def refusing_copies(self) -> AbstractContextManager[None]:
        return self.server.refusing("uploads")

    def new_world(self) -> World:
        below = uuid.uuid4().hex
        options = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        return World(self.server.uri(f"{below}/storage"), f"s3://{self.server.bucket}/{below}/delta", options)


class AzureStore:
    refusal = "403"

    def __init__(self, store: Azurite, proxy: CountingProxy) -> None:
        from xidstream.pipeline.log_tables.azure_copies import AzureCopies

        self.copies: type[StoreCopies] = AzureCopies
        self.store, self.proxy = store, proxy

    @property
    def failing(self) -> bool:
        return self.proxy.failing

    @failing.setter
    def failing(self, value: bool) -> None:
        self.proxy.failing = value

    @property
    def counts(self) -> tuple[int, int]:
        passed = list(self.proxy.passed)
        return len(passed), sum(each.n_received for each in passed)

    def refusing_copies(self) -> AbstractContextManager[None]:
        return self.proxy.refusing("comp=blocklist")

    def new_world(self) -> World:
        below = uuid.uuid4().hex
        storage = self.store.storage_uri(f"{below}/storage", self.proxy.port)
        return World(storage, f"{self.store.uri}/{below}/delta", self.store.behind(self.proxy.port))


@contextmanager
def azure_store(program: str, folder: Path) -> Iterator[AzureStore]:
    with azurite(program, folder) as store:
        proxy = CountingProxy(store.port)
        try:
            yield AzureStore(store, proxy)
        finally:
            proxy.stop()


def large(world: World, number: int = 0) -> Any:
    """A segment with more before its end than is fetched and put."""
    noise = random.Random(number)
    rows = [{"id": i, "name": noise.randbytes(400).hex()} for i in range(N_ROWS)]
    segment = late_segment(world.storage, key(number), A, rows)
    assert segment.file is not None and segment.file.head_bytes > SMALLEST_COPY_BYTES
    return segment
