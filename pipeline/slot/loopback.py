"""Have the kernel join rows where server and reader are one host.

A walsender sends each row by itself. On a network they are joined on their way, by the card's queue on one side and
by the kernel on the other. Loopback has no such queue: each row travels as a packet of its own, whose cost is the
walsender's and ours, as long as the receiver's window is open, and the kernel opens it to megabytes. Behind a closed
window the sender's kernel joins what waits into packets of 64 kB. So the receive buffer is kept small there: it is
soon full, and what comes behind is joined.

Measured (docs/performance/history.md): the reading thread takes 0.6 to 0.7 times the CPU for many small rows, and the
walsender is a fifth faster. With TCP's congestion control CUBIC, whose speed is erratic otherwise, it is up to twice
as fast. Rows of 1 kB gain nothing.

Used once by ``ReplicationConnection``. A network's receive buffer is left to the kernel, which fits it to the
round trip: a small one would bound the rate there.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

_RECEIVE_BUFFER_BYTES: Final = 64 << 10
"""Linux doubles it, for its own needs. Half of it stalls the walsender, twice as much is not full in time."""


def join_rows(descriptor: int) -> bool:
    """Make a connected socket's receive buffer small if both of its ends are on this host; whether it was."""
    if sys.platform != "linux":
        return False
    try:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if end.getsockname()[0] != end.getpeername()[0]:
                return False
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            return True
    except OSError:
        # The connection is lost already: whoever uses it next says so, in its own words.
        return False
