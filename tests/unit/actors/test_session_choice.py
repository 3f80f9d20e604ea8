"""Which Spark session a setting gives on which Ray, and what the one JVM gets of the executors' settings."""

from __future__ import annotations

from typing import Any

import pytest

from xidstream.actors.driver import session
from xidstream.actors.driver.local_session import heap_of
from xidstream.actors.driver.session import settled
from xidstream.actors.driver.session_kind import has_ray_executors, reads_ray_objects
from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.config import Config


@pytest.mark.parametrize(
    ("setting", "is_ours", "expected"),
    [
        ("auto", True, "local"),
        ("auto", False, "raydp"),
        ("local", True, "local"),
        ("local", False, "local"),
        ("raydp", True, "raydp"),
        ("raydp", False, "raydp"),
    ],
)
def test_auto_is_one_jvm_on_a_ray_of_the_runs_own_and_raydp_elsewhere(
    monkeypatch: pytest.MonkeyPatch, setting: str, is_ours: bool, expected: str
) -> None:
    monkeypatch.setattr(session, "is_ours", lambda: is_ours)
    assert settled(Config(slot="s", spark=setting)) == Config(slot="s", spark=expected)


def test_the_setting_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="spark must be auto, local or raydp, got 'yarn'"):
        Config(spark="yarn")


@pytest.mark.parametrize(
    ("settings", "heap"),
    [
        ({}, "1024m"),
        ({"spark_executor_memory": "8g"}, "8704m"),
        ({"spark_executors": 3, "spark_executor_memory": "600M"}, "2312m"),
    ],
)
def test_the_one_jvm_has_the_heap_of_all_executors_and_room_for_the_driver(
    settings: dict[str, Any], heap: str
) -> None:
    assert heap_of(Config.of(settings)) == heap


class Session:
    """What is asked of a session: its master, and its settings."""

    def __init__(self, master: str, **settings: str) -> None:
        self.sparkContext = self
        self.master = master
        self._settings = settings

    def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return {key.replace("_", "."): value for key, value in self._settings.items()}


@pytest.mark.parametrize(
    ("made", "reads", "waits"),
    [
        (Session("ray://10.0.0.1:7077"), True, True),
        (Session("local[2, 4]", spark_xidstream_joinedRay="true"), True, False),
        (Session("local[2]"), False, False),
        (Session("yarn"), False, False),
    ],
)
def test_a_session_reads_rays_objects_or_has_executors_on_ray_or_neither(
    made: Any, reads: bool, waits: bool
) -> None:
    assert (reads_ray_objects(made), has_ray_executors(made)) == (reads, waits)
