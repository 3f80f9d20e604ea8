"""What stands between a client and a server in tests: a link that can be lost, TLS, and an S3 server that fails.

The wheel's PostgreSQL has no OpenSSL, so TLS is spoken by ``TlsProxy``. It packs the server's bytes into TLS records
of the largest size, 16 kB.
"""

from __future__ import annotations

import datetime
import select
import socket
import ssl
import struct
import threading
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SSL_REQUEST = 80877103
_RECORD = 16384


def connect(backend: Path | int) -> socket.socket:
    """A Unix socket's path, or a TCP port of this machine."""
    if isinstance(backend, int):
        return socket.create_connection(("127.0.0.1", backend))
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(backend))
    return server


class TlsProxy:
    """Terminates PostgreSQL's TLS before a Unix socket, or before a TCP port of this machine."""

    def __init__(self, backend: Path | int, certificate: Path) -> None:
        self._backend = backend
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client:
            while int.from_bytes(client.recv(8, socket.MSG_WAITALL)[4:], "big") != _SSL_REQUEST:
                client.sendall(b"N")  # GSSAPI was asked for first
            client.sendall(b"S")
            with (
                self._context.wrap_socket(client, server_side=True) as secure,
                connect(self._backend) as server,
            ):
                self._relay(secure, server)

    @staticmethod
    def _relay(secure: ssl.SSLSocket, server: socket.socket) -> None:
        """One thread for both ways, because an SSLSocket is not to be read and written by two at once."""
        while True:
            readable, _, _ = select.select([secure, server], [], [])
            if secure in readable:
                chunk = secure.recv(_RECORD)  # the client's messages are small: never more than one record
                if not chunk:
                    return
                server.sendall(chunk)
            if server in readable:
                # Gather a full record where more is coming, so that records are as large as can be.
                chunk = server.recv(_RECORD)
                if not chunk:
                    return
                while len(chunk) < _RECORD and select.select([server], [], [], 0.005)[0]:
                    more = server.recv(_RECORD - len(chunk))
                    if not more:
                        break
                    chunk += more
                secure.sendall(chunk)


class Link:
    """A TCP link to ``backend``. ``cut`` ends every connection and refuses new ones; ``freeze`` keeps them open and
    forwards nothing, as a router that forgot them does, and takes new ones the same way; ``mend`` ends both."""

    def __init__(self, backend: Path | int) -> None:
        self._backend = backend
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._refusing = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.n_accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        self._refusing = True
        self._whole.set()
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        """New connections pass; those that were frozen are ended."""
        if not self._whole.is_set():
            self.cut()
        self._refusing = False
        self._whole.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.n_accepted += 1
                if self._refusing:
                    client.close()
                else:
                    threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._whole.wait()
        with suppress(OSError), client, connect(self._backend) as server:
            with self._lock:
                self._sockets |= {client, server}
            try:
                while True:
                    for each in select.select([client, server], [], [])[0]:
                        chunk = each.recv(1 << 16)
                        self._whole.wait()
                        if not chunk:
                            return
                        (server if each is client else client).sendall(chunk)
            finally:
                with self._lock:
                    self._sockets -= {client, server}


class CutAfter:
    """A TCP link to a port of this machine that resets, or ends, each connection after ``n_bytes`` of the server's."""

    def __init__(self, port: int, n_bytes: int, *, resets: bool) -> None:
        self._backend = port
        self._n_bytes = n_bytes
        self._resets = resets
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        left = self._n_bytes
        with suppress(OSError), client, connect(self._backend) as server:
            while left > 0:
                for each in select.select([client, server], [], [])[0]:
                    chunk = each.recv(left if each is server else _RECORD)
                    if not chunk:
                        return
                    (client if each is server else server).sendall(chunk)
                    left -= len(chunk) if each is server else 0
            if self._resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def make_certificate(path: Path) -> Path:
    """Key and self-signed certificate of ``localhost``, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(pem))
    return path
