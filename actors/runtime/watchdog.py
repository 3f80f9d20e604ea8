"""Ends the Ray that this process started when the process dies without a word (SIGKILL, the OOM killer).

``ray.init`` leaves its servers to an exit handler, which SIGKILL does not run: they then notice only after many
seconds that nobody needs them, and until then their reader holds the slot. The watchdog is a shell in a session of its
own, out of reach of a kill of the whole process group, that waits on a pipe which only this process holds open. When
that closes it kills Ray's servers; workers and their JVMs end with their raylet.

Rejected: PR_SET_PDEATHSIG, which fires when the *thread* that made the child ends, and only for direct children.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Iterable

_SCRIPT = 'trap "" INT TERM HUP; read -r line && exit 0; kill -KILL "$@"'
"""A line means that all ended in order; the end of the pipe without one, that nobody could write it."""


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
        # A forked child inherits the registration, but not the duty. Ray's own handler was registered earlier, so
        # it runs after this one and ends the servers in order.
        if os.getpid() == owner and watchdog.stdin is not None:
            try:
                watchdog.stdin.write(b"done\n")
                watchdog.stdin.close()
            except OSError:
                pass  # the watchdog was killed: nothing to call off
            watchdog.wait()

    atexit.register(end)
