"""The status page of a run: what a browser gets, and nothing else. docs/status.md shows it.

A server of the standard library, on a thread of the run's process. It knows four paths: the page, its script, its
style, and the accounts of the run's slots as JSON. It takes no command, and reads nothing that was sent but the path.
The page has all it needs: no build step, no content from elsewhere, which its Content-Security-Policy forbids as well.

The accounts are gathered when a page asks, at most once a second for all pages together. A run that nobody looks at
pays for a waiting thread.

- *Where.* By default on a free port of 127.0.0.1, if Ray is the run's own, and nowhere on a cluster. Such a page can be
  read by whoever has a login on the machine. The setting ``status_address`` says another place, or ``off``.
- *Other sites.* A page that a browser loaded from elsewhere must not read this one under another name of 127.0.0.1. So
  a request on loopback must name loopback as its host.

Rejected: aiohttp, which Ray brings. It needs an event loop of its own in the user's process, for four paths.
"""

from __future__ import annotations

import http.server
import ipaddress
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from xidstream.actors.runtime.ray_cluster import is_ours
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.codec import to_json
from xidstream.pipeline.addresses import host_and_port
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import PreconditionMissing

_FOLDER: Final = Path(__file__).parent
_FILES: Final = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
}
_ACCOUNTS: Final = "/accounts.json"
_LOCAL: Final = "127.0.0.1:0"
_FRESH_S: Final = 0.9
_READ_TIMEOUT_S: Final = 10.0
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage:
    """Serves until ``close``. ``accounts`` gathers those of all slots; it is called on the server's threads."""

    def __init__(self, host: str, port: int, accounts: Callable[[], Sequence[Account]]) -> None:
        """Port 0: a free one. Raises PreconditionMissing where the address cannot be had."""
        self._accounts = accounts
        self._lock = threading.Lock()
        self._gathered_s = float("-inf")
        self._gathered = b"[]"
        self.is_local = _is_loopback(host)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            raise PreconditionMissing(
                f"the status page cannot be served at {host}:{port}: {error.strerror}",
                remedy="give another status_address, or off",
            ) from None
        self._server.page = self
        threading.Thread(target=self._server.serve_forever, name="xidstream-page", daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def accounts(self) -> bytes:
        """JSON: a list, not older than a second."""
        with self._lock:
            if time.monotonic() - self._gathered_s > _FRESH_S:
                self._gathered = f"[{','.join(map(to_json, self._accounts()))}]".encode()
                self._gathered_s = time.monotonic()
            return self._gathered


def serve(config: Config, supervisors: Sequence[Supervisor]) -> StatusPage | None:
    """The page of a run that is about to start, where its settings want one. Raises PreconditionMissing."""
    if config.status_address == "off" or not (config.status_address or is_ours()):
        return None
    host, port = host_and_port(config.status_address or _LOCAL, "status_address")
    page = StatusPage(host, port, lambda: [supervisor.account() for supervisor in supervisors])
    for supervisor in supervisors:
        supervisor.shown_at(page.url)
    return page


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    page: StatusPage

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
        page = self.server.page
        path = self.path.partition("?")[0]
        if page.is_local and not _names_loopback(self.headers.get("Host", "")):
            self._give(403, "text/plain", b"the host of the request is not this machine\n")
        elif path == _ACCOUNTS:
            self._give(200, "application/json", page.accounts())
        elif path in _FILES:
            name, kind = _FILES[path]
            self._give(200, kind, (_FOLDER / name).read_bytes())
        else:
            self._give(404, "text/plain", b"there is nothing here\n")

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
    """Of a Host header."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower() in _LOCAL_NAMES or (name.count(".") == 3 and _is_loopback(name))
