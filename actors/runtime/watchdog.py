"""Ends the Ray that this process started if the process is killed (SIGKILL, the OOM killer).

An exit handler of ``ray.init`` ends Ray's servers, and SIGKILL does not run it. The servers then notice only after many
seconds that nobody needs them, and until then their reader holds the slot. The watchdog is a shell that waits on a pipe
which only this process holds open. It has a session of its own, so a kill of the whole process group does not reach
it. When the pipe closes, it kills Ray's servers. Workers and their JVMs end with their raylet.

Rejected: PR_SET_PDEATHSIG, because it fires when the *thread* that made the child ends, and only for direct children.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Iterable

_SCRIPT = 'trap "" INT TERM HUP; read -r line && exit 0; kill -KILL "$@"'
"""A line means that everything ended in order. The end of the pipe without a line means that the process was killed."""


def kill_with_me(pids: Iterable[int]) -> None:
    """Kill these processes when this one ends in any way but an orderly exit."""
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", _SCRIPT, "xidstream-watchdog", *map(str, pids)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    owner = os.getpid()

    def end() -> None:
        # A forked child inherits this handler, but it must not run it. Ray's own handler was registered earlier, so it
        # runs after this one and ends the servers in order.
        if os.getpid() == owner and watchdog.stdin is not None:
            try:
                watchdog.stdin.write(b"done\n")
                watchdog.stdin.close()
            except OSError:
                pass  # the watchdog was killed, so it need not be told
            watchdog.wait()

    atexit.register(end)
