"""A Ray without CPUs for the parts of an epoch: the run ends, and says what is free and what is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from tests.ray.conftest import RayPipeline, wait_until
from tests.ray.test_pipeline import set_up
from xidstream.actors.supervision import placement
from xidstream.actors.supervision.placement import free_cpus
from xidstream.pipeline.errors import PreconditionMissing

pytestmark = pytest.mark.ray


class Hog:
    def is_there(self) -> bool:
        return True


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """``leave(cpus)``: take all CPUs of the tests' Ray but these, when those of the last test have come back.

    Other tests of this process may keep a Spark session, which has its CPUs to the end: the number need not be whole.
    """
    monkeypatch.setattr(placement, "LOCAL_PATIENCE_S", 2.0)
    hogs: list[Any] = []

    def take(cpus: float) -> None:
        seen: list[float] = []

        def is_settled() -> bool:
            seen.append(sum(free_cpus().free))
            return len(seen) > 30 and len(set(seen[-30:])) == 1

        wait_until(is_settled)
        hog = ray.remote(Hog).options(num_cpus=round(seen[-1] - cpus, 4)).remote()
        hogs.append(hog)
        ray.get(hog.is_there.remote())

    yield take
    for hog in hogs:
        ray.kill(hog)


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.parametrize(
    ("cpus", "lack"),
    [
        (
            0.0,
            r"the slot reader, the xid buffer and the commit sequencer cannot start: they need 0\.25 CPUs, and 0 of",
        ),
        (0.2, r"the xid buffer cannot start: it needs 0\.1 CPUs, and 0\.05 of"),
    ],
    ids=["reader", "buffer"],
)
def test_parts_that_ray_has_no_cpus_for_end_the_run_with_what_is_free_and_needed(
    pipeline: RayPipeline, leave: Callable[[float], None], cpus: float, lack: str
) -> None:
    set_up(pipeline.database)
    leave(cpus)
    pipeline.start()
    with pytest.raises(PreconditionMissing, match=lack) as raised:
        pipeline.join()
    assert "CPUs" in raised.value.remedy and pipeline.restarts() == []
