"""The connection of a snapshot's reader: ranges of a table as rows of ``COPY … TO STDOUT (FORMAT binary)``, under an
exported snapshot.

A plain connection with the walsender's session settings, so that a type's output function gives the same text as in
the stream. The caller says which columns are to come as that text: ``concat`` calls the very function. A cast to text
does not: it drops the padding of char(5), and gives an inet its /32. The other columns come as their send functions
give them.

Rejected: COPY's text format. It costs the server more for each column that is sent in binary now, and less for each
that comes as text: CPU seconds for a million rows of pgbench_accounts, and of 20 mixed columns, are 0.34 and 2.8 in
COPY's text format, 0.30 and 2.4 in binary, 0.54 and 3.7 with ``concat`` for every column
(``benchmarks/snapshot_read.py``). Most tables have few columns that need it.

Invariants:

- All ranges that are read between ``begin`` and ``end`` see one snapshot.
- No setting of the role, the database or the server ends a read: all time limits are off, and row security is an error
  and not a filter.
- The number of rows that COPY reports at its end is the number that was given out.
- No error has a row's value. A server's text is shown only where it cannot quote one: not for data exceptions, nor for
  what functions of users raise.

One thread reads, and waits at the socket. Only ``cancel`` may come from another one. A dead server is found by TCP
keepalives (``conninfo.complete`` turns them on).
"""

from __future__ import annotations

import re
import select
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq

from xidstream.pipeline.errors import (
    ComponentLost,
    ConnectionLost,
    PoisonedChange,
    ProtocolViolation,
    SnapshotInterrupted,
    SnapshotLost,
    TableUnreadable,
    XidstreamError,
)
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.pgoutput.message_buffer import Outcome
from xidstream.pipeline.postgres.copy_loop import RowLoop
from xidstream.pipeline.postgres.failures import TOO_LARGE, ServerReport, from_error, from_report
from xidstream.pipeline.postgres.login import Dsn
from xidstream.pipeline.postgres.sessions import connect, pinned, set_command
from xidstream.pipeline.postgres.stream_options import quote_identifier, quote_literal
from xidstream.pipeline.snapshot.key_filter import BY_BYTES, EQUAL, BoundComparison
from xidstream.pipeline.snapshot.tables import RangeTask

BLOCK_BYTES: Final = 4 << 20
"""The bytes of COPY's rows in a block."""
BLOCK_ROWS: Final = 64 << 10
_SLACK_BYTES: Final = 256 << 10
"""After ``BLOCK_BYTES``, so that an ordinary last row has room."""
_CANCEL_TIMEOUT_S: Final = 10.0
_NO_ROWS: Final = np.empty(0, np.uint8)
_HEADER: Final = np.frombuffer(b"PGCOPY\n\xff\r\n\0" + bytes(8), np.uint8)
"""The signature, no flags, and no extension of the header. The first row stands after it in its message."""
_TRAILER: Final = np.frombuffer(b"\xff\xff", np.uint8)
"""COPY's trailer, when it is a message of its own."""
_TICK_S: Final = 0.1
_NAP_S: Final = 0.0005
"""The server sends 8 KiB at a time, and would wake a reader that waits at the socket for each of them. With the nap two
readers on two cores take 4 % less time (medians of four runs in turn)."""

_READER_SETTINGS: Final = {
    # The ranges are the parallelism. Compiling an expression costs more than a range of 64 MB gains.
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    # Without it each range would be read by a scan of the whole table.
    "enable_tidscan": "on",
}

_WITHHELD: Final = re.compile(r"2[01237F].*|3[89].*|44.*|P0.*|HV.*")
"""SQLSTATEs of errors whose text can quote a row's value: data exceptions, functions and triggers of users."""
REMEDY_SELECT: Final = (
    "GRANT SELECT on the table (and USAGE on its schema) to the role; "
    "where it has row security, ALTER ROLE … BYPASSRLS"
)
REMEDY_ROW: Final = (
    "correct the row, or leave its column out of the publication, and take the table's snapshot again"
)


class CopiedRows(NamedTuple):
    """Rows of COPY's binary format. ``payload: uint8[n]``; ``lengths: int32[n_rows]``.

    Both are views of the connection's own arrays, and gone with the next block."""

    payload: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]


