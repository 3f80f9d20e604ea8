"""Which sockets get a small receive buffer: those whose other end is on this host, and no others."""

from __future__ import annotations

import contextlib
import socket
import struct

from tests.waiting import wait_until
from xidstream.pipeline.postgres.loopback import join_rows


def receive_buffer_bytes(end: socket.socket) -> int:
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def carry(content: bytes, sender: socket.socket, reader: socket.socket) -> bytes:
    sender.setblocking(False)
    received, n_sent = bytearray(), 0
    while len(received) < len(content):
        with contextlib.suppress(BlockingIOError):
            n_sent += sender.send(content[n_sent : n_sent + 100_000])
        received += reader.recv(1 << 20)
    return bytes(received)


def test_a_connection_to_this_host_has_a_receive_buffer_that_stays_small() -> None:
    content = bytes(range(256)) * 100_000
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as reader,
    ):
        sender, _ = server.accept()
        with sender:
            assert join_rows(reader.fileno())
            before = receive_buffer_bytes(reader)
            assert before <= 256 << 10
            assert carry(content, sender, reader) == content
            assert receive_buffer_bytes(reader) == before
        assert reader.recv(1) == b"", "the caller's descriptor is still open"


def test_a_unix_socket_is_left_as_it_is() -> None:
    one, other = socket.socketpair()
    with one, other:
        before = receive_buffer_bytes(one)
        assert not join_rows(one.fileno())
        assert receive_buffer_bytes(one) == before


def test_a_connection_that_was_reset_meanwhile_is_left_to_who_uses_it() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as reader,
    ):
        sender, _ = server.accept()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sender.close()
        wait_until(lambda: reset(reader))
        assert not join_rows(reader.fileno())


def reset(end: socket.socket) -> bool:
    try:
        end.getpeername()
    except OSError:
        return True
    return False
