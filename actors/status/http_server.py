"""A small HTTP server of a run: it answers GET, on a thread of the run's process, and reads nothing but the path.

The status page and the metrics are served by it. Where it listens on loopback, a request must name loopback as its
host: a page that a browser loaded from elsewhere must not read this one under another name of 127.0.0.1.

Rejected: aiohttp, which Ray brings. It needs an event loop of its own in the user's process, for a few paths.
"""

from __future__ import annotations

import http.server
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from xidstream.pipeline.errors import PreconditionMissing

Answer: TypeAlias = tuple[int, str, bytes]
"""Status, content type, content."""

_READ_TIMEOUT_S: Final = 10.0
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class HttpServer:
    """Serves until ``close``. ``answer`` gets a path, and is called on the server's threads."""

    def __init__(
        self, host: str, port: int, answer: Callable[[str], Answer], content: str, setting: str
    ) -> None:
        """Port 0: a free one. Raises PreconditionMissing, which names ``content`` and the ``setting`` of the address,
        where this cannot be had."""
        self.answer = answer
        self.is_local = _is_loopback(host)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            raise PreconditionMissing(
                f"the {content} cannot be served at {host}:{port}: {error.strerror}",
                remedy=f"give another {setting}, or none",
            ) from None
        self._server.owner = self
        threading.Thread(target=self._server.serve_forever, name="xidstream-http", daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    owner: HttpServer

    def server_bind(self) -> None:
        # HTTPServer's own asks a name service for the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection. Answers GET alone."""

    server: _Server
    server_version = "xidstream"
    sys_version = ""
    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        if self.server.owner.is_local and not _names_loopback(self.headers.get("Host", "")):
            self._give(403, "text/plain", b"the host of the request is not this machine\n")
        else:
            self._give(*self.server.owner.answer(self.path.partition("?")[0]))

    def _give(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the standard library's name
        """Nothing: a run's log is about the run."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_loopback(host: str) -> bool:
    """Whether a Host header names loopback."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower() in _LOCAL_NAMES or (name.count(".") == 3 and _is_loopback(name))
