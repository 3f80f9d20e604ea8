"""The fixtures of ``tests/postgres_fixtures.py``, for this folder."""

from __future__ import annotations

from tests.postgres_fixtures import *  # noqa: F403
