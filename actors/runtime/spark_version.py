"""Which Spark is installed, and whether the RayDP beside it supports that Spark.

RayDP has a shim for each line of Spark. Where it has none, ``raydp.init_spark`` returns all the same; no executor ever
registers, and the first job hangs (Spark 4.3 with RayDP 1.7). What RayDP supports is what its package asks for, so no
version is written here. pip allows another pair with ``--no-deps`` alone. A session that the user made needs no RayDP.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from xidstream.pipeline.errors import PreconditionMissing


@lru_cache(maxsize=1)
def spark_version() -> Version:
    """The version of the PySpark that this process imports."""
    try:
        return Version(metadata.version("pyspark"))
    except metadata.PackageNotFoundError:  # of a Spark that was unpacked by hand
        import pyspark

        return Version(pyspark.__version__)


def require_raydp_for_spark() -> None:
    """Raises PreconditionMissing where RayDP does not support this Spark."""
    supported = _supported()
    found = spark_version()
    if supported is not None and found not in supported.specifier:
        raise PreconditionMissing(
            f"RayDP {metadata.version('raydp')} does not support Spark {found}, only {supported}",
            remedy="install both in tested versions, `pip install 'xidstream[pinned]'` or 'xidstream[spark4]', or give "
            "ChangeStream.start() a session that you make yourself, which needs no RayDP",
        )


def _supported() -> Requirement | None:
    try:
        wanted = metadata.requires("raydp") or []
    except metadata.PackageNotFoundError:
        return None  # The import of raydp says that it is missing.
    return next((r for r in map(Requirement, wanted) if r.name == "pyspark"), None)
