"""What the driver's JVM writes to stderr, without the notes of Ray's library in it.

A JVM that joins Ray loads Ray's C++ library. Before that library has read any setting, it notes each connection on
stderr, at its level INFO. In a user's script the JVM shares the terminal. So its stderr is a pipe here. A thread passes
on what comes, but for these notes. Warnings and errors of Ray, and all that Java and Spark say, get through.

Rejected: ``RAY_BACKEND_LOG_LEVEL``, which the library reads later; a file in place of the terminal, which would hide
what Spark has to say.

Called by ``local_session``, before it makes the session.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from typing import BinaryIO, Final

_NOTE: Final = re.compile(rb"\[\d{4}-\d\d-\d\d [^]]* I \d+ \d+\] \S+\.cc:\d+: ")


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM that the next session of this process will have. Does nothing if there is one.

    Raises what PySpark raises where it does not start.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    reading, writing = os.pipe()
    try:
        gateway = launch_gateway(conf, popen_kwargs={"stderr": writing})
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    threading.Thread(
        target=_pass_on, args=(os.fdopen(reading, "rb"),), name="JVM stderr", daemon=True
    ).start()
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def _pass_on(lines: BinaryIO) -> None:
    with lines:
        for line in lines:
            if not _NOTE.match(line):
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
