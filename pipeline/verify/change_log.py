"""``ChangeLog``, as users import it: the log's tables as DataFrames (``changelog.log_frames``), and ``verify``.

It is a class of its own because a verification also needs the server, which the reading of a log does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.pg_rules import renamed_columns
from xidstream.pipeline.postgres.login import Login
from xidstream.pipeline.verify.result import Verification
from xidstream.pipeline.verify.settings import VerifySettings
from xidstream.pipeline.verify.verifying import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ChangeLog(LogFrames):
    __doc__ = LogFrames.__doc__

    def verify(
        self,
        spark: SparkSession,
        dsn: str,
        publication: str | Sequence[str],
        tables: Sequence[str] = (),
        *,
        password_command: Sequence[str] = (),
        column_names: Sequence[str] = (),
        result: str | os.PathLike[str] | None = None,
        rows_per_range: int = VerifySettings.rows_per_range,
        pause_ms: int = VerifySettings.pause_ms,
        bytes_per_s: int = VerifySettings.bytes_per_s,
        timeout_s: float = VerifySettings.timeout_s,
        keys: int = VerifySettings.keys,
        show_values: bool = VerifySettings.show_values,
        staging: str = VerifySettings.staging,
    ) -> Verification:
        """Compare each table's rows in the source with ``as_of`` at the moment of a snapshot of the source, exactly.

        ``dsn``, ``publication``, ``column_names``: those of the slot's run, which must be up meanwhile: the log has to
        reach the snapshot within ``timeout_s``. ``tables``: names, or patterns such as ``sales.*``; all, if there are
        none. ``result``: a JSON file, written after each table, from which an interrupted verification goes on.
        ``rows_per_range``: of the ranges of keys that are compared; ``keys``: how many rows that differ are shown, with
        ``show_values`` their values, too. ``pause_ms``, ``bytes_per_s``: spare the source. ``staging``: a folder that
        Spark's executors can read, for the source's rows; a session in one JVM needs none.

        A table that cannot be compared is not verified, and says why. Raises PreconditionMissing where the server is
        not the log's, UsageError for a table that nobody has, and what connecting raises. docs/verify.md has the rest.
        """
        settings = VerifySettings(
            rows_per_range, pause_ms, bytes_per_s, timeout_s, keys, show_values, staging
        )
        names = publication.split(",") if isinstance(publication, str) else publication
        login = Login(dsn, tuple(password_command))
        return verify(
            self,
            lambda: spark,
            login,
            [name.strip() for name in names],
            tables=tables,
            settings=settings,
            result=result,
            column_names=renamed_columns(column_names),
        )