def copy_statement(task: RangeTask, as_text: Collection[int] = ()) -> str:
    """The COPY of one range. The columns are those of the relation, by name: a partition may have them in another
    order. Those at the indexes ``as_text`` come as text."""
    relation, pages = task.source.relation, task.range
    names = (quote_identifier(column.source_name) for column in relation.columns)
    columns = ", ".join(_as_text(name) if i in as_text else name for i, name in enumerate(names))
    conditions = []
    if pages.first_page > 0:
        conditions.append(f"ctid >= '({pages.first_page},0)'::pg_catalog.tid")
    if pages.end_page is not None:
        conditions.append(f"ctid < '({pages.end_page},0)'::pg_catalog.tid")
    conditions += map(_condition, task.only)
    if task.source.row_filter is not None:
        conditions.append(f"({task.source.row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    leaf = f"{quote_identifier(pages.leaf.schema)}.{quote_identifier(pages.leaf.table)}"
    return f"COPY (SELECT {columns} FROM ONLY {leaf}{where}) TO STDOUT (FORMAT binary)"


def _condition(each: BoundComparison) -> str:
    """A comparison of a key column, in a form that an index on it can answer. A text's equality is told twice: once so
    that an index serves, whatever its collation is, and once by bytes, because some collations take two texts for one.
    Its order is that of bytes, which an index has where its collation is C."""
    name, type_ = quote_identifier(each.column.source_name), f"pg_catalog.{each.type}"
    is_text = each.type in BY_BYTES
    by_bytes = f'{name} COLLATE pg_catalog."C"'
    if each.operator != EQUAL:
        value = f"{quote_literal(each.values[0])}::{type_}"
        return f"{by_bytes if is_text else name} OPERATOR(pg_catalog.{each.operator}) {value}"
    values = f"ARRAY[{', '.join(map(quote_literal, each.values))}]::{type_}[]"
    equal = f"{name} OPERATOR(pg_catalog.=) ANY ({values})"
    return f"{equal} AND {by_bytes} OPERATOR(pg_catalog.=) ANY ({values})" if is_text else equal


def _as_text(name: str) -> str:
    """``IS NOT NULL`` would ask a row type whether all of its fields are not null."""
    return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN pg_catalog.concat({name}) END"


def range_text(task: RangeTask) -> str:
    """A range for people, in messages."""
    pages = task.range
    end = "the end" if pages.end_page is None else f"page {pages.end_page}"
    leaf = table_label(pages.leaf.schema, pages.leaf.table)
    if task.only:
        return f"the repair of {leaf}"
    return f"the snapshot of {leaf} from page {pages.first_page} to {end}"


def failure_of(report: ServerReport, doing: str) -> XidstreamError:
    """The error for what a server says instead of rows. Its text is left out where that can quote a value."""
    state = report.sqlstate
    if report.is_too_large:
        return PoisonedChange(f"{doing}: a row has {TOO_LARGE}", remedy=REMEDY_ROW)
    if state in ("22021", "22P05"):
        return PoisonedChange(
            f"{doing}: a row has a value that the server cannot send as UTF8 (SQLSTATE {state})",
            remedy=REMEDY_ROW,
        )
    if _WITHHELD.fullmatch(state):
        return PoisonedChange(
            f"{doing}: the server cannot give a value, or the publication's row filter fails (SQLSTATE {state}; "
            "its text is withheld)",
            remedy=REMEDY_ROW,
        )
    if state == "42501":
        return TableUnreadable(f"{doing}: {report.message} (SQLSTATE {state})", remedy=REMEDY_SELECT)
    return from_report(report, doing)


class Frame:
    """The bytes of COPY's binary format before the first row and after the last one."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._is_begun = self._is_ended = False

    def without(self, rows: CopiedRows) -> CopiedRows:
        """The rows alone. Raises ProtocolViolation for another header, and for rows after the trailer."""
        payload, lengths = rows
        if len(lengths) and not self._is_begun:
            self._is_begun = True
            n = len(_HEADER)
            if lengths[0] < n or not np.array_equal(payload[:n], _HEADER):
                raise ProtocolViolation(f"{self._doing}: COPY's binary format does not begin with its header")
            payload, lengths[0] = payload[n:], lengths[0] - n
            if not lengths[0]:
                lengths = lengths[1:]
        if len(lengths) and self._is_ended:
            raise ProtocolViolation(f"{self._doing}: there is something after COPY's trailer")
        n = len(_TRAILER)
        if len(lengths) and lengths[-1] == n and np.array_equal(payload[-n:], _TRAILER):
            self._is_ended = True
            payload, lengths = payload[:-n], lengths[:-1]
        return CopiedRows(payload, lengths)

    def check_end(self) -> None:
        if not self._is_ended:
            raise ProtocolViolation(f"{self._doing}: COPY's binary format has no trailer")


class RangeCopy:
    """A connection to the DSN's server. Raises what ``sessions.connect`` raises, without a secret."""

    def __init__(self, dsn: Dsn) -> None:
        self._connection = connect(dsn)
        """psycopg's connection, which keeps ``_pgconn`` alive."""
        self._pgconn = self._connection.pgconn
        """libpq's connection, which the compiled loop reads."""
        self._loop = RowLoop.of(self._pgconn)
        """Gathers rows from ``_pgconn``."""
        self._poll = select.poll()
        """Waits for the socket."""
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self._payload = _NO_ROWS
        """``uint8``: the rows of the block that is being gathered. The caller sees it until the next block."""
        self._lengths = np.empty(0, np.int32)
        """``int32[BLOCK_ROWS]``: their lengths. It is made at the first block."""
        self._cancelled = threading.Event()
        """Set by ``cancel``, on any thread."""
        self._closing = threading.Lock()
        """Held while the connection is closed or cancelled, so that libpq's struct is there for both."""
        try:
            self._configure()
        except BaseException:
            self.close()
            raise

    @property
    def backend_pid(self) -> int:
        """The server's process, for who measures it."""
        return self._pgconn.backend_pid

    def begin(self, snapshot_name: str) -> None:
        """Begin a transaction under the snapshot. Raises SnapshotLost where nobody holds it any more."""
        self._run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "a snapshot's reader")
        doing = f"snapshot {snapshot_name}"
        result = self._execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot_name)}", doing)
        if result.status != pq.ExecStatus.COMMAND_OK:
            report = ServerReport.of(result)
            if report.sqlstate in ("22023", "42704", "55000"):
                raise SnapshotLost(f"{doing}: {report.message} (SQLSTATE {report.sqlstate})")
            raise from_report(report, doing)

    def lock(self, task: RangeTask, wait_ms: int) -> None:
        """Lock the range's table as COPY does, and wait no longer than this for it.

        The snapshot's holder has the table locked already. So whoever is in the way waits for the holder, which waits
        for this reader, and the server knows nothing of that. Raises SnapshotInterrupted then."""
        doing, leaf = range_text(task), task.range.leaf
        name = f"{quote_identifier(leaf.schema)}.{quote_identifier(leaf.table)}"
        result = self._execute(
            f"SET LOCAL lock_timeout = {wait_ms}; LOCK TABLE ONLY {name} IN ACCESS SHARE MODE; "
            "SET LOCAL lock_timeout = 0",
            doing,
        )
        if result.status != pq.ExecStatus.COMMAND_OK:
            report = ServerReport.of(result)
            if report.sqlstate == "55P03":
                raise SnapshotInterrupted(
                    f"{doing}: somebody waits to alter or truncate the table: it goes first"
                )
            raise self._failure(report, doing)

    def end(self) -> None:
        """End the transaction, and with it the locks, and what keeps the server from cleaning up."""
        self._run("COMMIT", "a snapshot's reader")

    def blocks(self, task: RangeTask, as_text: Collection[int] = ()) -> Iterator[CopiedRows]:
        """The rows of one range; the columns at the indexes ``as_text`` come as text. Whoever leaves the iterator
        before its end closes the connection.

        Raises PoisonedChange for what the server cannot send, TableUnreadable, ConnectionLost, and
        ComponentLost after ``cancel``."""
        doing = range_text(task)
        statement = copy_statement(task, as_text)
        result = self._execute(statement, doing, until=pq.ExecStatus.COPY_OUT)
        if result.status != pq.ExecStatus.COPY_OUT:
            raise self._failure(ServerReport.of(result), doing)
        n_rows = 0
        frame = Frame(doing)
        outcome = Outcome.FULL
        while outcome is not Outcome.ENDED:
            self._make_room(self._loop.waiting_bytes)
            outcome = self._gather()
            if self._cancelled.is_set():
                raise self._cancellation(doing)
            if outcome is Outcome.FAILED:
                raise self._broken(doing)
            # No name is kept beside the caller's: a giant row's array goes before the next one is made.
            taken = [frame.without(self._taken())]
            n_taken = len(taken[0].lengths)
            n_rows += n_taken
            if n_taken:
                yield taken.pop()
        self._end(n_rows, doing)
        frame.check_end()

    def cancel(self) -> None:
        """End what is read now, from another thread. Nothing more is read over this connection."""
        self._cancelled.set()
        # A connection that cannot be reached has ended what it read, too. One that is closed does nothing here.
        with self._closing, suppress(psycopg.Error):
            self._connection.cancel_safe(timeout=_CANCEL_TIMEOUT_S)

    def close(self) -> None:
        with self._closing:  # libpq's struct must not go while ``cancel`` looks at it
            self._loop.drop_waiting()
            self._connection.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        version = self._pgconn.server_version
        settings = {**pinned(version), "client_encoding": "UTF8", **_READER_SETTINGS}
        if self._pgconn.parameter_status(b"server_encoding") == b"SQL_ASCII":
            settings["client_encoding"] = (
                "SQL_ASCII"  # as the walsender's session: the decoder checks the text
            )
        self._run(set_command(settings), "session settings")

    def _make_room(self, waiting_bytes: int) -> None:
        """Room for a block. A giant row gets an array of its own size, which goes with the block."""
        needed = max(BLOCK_BYTES + _SLACK_BYTES, waiting_bytes)
        if len(self._payload) != needed:
            self._payload = _NO_ROWS  # it goes before the next one is made
            self._payload = np.empty(needed, np.uint8)
        if not len(self._lengths):
            self._lengths = np.empty(BLOCK_ROWS, np.int32)

    def _gather(self) -> Outcome:
        """Fill the arrays, and wait meanwhile: a nap first, so that more has come when it looks again."""
        has_napped = False
        while (outcome := self._loop.gather(self._payload, self._lengths, BLOCK_BYTES)) is Outcome.DRAINED:
            if self._cancelled.is_set():
                break
            if has_napped:
                self._poll.poll(_TICK_S * 1000)  # as long for TLS as ``_result`` waits
            else:
                time.sleep(_NAP_S)
            has_napped = not has_napped
        return outcome

    def _taken(self) -> CopiedRows:
        """What was gathered. A giant row's array is the caller's alone, who may let it go as soon as it is decoded."""
        rows = CopiedRows(self._payload[: self._loop.n_bytes], self._lengths[: self._loop.n_rows])
        if len(self._payload) > BLOCK_BYTES + _SLACK_BYTES:
            self._payload = _NO_ROWS
        return rows

    def _run(self, command: str, doing: str) -> None:
        result = self._execute(command, doing)
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise from_report(ServerReport.of(result), doing)

    def _execute(self, command: str, doing: str, *, until: pq.ExecStatus | None = None) -> pq.abc.PGresult:
        """The last result of a command, or the first with the status ``until``."""
        last: pq.abc.PGresult | None = None
        try:
            self._pgconn.send_query(command.encode())
            while (result := self._result()) is not None:
                last = result
                if result.status == until:
                    break
        except psycopg.Error as error:
            raise from_error(error, doing) from None
        if last is None:
            raise ConnectionLost(f"{doing}: the server gave no answer")
        return last

    def _result(self) -> pq.abc.PGresult | None:
        """The next result. psycopg would wait for it with Python's lock held, so nobody could cancel it.

        Under TLS the socket does not tell all that has come, so no socket is believed for longer than a tick."""
        while self._pgconn.flush() or self._pgconn.is_busy():
            self._poll.poll(_TICK_S * 1000)
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _end(self, n_rows: int, doing: str) -> None:
        """Read COPY's own result. Raises where it is an error, or where it counts other rows than came."""
        result: pq.abc.PGresult | None = None
        try:
            while (one := self._result()) is not None:
                result = one if result is None or result.status == pq.ExecStatus.COMMAND_OK else result
        except psycopg.Error as error:
            raise from_error(error, doing) from None
        if result is None:
            raise ConnectionLost(f"{doing}: the server did not say how COPY ended")
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise self._failure(ServerReport.of(result), doing)
        if result.command_tuples != n_rows:
            raise ProtocolViolation(
                f"{doing}: the server counts {result.command_tuples} rows, and sent {n_rows}"
            )

    def _broken(self, doing: str) -> XidstreamError:
        return from_error(psycopg.OperationalError(self._pgconn.get_error_message()), doing)

    def _cancellation(self, doing: str) -> XidstreamError:
        return ComponentLost(f"{doing}: the read was cancelled")

    def _failure(self, report: ServerReport, doing: str) -> XidstreamError:
        return self._cancellation(doing) if self._cancelled.is_set() else failure_of(report, doing)
