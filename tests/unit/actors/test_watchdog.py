"""What a process started for itself ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = """
import subprocess, sys, time
from xidstream.actors.runtime.watchdog import kill_with_me
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
kill_with_me([child.pid])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def start(sleep_s: float) -> tuple[subprocess.Popen[str], psutil.Process]:
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(sleep_s)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    return owner, psutil.Process(int(owner.stdout.readline()))


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_server_dies_with_its_killed_owner_and_with_its_owners_process_group(whole_group: bool) -> None:
    owner, child = start(600)
    (os.killpg if whole_group else os.kill)(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the watchdog did not kill it"
        time.sleep(0.02)


def test_after_an_orderly_exit_the_watchdog_kills_nobody() -> None:
    owner, child = start(0)
    assert owner.wait(60) == 0
    assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    child.kill()
