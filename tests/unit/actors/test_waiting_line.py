"""A person at a terminal sees that something slow goes on; a file has nothing of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import time
from xidstream.actors.runtime.waiting_line import waiting

with waiting("waiting for Ray"):
    with waiting("waiting for something inside"):
        time.sleep(2.4)
print("done", flush=True)
"""


def test_a_terminal_has_a_line_that_counts_and_goes() -> None:
    """The README's script said nothing for 68 s."""
    ours, theirs = pty.openpty()
    ended = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:
            break  # Linux says so when the other side has closed
    os.close(ours)
    assert ended.communicate()[0] == b"done\n" and ended.returncode == 0
    assert b"\rwaiting for Ray (1 s)\rwaiting for Ray (2 s)" in shown
    assert shown.endswith(b"\r" + b" " * len("waiting for Ray (2 s)") + b"\r"), "it is taken away"
    assert b"inside" not in shown


def test_a_file_has_nothing_of_it() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert (ended.stdout, ended.stderr) == (b"done\n", b"")
