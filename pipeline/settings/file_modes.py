"""Who may read what a run writes to a local disk: the setting ``storage_mode``.

It is the mode of folders, 0700 unless the owner says otherwise; files have the same without the right to execute. Two
means bring it about, because rows are written by several libraries:

- *The umask* of each process that is a run's own: the command line, Ray's actors, and, by inheritance or by
  ``spark.executorEnv``, the JVMs and Spark's Python. deltalake and pyarrow create files with whatever the umask leaves.
- *The modes that* ``Storage`` *gives* to folders and files. They hold in any process, also in a user's own script and
  its executors, whose umask is the user's. Only what makes them wider must be told to a process (``choose``).

In a script, tables are written by the script's process and its executors, with their umask. So the tables' root is made
beforehand, with the right mode: whoever may not enter it reads nothing below.

What exists keeps its mode, since its owner may have chosen it. ``xidstream check`` tells of roots that others may read.

Rejected: a mode for each file after its creation (deltalake makes many, and a link has its segment's mode); a umask
for the user's script, whose other files are none of our business.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xidstream.pipeline.errors import ConfigError

DEFAULT: Final = "0700"
VARIABLE: Final = "XIDSTREAM_STORAGE_MODE"
"""For Spark's Python on other machines."""

_FORM: Final = re.compile(r"0?7[0-7][0-7]")
_chosen = int(DEFAULT, 8)


def check_mode(text: str) -> None:
    """Raise ConfigError for what is no mode of a folder that its owner can use."""
    if not _FORM.fullmatch(text):
        raise ConfigError(
            f"storage_mode must be the mode of a folder, with all rights for its owner, got {text!r}",
            remedy="give three octal digits: 0700 for this user alone, 0750 to let the group read",
        )
    if int(text, 8) & 0o002:
        raise ConfigError(
            f"storage_mode {text!r} would let every login change what is stored",
            remedy="give others at most 5, as in 0755",
        )


def choose(mode: str) -> None:
    """Give this mode to all files that ``Storage`` writes from now on in this process."""
    global _chosen
    _chosen = int(mode, 8)


def choose_for_process(mode: str) -> None:
    """For a process that is the run's own: all that it, and what it starts, writes has this mode."""
    choose(mode)
    os.umask(0o777 & ~_chosen)


def create_file(path: str | Path) -> int:
    """A descriptor of a new file, for writing. Raises FileExistsError, also for a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _chosen & 0o666)


def make_folders(path: str | Path) -> None:
    """Make a folder, and those above it, where they are missing."""
    try:
        os.mkdir(path, _chosen)
    except FileNotFoundError:
        make_folders(os.path.dirname(path))
        make_folders(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def who_else(path: str, mode: str) -> str | None:
    """Who but the owner, and those whom ``mode`` lets, may list a folder or write to it: in words; None for nobody.

    A folder counts only if it can be reached: one above it that nobody else may enter closes all below.
    """
    granted = stat.S_IMODE(os.stat(path).st_mode) & ~int(mode, 8)
    if granted & 0o007 and not _is_reached(path, 0o001):
        granted &= ~0o007
    if granted & 0o070 and not _is_reached(path, 0o011):
        granted &= ~0o070
    for who, bits in (("every login of this machine", 0o007), ("its group", 0o070)):
        if granted & bits:
            may = "change" if granted & bits & 0o022 else "read"
            return f"{who} may {may} it"
    return None


def is_anybodys(path: str) -> bool:
    """Whether every login of this machine may make files and links in a folder."""
    return bool(os.stat(path).st_mode & 0o002) and _is_reached(path, 0o001)


def planted_link(path: str, n_levels: int) -> str | None:
    """A link of another login's: among the folders that lead to ``path``, or at most so many levels below it.

    A run would write through it. root's links are trusted, as are one's own."""
    above = [path, *map(str, Path(path).parents)]
    return next((each for each in [*above, *_below(path, n_levels)] if _is_others_link(each)), None)


def who_may_move(path: str) -> str | None:
    """Who else may put another folder in the place of this one or of one above it: in words; None for nobody."""
    for folder in [path, *map(str, Path(path).resolve().parents)]:
        if not os.path.isdir(folder):
            continue
        facts = os.stat(folder)
        may_change = facts.st_mode & 0o002 and not facts.st_mode & stat.S_ISVTX and folder != path
        is_others = facts.st_uid not in (0, os.geteuid())
        if (is_others or may_change) and _is_reached(folder, 0o001):
            return (
                f"{folder} belongs to {_login(facts.st_uid)}"
                if is_others
                else f"every login of this machine may change {folder}"
            )
    return None


def _below(path: str, n_levels: int) -> Iterator[str]:
    with os.scandir(path) as entries:
        for entry in entries:
            yield entry.path
            if n_levels > 1 and entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, n_levels - 1)


def _is_others_link(path: str) -> bool:
    facts = os.lstat(path)
    return stat.S_ISLNK(facts.st_mode) and facts.st_uid not in (0, os.geteuid())


def _login(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user {uid}"


def _is_reached(path: str, bits: int) -> bool:
    """Whether each folder above can be entered by somebody of the class that ``bits`` name."""
    return all(os.stat(above).st_mode & bits for above in Path(path).resolve().parents)
