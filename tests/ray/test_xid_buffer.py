"""A real buffer actor whose calls are all on their way before the first of them fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.faults import unwrap
from actors.xid_buffer import BufferSettings, XidBuffer
from pipeline.errors import PoisonedChange, StorageFault
from pipeline.handoff import TransactionEnd
from pipeline.pg import Lsn, Xid
from pipeline.segments import Layout
from pipeline.stream import Prepared
from tests.unit.decode.builder import Block, block, insert, relation

pytestmark = pytest.mark.ray

XID = Xid(700)
GOOD = block(*[insert([str(i)], subxid=700) for i in range(100)])
POISON = block(insert([b"caf\xe9"], subxid=700))
COMMIT = TransactionEnd(XID, Lsn(0x200), Lsn(0x208), 0, streamed=True)
PREPARE = Prepared(XID, "p", Lsn(0x200), Lsn(0x208), streamed=True, origin=None, has_blocks=True)


class Buffer:
    def __init__(self, storage: Path, memory_bytes: int = 64 << 20) -> None:
        settings = BufferSettings(str(storage), Layout(1, "s", "e"), memory_bytes)
        self.actor = ray.remote(XidBuffer).options(num_cpus=0.01).remote(settings)
        self._relations = ray.put({5: relation(("note", "text"))})

    def add(self, content: Block) -> Any:
        return self.actor.add_block.remote(XID, Lsn(0x100), True, 0, [self._relations], content)

    def error_of(self, ref: Any) -> BaseException:
        with pytest.raises(Exception) as caught:
            ray.get(ref)
        return unwrap(caught.value, "xid buffer")


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "segments"


@pytest.mark.parametrize("end", ["commit", "prepare"])
def test_a_transaction_with_a_poisoned_block_is_neither_committed_nor_prepared(
    storage: Path, end: str
) -> None:
    buffer = Buffer(storage)
    refs = [buffer.add(GOOD), buffer.add(POISON), buffer.add(GOOD)]
    ended = buffer.actor.commit.remote(COMMIT) if end == "commit" else buffer.actor.prepare.remote(PREPARE)
    errors = [buffer.error_of(ref) for ref in [*refs[1:], ended]]
    assert all(isinstance(error, PoisonedChange) for error in errors), errors
    assert not list(storage.rglob("*.json")), "a torn transaction was made durable"
    ray.kill(buffer.actor)


def test_a_transaction_whose_spill_failed_is_not_committed_without_those_rows(storage: Path) -> None:
    storage.write_bytes(b"no folder")
    buffer = Buffer(storage, memory_bytes=1 << 20)
    big = block(*[insert(["x" * 1000], subxid=700) for _ in range(2000)])
    refs = [buffer.add(big), buffer.add(GOOD), buffer.actor.commit.remote(COMMIT)]
    errors = [buffer.error_of(ref) for ref in refs]
    assert all(isinstance(error, StorageFault) for error in errors), errors
    ray.kill(buffer.actor)


def test_another_transaction_of_a_failed_buffer_gets_its_error_too(storage: Path) -> None:
    buffer = Buffer(storage)
    buffer.add(POISON)
    other = buffer.actor.abort.remote(Xid(701))
    assert isinstance(buffer.error_of(other), PoisonedChange)
    assert ray.get(buffer.actor.pid.remote()) > 0, "it is alive, and says so"
    ray.kill(buffer.actor)
