"""examples/auto_cdc, as a person runs it: ``spark-pipelines`` over a log that the real sink wrote.

Spark has AUTO CDC from 4.3 on: with an older one the file is skipped. ``make test-spark43`` runs it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.spark.change_log_maker import INT8, TEXT, LogMaker, keyed
from xidstream.actors.runtime.spark_version import spark_version

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif((spark_version().major, spark_version().minor) < (4, 3), reason="AUTO CDC is of Spark 4.3"),
]

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "auto_cdc"
ORDERS = keyed("orders", {"id": INT8, "note": TEXT}, "id", relid=1)


def pipelines(command: str, folder: Path, configuration: dict[str, str], **spec: str) -> Any:
    """``spark-pipelines`` with the example's definition and its own spec, but for the catalog and the places."""
    import pyspark

    folder.mkdir(exist_ok=True)
    written = yaml.safe_load((EXAMPLE / "spark-pipeline.yml").read_text())
    places = {"storage": (folder / "checkpoints").as_uri(), "configuration": configuration, **spec}
    written = {key: value for key, value in {**written, **places}.items() if value}
    (folder / "spark-pipeline.yml").write_text(yaml.safe_dump(written))
    shutil.copy(EXAMPLE / "pipeline.py", folder)
    home = Path(pyspark.__file__).parent
    return subprocess.run(
        [home / "bin" / "spark-pipelines", command, "--spec", str(folder / "spark-pipeline.yml")],
        env={**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
    )


@pytest.mark.timeout(600)
def test_spark_resolves_the_pipeline_and_refuses_a_target_without_merge(
    spark: Any, make_batch: Any, tmp_path: Path
) -> None:
    log = LogMaker(tmp_path / "log", spark, make_batch)
    log.snapshot(ORDERS, [])
    dice = random.Random(1)
    for _ in range(5):
        log.random_commit(dice, [ORDERS])
    settings = {"cdc.root": str(log.path), "cdc.tables": json.dumps({"public.orders": ["id"]})}
    done = pipelines("dry-run", tmp_path / "pipeline", settings, catalog="", database="")
    assert done.returncode == 0 and "Run is COMPLETED" in done.stdout, done.stdout
    done = pipelines("run", tmp_path / "pipeline", settings, catalog="", database="")
    assert done.returncode != 0 and "AUTOCDC_TARGET_DOES_NOT_SUPPORT_MERGE" in done.stdout, done.stdout
