"""Chooses the account that an embedded PostgreSQL runs under, and lets that account reach its files.

PostgreSQL refuses to run as root. For root the server runs as the system user ``pgserver``, which is the wheel's name
for it. If that user is missing, ``useradd`` makes it; without ``useradd`` the server runs as ``nobody``. The folders
above the data and the binaries get the traverse permission (``o+x``, not ``o+r``). For any other user the server runs
as that user, and nothing is changed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any, final

from xidstream.pipeline.errors import PreconditionMissing

_NAMES = ("pgserver", "nobody")


@final
class ServerAccount:
    """``entry`` is None if the server runs as the present user."""

    def __init__(self, entry: pwd.struct_passwd | None) -> None:
        self._entry = entry

    @classmethod
    def choose(cls) -> ServerAccount:
        """The account for this process. Raises PreconditionMissing for root if there is no other user."""
        if os.geteuid() != 0:
            return cls(None)
        useradd = shutil.which("useradd")
        for name in _NAMES:
            entry = _entry(name)
            if entry is None and name == _NAMES[0] and useradd is not None:
                subprocess.run(
                    [useradd, "--system", "-s", "/usr/sbin/nologin", name], check=False, capture_output=True
                )
                entry = _entry(name)
            if entry is not None:
                return cls(entry)
        raise PreconditionMissing(
            "PostgreSQL does not run as root, and there is no system user for it",
            remedy="run as an ordinary user",
        )

    def give(self, path: Path) -> None:
        """Make the account the owner of ``path``."""
        if self._entry is not None:
            os.chown(path, self._entry.pw_uid, self._entry.pw_gid)

    def open_way_to(self, path: Path) -> None:
        """Let every account pass through the folders above ``path``, but not list them."""
        if self._entry is None:
            return
        for parent in path.resolve().parents:
            mode = parent.stat().st_mode
            if not mode & 0o001:
                parent.chmod(mode | 0o001)

    def popen_options(self) -> dict[str, Any]:
        if self._entry is None:
            return {}
        return {"user": self._entry.pw_uid, "group": self._entry.pw_gid, "extra_groups": []}


def _entry(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None
