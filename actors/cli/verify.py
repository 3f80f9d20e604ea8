"""``xidstream verify``: a Spark session of its own, one verification, and its result as text or JSON.

The statuses are the command line's, with a narrower meaning: 0 says that every table was compared and is equal, 1 that
one differs. What could not be compared ends with 3 (or with 2 or 4, as the error's class has it), also where the cause
is one that ends other commands with 1. So a job that runs it needs no look at the text.

A signal ends it between two ranges or tables. What is finished by then is in the file that ``--result`` names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.errors import ConfigError, ExitStatus, PreconditionMissing, XidstreamError
from xidstream.pipeline.pg_rules import renamed_columns
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.settings.sink_kinds import DELTA, ICEBERG
from xidstream.pipeline.sinks.sink import check_sink_spec, parse_sink_spec
from xidstream.pipeline.verify.change_log import ChangeLog
from xidstream.pipeline.verify.result import Verdict, Verification
from xidstream.pipeline.verify.settings import VerifySettings
from xidstream.pipeline.verify.verifying import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def verify_command(
    config: Config,
    stop: StopRequest,
    tables: Sequence[str],
    settings: VerifySettings,
    *,
    result: Path | None,
    as_json: bool,
) -> None:
    """Raises SystemExit with what was found, and what could not be begun."""
    kind, _ = parse_sink_spec(config.sink)
    if not kind.has_states:
        raise ConfigError(
            f"verify reads the change log of a sink of tables, and the sink {kind.name} keeps none",
            remedy=f"give what the run has as --sink: {DELTA.form} or {ICEBERG.form}",
        )
    check_sink_spec(config.sink)
    choose_for_process(config.storage_mode)
    from xidstream.actors.driver.session import spark_session, stop_spark

    def check() -> None:
        if stop.asked:
            raise click.Abort

    started: list[SparkSession] = []

    def session() -> SparkSession:
        with stop.held():
            started.append(spark_session("xidstream-verify", config))
        check()
        return started[0]

    try:
        found = verify(
            ChangeLog(config.sink, config.slot or None),
            session,
            login_of(config),
            config.publication,
            tables=tables,
            settings=settings,
            result=result,
            tell=click.echo if not as_json else lambda text: None,
            check=check,
            column_names=renamed_columns(config.column_names),
        )
    except XidstreamError as error:
        if error.policy.exit_status is not ExitStatus.FAILED:
            raise
        # 1 says that a table differs.
        raise PreconditionMissing(error.message, remedy=error.remedy) from error
    finally:
        if started:
            stop_spark()
    click.echo(json.dumps(found.to_json(), ensure_ascii=False) if as_json else found.summary)
    status = status_of(found)
    if status:
        raise SystemExit(status)


def status_of(found: Verification) -> ExitStatus:
    if found.differs:
        return ExitStatus.FAILED
    if found.of(Verdict.NOT_VERIFIED) or not found.tables:
        return ExitStatus.PRECONDITION
    return ExitStatus.DONE
