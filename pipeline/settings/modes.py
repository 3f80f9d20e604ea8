"""Settings of which the code asks again and again which word they have: an enum for each, whose values people write."""

from __future__ import annotations

import enum


class SparkMode(enum.Enum):
    """The setting ``spark``. ``AUTO`` is LOCAL on a Ray that the run itself starts, and RAYDP on any other."""

    AUTO = "auto"
    LOCAL = "local"
    RAYDP = "raydp"


class SnapshotMode(enum.Enum):
    """The setting ``snapshot``. ``ONLY`` is INITIAL in a run that ends when all tables are taken."""

    INITIAL = "initial"
    NEVER = "never"
    ONLY = "only"
