"""Ray's native library for a JVM that joins Ray as a driver, from a folder that nobody else may write to.

Such a JVM would unpack it to ``/tmp/ray/MILLISECONDS``, and load a file that is there, whoever put it there: another
login could so run code in it. (It would also stay there, 41 MB a start.) Ray loads its library once. So whoever starts
the JVM has it loaded before, and Ray does not look in its own place.

Called by ``local_session`` and ``locked_master``. Other JVMs of Ray have the library from its session's folder.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from xidstream.actors.runtime.ray_cluster import temporary_folder


def load_library(jvm: Any) -> None:
    """Before the JVM joins Ray."""
    folder = tempfile.mkdtemp(prefix="ray-java-", dir=temporary_folder())
    try:
        jvm.io.ray.runtime.util.JniUtils.loadLibrary(folder, "core_worker_library_java", True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a loaded library needs no file
