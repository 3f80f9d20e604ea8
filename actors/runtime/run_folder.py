"""The one folder on this machine that a run has for itself: Ray's session, the temporary files of all its processes.

``xids-…`` below RAY_TMPDIR, TMPDIR or /tmp, for its user alone::

    xids-3f09ac/
        logs -> r/session_latest/logs      the logs, also after a run that failed
        r/                                 Ray's temporary folder: sessions, sockets, the library of Ray's Java
        t/                                 TMPDIR and java.io.tmpdir of all processes, Spark's local folder

Ray gives everybody every right on its own folders (it changes their modes itself), so they lie within one that only
its user may enter.

*Who lives in it.* The run and its watchdog hold a lock (flock) on the folder itself. The kernel gives it up with the
last of them, so it is right after any crash, and no process id is trusted. systemd-tmpfiles leaves a locked folder
alone, too: without that it takes the sockets of a run after ten days. Ray's processes cannot hold the lock, because Ray
closes what they would inherit. They are known by RUN_FOLDER in their environment, or by a file of the folder that they
have open (``setproctitle`` overwrites the environment of Ray's workers).

*Who removes it.* The watchdog, after any end of the run (``actors.runtime.watchdog``). If it was killed as well, the
next run of this user does (``sweep``). After a failure the logs stay, cut to KEPT_LOGS_BYTES, of the last KEPT_RUNS
runs.

Only the standard library: the watchdog imports this, and should be small.

Rejected: a lock file beside the folder, which a cleaner of /tmp removes; a name that can be foretold, which another
login could make first; the session's own name for Ray's folder, as paths of sockets have 107 bytes at most.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from xidstream.pipeline.errors import EnvironmentFault

RUN_FOLDER: Final = "XIDSTREAM_RUN_FOLDER"
"""The variable in the environment of Ray's processes, and of the processes that they start."""
LOGS_BYTES: Final = 256 << 20
"""The most that the logs of a run may take while it runs."""
ROTATED_BYTES: Final = 8 << 20
"""At this size Ray begins a log anew, and keeps the one before. A day of a busy run is some 200 KB a process."""
KEPT_LOGS_BYTES: Final = 16 << 20
KEPT_FILE_BYTES: Final = 1 << 20
KEPT_RUNS: Final = 3
"""What is kept of a failed run: of all its logs, of one file (its end), and of how many runs."""

_NAME: Final = re.compile(r"xids-[0-9a-f]{6}")
_SOCKET_BYTES: Final = 107
_LONGEST_SOCKET: Final = len("/xids-3f09ac/r/session_2026-11-26_12-43-49_123456_4194304/sockets/plasma_store")
_PID: Final = re.compile(r"[-_](\d+)\.(?:out|err|log)$")


class RunFolder:
    """A folder that this process holds the lock of. A child that inherits ``descriptor`` holds it, too."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.ray = os.path.join(path, "r")
        self.temporary = os.path.join(path, "t")
        self.logs = os.path.join(path, "logs")

    def release(self) -> None:
        """Close this process's descriptor; a process that inherited one keeps it."""
        with suppress(OSError):
            os.close(self.descriptor)


def make_run_folder() -> RunFolder:
    """Make a run's folder. Folders of runs without a living process are removed first.

    Raises EnvironmentFault where there is no room for it, or the path is too long for Ray's sockets.
    """
    parent = parent_folder()
    try:
        os.makedirs(parent, exist_ok=True)
        sweep(parent)
        return _make(parent)
    except OSError as error:
        raise EnvironmentFault(
            f"no folder for the run's temporary files can be made in {parent}: {error.strerror}",
            remedy="give RAY_TMPDIR a folder on a local disk that this user may write to",
        ) from error


def parent_folder() -> str:
    """Where the folders of runs are: as Ray, and nearly all programs, choose it."""
    chosen = os.environ.get("RAY_TMPDIR")
    if chosen:
        if not _fits(chosen):
            raise EnvironmentFault(
                f"RAY_TMPDIR is too long a path: Ray's sockets below it have {_SOCKET_BYTES} bytes",
                remedy=f"give RAY_TMPDIR a path of at most {_SOCKET_BYTES - _LONGEST_SOCKET} bytes",
            )
        return os.path.realpath(chosen)
    general = os.environ.get("TMPDIR", "")
    return os.path.realpath(general) if general and _fits(general) else "/tmp"


def _fits(parent: str) -> bool:
    return len(os.fsencode(os.path.realpath(parent))) + _LONGEST_SOCKET <= _SOCKET_BYTES


def _make(parent: str) -> RunFolder:
    while True:
        path = os.path.join(parent, f"xids-{secrets.token_hex(3)}")
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        descriptor = _locked(path)
        if descriptor is None:
            continue  # another run that starts now took it for left behind, in the moment before the lock
        folder = RunFolder(path, descriptor)
        os.mkdir(folder.ray, 0o700)
        os.mkdir(folder.temporary, 0o700)
        os.symlink(os.path.join("r", "session_latest", "logs"), folder.logs)
        return folder


