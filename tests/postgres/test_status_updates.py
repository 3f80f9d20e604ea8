"""What the server is told, and how often, by the reader's loop: no Ray, a sink that the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import psycopg
import pytest

from tests.feedback_spy import FeedbackSpy, Held
from tests.open_slot import open_slot
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.actors.reader.reading import Reading
from xidstream.pipeline.config import Config
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.slot.opening import slot_settings
from xidstream.pipeline.stream import Cut, PlainBlock, Position, StreamCutter

pytestmark = pytest.mark.postgres


class StalledSink:
    """All that is behind the reader's loop; from ``go_on`` on it holds everything at once."""

    def __init__(self, confirm: Callable[[Lsn], None]) -> None:
        self._confirm = confirm
        self._lock = threading.Lock()
        self._goes_on = False
        self.n_blocks = 0
        self.submitted_bytes = self.sent_bytes = self.queued_bytes = 0
        self.in_flight_bytes = self.backlog_bytes = 0
        self.end_lsn = INVALID_LSN
        self._reached = INVALID_LSN

    def submit(self, cuts: Sequence[Cut]) -> None:
        with self._lock:
            for cut in cuts:
                assert isinstance(cut, (PlainBlock, Position)), cut
                lsn = cut.wal_end if isinstance(cut, Position) else cut.end_lsn
                self.n_blocks += isinstance(cut, PlainBlock)
                self._reached = max(self._reached, lsn)
            if self._goes_on:
                self._confirm(self._reached)

    def go_on(self) -> None:
        with self._lock:
            self._goes_on = True
            self._confirm(self._reached)

    def check(self) -> None:
        pass

    def await_look(self, timeout_s: float) -> None:
        raise AssertionError("nothing is over credit")


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
            slot = open_slot(slot_settings(config), create=True)
            reading = Reading(
                config,
                slot.connection,
                StreamCutter(block_bytes=config.block_bytes, pending_limit_bytes=1 << 20, parallel=False),
                threading.Event(),
                confirmed_flush_lsn=slot.confirmed_flush_lsn,
                status_interval_s=10.0,
            )
            sink = StalledSink(reading.confirm)
            failed: list[BaseException] = []

            def read() -> None:
                try:
                    reading.run(sink)  # type: ignore[arg-type]
                except BaseException as error:
                    failed.append(error)

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
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
            assert shutdown.is_alive() and not failed, "the server waits for what was not confirmed"
            sink.go_on()
            shutdown.join(30)
            assert not shutdown.is_alive()
            assert "immediate shutdown" not in server.log_tail(200)
            reader.join(30)
            assert failed, "the server has ended the stream"
            slot.connection.close()
