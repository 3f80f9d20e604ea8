"""Blocks that the reader decodes itself: the same content as a buffer's, and nothing before the kernels are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.decode.builder import Block as RawBlock
from tests.unit.decode.builder import begin, block, commit, insert, relation
from tests.waiting import wait_until
from xidstream.actors.reader.small_blocks import LOADING_AFTER, SMALL_BYTES, SmallBlocks
from xidstream.actors.runtime.object_store import get_arrow, hold_arrow
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.exchange import Sealed
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.stream import Block, UsedRelations
from xidstream.pipeline.transactions.buffer_calls import BufferSettings
from xidstream.pipeline.transactions.transaction_buffer import TransactionBuffer

VERSIONS = {1: relation(("id", "int4"), ("note", "text"))}


def cut(raw: RawBlock) -> Block:
    payload, lengths = raw
    return Block(payload.copy(), lengths.copy(), UsedRelations(VERSIONS))


def small() -> Block:
    return cut(block(begin(0x100, 700), insert(["1", "one"]), insert(["2", None]), commit(0x100)))


@pytest.fixture
def settings(tmp_path: Path) -> BufferSettings:
    return BufferSettings(str(tmp_path), Layout(1, "s", "e"), 1 << 20)


@pytest.fixture
def loaded(settings: BufferSettings) -> SmallBlocks:
    blocks = SmallBlocks(settings)
    wait_until(lambda: blocks.decode(small()) is not None)
    return blocks


def rows_of(sealed: Sealed) -> list[list[dict[str, object]]]:
    return [get_arrow(part.ref).to_pylist() for part in sealed.memory]


def test_what_is_decoded_here_is_what_a_buffer_gives_whatever_becomes_of_the_arrays(
    loaded: SmallBlocks, settings: BufferSettings
) -> None:
    given = small()
    content = loaded.decode(given)
    assert content is not None
    given.payload[:] = 0
    given.lengths[:] = 0
    same = small()
    expected = TransactionBuffer(settings, hold_arrow).decode_plain(
        (1,), VERSIONS, (same.payload, same.lengths)
    )
    assert rows_of(content) == rows_of(expected)
    assert [row["note"] for row in rows_of(content)[0]] == ["one", None]
    assert content.transactions.to_pylist() == expected.transactions.to_pylist()
    assert (content.n_rows, content.n_bytes) == (expected.n_rows, expected.n_bytes)


def test_nothing_is_loaded_for_a_few_blocks_and_blocks_go_to_buffers_until_it_is(
    settings: BufferSettings,
) -> None:
    blocks = SmallBlocks(settings)
    assert [blocks.decode(small()) for _ in range(LOADING_AFTER - 1)] == [None] * (LOADING_AFTER - 1)
    assert blocks._decoder is None
    wait_until(lambda: blocks.decode(small()) is not None)


def test_a_block_of_more_bytes_is_a_buffers(loaded: SmallBlocks) -> None:
    large = cut(block(begin(0x100, 700), insert(["1", "x" * SMALL_BYTES]), commit(0x100)))
    assert loaded.decode(large) is None
    assert loaded.decode(small()) is not None


def test_a_torn_block_raises_and_so_does_all_behind_it(loaded: SmallBlocks) -> None:
    torn = cut(block(begin(0x100, 700), insert(["1", "one"])))
    with pytest.raises(XidstreamError) as first:
        loaded.decode(torn)
    with pytest.raises(XidstreamError) as later:
        loaded.decode(small())
    assert later.value is first.value


def test_where_the_kernels_cannot_be_loaded_the_error_comes_out_of_the_next_block(
    settings: BufferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no room for kernels")

    monkeypatch.setattr("xidstream.actors.reader.small_blocks.TransactionBuffer", fails)
    blocks = SmallBlocks(settings)

    def has_failed() -> bool:
        try:
            blocks.decode(small())
        except MemoryError:
            return True
        return False

    wait_until(has_failed)
