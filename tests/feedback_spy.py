"""A proxy between the reader and its server that writes down every status update, and what was true when it came.

``FeedbackSpy`` listens on 127.0.0.1 and forwards to a server's Unix socket. It understands the framing of the
protocol and of CopyBoth: from the client ``r`` (write, flush, apply), from the server ``w`` and ``k`` (how far it
sent) and inside ``w`` the ends of transactions. Before a status update is forwarded, ``observe`` says what the sink
and the storage durably hold; so a position that is confirmed too early is caught however short the moment was.

``problems`` judges the record when the run is over:

- within a connection the flush position never goes back;
- it never exceeds what the server had sent, on that connection or an earlier one (what was recorded before a kill is
  confirmed after it, perhaps before the server has repeated it);
- when it was sent, ``_transactions`` held every transaction that ends at or below it, and ``_messages`` every
  non-transactional message below it, or the recorded journal had them; and every prepared transaction whose PREPARE
  ends at or below it was durable: by its manifest, or by being in the sink, in the recorded journal, or rolled back
  already.

The sink's final content stands for what should be there: whether that is complete is another judge's matter.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.journal_contents import JournalContents, Journaled
from tests.lakes import Lake
from xidstream.pipeline.log_tables.locations import MESSAGES, TRANSACTIONS
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.storage import Storage

_STATUS = struct.Struct("!qqqqB")
_XLOG = struct.Struct("!qqq")
_END = struct.Struct("!qqq")


@dataclass(frozen=True)
class Held:
    """What was durable at one moment: the lake's numbers for its tables (-1: no table), names of prepared manifests,
    and what the recorded journal had."""

    transactions_version: int = -1
    messages_version: int = -1
    manifests: frozenset[str] = frozenset()
    journaled: Journaled = Journaled()  # noqa: RUF009 - frozen


@dataclass(frozen=True)
class Status:
    """One ``r``. ``sent``: the end of what the server had ever sent."""

    at_s: float
    connection: int
    write: int
    flush: int
    sent: int
    n_ends: int
    """How many of the spy's ``ended`` had been seen."""
    held: Held


@dataclass
class FeedbackSpy:
    """``socket_path``: the server's. Start it with ``with``; ``port`` is where the reader must connect."""

    socket_path: str
    observe: Callable[[], Held]
    statuses: list[Status] = field(default_factory=list)
    prepared: set[tuple[int, int]] = field(default_factory=set)
    """(xid, end of PREPARE)."""
    ended: list[tuple[int, int, int | None]] = field(default_factory=list)
    """Of prepared transactions, as they came: (xid, end, commit LSN), or (xid, end of PREPARE, None) rolled back."""
    n_connections: int = 0
    n_messages: int = 0
    sent: int = 0
    """The end of what the server ever sent."""

    def __enter__(self) -> FeedbackSpy:
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def dsn(self, dbname: str, **parameters: str) -> str:
        """Through the proxy; to the server it is a local connection of its superuser."""
        more = "".join(f" {k}='{v}'" for k, v in parameters.items())
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={dbname} sslmode=disable gssencmode=disable{more}"

    def cut(self) -> None:
        """Break every connection, without a word."""
        for end in list(self._open):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # gone already

    # -- forwarding ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self.socket_path)
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            self.n_connections += 1
            link = _Link(self, self.n_connections)
            for source, target, see in ((client, server, link.client), (server, client, link.server)):
                threading.Thread(target=self._pump, args=(source, target, see), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, see: Callable[[bytes], None]) -> None:
        try:
            while data := source.recv(1 << 18):
                see(data)
                target.sendall(data)
        except OSError:
            pass  # the other direction ended, or one of the two was killed
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._open -= {source, target}

    # -- judging ---------------------------------------------------------------------------------------

    def problems(self, lake: Lake, confirmed_before: int) -> list[str]:
        """What was wrong, in words; ``confirmed_before``: the slot's position before the first connection."""
        found = []
        transactions, messages = lake.watermarks(TRANSACTIONS), lake.watermarks(MESSAGES)
        ends = sorted(_rows(lake, TRANSACTIONS, "commit_lsn", "end_lsn"))
        commits = {commit for commit, _ in ends}
        lsns = sorted(lsn for lsn, t in _rows(lake, MESSAGES, "lsn", "transactional") if not t)
        highest: dict[int, int] = {}
        reached = confirmed_before
        for status in self.statuses:
            shown = f"status {_lsn(status.flush)} on connection {status.connection}"
            before = highest.get(status.connection)
            if before is not None and status.flush < before:
                found.append(f"{shown} went back from {_lsn(before)}")
            highest[status.connection] = status.flush
            if status.flush > max(status.sent, reached):
                found.append(f"{shown} is beyond what the server had sent ({_lsn(status.sent)})")
            reached = max(reached, status.flush)
            held = transactions(status.held.transactions_version, last=False)
            journaled = status.held.journaled
            late = [
                commit
                for commit, end in ends
                if end <= status.flush and commit > held and not journaled.has(commit, end)
            ]
            if late:
                found.append(f"{shown}: the sink held commits up to {_lsn(held)} only, not {_lsn(late[0])}")
            told = messages(status.held.messages_version, last=True)
            missing = [lsn for lsn in lsns if told < lsn < status.flush and lsn not in journaled.messages]
            if missing:
                found.append(
                    f"{shown}: the sink held messages up to {_lsn(told)} only, not {_lsn(missing[0])}"
                )
            found += self._prepared_problems(status, shown, held, commits)
        return found

    def _prepared_problems(self, status: Status, shown: str, held: int, commits: set[int]) -> list[str]:
        ended = self.ended[: status.n_ends]
        found = []
        for xid, end_lsn in self.prepared:
            if end_lsn > status.flush:
                continue
            # One that left no row is in no sink, whatever its commit.
            gone = any(
                x == xid
                and (
                    end == end_lsn
                    if commit is None
                    else end > end_lsn
                    and (commit <= held or commit not in commits or status.held.journaled.has(commit, end))
                )
                for x, end, commit in ended
            )
            name = f"{xid}-{end_lsn:016X}."
            if not gone and not any(m.startswith(name) for m in status.held.manifests):
                found.append(f"{shown}: prepared transaction {xid} ({_lsn(end_lsn)}) was not durable")
        return found


