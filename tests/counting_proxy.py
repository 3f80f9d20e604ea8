"""A reverse proxy before an HTTP server of this machine: it counts what passes, and fails or refuses as it is told.

It is for stores that are programs of their own, such as Azurite. The ``Host`` of a request stays, because stores sign
it, and compare the sources of copies with it.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Passed:
    """``what``: method and path with query. ``n_received``: of the request's body; ``n_sent``: of the answer's."""

    what: str
    n_received: int
    n_sent: int


class CountingProxy:
    """``failing``: answer 500 to everything. ``refused``: answer 403 where the path with its query has this text."""

    def __init__(self, backend_port: int) -> None:
        self.passed: list[Passed] = []
        self.failing = False
        self._refused: str | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(backend_port))
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def refusing(self, text: str) -> Iterator[None]:
        self._refused = text
        try:
            yield
        finally:
            self._refused = None

    def _handler(self, backend_port: int) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if proxy.failing or (proxy._refused is not None and proxy._refused in self.path):
                    status, headers, answer = 500 if proxy.failing else 403, [], b""
                else:
                    status, headers, answer = self._asked(body)
                proxy.passed.append(Passed(f"{self.command} {self.path}", len(body), len(answer)))
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _asked(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", backend_port, timeout=60)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    answer = connection.getresponse()
                    left_out = {"connection", "keep-alive", "transfer-encoding"}
                    if self.command != "HEAD":
                        left_out.add("content-length")
                    headers = [pair for pair in answer.getheaders() if pair[0].lower() not in left_out]
                    return answer.status, headers, answer.read()
                finally:
                    connection.close()

            do_DELETE = _pass  # noqa: N815 - http.server's names, as the next four
            do_GET = _pass  # noqa: N815
            do_HEAD = _pass  # noqa: N815
            do_POST = _pass  # noqa: N815
            do_PUT = _pass  # noqa: N815

            def log_message(self, *args: Any) -> None:
                """Not to stderr."""

        return Handler
