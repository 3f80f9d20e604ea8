"""How the suite is divided where it runs in several processes (``-n 2 --dist loadscope``, as ``make test`` does).

A file is one unit of work, because its tests share servers. Files of tests/e2e that share a Ray with its Spark session
are one unit, too, so that there is one such session at a time. The tests of the command line and of users' scripts
start all they need themselves, half a minute each: every one is a unit, and fills the time that the others leave. What
takes gigabytes (``make test-nightly``) is one unit: two such tests side by side would need more memory than a small
machine has.

Long units come first, so that the processes end together: a unit is never divided.

No property test has a deadline: no test asserts anything about time, and a busy machine makes any example slow.

And for every folder the credentials of the tests' S3 server, before any Ray is started that inherits them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from xidstream.pipeline.settings import file_modes

settings.register_profile("no_deadline", settings(), deadline=None)
settings.load_profile("no_deadline")

_BY_ITSELF = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "capture",
        "command_line",
        "hardened_run",
        "locked",
        "moved_server",
        "readme",
        "spark_modes",
        "users_session",
    )
)
_NO_SESSION = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "empty_storage",
        "iceberg",
        "login",
        "quickstart",
        "session_end",
        "small_tables_killed",
        "snapshots_s3",
        "source_kills",
        "wheel",
    )
)
_SHARED_SESSION = "tests/e2e"
_GIGABYTES = ("tests/postgres/test_largest_values.py", "tests/unit/test_gigabytes.py")
_FIRST = ("tests/e2e", "tests/ray", "tests/spark", "tests/property", "tests/differential", "tests/postgres")
"""Folders, from the one with the longest units to the one with the shortest; the others come behind them."""
_NOT_THE_USERS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
)


def unit_of(nodeid: str) -> str:
    """What a test is done together with, in one process: the name of the unit."""
    file = nodeid.partition("::")[0]
    if file in _BY_ITSELF:
        return nodeid
    if file in _GIGABYTES:
        return "gigabytes"
    if file in _NO_SESSION:
        return file
    return _SHARED_SESSION if file.startswith(_SHARED_SESSION) else file


def place_of(nodeid: str) -> tuple[int, bool]:
    """Where a unit stands in the order; those that are equal keep theirs."""
    folder = next((n for n, name in enumerate(_FIRST) if nodeid.startswith(f"{name}/")), len(_FIRST))
    return folder, unit_of(nodeid) == nodeid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's own groups (``--dist loadgroup``) do nothing under pytest 9.2, which has no ``_nodeid`` to mark."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return ByUnit(config, log)


@pytest.fixture(scope="session", autouse=True)
def s3_credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in _NOT_THE_USERS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """An actor sets the umask of its process. Made in a test's process it would be every later test's."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
    file_modes.choose(file_modes.DEFAULT)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For what has sockets below it: a path of a test's own folder is too long."""
    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
