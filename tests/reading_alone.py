"""The reader's loop alone: a real slot, no Ray, and a sink that the test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.open_slot import open_slot
from xidstream.actors.reader.reading import Reading
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.opening import OpenSlot, slot_settings
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.stream import PlainBlock, Position, StreamCutter, StreamEvent


class PlayedSink:
    """All that is behind the reader's loop; from ``go_on`` on it holds everything at once."""

    def __init__(self, confirm: Callable[[Lsn], None]) -> None:
        self._confirm = confirm
        self._lock = threading.Lock()
        self._goes_on = False
        self.n_blocks = 0
        self.submitted_bytes = self.sent_bytes = self.queued_bytes = 0
        self.in_flight_bytes = self.credit_bytes = self.backlog_bytes = 0
        self.end_lsn = INVALID_LSN
        self._reached = INVALID_LSN
        self.failed: list[BaseException] = []

    def submit(self, events: Sequence[StreamEvent]) -> None:
        with self._lock:
            for event in events:
                assert isinstance(event, (PlainBlock, Position)), event
                lsn = event.wal_end if isinstance(event, Position) else event.end_lsn
                self.n_blocks += isinstance(event, PlainBlock)
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


@contextmanager
def reading_alone(config: Config) -> Iterator[tuple[OpenSlot, PlayedSink, threading.Thread]]:
    """Read the config's slot, which is made, on a thread, until the block ends or the server ends the stream."""
    slot = open_slot(slot_settings(config), create=True)
    stop = threading.Event()
    reading = Reading(
        config,
        slot.connection,
        StreamCutter(block_bytes=config.block_bytes, pending_limit_bytes=1 << 20, parallel=False),
        stop,
        confirmed_flush_lsn=slot.confirmed_flush_lsn,
        status_interval_s=config.status_interval_ms / 1000,
    )
    sink = PlayedSink(reading.confirm)

    def read() -> None:
        try:
            reading.run(sink)  # type: ignore[arg-type]
        except BaseException as error:
            sink.failed.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield slot, sink, thread
    finally:
        stop.set()
        thread.join(30)
        slot.connection.close()
