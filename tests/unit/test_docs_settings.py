"""Settings, clusters and deployment in docs/ say what the code does: every block is read, every setting is there."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from tests.settings_table import PAGE, page_with_table
from xidstream.actors.driver.session import BASE_CONF
from xidstream.actors.runtime.ray_cluster import LOCAL_OBJECT_STORE_BYTES
from xidstream.actors.supervision.cpu_plan import FULL_SHARES, MASTER_CPUS, plan
from xidstream.pipeline.settings.config import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TEXT = PAGE.read_text(encoding="utf-8")
# Chapter → CPUs of the machine that it is for.
PROFILES = {"A laptop": 2.0, "A server": 16.0, "A cluster": None}
SPENT = {"slot reader": 0.1, "commit sequencer": 0.05, "Spark driver": 0.1}


def chapter(title: str) -> Config:
    (block,) = re.findall(rf"^## {title}\n.*?```toml\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    return config_of(block)


def config_of(block: str) -> Config:
    config = Config.of(tomllib.loads(block))
    config.require("dsn", "slot", "publication", "storage", "sink")
    config.refuse_credentials()
    return config


def test_the_table_has_every_setting_with_its_default_and_its_sentence() -> None:
    assert page_with_table(TEXT) == TEXT, "run `make docs`"


@pytest.mark.parametrize("page", ["settings.md", "cluster.md", "deployment.md"])
def test_every_block_is_a_complete_file_of_settings(page: str) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert page != "settings.md" or len(blocks) == len(PROFILES)
    for block in blocks:
        config_of(block)


@pytest.mark.parametrize("title", PROFILES)
def test_each_profile_fits_its_machine(title: str) -> None:
    config, cpus = chapter(title), PROFILES[title]
    if cpus is None:
        assert config.buffers_max * config.buffer_cpus > 8, "open transactions must make a cluster grow"
        assert config.storage.startswith("s3://") and config.sink.startswith("delta:s3://")
    else:
        assert plan([dataclasses.replace(config, spark="local")], cpus).scale == 1.0


def test_the_servers_data_has_room_in_the_object_store_that_run_starts() -> None:
    config = chapter("A server")
    held = config.reader_memory_bytes + config.backlog_bytes + config.batch_bytes
    assert held <= 0.75 * LOCAL_OBJECT_STORE_BYTES


def test_the_defaults_take_what_the_page_says() -> None:
    config = Config()
    # RayDP's master is charged twice.
    raydp = 2 * MASTER_CPUS + config.spark_executors * config.spark_executor_cpus
    for of_spark in (0.0, raydp):
        fixed = sum(SPENT.values()) + of_spark
        least, most = (fixed + n * config.buffer_cpus for n in (config.buffers_min, config.buffers_max))
        assert f"it is {least:.2f}\nCPUs at the start and {most:.2f}" in TEXT
    for process, cpus in SPENT.items():
        assert f"| {process} | {cpus} | |" in TEXT
    assert f"| each buffer | {config.buffer_cpus} | `buffer_cpus` |" in TEXT
    assert (
        f"| each executor, with `spark = raydp` | {config.spark_executor_cpus} | `spark_executor_cpus` |"
        in TEXT
    )


def test_the_page_knows_what_the_actors_ask_for() -> None:
    asked = [
        float(cpus)
        for file in (ROOT / "actors").rglob("*.py")
        for cpus in re.findall(r"num_cpus=([\d.]+)", file.read_text(encoding="utf-8"))
    ]
    assert sum(asked) == 0, "what is asked for is in supervision.cpu_plan"
    assert {
        "slot reader": FULL_SHARES.reader,
        "commit sequencer": FULL_SHARES.sequencer,
        "Spark driver": FULL_SHARES.driver,
    } == SPENT
    assert BASE_CONF["spark.ray.raydp_spark_master.actor.resource.CPU"] == str(MASTER_CPUS)
