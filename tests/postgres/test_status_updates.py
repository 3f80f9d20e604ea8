"""What the server is told, and how often, by the reader's loop: no Ray, a sink that the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg
import pytest

from tests.feedback_spy import FeedbackSpy, Held
from tests.reading_alone import reading_alone
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.settings.config import Config

pytestmark = pytest.mark.postgres


def test_a_fast_shutdown_with_a_stalled_sink_is_answered_at_a_bounded_rate_and_ends_once_the_sink_has_caught_up(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    """The server asks again as soon as it is answered: 3,000 status updates a second."""
    server = own_postgres()
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("create table t (id int primary key)")
        admin.execute("create publication p for table t")
        with FeedbackSpy(str(server.socket_dir / f".s.PGSQL.{server.port}"), Held) as spy:
            config = Config(dsn=spy.dsn("postgres"), slot="s", publication=("p",), status_interval_ms=10_000)
            with reading_alone(config) as (_, sink, reader):
                admin.execute("insert into t values (1)")
                wait_until(lambda: sink.n_blocks)
                admin.close()
                shutdown = threading.Thread(target=server.stop, args=("fast",), daemon=True)
                shutdown.start()
                wait_until(lambda: "received fast shutdown request" in server.log_tail(200))
                n_before, began_s = len(spy.statuses), time.monotonic()
                wait_until(lambda: len(spy.statuses) - n_before >= 20)
                rate = (len(spy.statuses) - n_before) / (time.monotonic() - began_s)
                # A rate, which a slow machine only makes smaller.
                assert rate < 30, f"{rate:.0f} status updates a second"
                assert shutdown.is_alive() and not sink.failed, "the server waits for what was not confirmed"
                sink.go_on()
                shutdown.join(30)
                assert not shutdown.is_alive()
                assert "immediate shutdown" not in server.log_tail(200)
                reader.join(30)
                assert sink.failed, "the server has ended the stream"
