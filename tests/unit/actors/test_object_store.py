"""Rows that a buffer gives away: as an object of Ray's, or by value where they are few. Without Ray."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import ray

from xidstream.actors.driver import object_store_frames
from xidstream.actors.driver.object_store_frames import ObjectStoreFrames, read_object
from xidstream.actors.runtime.object_store import HELD_BYTES, as_object, get_arrow, hold_arrow

FEW = pa.table({"a": [1, 2, 3]})
MANY = pa.table({"a": list(range(HELD_BYTES))})


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was put, whose place is its reference."""
    put: list[Any] = []

    def store(value: Any) -> int:
        put.append(value)
        return len(put) - 1

    monkeypatch.setattr(ray, "put", store)
    monkeypatch.setattr(ray, "get", put.__getitem__)
    return put


def test_few_rows_are_held_by_value_and_read_as_an_object_is(stored: list[Any]) -> None:
    held, reference = hold_arrow(FEW), hold_arrow(MANY)
    assert isinstance(held, bytes) and len(held) <= HELD_BYTES
    assert reference == 0 and len(stored) == 1 and isinstance(stored[0], bytes)
    for ref, table in ((held, FEW), (reference, MANY)):
        assert get_arrow(ref).equals(table)
        assert pa.Table.from_batches(read_object(ref)).equals(table)


def test_executors_get_objects_alone_which_stay_as_long_as_the_batch(
    stored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        object_store_frames, "object_store_frame", lambda spark, schema, refs: given.extend(refs)
    )
    held: Any = hold_arrow(FEW)
    spark: Any = None
    frames = ObjectStoreFrames()
    frames.frame(spark, FEW.schema, [held, as_object(held), as_object(held)])
    assert given == [2, 0, 1] and stored == [held] * 3, "what is an object already is not put again"
    assert frames._made == given
    frames.forget()
    assert not frames._made
