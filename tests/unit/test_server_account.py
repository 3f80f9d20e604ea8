"""What is done to files so that an embedded server may run as another user than we are."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from xidstream.actors.demo.server_account import ServerAccount

OURSELVES = ServerAccount(None)
AN_ACCOUNT = ServerAccount(pwd.getpwuid(os.getuid()))


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A file below folders that are private, and one that is not."""
    for folder, mode in (
        (tmp_path / "a", 0o700),
        (tmp_path / "a" / "b", 0o755),
        (tmp_path / "a" / "b" / "c", 0o750),
    ):
        folder.mkdir()
        folder.chmod(mode)
    file = tmp_path / "a" / "b" / "c" / "file"
    file.touch(0o600)
    return file


def modes(file: Path) -> list[str]:
    return [oct(path.stat().st_mode & 0o777) for path in (file, *file.parents[:3])]


def test_the_folders_above_may_be_passed_through_and_not_listed(deep: Path) -> None:
    AN_ACCOUNT.open_way_to(deep)
    assert modes(deep) == ["0o600", "0o751", "0o755", "0o701"]


def test_a_server_that_runs_as_ourselves_changes_nothing(deep: Path) -> None:
    OURSELVES.open_way_to(deep)
    OURSELVES.give(deep)
    assert modes(deep) == ["0o600", "0o750", "0o755", "0o700"]
    assert OURSELVES.popen_options() == {}


def test_the_server_gets_no_group_of_ours() -> None:
    assert AN_ACCOUNT.popen_options() == {
        "user": os.getuid(),
        "group": pwd.getpwuid(os.getuid()).pw_gid,
        "extra_groups": [],
    }
