"""A connection that is cut while TLS is agreed on, at each place, by sockets that do just that.

What libpq says of it differs from place to place, and with its version and OpenSSL's. To try another libpq:
``PSYCOPG_IMPL=python``.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.proxies import make_certificate
from xidstream.pipeline.errors import ConnectionLost, LoginRefused, XidstreamError
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.settings import SlotSettings

_SSL_REQUEST = 80877103
_NO_ENTRY = (
    b'SFATAL\0C28000\0Mno pg_hba.conf entry for host "127.0.0.1", user "x", database "y", no encryption\0\0'
)

Behaviour = Callable[[socket.socket], None]


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def finish(client: socket.socket) -> None:
    client.close()


StreamEvent = Callable[[socket.socket], None]


def at_request(cut: StreamEvent) -> Behaviour:
    def behave(client: socket.socket) -> None:
        client.recv(8)
        cut(client)

    return behave


def behind_the_answer(cut: StreamEvent) -> Behaviour:
    def behave(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"S")
        cut(client)

    return behave


def at_hello(cut: StreamEvent) -> Behaviour:
    def behave(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"S")
        client.recv(4096)
        cut(client)

    return behave


def within_the_handshake(n_bytes: int, certificate: Path, cut: StreamEvent) -> Behaviour:
    """``n_bytes`` of a real server's handshake, which is some thousand bytes long."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def behave(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"S")
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = context.wrap_bio(incoming, outgoing, server_side=True)
        while not outgoing.pending:
            incoming.write(client.recv(4096))
            with suppress(ssl.SSLWantReadError):
                server.do_handshake()
        client.sendall(outgoing.read()[:n_bytes])
        client.settimeout(0.2)
        with suppress(TimeoutError):
            client.recv(4096)
        cut(client)

    return behave


@contextmanager
def serving(behave: Behaviour) -> Iterator[str]:
    """A DSN."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with suppress(OSError):
                    behave(client)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"host=127.0.0.1 port={listener.getsockname()[1]} user=x dbname=y sslmode=require gssencmode=disable"
    finally:
        listener.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


def failures(dsn: str) -> list[XidstreamError]:
    """Of a stream's connection, and of a question's."""
    found = []
    for connect in (
        lambda: ReplicationConnection(SlotSettings(dsn, "s", ("p",))).close(),
        lambda: describe_slot(dsn, "s"),
    ):
        with pytest.raises(XidstreamError) as raised:
            connect()
        found.append(raised.value)
    return found


@pytest.mark.parametrize("cut", [reset, finish])
@pytest.mark.parametrize("place", [at_request, behind_the_answer, at_hello])
def test_a_cut_before_the_server_speaks_tls_is_a_lost_connection(
    place: Callable[[StreamEvent], Behaviour], cut: StreamEvent
) -> None:
    with serving(place(cut)) as dsn:
        assert [type(error) for error in failures(dsn)] == [ConnectionLost] * 2


@pytest.mark.parametrize("cut", [reset, finish])
@pytest.mark.parametrize("n_bytes", [1, 3, 5, 60, 127, 128, 300, 100_000])
def test_a_cut_within_the_handshake_is_a_lost_connection(
    certificate: Path, n_bytes: int, cut: StreamEvent
) -> None:
    with serving(within_the_handshake(n_bytes, certificate, cut)) as dsn:
        assert [type(error) for error in failures(dsn)] == [ConnectionLost] * 2


def test_a_handshake_that_stands_still_is_a_lost_connection() -> None:
    with serving(lambda client: threading.Event().wait(30)) as dsn:
        assert [type(error) for error in failures(f"{dsn} connect_timeout=2")] == [ConnectionLost] * 2


def test_a_server_that_is_too_busy_to_answer_the_request_is_a_lost_connection() -> None:
    def behave(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"Ecould not fork new process for connection: Resource temporarily unavailable\n\0")
        client.close()

    with serving(behave) as dsn:
        assert [type(error) for error in failures(dsn)] == [ConnectionLost] * 2


def test_a_port_that_speaks_another_protocol_is_not_taken_for_a_mistake_in_sslmode() -> None:
    def behave(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        client.close()

    with serving(behave) as dsn:
        assert [type(error) for error in failures(dsn)] == [ConnectionLost] * 2


def test_a_server_without_tls_is_for_a_person() -> None:
    def behave(client: socket.socket) -> None:
        client.recv(8)
        client.sendall(b"N")

    with serving(behave) as dsn:
        assert [type(error) for error in failures(dsn)] == [LoginRefused] * 2


def test_a_cut_under_sslmode_prefer_is_not_taken_for_the_refusal_of_the_second_try() -> None:
    """libpq tries again without TLS, and a server that wants TLS refuses that."""

    def behave(client: socket.socket) -> None:
        head = client.recv(8, socket.MSG_WAITALL)
        if int.from_bytes(head[4:], "big") == _SSL_REQUEST:
            client.sendall(b"S")
            client.recv(4096)
        else:
            client.recv(4096)
            client.sendall(b"E" + struct.pack("!i", len(_NO_ENTRY) + 4) + _NO_ENTRY)
        client.close()

    with serving(behave) as dsn:
        found = failures(dsn.replace("sslmode=require", "sslmode=prefer"))
    assert [type(error) for error in found] == [ConnectionLost] * 2
    assert "cut while TLS was agreed on" in found[0].message and "no pg_hba.conf entry" in found[0].message
