"""PostgreSQL transactions in Spark the moment they commit, however big they are.

This package is what gets installed and imported. ``xidstream.actors`` and ``xidstream.pipeline`` are the folders
``actors/`` and ``pipeline/`` at the top of the repository (``xidstream.checkout`` says how). As installed names of
their own they would collide with a user's ``pipeline.py`` and with packages on the index.

The public names are loaded on first use. Every Spark worker imports this package on its way to
``xidstream.pipeline``, and must not load Ray for that.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Final

from xidstream.checkout import load_folders

if TYPE_CHECKING:
    from xidstream.actors.api.change_stream import ChangeStream
    from xidstream.actors.api.streaming_query import StreamingQuery
    from xidstream.actors.driver.session import spark_session
    from xidstream.actors.mirror import Mirror
    from xidstream.pipeline import errors
    from xidstream.pipeline.changelog.log_frames import LogState
    from xidstream.pipeline.pg import Lsn
    from xidstream.pipeline.settings.config import Config
    from xidstream.pipeline.spark.spark_batch import SparkBatch
    from xidstream.pipeline.verify.change_log import ChangeLog
    from xidstream.pipeline.verify.result import Verification

__all__ = [
    "ChangeLog",
    "ChangeStream",
    "Config",
    "LogState",
    "Lsn",
    "Mirror",
    "SparkBatch",
    "StreamingQuery",
    "Verification",
    "__version__",
    "errors",
    "spark_session",
]

_HOMES: Final = {
    "ChangeLog": "xidstream.pipeline.verify.change_log",
    "LogState": "xidstream.pipeline.changelog.log_frames",
    "ChangeStream": "xidstream.actors.api.change_stream",
    "StreamingQuery": "xidstream.actors.api.streaming_query",
    "Config": "xidstream.pipeline.settings.config",
    "Mirror": "xidstream.actors.mirror",
    "Lsn": "xidstream.pipeline.pg",
    "SparkBatch": "xidstream.pipeline.spark.spark_batch",
    "Verification": "xidstream.pipeline.verify.result",
    "spark_session": "xidstream.actors.driver.session",
}

load_folders()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("xidstream")
    if name == "errors":
        return import_module("xidstream.pipeline.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