class _Link:
    """One connection: cuts both directions into messages and notes what matters."""

    def __init__(self, spy: FeedbackSpy, number: int) -> None:
        self._spy = spy
        self._number = number
        self._started = False
        self._rest = {"client": b"", "server": b""}

    def client(self, data: bytes) -> None:
        data = self._rest["client"] + data
        at = 0
        if not self._started:
            # The startup packet alone has no type byte.
            if len(data) < 4 or len(data) < (size := int.from_bytes(data[:4], "big")):
                self._rest["client"] = data
                return
            at, self._started = size, True
        while len(data) - at >= 5 and len(data) - at > (size := int.from_bytes(data[at + 1 : at + 5], "big")):
            if data[at] == 0x64 and data[at + 5] == 0x72:
                self._status(data[at + 6 : at + 1 + size])
            at += 1 + size
        self._rest["client"] = data[at:]

    def server(self, data: bytes) -> None:
        data = self._rest["server"] + data
        at, n = 0, len(data)
        while n - at >= 5 and n - at > (size := int.from_bytes(data[at + 1 : at + 5], "big")):
            if data[at] == 0x64:
                kind = data[at + 5]
                if kind == 0x77:
                    self._xlog(data, at + 6)
                elif kind == 0x6B:
                    self._reached(int.from_bytes(data[at + 6 : at + 14], "big"))
            at += 1 + size
        self._rest["server"] = data[at:]

    def _xlog(self, data: bytes, at: int) -> None:
        start, end, _ = _XLOG.unpack_from(data, at)
        self._reached(max(start, end))
        spy = self._spy
        spy.n_messages += 1
        kind = chr(data[at + 24])
        body = at + 25
        if kind in "Pp":
            _, end_lsn, _ = _END.unpack_from(data, body + 1)
            xid = int.from_bytes(data[body + 25 : body + 29], "big")
            with spy._lock:
                spy.prepared.add((xid, end_lsn))
        elif kind == "K":
            commit_lsn, end_lsn, _ = _END.unpack_from(data, body + 1)
            with spy._lock:
                spy.ended.append((int.from_bytes(data[body + 25 : body + 29], "big"), end_lsn, commit_lsn))
        elif kind == "r":
            prepare_end_lsn, _, _ = _END.unpack_from(data, body + 1)
            with spy._lock:
                spy.ended.append((int.from_bytes(data[body + 33 : body + 37], "big"), prepare_end_lsn, None))
        if kind in "CcKPpr":
            # The end of the record lies after the position in its message's header.
            place = body + (5 if kind == "c" else 1)
            self._reached(_END.unpack_from(data, place)[1])

    def _reached(self, lsn: int) -> None:
        self._spy.sent = max(self._spy.sent, lsn)

    def _status(self, body: bytes) -> None:
        write, flush, _, _, _ = _STATUS.unpack(body)
        spy = self._spy
        with spy._lock:
            n_ends = len(spy.ended)
        status = Status(time.time(), self._number, write, flush, spy.sent, n_ends, spy.observe())
        spy.statuses.append(status)


# -- what the sink holds ---------------------------------------------------------------------------------


def observe(lake: Lake, storage: Path) -> Callable[[], Held]:
    """What ``FeedbackSpy`` asks at each status: the lake, names in directories, and what the record names."""

    journals: list[JournalContents] = []

    def look_at_journal() -> Journaled:
        if not journals:
            for record in storage.glob("*/*/progress/*.json"):
                folder = record.parent.parent
                layout = Layout(int(folder.parent.name), folder.name, "spy")
                journals[:] = [JournalContents(Storage(str(storage)), layout)]
        return journals[0].look() if journals else Journaled()

    def look() -> Held:
        manifests = (p.name for p in storage.glob("*/*/prepared/*.json"))
        # In this order: what leaves the journal meanwhile is in the sink.
        journaled = look_at_journal()
        return Held(lake.holds(TRANSACTIONS), lake.holds(MESSAGES), frozenset(manifests), journaled)

    return look


def _rows(lake: Lake, name: str, *columns: str) -> list[tuple[Any, ...]]:
    rows = lake.rows(name)
    return [] if rows is None else list(zip(*(rows[c].to_pylist() for c in columns), strict=True))


def _lsn(value: int) -> str:
    return f"{value >> 32:X}/{value & 0xFFFFFFFF:X}"
