"""``xidstream mirror``: the loop of refreshes, and a Spark session of its own where a table is large.

The loop is on the main thread, because Ray wants to be started there. Another one looks whether a signal has come. The
first signal ends the loop. The current refresh is cancelled (the next one goes on from it), and the status is 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import click

from xidstream.actors.mirror import MirrorLoop, loop_of
from xidstream.actors.runtime.driver_session import DriverSession
from xidstream.actors.runtime.signals import StopRequest
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.settings.sink_kinds import DELTA, kind_named
from xidstream.pipeline.settings.times import duration_s
from xidstream.pipeline.sinks.sink import check_sink_spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.25


def mirror_command(config: Config, stop: StopRequest) -> None:
    """Raises what ended the refreshes."""
    kind = kind_named(config.sink)
    if kind is None or not kind.has_base_tables:
        raise ConfigError(
            "base tables are made from the change log of a Delta or Iceberg sink, not from "
            f"{redacted(config.sink)!r}",
            remedy="give what the run has: --sink delta:URI, or iceberg:CATALOG/namespace"
            if kind is not None
            else f"did you mean {DELTA.spec(redacted(config.sink))}?",
        )
    check_sink_spec(config.sink)
    choose_for_process(config.storage_mode)
    every_s = duration_s(config.mirror_every, "every") if config.mirror_every else None

    def start() -> SparkSession:
        from xidstream.actors.driver.session import spark_session

        with stop.held():
            return spark_session("xidstream-mirror", config)

    session = DriverSession(start)
    loop = loop_of(config, session, every_s=every_s, tell=click.echo)
    try:
        with (
            _stopped_with(loop, stop),
            waiting("refreshing the base tables") if every_s is None else nullcontext(),
        ):
            loop.run()
    finally:
        if session.started is not None:
            from xidstream.actors.driver.session import stop_spark

            stop_spark()


@contextmanager
def _stopped_with(loop: MirrorLoop, stop: StopRequest) -> Iterator[None]:
    """The loop ends when a person asks for it."""
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.wait(_POLL_S):
            if stop.asked:
                loop.stop()  # again and again: a job that began since is cancelled, too

    thread = threading.Thread(target=watch, name="xidstream-mirror-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
