"""When a lack of CPUs is one, how it is told, and when it ends the wait."""

from __future__ import annotations

import pytest

from xidstream.actors.supervision.cpu_plan import Demand, demands
from xidstream.actors.supervision.placement import (
    CLUSTER_PATIENCE_S,
    LOCAL_PATIENCE_S,
    FreeCpus,
    RoomWatch,
    fits,
)
from xidstream.pipeline.errors import EnvironmentFault, PreconditionMissing
from xidstream.pipeline.settings.config import Config

READER, BUFFERS = Demand("slot reader", 0.1), Demand("xid buffer", 0.1, 2)
NONE_FREE = FreeCpus((0.0,), 2.0)


@pytest.mark.parametrize(
    ("needed", "free", "expected"),
    [
        ([READER, BUFFERS], [0.3], True),
        ([READER, BUFFERS], [0.1, 0.2], True),
        ([READER, BUFFERS], [0.29], False),
        ([READER], [0.05, 0.05, 0.05], False),
        ([Demand("a", 0.5), Demand("b", 1.0)], [0.5, 1.0], True),
        # Ray counts in steps of 1/10,000, and its sums in floats.
        ([READER], [0.09999999], True),
        ([Demand("buffer that asks for nothing", 0.0)], [0.0], True),
        ([], [], True),
    ],
)
def test_each_actor_needs_one_node_with_room(needed: list[Demand], free: list[float], expected: bool) -> None:
    assert fits(needed, free) == expected


def test_a_lack_is_told_at_once_and_ends_the_wait_when_it_has_lasted() -> None:
    watch = RoomWatch(local=True)
    lack = "the slot reader and 2 xid buffers cannot start: they need 0.3 CPUs, and 0 of 2 CPUs are free"
    assert watch.look(100.0, [READER, BUFFERS], NONE_FREE) == lack
    assert watch.look(100.0 + LOCAL_PATIENCE_S - 0.1, [READER, BUFFERS], NONE_FREE) == lack
    with pytest.raises(PreconditionMissing, match=r"need 0\.3 CPUs, and 0 of 2 CPUs are free") as caught:
        watch.look(100.0 + LOCAL_PATIENCE_S, [READER, BUFFERS], NONE_FREE)
    assert "spark_session" in caught.value.remedy


def test_room_that_came_in_between_starts_the_wait_anew() -> None:
    watch = RoomWatch(local=True)
    assert watch.look(0.0, [READER], NONE_FREE) is not None
    assert watch.look(20.0, [READER], FreeCpus((0.1,), 2.0)) is None
    assert watch.look(21.0, [READER], NONE_FREE) is not None
    assert watch.look(20.0 + LOCAL_PATIENCE_S, [READER], NONE_FREE) is not None


def test_a_cluster_is_given_time_to_add_a_node_and_then_the_epoch_may_be_tried_again() -> None:
    watch = RoomWatch(local=False)
    assert watch.look(0.0, [READER], NONE_FREE) is not None
    assert watch.look(CLUSTER_PATIENCE_S - 1, [READER], NONE_FREE) is not None
    with pytest.raises(EnvironmentFault) as caught:
        watch.look(CLUSTER_PATIENCE_S, [READER], NONE_FREE)
    assert not isinstance(caught.value, PreconditionMissing)


def test_free_cpus_that_are_scattered_over_nodes_are_told_as_such() -> None:
    lack = RoomWatch(local=True).look(0.0, [READER], FreeCpus((0.06, 0.06), 8.0))
    assert lack == (
        "the slot reader cannot start: it needs 0.1 CPUs, and 0.12 of 8 CPUs are free, too few on each node"
    )


def test_an_epoch_needs_a_reader_a_sequencer_and_the_buffers_that_are_kept_ready() -> None:
    needed = demands(Config(buffers_min=3, buffers_max=4, buffer_cpus=0.5))
    assert sum(each.cpus * each.n for each in needed) == pytest.approx(1.65)
