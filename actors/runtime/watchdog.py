"""Ends the Ray that this process started if the process is killed (SIGKILL, the OOM killer), and tidies up after it.

An exit handler of ``ray.init`` ends Ray's servers, and SIGKILL does not run it. The servers then notice only after many
seconds that nobody needs them, and until then their reader holds the slot. Nobody would remove the run's folder,
either. The watchdog is a small process that waits on a pipe which only the run holds open. It has a session of its
own, so a kill of the whole process group does not reach it. It is told of Ray's servers, and of how the run ended:

====================  ==============================================================================
the pipe says         the watchdog
====================  ==============================================================================
``servers PID …``     opens a descriptor of each (pidfd), so that it never kills a later process with the same number
``done``              waits until nobody lives in the folder, and removes it
``failed``            the same, but keeps the logs
nothing, and ends     kills the servers and all that were started in the folder, and keeps the logs
====================  ==============================================================================

Workers and their JVMs end with their raylet. They and whoever has a file of the folder open are waited for, and never
killed for that: it may be a person who reads a log. While the run goes on the watchdog keeps its logs within bounds.

Rejected: PR_SET_PDEATHSIG, because it fires when the *thread* that made the child ends, and only for direct children;
a shell with the process ids, because a number may be another process's after months.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from xidstream.actors.runtime.run_folder import (
    RunFolder,
    bound_logs,
    keep_logs,
    living,
    remove,
    started_in,
    was_started_in,
)
from xidstream.checkout import IMPORT_ROOT

_LOOK_AT_LOGS_S: Final = 60.0
_KILLED_S: Final = 30.0
"""How long servers may go on to start others while they are killed."""
_LEFT_S: Final = 600.0
"""How long others may take to leave the folder, on a machine that is very busy. Then it is left to the next run."""
_END_S: Final = 20.0
"""How long an orderly end waits for the watchdog, so that a program that has ended has left nothing."""
_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[2]); from xidstream.actors.runtime.watchdog import watch; "
    "watch(sys.argv[3])"
)


class Watchdog:
    """The run's end of the pipe."""

    def __init__(self, folder: RunFolder) -> None:
        # A defect of its own is told there, and stays there: nobody tidies up then.
        with open(f"{folder.path}/watchdog.err", "ab") as errors:
            # Isolated: neither the user's PYTHONPATH nor their site decides what this imports.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, "xidstream-watchdog", str(IMPORT_ROOT), folder.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                start_new_session=True,
                pass_fds=[folder.descriptor],
            )

    def guard(self, pids: Iterable[int]) -> None:
        """Kill these, which live now, if the run is killed."""
        self._tell(f"servers {' '.join(map(str, pids))}")

    def end(self, word: str | None) -> None:
        """``done`` or ``failed``, when Ray has ended; None kills what there is. Waits until the folder is removed."""
        if word is not None:
            self._tell(word)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the watchdog was killed: the next run tidies up
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def watch(path: str) -> None:
    """The watchdog's process, with the pipe at its standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = os.getppid()
    servers, last = _listen(path)
    if last not in ("done", "failed"):
        _kill_all(path, servers)
    deadline_s = time.monotonic() + _LEFT_S
    # The owner waits for this process, and may have Ray's log open still.
    while next(living(path, owner), None) is not None:
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.2)
    if last == "done":
        remove(path)
    else:
        keep_logs(path)


def _listen(path: str) -> tuple[dict[int, int | None], str]:
    """The servers that the run has named, with their descriptors, and the last line that it sent."""
    servers: dict[int, int | None] = {}
    read, last = b"", ""
    while True:
        if not select.select([0], [], [], _LOOK_AT_LOGS_S)[0]:
            with suppress(OSError):  # it is tried again in a minute
                bound_logs(path)
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return servers, last
        *lines, read = (read + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "servers":
                servers |= {pid: _descriptor(pid) for pid in map(int, rest.split())}
            else:
                last = word


def _descriptor(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # it has ended, or the kernel is older than 5.3


def _kill_all(path: str, servers: dict[int, int | None]) -> None:
    """Kill the servers, and again what they start meanwhile, until no process is left."""
    for descriptor in servers.values():
        if descriptor is not None:
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    deadline_s = time.monotonic() + _KILLED_S
    while (found := started_in(path)) and time.monotonic() < deadline_s:
        for pid in found:
            _kill_if_started_in(pid, path)
        time.sleep(0.05)


def _kill_if_started_in(pid: int, path: str) -> None:
    """The environment is read again after the descriptor: then they are the same process's."""
    descriptor = _descriptor(pid)
    with suppress(OSError):
        if not was_started_in(pid, path):
            return
        if descriptor is None:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    if descriptor is not None:
        os.close(descriptor)
