"""The replication connection: START_REPLICATION, messages in, status out.

psycopg makes the connection (several hosts, name resolution, time limits, interruptible by signals). From then on its
pq layer is used, because only that layer has COPY_BOTH. Messages are read with libpq's copy functions, never from the
raw socket, which breaks under TLS (fact 31).

Rows do not become Python objects: ``copy_loop`` returns the compiled loop over the same libpq (``postgres.copy_loop``).
A caller that expects few messages can read them one by one::

    data = connection.get_copy_data()         # one CopyData message, or None when there is none yet
    if data is None: connection.wait_readable(timeout_s)

Invariants:

- One thread uses the connection. Only ``close`` may come from a second one, after the first has ended.
- No wait is unbounded: commands have ``query_timeout_s``, ``wait_readable`` has its argument, and ``send_status`` never
  waits at all.
- Output is bounded: while an earlier status is still in libpq's buffer (the server is too busy to read), a new one is
  not added. The next one supersedes it anyway.
- Input is bounded: only ``wait_readable`` and the compiled loop read the socket. If nobody calls them, the backpressure
  reaches the walsender through the socket.

Session settings are those of ``sessions``, with the encoding and the memory of decoding over them.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import pq

from xidstream.pipeline.errors import (
    ANOTHER_SLOT,
    ConnectionLost,
    EnvironmentFault,
    PreconditionMissing,
    SlotLost,
    XidstreamError,
)
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US, Lsn
from xidstream.pipeline.postgres.failures import ServerReport, from_error, from_report, from_result
from xidstream.pipeline.postgres.login import Login
from xidstream.pipeline.postgres.loopback import join_rows
from xidstream.pipeline.postgres.sessions import (
    LEAST_WAL_SENDER_TIMEOUT_MS,
    SHORT_WAL_SENDER_TIMEOUT,
    connect,
    pinned,
    set_command,
)
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.stream_options import (
    PG13,
    StreamOptions,
    quote_literal,
    start_replication_command,
)

if TYPE_CHECKING:
    from xidstream.pipeline.postgres.copy_loop import CopyLoop

_STATUS: Final = struct.Struct("!cqqqqB")  # StandbyStatusUpdate: 'r', write, flush, apply, time, reply
_DATABASE_OID: Final = (
    "SELECT oid FROM pg_catalog.pg_database "
    "WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database()"
)
_MAX_NOTICES: Final = 100
_TLS_RECHECK_S: Final = 0.1
"""Under TLS, how long a socket without data is believed before libpq is asked again."""
_READABLE: Final = select.POLLIN | select.POLLERR | select.POLLHUP


class SystemIdentity(NamedTuple):
    """The answer to IDENTIFY_SYSTEM, and the database's OID, which a rename does not change."""

    system_identifier: str
    timeline: int
    xlogpos: Lsn
    """The present end of the flushed WAL (on a standby: of the replayed WAL)."""
    dbname: str
    database_oid: int


