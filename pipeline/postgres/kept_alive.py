"""Keeps a replication connection alive between START_REPLICATION and the first read from it.

The server expects a status within ``wal_sender_timeout`` (60 s), and hangs up on a reader that is silent for longer.
The slot is ours from START_REPLICATION on, and only then the storage is taken over. That may take long: a store that is
slow, a large journal, much to clean up. A run that was cut off there began anew with the same work before it, for ever.

So a thread sends what the server knows already, the confirmed position, until ``end``. It moves nothing. What the
server sends meanwhile stays in the socket: nobody reads it, and the server waits. Whoever reads calls ``end`` first,
because a connection is one thread's.

Rejected: to take the storage over first and ask for the slot then. Another run may have the slot, and goes on writing.
"""

from __future__ import annotations

import threading

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.connection import ReplicationConnection


class KeptAlive:
    """``interval_s``: between two statuses; well below ``wal_sender_timeout``."""

    def __init__(self, connection: ReplicationConnection, confirmed_lsn: Lsn, interval_s: float) -> None:
        self._connection = connection
        self._confirmed_lsn = confirmed_lsn
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._error: XidstreamError | None = None
        self._thread = threading.Thread(target=self._send_forever, name="kept alive", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The caller's thread has the connection from here on. Raises what ended the connection meanwhile."""
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _send_forever(self) -> None:
        lsn = self._confirmed_lsn
        try:
            while not self._ended.wait(self._interval_s):
                self._connection.send_status(lsn, lsn, lsn)
        except XidstreamError as error:
            self._error = error
