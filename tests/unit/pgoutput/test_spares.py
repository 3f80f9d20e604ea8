"""Which array is used again, and that none is with two owners."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from xidstream.pipeline.pgoutput.message_buffer import MessageBuffer
from xidstream.pipeline.pgoutput.spares import Spares

KIB, MIB = 1 << 10, 1 << 20


def given(spares: Spares, *sizes: int) -> list[np.ndarray]:
    arrays = [np.zeros(size, np.uint8) for size in sizes]
    for array in arrays:
        spares.release(array[: len(array) // 2])
    return arrays


def test_the_smallest_that_fits_is_taken_whole_and_once() -> None:
    spares = Spares(16 * MIB)
    _, middle, _ = given(spares, 3 * MIB, 2 * MIB, MIB)
    assert spares.allocate(3 * MIB // 2) is middle
    assert spares.allocate(3 * MIB // 2) is not middle


def test_one_more_than_twice_as_large_is_not_given_out() -> None:
    spares = Spares(16 * MIB)
    (large,) = given(spares, 2 * MIB)
    assert spares.allocate(MIB - 1) is not large
    assert spares.allocate(MIB) is large


@pytest.mark.parametrize(
    ("limit_bytes", "size"), [(0, MIB), (MIB, 2 * MIB), (MIB, 64 * KIB)], ids=["no-limit", "large", "small"]
)
def test_what_is_not_worth_keeping_is_not_kept(limit_bytes: int, size: int) -> None:
    spares = Spares(limit_bytes)
    (array,) = given(spares, size)
    assert spares.allocate(size) is not array


def test_over_the_limit_the_oldest_go() -> None:
    spares = Spares(2 * MIB)
    oldest, *others = given(spares, MIB, MIB, MIB)
    taken = [spares.allocate(MIB) for _ in range(3)]
    assert all(any(array is other for array in taken) for other in others)
    assert not any(array is oldest for array in taken)


def test_what_serves_again_counts_wherever_it_is_until_it_is_dropped() -> None:
    spares = Spares(2 * MIB)
    given(spares, MIB, MIB)
    out = [spares.allocate(MIB), spares.allocate(MIB)]
    (third,) = given(spares, MIB)
    assert spares.allocate(MIB) is not third, "two are out: there is no room for a third"
    spares.release(out.pop())
    returned = spares.allocate(MIB)
    (third,) = given(spares, MIB)
    assert spares.allocate(MIB) is not third
    del returned
    (third,) = given(spares, MIB)
    assert spares.allocate(MIB) is third, "one was dropped, and counts no more"
    assert len(out) == 1


def test_what_is_given_is_bounded_though_nobody_takes() -> None:
    spares = Spares(2 * MIB)
    references = [weakref.ref(array) for array in given(spares, *[MIB] * 20)]
    assert sum(reference() is not None for reference in references) == 2


def test_what_was_taken_from_a_gathering_is_filled_again_only_after_it_was_given_back() -> None:
    spares = Spares(16 * MIB)
    gathered = MessageBuffer(spares)
    gathered.append(b"a" * MIB)
    first, _ = gathered.detach()
    gathered.append(b"b" * MIB)
    second, _ = gathered.detach()
    assert first.tobytes() == b"a" * MIB and second.tobytes() == b"b" * MIB
    address = first.base.ctypes.data  # type: ignore[union-attr]
    spares.release(first)
    del first
    gathered.append(b"c" * MIB)
    assert gathered.payload.ctypes.data == address
    assert second.tobytes() == b"b" * MIB
