"""``xidstream mirror``: a Spark session of its own, and the loop of refreshes on a thread.

The main thread waits for signals. The first one ends the loop, with what it has in hand given up (the next refresh
takes it up), and the status is 0.
"""

from __future__ import annotations

import threading

import click

from xidstream.actors.mirror import MirrorLoop, loop_of
from xidstream.actors.runtime.signals import StopRequest
from xidstream.actors.runtime.waiting_line import waiting
from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.pg_rules import duration_s
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.settings.sink_kinds import DELTA, kind_named
from xidstream.pipeline.sinks.sink import check_sink_spec

_POLL_S = 0.25


def mirror_command(config: Config, stop: StopRequest) -> None:
    """Raises what ended the refreshes."""
    kind = kind_named(config.sink)
    if kind is None or not kind.has_states:
        raise ConfigError(
            f"base tables are made from the change log of a Delta sink, not from {redacted(config.sink)!r}",
            remedy="give its root as --sink delta:URI"
            if kind is not None
            else f"did you mean {DELTA.spec(redacted(config.sink))}?",
        )
    check_sink_spec(config.sink)
    choose_for_process(config.storage_mode)
    every_s = duration_s(config.mirror_every, "every") if config.mirror_every else None
    from xidstream.actors.driver.session import spark_session, stop_spark

    with stop.held():
        spark = spark_session("xidstream-mirror", config)
    try:
        if stop.asked:
            return
        loop = loop_of(config, spark, every_s=every_s, tell=click.echo)
        thread = threading.Thread(target=loop.run_quietly, name="xidstream-mirror", daemon=True)
        thread.start()
        if every_s is None:
            with waiting("refreshing the base tables"):
                _wait(thread, loop, stop)
        else:
            _wait(thread, loop, stop)
        if loop.failure is not None:
            raise loop.failure
    finally:
        stop_spark()


def _wait(thread: threading.Thread, loop: MirrorLoop, stop: StopRequest) -> None:
    while thread.is_alive():
        thread.join(_POLL_S)
        if stop.asked:
            loop.stop()  # again and again: a job that began since is cancelled, too
