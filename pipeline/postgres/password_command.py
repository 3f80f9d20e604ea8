"""The password command: a program whose standard output is the password, called anew for each connection.

It is for tokens that live for minutes: those of RDS, Cloud SQL and Entra, or of a vault. It is started without a shell,
with the environment and the folder of the process that connects, and in a session of its own. So a Ctrl-C at the
terminal does not end it in the middle, and at the end of its time its children end with it.

Nothing of it is ever shown: neither its text, which may hold a secret, nor what it writes. Not stderr either: some
programs print the token there when asked to be verbose. Whoever looks for the cause runs it by hand.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from xidstream.pipeline.errors import PasswordCommandFailed

TIMEOUT_S: Final = 30.0
"""A cloud's program takes one to three seconds, and on a busy machine several times that."""
_MOST_BYTES: Final = 64 << 10
"""A token of Entra has some two thousand."""


def password_from(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Run the program. Returns what it wrote, without the end of the line. Raises PasswordCommandFailed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        # The error's own text names the program.
        reason = error.strerror if isinstance(error, OSError) else "not a program's name"
        raise PasswordCommandFailed(f"password_command cannot be started: {reason}") from None
    deadline_s = time.monotonic() + timeout_s
    try:
        written = _output(process, deadline_s)
        status = process.wait(max(0.0, deadline_s - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise PasswordCommandFailed(f"password_command did not end within {timeout_s:g} s") from None
    finally:
        _end(process)
    if status:
        ending = f"exit status {status}" if status > 0 else f"signal {-status}"
        raise PasswordCommandFailed(f"password_command failed with {ending} (what it wrote is withheld)")
    return _password(written)


def _password(written: bytes) -> str:
    try:
        text = written.decode()
    except UnicodeDecodeError:
        raise PasswordCommandFailed("password_command wrote what is not UTF-8") from None
    password = text.rstrip("\r\n")
    if not password.strip():
        raise PasswordCommandFailed("password_command wrote nothing to its standard output")
    if "\n" in password or "\0" in password:
        raise PasswordCommandFailed("password_command wrote more than one line to its standard output")
    return password


def _output(process: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    """All that it writes. Raises TimeoutError, and PasswordCommandFailed where it is too much."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    written = b""
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError
        chunk = os.read(descriptor, _MOST_BYTES)
        if not chunk:
            return written
        written += chunk
        if len(written) > _MOST_BYTES:
            raise PasswordCommandFailed(f"password_command wrote more than {_MOST_BYTES >> 10} KiB")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it started, if it has not ended. A child that keeps the pipe open has not."""
    assert process.stdout is not None
    process.stdout.close()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
