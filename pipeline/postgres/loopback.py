"""Make the kernel join rows if server and reader are on the same host.

A walsender sends each row by itself. On a network rows are joined on their way, by the card's queue on one side and by
the kernel on the other. Loopback has no such queue. Each row travels as a packet of its own while the receiver's window
is open, and both the walsender and the reader pay for each packet. The kernel opens the window to megabytes. When the
window is closed, the sender's kernel joins the rows that wait into packets of 64 kB. So the receive buffer is kept
small on loopback: it is soon full, and the rows after it are joined.

Measured (docs/performance/history.md): for many small rows the reading thread takes 0.6 to 0.7 times the CPU, and the
walsender is a fifth faster. With TCP's congestion control CUBIC, whose speed is erratic otherwise, it is up to twice as
fast. Rows of 1 kB gain nothing.

``ReplicationConnection`` uses this once. On a network the receive buffer is left to the kernel, which fits it to the
round trip: a small buffer would limit the rate there.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

_RECEIVE_BUFFER_BYTES: Final = 64 << 10
"""Linux doubles it for its own needs. Half as much stalls the walsender; twice as much does not fill up in time."""


def join_rows(descriptor: int) -> bool:
    """Make a connected socket's receive buffer small if both of its ends are on this host. Returns whether it did."""
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
        # The connection is lost already. The next call on it reports that.
        return False
