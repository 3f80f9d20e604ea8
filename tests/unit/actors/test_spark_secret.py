"""Where Spark's secret comes from, and that it is in no setting: RayDP makes arguments of them all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from xidstream.actors.driver import spark_secret as secrets_of_spark
from xidstream.actors.driver.spark_secret import SECRET_VARIABLE, spark_secret


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def test_on_a_ray_of_the_runs_own_each_session_has_one_in_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets_of_spark, "temporary_folder", lambda: str(tmp_path))
    one, other = spark_secret(), spark_secret()
    assert one is not None and other is not None and one.value != other.value
    files = sorted(tmp_path.iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    assert {file.read_bytes()[-64:].decode() for file in files} == {one.value, other.value}
    conf = one.added_to({"spark.executor.extraJavaOptions": "-Dx=y", "spark.app.name": "a"})
    assert one.value not in f"{conf}{one}" and conf["spark.authenticate"] == "true"
    assert conf["spark.executor.extraJavaOptions"].endswith(" -Dx=y")
    assert one.of_driver == {"spark.authenticate.secret": one.value}


def test_on_a_cluster_it_is_the_nodes_and_connections_are_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets_of_spark, "temporary_folder", lambda: None)
    assert spark_secret() is None
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    found = spark_secret()
    assert found is not None and found.value == "hunter2"
    conf = found.added_to({"spark.network.crypto.enabled": "false"})
    assert conf == {"spark.authenticate": "true", "spark.network.crypto.enabled": "false"}, "the user's word"
    assert found.added_to({})["spark.network.crypto.enabled"] == "true"


def test_the_variable_counts_also_on_a_ray_of_the_runs_own_as_its_jvms_inherit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets_of_spark, "temporary_folder", lambda: str(tmp_path))
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    found = spark_secret()
    assert found is not None and found.value == "hunter2" and list(tmp_path.iterdir()) == []
