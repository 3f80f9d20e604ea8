"""A document that is replaced while it is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3_server import ReplacesBehindLook
from xidstream.pipeline.errors import SegmentCorrupt
from xidstream.pipeline.storage.envelope import Document
from xidstream.pipeline.storage.storage import Storage

NOTE = Document[str](
    "xidstream.note", 1, "none", lambda text: {"text": text}, lambda content: str(content["text"])
)


@pytest.fixture
def server() -> Iterator[ReplacesBehindLook]:
    server = ReplacesBehindLook()
    yield server
    server.stop()


@pytest.mark.parametrize("later", ["a much longer text than before", "-"], ids=["longer", "shorter"])
def test_document_replaced_between_the_two_requests_of_a_reader_is_read_whole(
    server: ReplacesBehindLook, later: str
) -> None:
    storage = Storage(server.uri("root"))
    NOTE.write(storage, "note.json", "a short one")
    server.then = lambda: NOTE.write(storage, "note.json", later)
    assert NOTE.read(storage, "note.json") == later
    assert server.then is None


def test_document_that_stays_damaged_is_said_to_be(server: ReplacesBehindLook) -> None:
    storage = Storage(server.uri("root"))
    storage.write_bytes("note.json", NOTE.seal("a text")[:-10])
    with pytest.raises(SegmentCorrupt, match=r"note\.json"):
        NOTE.read(storage, "note.json")