class ReplicationConnection:
    """A connection to a walsender of our own, bound to the DSN's database.

    ``pgconn`` is psycopg's ``PGconn``, for the hot loop. ``server_version`` is ``server_version_num``.
    ``server_options`` lead a DSN to the server that was reached; no secret is in them.
    Raises what ``sessions.connect`` raises, never with a secret in the message.
    """

    def __init__(self, settings: SlotSettings) -> None:
        self._settings = settings
        self._doing = f"slot {settings.slot}"
        """The beginning of each error's text."""
        self._notices: deque[ServerReport] = deque(maxlen=_MAX_NOTICES)
        """The server's last notices, for the error that may follow them."""
        self._streaming = False
        """Whether START_REPLICATION was answered and the stream has not ended."""
        self._tls_rest = False
        """Whether OpenSSL may hold bytes that the socket does not show."""
        self._connection = connect(settings.login, replication="database")
        """psycopg's connection, which keeps ``pgconn`` alive."""
        self.pgconn = self._connection.pgconn
        """libpq's connection, which the compiled loop reads."""
        self.pgconn.notice_handler = self._take_notice
        self.server_version = self.pgconn.server_version
        """``server_version_num``, read at the login."""
        # Now, because others ask for it on other threads, and a connection that was closed meanwhile does not tell it.
        self.server_options: dict[str, str] = {
            name: value.decode()
            for name in ("host", "port", "hostaddr")
            if (value := getattr(self.pgconn, name))
        }
        self._poll = select.poll()
        """Waits for the socket."""
        self._poll.register(self.pgconn.socket, select.POLLIN)
        try:
            join_rows(self.pgconn.socket)
            self._configure()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self.closed else "streaming" if self._streaming else "idle"
        return f"ReplicationConnection({self._doing}, {state})"

    def __enter__(self) -> ReplicationConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def same_server(self) -> Login:
        """For further connections to this very server. The settings' DSN alone may lead to another one."""
        return self._settings.login.to(**self.server_options)

    # -- commands ----------------------------------------------------------------------------------------

    def identify_system(self) -> SystemIdentity:
        row = self._ask("IDENTIFY_SYSTEM")
        (oid,) = self._ask(_DATABASE_OID)
        return SystemIdentity(row[0], int(row[1]), Lsn.parse(row[2]), row[3], int(oid))

    def switch_points(self, timeline: int) -> dict[int, Lsn]:
        """Where each earlier timeline ended on the way to ``timeline`` (TIMELINE_HISTORY); empty for the first."""
        if timeline <= 1:
            return {}
        lines = self._ask(f"TIMELINE_HISTORY {timeline}")[1].splitlines()  # timeline, LSN, a reason in words
        parts = [line.split("\t") for line in lines if line.strip() and not line.startswith("#")]
        return {int(part[0]): Lsn.parse(part[1]) for part in parts}

    def show(self, setting: str) -> str:
        """The value of a setting in this session. Raises PreconditionMissing if there is no such setting."""
        return self._ask(f"SHOW {setting}")[0]

    def server_pid(self) -> int:
        """The process of this session on the server, as ``pg_replication_slots.active_pid`` has it."""
        return int(self._ask("SELECT pg_backend_pid()")[0])

    def execute(self, command: str, doing: str) -> None:
        """A command that returns nothing."""
        result = self._query(command)
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise from_result(result, doing)

    def start_replication(self, slot: str, start_lsn: Lsn, options: StreamOptions) -> None:
        """Enter COPY_BOTH. 0/0 starts at the slot's confirmed position.

        Raises SlotInUse, SlotLost, PreconditionMissing (no such slot or publication, wrong wal_level, …).
        """
        result = self._query(start_replication_command(slot, start_lsn, options))
        if result.status == pq.ExecStatus.COPY_BOTH:
            self._streaming = True
            return
        raise self._start_failure(slot, result)

    # -- the stream --------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn psycopg's errors inside the block into ours."""
        try:
            yield
        except psycopg.Error as error:
            raise from_error(error, self._doing) from None

    def get_copy_data(self) -> memoryview | None:
        """The next CopyData message, or None if there is none yet. Raises what ``end_of_stream`` returns."""
        with self.reading():
            n_bytes, data = self.pgconn.get_copy_data(1)
        if n_bytes > 0:
            return data
        if n_bytes == 0:
            return None
        raise self.end_of_stream()

    def copy_loop(self) -> CopyLoop:
        """The compiled loop over this connection. Call this after replication has started, on the same thread."""
        # Not above: it loads numba, which commands and checks do not need.
        from xidstream.pipeline.postgres.copy_loop import CopyLoop

        return CopyLoop.of(self.pgconn)

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for the server, and read what the socket has into libpq's buffer.

        Returns False when time ran out. After True there may be messages. While it waits, it sends a status that could
        not be sent at once.

        Under TLS the socket does not tell everything. libpq reads as much as its buffer has room for. A TLS record has
        up to 16 kB, and its rest then waits, decrypted, inside OpenSSL, while poll() sees an empty socket. (With libpq
        15.18 the end of a transaction came with the next keepalive, 15 s late; 18.6 reads the rest itself.) libpq's
        interface does not show such a rest. So one more read without poll() follows each read from the socket, and an
        idle socket is not believed for longer than ``_TLS_RECHECK_S``.
        """
        events = select.POLLIN
        with self.reading():
            if self.pgconn.flush() != 0:
                events |= select.POLLOUT
            if self._tls_rest:
                self._tls_rest = False
                self.pgconn.consume_input()
                return True
            patience_s = timeout_s
            if self.pgconn.ssl_in_use and timeout_s > _TLS_RECHECK_S:
                patience_s, self._tls_rest = _TLS_RECHECK_S, True
            self._poll.modify(self.pgconn.socket, events)
            for _, event in self._poll.poll(max(0.0, patience_s) * 1000):
                if event & select.POLLOUT:
                    self.pgconn.flush()
                if event & _READABLE:
                    self.pgconn.consume_input()
                    self._tls_rest = bool(self.pgconn.ssl_in_use)
                    return True
        return self._tls_rest

    def send_status(self, write: Lsn, flush: Lsn, apply: Lsn, reply: bool = False) -> bool:
        """Send feedback to the server. Only ``flush`` moves the slot. Never waits.

        Returns False if the server still has not taken an earlier status; then send again later. ``flush`` must never
        be beyond what is durable downstream, nor beyond the end of the WAL (fact 26).
        """
        now_us = time.time_ns() // 1000 - POSTGRES_EPOCH_UNIX_US
        with self.reading():
            if self.pgconn.flush() != 0:
                return False
            # Unsigned LSNs in signed fields: the top bit is set only after eight exabytes of WAL.
            if self.pgconn.put_copy_data(_STATUS.pack(b"r", write, flush, apply, now_us, reply)) != 1:
                return False
            self.pgconn.flush()
        return True

    def failure(self) -> XidstreamError:
        """The error to raise when the compiled loop found that the connection failed."""
        return from_error(psycopg.OperationalError(self.pgconn.get_error_message()), self._doing)

    def end_of_stream(self) -> XidstreamError:
        """The error that says why COPY ended. Call it when libpq returned -1, and raise its result."""
        self._streaming = False
        with self.reading():
            deadline = time.monotonic() + self._settings.query_timeout_s
            while (result := self._result(deadline)) is not None:
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    report = ServerReport.of(result)
                    if report.lacks_publication:
                        return SlotLost(
                            f"{self._doing}: {report.message} at this point of the WAL: its changes are lost",
                            remedy="creating it again is not enough, because the server decodes with the catalog of "
                            f"that time; after that, {ANOTHER_SLOT}",
                        )
                    return from_report(report, self._doing)
                if result.status in (pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_BOTH):
                    break  # the server waits for our CopyDone; the connection is given up anyway
        return ConnectionLost(f"{self._doing}: the server ended the stream, as it does when it shuts down")

    def check_notices(self) -> None:
        """Raise SlotLost where a warning tells of lost changes. Call it before what came after the warning is used.

        PostgreSQL 18 only warns, and goes on, without a publication that does not exist at that point of the WAL. The
        publication's changes are then missing from the stream for good.
        """
        while self._notices:
            notice = self._notices.popleft()
            if notice.skips_publication:
                raise SlotLost(
                    f"{self._doing}: {notice.message}",
                    remedy="create the publication again; changes made meanwhile are missing: take a new snapshot",
                )

    def stop(self, timeout_s: float) -> bool:
        """End COPY in order and close. Returns True if the server has surely read the last status.

        Closing alone does not ensure that: if input is unread, the kernel resets the connection, and the last status
        may be lost with it. Messages that still arrive are thrown away. Returns False if ``timeout_s`` was not enough
        (a walsender finishes the transaction it is sending), or if the connection broke.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if self._streaming and self._finish_copy(deadline):
                return self._result(deadline) is not None
        except (psycopg.Error, EnvironmentFault):
            pass  # it was to be closed anyway; False tells the caller that the end was not in order
        finally:
            self.close()
        return False

    def close(self) -> None:
        self._streaming = False
        self.pgconn.notice_handler = None
        self._connection.close()

    @property
    def is_local(self) -> bool:
        """Whether the connection uses a Unix socket."""
        return self.pgconn.host.startswith((b"/", b"@"))

    @property
    def closed(self) -> bool:
        return self._connection.closed

    # -- inside ------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        settings = {**pinned(self.server_version), "client_encoding": "UTF8"}
        if self.pgconn.parameter_status(b"server_encoding") == b"SQL_ASCII":
            # Such a server converts nothing. Asked for UTF8 it would still check the text, and its error names no
            # transaction, table or column. So the text is taken as it is; the decoder checks it and names them.
            settings["client_encoding"] = "SQL_ASCII"
        work_mem = self._settings.logical_decoding_work_mem
        if work_mem is not None and self.server_version >= PG13:
            settings["logical_decoding_work_mem"] = work_mem
        self.execute(set_command(settings), "session settings")
        if self._ask(SHORT_WAL_SENDER_TIMEOUT)[0] != "0":
            least = {"wal_sender_timeout": f"{LEAST_WAL_SENDER_TIMEOUT_MS}ms"}
            self.execute(set_command(least), "session settings")

    def _ask(self, command: str) -> list[str]:
        result = self._query(command)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise from_result(result, command)
        if result.ntuples != 1:
            raise PreconditionMissing(f"{command}: no answer")
        return [(result.get_value(0, column) or b"").decode() for column in range(result.nfields)]

    def _query(self, command: str) -> pq.abc.PGresult:
        """The last result of a command, or COPY_BOTH. After COPY_BOTH no more results may be asked for (fact 31)."""
        deadline = time.monotonic() + self._settings.query_timeout_s
        last: pq.abc.PGresult | None = None
        with self.reading():
            self.pgconn.send_query(command.encode())
            while (result := self._result(deadline)) is not None:
                last = result
                if result.status == pq.ExecStatus.COPY_BOTH:
                    break
        if last is None:
            raise ConnectionLost(f"{self._doing}: the server gave no answer to {command.split(' ', 1)[0]}")
        return last

    def _result(self, deadline: float) -> pq.abc.PGresult | None:
        while self.pgconn.is_busy():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ConnectionLost(f"{self._doing}: the server did not answer in time")
            self.wait_readable(remaining_s)
        return self.pgconn.get_result()

    def _finish_copy(self, deadline: float) -> bool:
        """Send CopyDone, and throw away messages until the server's CopyDone. Returns False if time ran out."""
        while self.pgconn.put_copy_end() != 1:
            if time.monotonic() >= deadline:
                return False
            self.wait_readable(0.1)
        while time.monotonic() < deadline:
            n_bytes, _ = self.pgconn.get_copy_data(1)
            if n_bytes < 0:
                return True
            if n_bytes == 0:
                self.wait_readable(deadline - time.monotonic())
        return False

    def _start_failure(self, slot: str, result: pq.abc.PGresult) -> XidstreamError:
        report = ServerReport.of(result)
        # 55000 has many meanings, and its text may be in any language. The catalog says whether the slot is lost.
        if report.sqlstate == "55000" and self.server_version >= PG13:
            status = self._query(
                f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = {quote_literal(slot)}"
            )
            found = status.status == pq.ExecStatus.TUPLES_OK and status.ntuples
            if found and status.get_value(0, 0) == b"lost":
                return SlotLost(f"{self._doing}: {report.message} (SQLSTATE {report.sqlstate})")
        return from_report(report, self._doing)

    def _take_notice(self, result: pq.abc.PGresult) -> None:
        self._notices.append(ServerReport.of(result))
