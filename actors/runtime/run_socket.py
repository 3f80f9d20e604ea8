"""Where a run can be asked for its account: a socket of its process, which whoever is on the machine finds by the slot.

Each slot of a run has an *abstract* Unix socket. Its name, ``xidstream/SLOT/RANDOM``, stands in /proc/net/unix as long
as the process lives, and leaves nothing behind when the process is killed. Whoever connects gets the account as JSON,
and the connection ends. Nothing is made before somebody connects, so a run that nobody looks at does nothing for it.

Such a socket has no file and so no permissions. Both sides ask the kernel who the other is (SO_PEERCRED): a run answers
its own user and root, and a reader believes its own user and root. Root believes everybody.

On a cluster the run is on another machine, perhaps. Then the same question is asked on each node, by a task of Ray's
that needs no CPU. So nothing listens on a network.

Rejected: a named Ray actor for each run, which would be a process more, of some 100 MB, for what is seldom asked. The
run's process itself cannot be called through Ray. Rejected, too: a socket in a folder, which a killed run leaves
behind, and which is not found where TMPDIR differs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from xidstream.pipeline.errors import EnvironmentFault

log = logging.getLogger(__name__)

_PREFIX: Final = "xidstream/"
_LISTED: Final = Path("/proc/net/unix")
_CREDENTIALS: Final = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid
_ANSWER_S: Final = 20.0
_CLOSE_S: Final = 2.0
_CHUNK_BYTES: Final = 1 << 16


class RunSocket:
    """Answers on a thread of its own, one reader after the other, until ``close``."""

    def __init__(self, slot: str, answer: Callable[[], str]) -> None:
        self.name = f"{_PREFIX}{slot}/{secrets.token_hex(4)}"
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._serve, name="xidstream-account", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run is not found any more, unless a slow reader is still being answered."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        # The kernel lists the socket until the thread has left it.
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self._give(connection)

    def _give(self, connection: socket.socket) -> None:
        # A reader that went away is its own concern.
        with contextlib.suppress(OSError):
            connection.settimeout(_ANSWER_S)
            if _peer(connection) not in (0, os.geteuid()):
                return
            try:
                answer = self._answer().encode()
            except Exception:
                # A defect in what is only shown must not end the run.
                log.exception("the account of this run cannot be given")
                return
            connection.sendall(answer)


def running(slot: str = "") -> list[str]:
    """The names of the sockets on this machine, of one slot or of all."""
    prefix = f"@{_PREFIX}{slot}/" if slot else f"@{_PREFIX}"
    try:
        lines = _LISTED.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = (line.split()[-1] for line in lines[1:])
    # A connection has its server's name, too.
    return sorted({path[1:] for path in paths if path.startswith(prefix)})


def ask(name: str) -> str | None:
    """The answer of one socket; None if the run has ended meanwhile. Raises EnvironmentFault where it is another
    user's run, or does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(f"\0{name}")
            uid = _peer(connection)
            is_believed = os.geteuid() in (0, uid) or uid == 0
            chunks = list(iter(lambda: connection.recv(_CHUNK_BYTES), b"")) if is_believed else []
        except (ConnectionError, FileNotFoundError):
            return None
        except OSError:
            raise EnvironmentFault(
                f"a run of slot {slot_of(name)} is on this machine, and has not answered within {_ANSWER_S:.0f} s",
                remedy="look at its log and its processes",
            ) from None
    if not chunks and os.geteuid() not in (0, uid):
        raise EnvironmentFault(
            f"a run of slot {slot_of(name)} is on this machine, and answers only its own user (user id {uid})",
            remedy="ask as that user, or as root",
        )
    if not chunks:
        raise EnvironmentFault(
            f"a run of slot {slot_of(name)} is on this machine, and has not told its state",
            remedy="look at its log",
        )
    return b"".join(chunks).decode()


def slot_of(name: str) -> str:
    return name.removeprefix(_PREFIX).rpartition("/")[0]


def _peer(connection: socket.socket) -> int:
    """The user id of the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