def _locked(path: str) -> int | None:
    """A descriptor of the folder with its lock; None if it is gone, not ours, or somebody's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, there = os.fstat(descriptor), os.stat(path, follow_symlinks=False)
        if held.st_uid == os.geteuid() and (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino):
            return descriptor
    except OSError:
        pass  # locked by its run, or removed in between
    os.close(descriptor)
    return None


# -- the end -------------------------------------------------------------------------------------------


def sweep(parent: str) -> None:
    """Remove what is left of this user's runs that nobody lives in, but the logs of the last ones."""
    claimed = {}
    for entry in list(os.scandir(parent)):
        descriptor = _locked(entry.path) if _NAME.fullmatch(entry.name) else None
        if descriptor is not None:
            claimed[entry.path] = descriptor
    left = [path for path in claimed if not _is_kept(path)]
    inhabited = {folder for pid in _pids() for folder in _folders_used_by(pid, parent)} if left else set()
    for path in left:
        if path not in inhabited:
            with suppress(OSError):  # what cannot be removed today is tried again by the next run
                keep_logs(path)
    kept = [path for path in claimed if os.path.exists(path) and path not in inhabited]
    for path in sorted(kept, key=lambda path: os.stat(path).st_mtime)[:-KEPT_RUNS]:
        remove(path)
    for descriptor in claimed.values():
        os.close(descriptor)


def remove(path: str) -> None:
    """All of it. A process that ends just now may still write, so it is tried twice; the next run tries again."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def keep_logs(path: str) -> None:
    """Remove all but the logs, and of these what is too much. Without logs nothing is left."""
    folder, aside = Path(path), Path(path, "logs.kept")
    logs = folder / "logs"
    if logs.is_symlink():
        found = logs.resolve()
        # A link that leads elsewhere is not of our making.
        if found.is_dir() and folder.resolve() in found.parents:
            os.rename(found, aside)
        logs.unlink()
    if aside.is_dir():
        os.rename(aside, logs)
    for entry in folder.iterdir():
        if entry.name == "logs":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if not logs.is_dir():
        folder.rmdir()
        return
    _cut(logs)


def _is_kept(path: str) -> bool:
    return os.listdir(path) == ["logs"] and not os.path.islink(os.path.join(path, "logs"))


def _cut(logs: Path) -> None:
    """Keep the ends of the newest files."""
    left = KEPT_LOGS_BYTES
    for path, facts in sorted(_files(logs), key=lambda file: -file[1].st_mtime):
        n_kept = min(facts.st_size, KEPT_FILE_BYTES, left)
        left -= n_kept
        if not n_kept:
            path.unlink(missing_ok=True)
        elif n_kept < facts.st_size:
            with open(path, "rb+") as file:
                file.seek(-n_kept, os.SEEK_END)
                end = file.read()
                file.seek(0)
                file.write(end)
                file.truncate()
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def bound_logs(path: str) -> None:
    """In a run that goes on: keep its logs within LOGS_BYTES.

    Ray bounds each file of a process that lives (ROTATED_BYTES), and each epoch has new processes. So the oldest files
    of ended processes go first. What is left may be files that nobody rotates, such as what users' code prints in a
    JVM: the largest are emptied.
    """
    files = sorted(_files(Path(path, "r")), key=lambda file: file[1].st_mtime)
    files = [file for file in files if "logs" in file[0].parts]
    total = sum(facts.st_blocks * 512 for _, facts in files)
    for file, facts in [f for f in files if not _is_in_use(f[0])]:
        if total <= LOGS_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= facts.st_blocks * 512
    for file, facts in sorted(files, key=lambda f: -f[1].st_blocks):
        if total <= LOGS_BYTES:
            return
        with suppress(FileNotFoundError):
            os.truncate(file, 0)
            total -= facts.st_blocks * 512


def _is_in_use(file: Path) -> bool:
    """Whether a process may still write to it. One whose name has no process id is that of a server."""
    found = _PID.search(file.name)
    if found is None:
        return not re.search(r"\.\d+$", file.name)
    return os.path.exists(f"/proc/{found[1]}")


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone by now
                facts = os.stat(os.path.join(root, name), follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    found.append((Path(root, name), facts))
    return found


# -- who lives in it -----------------------------------------------------------------------------------


def living(path: str, besides: int = 0) -> Iterator[int]:
    """The process ids, but this one's and ``besides``, of those that were started in the folder or have a file of it
    open."""
    for pid in _pids():
        if pid != besides and path in _folders_used_by(pid, os.path.dirname(path)):
            yield pid


def started_in(path: str) -> list[int]:
    """The process ids of those that have the folder in their environment."""
    return [pid for pid in _pids() if was_started_in(pid, path)]


def was_started_in(pid: int, path: str) -> bool:
    return _birthplace(pid) == path


def _folders_used_by(pid: int, parent: str) -> Iterator[str]:
    """The folders below ``parent`` that the process was started in or has a file of open. More than once, perhaps."""
    if (birthplace := _birthplace(pid)) is not None:
        yield birthplace
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # ended, or another user's
    above = f"{parent.rstrip('/')}/"
    for each in descriptors:
        with suppress(OSError):
            file = os.readlink(f"/proc/{pid}/fd/{each}")
            if file.startswith(above) and "/" in (rest := file[len(above) :]):
                yield above + rest.partition("/")[0]


def _birthplace(pid: int) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None  # ended, or another user's
    name = f"{RUN_FOLDER}=".encode()
    found = next((each for each in environment.split(b"\0") if each.startswith(name)), None)
    return None if found is None else os.fsdecode(found[len(name) :])


def _pids() -> list[int]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []  # not Linux: then only the lock tells
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]
