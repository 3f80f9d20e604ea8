"""What a run asks of a Ray of its own: all of it fits, whatever the machine, or the run is refused with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from xidstream.actors.supervision.cpu_plan import FULL_SHARES, LEAST, MASTER_CPUS, Plan, plan
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.settings.config import Config

MASTER = "spark.ray.raydp_spark_master.actor.resource.CPU"
EXECUTOR = "spark.ray.raydp_spark_executor.actor.resource.cpu"


def slots(n: int, **settings: Any) -> list[Config]:
    return [Config.of({"spark": "local", "snapshot": "never", **settings, "slot": f"s{i}"}) for i in range(n)]


def asked_at_the_start(planned: Plan) -> float:
    """By the parts themselves, as they will ask Ray."""
    first, shares = planned.configs[0], planned.shares
    asked = shares.driver
    if first.spark == "raydp":
        asked += 2 * float(first.spark_conf.get(MASTER, MASTER_CPUS))
        executor = float(first.spark_conf.get(EXECUTOR, first.spark_executor_cpus))
        asked += first.spark_executors * executor
    for config in planned.configs:
        asked += shares.reader + shares.sequencer + config.buffers_min * config.buffer_cpus
    return asked


def asked_at_most(planned: Plan) -> float:
    first = planned.configs[0]
    n_later = first.buffers_max - sum(config.buffers_min for config in planned.configs)
    return asked_at_the_start(planned) + n_later * first.buffer_cpus


@pytest.mark.parametrize("spark", ["local", "raydp"])
def test_one_slot_on_two_cpus_asks_for_what_its_settings_say(spark: str) -> None:
    configs = slots(1, spark=spark)
    planned = plan(configs, 2.0)
    assert planned.configs == tuple(configs) and planned.shares == FULL_SHARES and planned.scale == 1.0
    assert planned.needed == pytest.approx(1.05 if spark == "raydp" else 0.35)


@pytest.mark.parametrize("spark", ["local", "raydp"])
@pytest.mark.parametrize(("n", "cpus"), [(6, 2.0), (6, 1.0), (1, 1.0), (3, 1.0), (16, 2.0), (20, 4.0)])
def test_all_parts_of_several_slots_fit_a_small_machine_with_every_buffer_that_may_come(
    n: int, cpus: float, spark: str
) -> None:
    planned = plan(slots(n, spark=spark, buffers_max=n + 3), cpus)
    assert asked_at_most(planned) <= cpus + 1e-9
    assert asked_at_the_start(planned) <= planned.needed + 1e-9 <= cpus + 2e-9
    assert planned.scale >= LEAST


def test_six_slots_with_raydp_on_two_cpus_leave_its_executor_the_cpus_that_it_asks_for() -> None:
    """They started, and each ended after 120 s: 0.45 CPUs were free, and the executor asked for 0.5."""
    unplanned = Plan(tuple(slots(6, spark="raydp", buffers_max=6)))
    assert asked_at_the_start(unplanned) == pytest.approx(2.3)
    planned = plan(unplanned.configs, 2.0)
    assert 0.85 < planned.scale < 0.88
    assert asked_at_the_start(planned) <= 2.0


def test_parts_shrink_alike_in_steps_that_ray_knows() -> None:
    planned = plan(slots(6, spark="raydp", buffers_max=6), 2.0)
    scale = planned.scale
    first = planned.configs[0]
    found = [
        planned.shares.reader,
        first.buffer_cpus,
        first.spark_executor_cpus,
        float(first.spark_conf[MASTER]),
    ]
    full = [0.1, 0.1, 0.5, 0.1]
    assert all(f * scale - 1e-4 <= each <= f * scale for each, f in zip(found, full, strict=True))
    assert all(each * 10_000 == pytest.approx(round(each * 10_000)) for each in found)


def test_what_a_user_has_an_executor_ask_for_stays_and_the_other_parts_shrink() -> None:
    configs = slots(6, spark="raydp", buffers_max=6, spark_conf={EXECUTOR: "1.0"})
    planned = plan(configs, 2.0)
    assert planned.configs[0].spark_conf[EXECUTOR] == "1.0"
    assert asked_at_the_start(planned) <= 2.0


def test_shares_above_one_cpu_stay_whole_as_ray_wants_them() -> None:
    planned = plan(slots(1, spark="raydp", spark_executors=4, spark_executor_cpus=4.0), 9.0)
    assert planned.configs[0].spark_executor_cpus == 2.0
    assert asked_at_most(planned) <= 9.0


def test_readers_of_snapshots_have_room_beside_the_executor_that_starts() -> None:
    with_snapshots = plan(slots(1, spark="raydp", snapshot="initial"), 1.05)
    without = plan(slots(1, spark="raydp"), 1.35)
    assert with_snapshots.scale < 1.0 and without.scale == 1.0


def test_a_capture_asks_for_nothing_of_spark() -> None:
    assert plan(slots(4, spark="raydp"), 1.0, has_sink=False).scale == 1.0


@pytest.mark.parametrize(
    ("n", "spark", "least", "full"), [(32, "local", "2.025", "8.1"), (30, "raydp", "2.075", "8.3")]
)
def test_a_run_that_fits_in_no_way_is_refused_with_the_numbers(
    n: int, spark: str, least: str, full: str
) -> None:
    with pytest.raises(PreconditionMissing) as caught:
        plan(slots(n, spark=spark, buffers_max=n), 2.0)
    assert f"{n} slots would ask Ray for {full} CPUs" in caught.value.message
    assert f"or for {least} at the least, and it has 2" in caught.value.message
    assert "fewer slots" in caught.value.remedy


def test_buffers_without_end_do_not_keep_a_run_from_starting() -> None:
    planned = plan(slots(1, spark="raydp", buffers_max=10_000), 2.0)
    assert planned.scale == LEAST and asked_at_the_start(planned) <= 2.0


@pytest.mark.parametrize(
    ("settings", "says", "remedy"),
    [
        (
            {"buffer_cpus": 100},
            "100 are for the xid buffer (buffers_min = 1, buffer_cpus = 100)",
            "lower buffer_cpus;",
        ),
        (
            {"buffers_min": 400, "buffers_max": 400},
            "40 are for 400 xid buffers (buffers_min = 400, buffer_cpus = 0.1)",
            "lower buffers_min;",
        ),
        (
            {"spark": "raydp", "spark_executors": 60},
            "30 are for 60 executors (spark_executors = 60, spark_executor_cpus = 0.5)",
            "lower spark_executors;",
        ),
    ],
)
def test_the_setting_that_makes_a_run_too_large_is_named(
    settings: dict[str, Any], says: str, remedy: str
) -> None:
    """It blamed the machine, and asked for fewer slots, of which there was one."""
    with pytest.raises(PreconditionMissing) as caught:
        plan(slots(1, **settings), 2.0)
    assert says in caught.value.message
    assert caught.value.remedy.startswith(remedy)
