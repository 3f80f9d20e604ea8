"""What a process started for itself ends with it, however it ends, and its folder is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

PROGRAM = """
import os, subprocess, sys, time
from xidstream.actors.runtime.run_folder import RUN_FOLDER, make_run_folder
from xidstream.actors.runtime.watchdog import Watchdog

folder = make_run_folder()
watchdog = Watchdog(folder)
os.makedirs(f"{folder.ray}/session_1/logs")
os.symlink("session_1", f"{folder.ray}/session_latest")
open(f"{folder.ray}/session_1/logs/raylet.out", "w").write("said")
open(f"{folder.temporary}/big", "w").write("x" * 1000)
inside = {**os.environ, RUN_FOLDER: folder.path}
server = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True, env=inside)
stranger = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
watchdog.guard([server.pid])
print(folder.path, server.pid, child.pid, stranger.pid, flush=True)
word = sys.stdin.readline().strip()
server.kill(), server.wait(), child.kill(), child.wait()
watchdog.end(word)
"""


class Owner:
    """The program above, below a folder of its own."""

    def __init__(self, parent: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "RAY_TMPDIR": str(parent)},
        )
        assert self.process.stdout is not None
        path, *pids = self.process.stdout.readline().split()
        self.folder = Path(path)
        self.server, self.child, self.stranger = (psutil.Process(int(pid)) for pid in pids)

    def end(self, word: str) -> None:
        assert self.process.communicate(f"{word}\n", 60)[0] == "" and self.process.returncode == 0


@pytest.fixture
def owner(short_folder: Path) -> Owner:
    return Owner(short_folder)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("whole_group", [False, True])
def test_servers_and_their_children_die_with_their_killed_owner_and_only_the_logs_stay(
    owner: Owner, whole_group: bool
) -> None:
    (os.killpg if whole_group else os.kill)(owner.process.pid, signal.SIGKILL)
    owner.process.wait()
    wait_until(lambda: is_gone(owner.server) and is_gone(owner.child))
    wait_until(lambda: os.listdir(owner.folder) == ["logs"])
    assert os.listdir(owner.folder / "logs") == ["raylet.out"]
    assert not is_gone(owner.stranger)
    owner.stranger.kill()


def test_after_an_orderly_end_nothing_is_left_and_nobody_is_killed(owner: Owner) -> None:
    owner.end("done")
    assert not owner.folder.exists()
    assert not is_gone(owner.stranger)
    owner.stranger.kill()


def test_after_a_failure_the_logs_are_left(owner: Owner) -> None:
    owner.end("failed")
    assert (owner.folder / "logs" / "raylet.out").read_text() == "said"
    assert not (owner.folder / "r").exists()
    owner.stranger.kill()


def test_whoever_reads_a_log_of_a_killed_run_is_waited_for_and_not_killed(owner: Owner) -> None:
    log = owner.folder / "logs" / "raylet.out"
    reader = subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL)
    wait_until(lambda: str(log.resolve()) in [f.path for f in psutil.Process(reader.pid).open_files()])
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.wait()
    wait_until(lambda: is_gone(owner.server) and is_gone(owner.child))
    assert reader.poll() is None and log.exists()
    reader.kill()
    reader.wait()
    wait_until(lambda: not (owner.folder / "r").exists())
    owner.stranger.kill()


def test_the_number_of_a_server_that_ended_is_another_process_s_by_now(short_folder: Path) -> None:
    """A number that comes round again is made here by a program that tells the watchdog of a process, and then ends it:
    the descriptor of that process is no way to any other."""
    from xidstream.actors.runtime import watchdog

    ended = subprocess.Popen(["sleep", "600"])
    servers = {ended.pid: watchdog._descriptor(ended.pid)}
    ended.kill()
    ended.wait()
    stranger = subprocess.Popen(["sleep", "600"])
    watchdog._kill_all(str(short_folder), {stranger.pid: servers[ended.pid]})
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
