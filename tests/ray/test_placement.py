"""A Ray without CPUs for the parts of an epoch: the run ends, and says what is free and what is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ray.conftest import RayPipeline
from tests.ray.test_pipeline import set_up
from xidstream.actors.supervision import placement
from xidstream.pipeline.errors import PreconditionMissing

pytestmark = pytest.mark.ray


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.parametrize(
    ("cpus", "lack"),
    [
        pytest.param(
            0.0,
            r"the slot reader, the xid buffer and the commit sequencer cannot start: they need 0\.25 CPUs, and 0 of",
            id="reader",
            marks=pytest.mark.slow,
        ),
        pytest.param(0.2, r"the xid buffer cannot start: it needs 0\.1 CPUs, and 0\.05 of", id="buffer"),
    ],
)
def test_parts_that_ray_has_no_cpus_for_end_the_run_with_what_is_free_and_needed(
    pipeline: RayPipeline,
    leave: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    cpus: float,
    lack: str,
) -> None:
    monkeypatch.setattr(placement, "LOCAL_PATIENCE_S", 2.0)
    set_up(pipeline.database)
    leave(cpus)
    pipeline.start()
    with pytest.raises(PreconditionMissing, match=lack) as raised:
        pipeline.join()
    assert "CPUs" in raised.value.remedy and pipeline.restarts() == []
