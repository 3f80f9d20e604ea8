"""The wheel as a user installs it: in an empty environment, far from the checkout, beside modules named as our folders.

It is slow, because pip installs everything that a run needs, 1.5 GB on the disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.postgres_fixtures import Database

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]

USERS_PIPELINE = """
import actors
import xidstream
from pyspark.sql.functions import udf


def handle(batch):
    rows = batch.dataframe("public.t").select(udf(actors.shout)("note").alias("note")).collect()
    print("mine:", sorted(row.note for row in rows), xidstream.__file__, flush=True)
"""
USERS_ACTORS = """
def shout(text):
    return text.upper()
"""


@dataclass(frozen=True)
class Installed:
    source_archive: Path
    wheel: Path
    bin: Path
    users_folder: Path

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """In the user's folder, with nothing of this process's environment that leads to the checkout."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.users_folder,
            env={**inherited, **environ},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def install(self, extras: str) -> None:
        done = self.run("pip", "install", "--quiet", f"{self.wheel}[{extras}]")
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The source distribution of a copy of the checkout, and the wheel of that, installed with what a run needs."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("actors", "pipeline", "xidstream"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pyspark_xidstream.py"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    users_folder = folder / "user"
    users_folder.mkdir()
    (users_folder / "pipeline.py").write_text(USERS_PIPELINE)
    (users_folder / "actors.py").write_text(USERS_ACTORS)
    into = folder / "dist"
    found = Installed(folder, folder, folder / "env" / "bin", users_folder)
    upgraded = found.run("pip", "install", "--quiet", "--upgrade", *BUILD["requires"])
    assert upgraded.returncode == 0, upgraded.stderr
    program = (
        f"import os; os.chdir({str(source)!r}); from setuptools.build_meta import build_sdist as build; "
    )
    program += f"build({str(into)!r})"
    packed = found.run("python", "-c", program)
    assert packed.returncode == 0, packed.stderr
    (source_archive,) = into.glob("*.tar.gz")
    built = found.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(source_archive))
    assert built.returncode == 0, built.stderr
    (wheel,) = into.glob("*.whl")
    found = Installed(source_archive, wheel, found.bin, users_folder)
    found.install("pinned")
    return found


def test_the_source_distribution_holds_every_file_of_the_package_and_no_link(installed: Installed) -> None:
    with tarfile.open(installed.source_archive) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    packed = {member.name.partition("/")[2] for member in members if member.isfile()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("actors", "pipeline", "xidstream")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(wanted) > 400
    assert {*wanted, "pyproject.toml", "setup.py", "pyspark_xidstream.py"} - packed == set()


def test_the_wheel_holds_every_module_and_nothing_under_another_name(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        f"{prefix}{file.relative_to(ROOT)}"
        for folder, prefix in (("actors", "xidstream/"), ("pipeline", "xidstream/"), ("xidstream", ""))
        for pattern in ("*.py", "*.css", "*.html", "*.js", "*.properties", "*.xml", "py.typed")
        for file in (ROOT / folder).rglob(pattern)
    }
    assert len(wanted) > 100
    assert packed == {*wanted, "pyspark_xidstream.py"}, (
        "the one name beside ours, by which Spark finds the source"
    )


def test_a_run_needs_no_postgresql_and_the_demo_says_what_it_needs(installed: Installed) -> None:
    packages = installed.run("pip", "list").stdout
    assert "pyspark" in packages and "pgserver" not in packages and "pytest" not in packages
    refused = installed.run("xidstream", "demo")
    assert refused.returncode == 3, refused.stderr
    assert "pip install 'xidstream[demo]'" in refused.stderr
    assert not (installed.users_folder / "demo-out").exists()


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_run_calls_the_users_pipeline_py_and_its_executors_the_users_actors_py(
    installed: Installed, database: Database, tmp_path: Path
) -> None:
    database.execute("create table t (id bigint primary key, note text)")
    database.execute("create publication p for table t")
    slot = f"s_{database.name}"[:63]
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    database.execute("insert into t values (1, 'one'), (2, 'two')")
    connection = ["--dsn", database.dsn(), "--slot", slot, "--publication", "p"]
    there = ["--storage", str(tmp_path), "--sink", "foreach:pipeline:handle", "--available-now"]
    done = installed.run("xidstream", "run", *connection, *there, PYTHONPATH=str(installed.users_folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"mine: ['ONE', 'TWO'] {installed.bin.parent}" in done.stdout


def test_the_demo_proves_itself_far_from_the_checkout(installed: Installed) -> None:
    installed.install("pinned,demo")
    shown = installed.run("xidstream", "demo", "--rows", "60000")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "60,005" in shown.stdout and "NO" not in shown.stdout
    assert (installed.users_folder / "demo-out" / "public.orders" / "_delta_log").is_dir()
