"""The copies that Ray's Java makes of its library in ``/tmp/ray/MILLISECONDS``, 41 MB each, and never removes.

A JVM of RayDP's that joins Ray as a driver unpacks the library there before it knows Ray's session. The path is fixed
in Ray's class: neither RAY_TMPDIR nor ``java.io.tmpdir`` changes it. So the file is removed when the JVM has loaded it,
which the JVM does not notice. What a run that was killed at that moment left is removed by a later one, when it is so
old that it must have been loaded.

Ray loads a file that it finds there, whoever made it (docs/security.md says what follows). So a session in one JVM has
the library from elsewhere (``driver.local_session``).

``/tmp/ray`` belongs to all users of the machine. Where the run makes it, it has the mode of /tmp: others may add to it,
and not remove or rename what they did not make. Otherwise the umask of the first run would lock all other users out.

Only the standard library, because the watchdog imports this. Linux tells what a process has loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = Path("/tmp/ray")
_MAPPED: Final = re.compile(rb"/tmp/ray/\d{13}/libcore_worker_library_java\.so$", re.MULTILINE)
_COPY: Final = re.compile(r"\d{13}")
_OLD_S: Final = 600.0
"""Loading takes a second or two."""


def make_shared_folder() -> None:
    with suppress(OSError):  # somebody's already; where it cannot be made, the JVM says so
        _FOLDER.mkdir()
        _FOLDER.chmod(0o1777)


def remove_loaded(pids: Iterable[int]) -> None:
    """Remove the copies that these processes have loaded."""
    for pid in pids:
        with suppress(OSError):  # ended by now
            for found in _MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes()):
                _remove(Path(os.fsdecode(found)).parent)


def remove_old() -> None:
    """Remove this user's copies that nobody has removed for long."""
    with suppress(OSError):
        for entry in list(os.scandir(_FOLDER)):
            if _COPY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                facts = entry.stat(follow_symlinks=False)
                if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > _OLD_S:
                    _remove(Path(entry.path))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
