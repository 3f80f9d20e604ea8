"""Where the pipeline runs: Ray actors, a RayDP Spark session, the command line.

Only this package imports ray and raydp. The actors are thin shells around ``pipeline``: they move blocks and
names between processes and keep no rule of their own.

The public interface is ``xidstream``'s. The names are found here as well, because ``from actors import ChangeStream``
and ``python -m actors`` work from a checkout. Nothing else may be imported under the name ``actors``: every module
would then exist twice.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import xidstream

    if name in xidstream.__all__:
        return getattr(xidstream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
