"""Writes heartbeats while a reader reads: a thread of the reader's process, with a connection of its own.

What goes wrong here is no reason to stop reading: the reader notices a lost server by itself, and a server that cannot
be written to (a standby) can still be read. So an error is logged, once until the next heartbeat that succeeds, and
the thread connects again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.postgres.heartbeat import heartbeat_connection, write_heartbeat
from xidstream.pipeline.postgres.login import Dsn

log = logging.getLogger(__name__)

_LEAST_PAUSE_S = 1.0


@contextmanager
def heartbeats(dsn: Dsn, interval_s: float) -> Iterator[None]:
    """Write a heartbeat each ``interval_s`` while the block runs; 0: none. ``dsn``: of the very server that is read."""
    if not interval_s:
        yield
        return
    over = threading.Event()
    # Nobody waits for its end: it may wait for the server, which may be gone.
    threading.Thread(target=_write_until, args=(over, dsn, interval_s), name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _write_until(over: threading.Event, dsn: Dsn, interval_s: float) -> None:
    is_logged = False
    while not over.is_set():
        try:
            with heartbeat_connection(dsn) as connection:
                while not over.is_set():
                    write_heartbeat(connection)
                    is_logged = False
                    over.wait(interval_s)
        except XidstreamError as error:
            if not is_logged:
                log.warning("no heartbeat was written: %s", error.message)
            is_logged = True
            over.wait(max(_LEAST_PAUSE_S, interval_s))
