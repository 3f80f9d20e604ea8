"""Where the pipeline runs: Ray actors, a RayDP Spark session, the command line.

Only this package imports ray and raydp. The actors are thin shells around ``pipeline``: they move blocks and
names between processes and keep no rule of their own.

``ChangeStream`` is the interface for PySpark scripts; ``python -m actors`` (installed as ``xidstream``) the one
for shells. It is loaded on first use, so that ``xidstream --help`` does not wait for Ray and a JVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.change_stream import ChangeStream, StreamingQuery
    from pipeline.config import Config

__all__ = ["ChangeStream", "Config", "StreamingQuery"]


def __getattr__(name: str) -> Any:
    if name in ("ChangeStream", "StreamingQuery"):
        import actors.change_stream

        return getattr(actors.change_stream, name)
    if name == "Config":
        from pipeline.config import Config

        return Config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
