"""A session that is started when something first asks for it: once, by any thread, and never again if it failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.pipeline.errors import EnvironmentFault


class Context:
    """Notes which thread has its jobs in which group, and which groups were cancelled."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, str, str]] = []
        self.cancelled: list[str] = []

    def setJobGroup(self, group: str, about: str) -> None:  # noqa: N802 - Spark's name
        self.groups.append((threading.get_ident(), group, about))

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802 - Spark's name
        self.cancelled.append(group)


class Spark:
    def __init__(self) -> None:
        self.sparkContext = Context()


def test_threads_that_ask_together_wait_for_the_one_session() -> None:
    may_start, n_made = threading.Event(), 0

    def make() -> Any:
        nonlocal n_made
        n_made += 1
        assert may_start.wait(30)
        return Spark()

    session = DriverSession(make)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(session.get) for _ in range(4)]
        assert session.started is None, "who only looks does not wait"
        may_start.set()
        found = {id(each.result(30)) for each in asked}
    assert n_made == 1 and found == {id(session.started)}


def test_a_session_that_did_not_start_is_not_tried_again() -> None:
    n_made = 0

    def make() -> Any:
        nonlocal n_made
        n_made += 1
        raise EnvironmentFault("no Java")

    session = DriverSession(make)
    assert not session.has_failed
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="no Java"):
            session.get()
    assert n_made == 1 and session.has_failed and session.started is None


def test_the_jobs_of_each_thread_are_of_the_loops_group_and_another_loops_are_not_cancelled() -> None:
    spark: Any = Spark()
    session = DriverSession(lambda: spark)
    old, new = LoopSession(session, "old", "slot s"), LoopSession(session, "new", "slot s")
    old.cancel_jobs()
    assert session.started is None, "where nothing has started there is nothing to cancel"
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            assert old.get() is other.submit(old.get).result() is spark
    assert len({thread for thread, _, _ in spark.sparkContext.groups}) == 2
    assert [each[1:] for each in spark.sparkContext.groups] == [("old", "slot s")] * 2, "once a thread"
    new.get()
    new.cancel_jobs()
    assert spark.sparkContext.cancelled == ["new"]


def test_a_users_session_is_there_at_once_and_keeps_its_own_groups() -> None:
    spark: Any = Spark()
    session = DriverSession.given(spark)
    assert session.started is spark
    of_loop = LoopSession(session)
    assert of_loop.started is of_loop.get() is spark
    of_loop.cancel_jobs()
    assert not spark.sparkContext.groups and not spark.sparkContext.cancelled
