"""Memory that is used again: whose it is, and how much of it is kept."""

from __future__ import annotations

import numpy as np

from pipeline.protocol.gathered import Gathered, Spare

_FIRST_BYTES = 128 << 10


def taken(gathered: Gathered, n_bytes: int) -> np.ndarray:  # type: ignore[type-arg]
    gathered.append(bytes(n_bytes))
    return gathered.take()[0]


def test_an_array_that_was_given_back_is_the_next_of_its_size() -> None:
    spare = Spare(1 << 20)
    first = spare.empty(1000)
    spare.give_back(first[:10])
    assert spare.empty(999) is not first
    assert spare.empty(1000) is first
    assert spare.empty(1000) is not first, "it was given out once"


def test_no_more_is_kept_than_the_limit() -> None:
    spare = Spare(2500)
    arrays = [spare.empty(1000) for _ in range(3)]
    for array in arrays:
        spare.give_back(array[:1])
    again = [spare.empty(1000) for _ in range(3)]
    assert sum(any(a is b for b in arrays) for a in again) == 2


def test_what_owns_no_array_is_not_kept() -> None:
    spare = Spare(1 << 20)
    array = np.empty(1000, np.uint8)
    spare.give_back(array)
    assert spare.empty(1000) is not array, "only what gathering gave away, which is a part of its array"


def test_a_block_that_is_still_with_its_reader_keeps_its_bytes_while_others_memory_is_used_again() -> None:
    spare = Spare(1 << 20)
    gathered = Gathered(spare)
    kept = taken(gathered, 100)
    done = taken(gathered, 100)
    spare.give_back(done)
    gathered.append(b"\xff" * 100)
    gathered.take()
    gathered.append(b"\xff" * 100)
    assert not kept.any()


def test_room_that_was_outgrown_is_used_again_by_another() -> None:
    spare = Spare(1 << 20)
    gathered = Gathered(spare)
    outgrown = gathered.payload
    gathered.append(bytes(_FIRST_BYTES + 1))
    assert gathered.payload is not outgrown
    assert Gathered(spare).payload is outgrown
    assert gathered.take()[0].tobytes() == bytes(_FIRST_BYTES + 1)
