"""The folder of a run: whose it is, who removes it, and what stays."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from xidstream.actors.runtime import run_folder
from xidstream.actors.runtime.run_folder import (
    KEPT_FILE_BYTES,
    KEPT_LOGS_BYTES,
    KEPT_RUNS,
    RUN_FOLDER,
    RunFolder,
    bound_logs,
    keep_logs,
    make_run_folder,
    sweep,
)
from xidstream.pipeline.errors import EnvironmentFault


@pytest.fixture(autouse=True)
def parent(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    return short_folder


def with_logs(folder: RunFolder, **contents: bytes) -> Path:
    logs = Path(folder.ray, "session_1", "logs")
    logs.mkdir(parents=True)
    Path(folder.ray, "session_latest").symlink_to("session_1")
    for name, content in contents.items():
        (logs / name).write_bytes(content)
    return logs


def test_it_is_its_users_alone_whatever_the_umask_and_ray_makes_of_its_own_folders(parent: Path) -> None:
    before = os.umask(0)
    try:
        folder = make_run_folder()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    os.chmod(folder.ray, 0o777)  # as Ray does
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    folder.release()


def test_starts_that_nobody_tidied_up_after_leave_no_more_than_one_does(parent: Path) -> None:
    for _ in range(40):
        folder = make_run_folder()
        with_logs(folder, **{"raylet.out": b"x" * 1000})
        Path(folder.temporary, "libcore_worker_library_java.so").write_bytes(bytes(1000))
        folder.release()
    sweep(str(parent))
    left = [p for p in parent.rglob("*") if p.is_file()]
    assert [p.name for p in left] == ["raylet.out"] * KEPT_RUNS


def test_the_folder_of_a_run_that_lives_is_left_alone(parent: Path) -> None:
    living = make_run_folder()
    with_logs(living)
    for _ in range(2):
        make_run_folder().release()
    assert Path(living.ray).exists() and Path(living.logs).is_dir()
    living.release()


@pytest.mark.parametrize("way", ["environment", "open file"])
def test_a_process_of_a_run_whose_watchdog_was_killed_too_keeps_its_folder(parent: Path, way: str) -> None:
    folder = make_run_folder()
    log = with_logs(folder) / "raylet.out"
    environment = {**os.environ, **({RUN_FOLDER: folder.path} if way == "environment" else {})}
    with open(log if way == "open file" else os.devnull, "w") as output:
        process = subprocess.Popen(["sleep", "600"], env=environment, stdout=output)
    folder.release()
    sweep(str(parent))
    assert Path(folder.ray).exists()
    process.kill()
    process.wait()
    sweep(str(parent))
    assert not Path(folder.ray).exists()


def test_what_only_looks_like_a_run_is_left_alone(parent: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (parent / "xids-abcdef").symlink_to(precious)
    (parent / "xids-abcde0").touch()
    (parent / "xids-mine").mkdir()
    sweep(str(parent))
    assert (precious / "file").exists()
    assert sorted(p.name for p in parent.iterdir()) == ["xids-abcde0", "xids-abcdef", "xids-mine"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_another_users_folder_is_left_alone(parent: Path) -> None:
    theirs = parent / "xids-abcdef"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    sweep(str(parent))
    assert theirs.exists()


def test_a_link_that_leads_out_of_the_folder_is_not_followed(parent: Path, tmp_path: Path) -> None:
    folder = make_run_folder()
    (tmp_path / "precious").touch()
    Path(folder.logs).unlink()
    Path(folder.logs).symlink_to(tmp_path)
    keep_logs(folder.path)
    assert (tmp_path / "precious").exists()
    assert not Path(folder.path).exists()
    folder.release()


def test_the_logs_that_stay_are_the_ends_of_the_newest_files(parent: Path) -> None:
    folder = make_run_folder()
    long = bytes(KEPT_FILE_BYTES) + b"the end"
    logs = with_logs(folder, **{f"worker-{i:02}.out": long for i in range(20)})
    for i in range(20):
        os.utime(logs / f"worker-{i:02}.out", (i, i))
    keep_logs(folder.path)
    left = {p.name: p.stat().st_size for p in Path(folder.logs).iterdir()}
    assert sum(left.values()) <= KEPT_LOGS_BYTES
    assert Path(folder.logs, "worker-19.out").read_bytes().endswith(b"the end")
    assert sorted(left) == [f"worker-{i:02}.out" for i in range(4, 20)]
    folder.release()


def test_logs_of_a_living_run_lose_ended_processes_first_and_then_the_largest(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOGS_BYTES", 100 << 10)
    folder = make_run_folder()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    living = f"worker-a-{os.getpid()}.out"
    content = b"x" * (40 << 10)
    names = [f"worker-b-{ended.pid}.out", "gcs_server.out.1", living, "raylet.out"]
    logs = with_logs(folder, **dict.fromkeys(names, content))
    for i, name in enumerate(names):
        os.utime(logs / name, (i, i))
    bound_logs(folder.path)
    assert {p.name for p in logs.iterdir()} == {living, "raylet.out"}
    for name in (living, "raylet.out"):
        with open(logs / name, "ab") as file:
            file.write(content)
    bound_logs(folder.path)
    assert sorted(p.stat().st_size for p in logs.iterdir()) == [0, 80 << 10], "one was emptied, none removed"
    folder.release()


def test_a_path_too_long_for_sockets_is_told_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(EnvironmentFault, match="too long"):
        make_run_folder()
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(long))  # nobody gave that for Ray
    assert run_folder.parent_folder() == "/tmp"


def test_a_parent_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/proc")
    with pytest.raises(EnvironmentFault, match="no folder for the run"):
        make_run_folder()


def test_the_lock_goes_with_the_last_process_that_holds_it(parent: Path) -> None:
    folder = make_run_folder()
    holder = subprocess.Popen(["sleep", "600"], pass_fds=[folder.descriptor])
    folder.release()
    descriptor = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder.kill()
    holder.wait()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
