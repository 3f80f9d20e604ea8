"""What the sequencer's loops wait for: on an event loop of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from xidstream.pipeline.commits.changes import Changes

AT_MOST_S = 5.0


def run(test: Callable[[Changes], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(Changes()), AT_MOST_S)

    asyncio.run(limited())


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_wait_is_over_behind_the_change_that_makes_its_condition_true() -> None:
    async def test(changes: Changes) -> None:
        values: list[int] = []
        wait = asyncio.ensure_future(changes.when(lambda: len(values) > 1))
        for value in range(2):
            await some_turns()
            assert not wait.done()
            values.append(value)
            await some_turns()
            assert not wait.done(), "nobody has told"
            changes.notify()
        await wait

    run(test)


def test_changes_of_one_turn_are_looked_at_once_and_wake_only_whom_they_concern() -> None:
    async def test(changes: Changes) -> None:
        n_asked = 0

        def never() -> bool:
            nonlocal n_asked
            n_asked += 1
            return False

        wait = asyncio.ensure_future(changes.when(never))
        await some_turns()
        before = n_asked
        for _ in range(100):
            changes.notify()
        await some_turns()
        assert n_asked == before + 1 and not wait.done()
        wait.cancel()
        await some_turns()
        changes.notify()
        await some_turns()
        assert n_asked == before + 1, "a wait that was given up is looked at no more"

    run(test)


def test_whoever_comes_second_waits_on() -> None:
    async def test(changes: Changes) -> None:
        there: list[str] = []
        taken: list[str] = []

        async def take() -> None:
            await changes.when(lambda: bool(there))
            taken.append(there.pop())

        takers = [asyncio.ensure_future(take()) for _ in range(2)]
        await some_turns()
        for n in (1, 2):
            there.append("it")
            changes.notify()
            await some_turns()
            assert len(taken) == n
        await asyncio.gather(*takers)

    run(test)


def test_a_wait_with_a_time_ends_then_and_a_change_may_move_the_time() -> None:
    async def test(changes: Changes) -> None:
        loop = asyncio.get_running_loop()
        due = [loop.time() + 3600]
        wait = asyncio.ensure_future(changes.until(lambda: max(0.0, due[0] - loop.time())))
        await some_turns()
        assert not wait.done()
        due[0] = loop.time() + 0.05
        changes.notify()
        await wait
        assert loop.time() >= due[0]

    run(test)


def test_next_ends_behind_any_change_or_after_its_time() -> None:
    async def test(changes: Changes) -> None:
        wait = asyncio.ensure_future(changes.next(3600))
        await some_turns()
        assert not wait.done()
        changes.notify()
        await wait
        await changes.next(0.01)

    run(test)


def test_what_a_condition_raises_is_raised_where_it_is_awaited() -> None:
    async def test(changes: Changes) -> None:
        failing = False

        def condition() -> bool:
            if failing:
                raise ValueError("lost")
            return False

        wait = asyncio.ensure_future(changes.when(condition))
        await some_turns()
        failing = True
        changes.notify()
        with pytest.raises(ValueError, match="lost"):
            await wait

    run(test)
