"""The status page of a run: what a browser gets, and nothing else. docs/status.md shows it.

It knows four paths: the page, its script, its style, and the accounts of the run's slots as JSON. It takes no command,
and reads nothing that was sent but the path (``status.http_server``). The page has all it needs: no build step, no
content from elsewhere, which its Content-Security-Policy forbids as well.

The accounts are gathered when a page asks, at most once a second for all pages together. A run that nobody looks at
pays for a waiting thread.

By default it is on a free port of 127.0.0.1, if Ray is the run's own, and nowhere on a cluster. Such a page can be read
by whoever has a login on the machine. The setting ``status_address`` says another place, or ``off``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from xidstream.actors.runtime.ray_cluster import is_ours
from xidstream.actors.status.http_server import Answer, HttpServer
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account import Account
from xidstream.pipeline.account.codec import to_json
from xidstream.pipeline.settings.addresses import host_and_port
from xidstream.pipeline.settings.config import Config

_FOLDER: Final = Path(__file__).parent
_FILES: Final = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
}
_ACCOUNTS: Final = "/accounts.json"
_LOCAL: Final = "127.0.0.1:0"
_FRESH_S: Final = 0.9


class StatusPage:
    """Serves until ``close``. ``accounts`` gathers those of all slots; it is called on the server's threads."""

    def __init__(self, host: str, port: int, accounts: Callable[[], Sequence[Account]]) -> None:
        """Port 0: a free one. Raises PreconditionMissing where the address cannot be had."""
        self._accounts = accounts
        self._lock = threading.Lock()
        self._gathered_s = float("-inf")
        self._gathered = b"[]"
        self._server = HttpServer(host, port, self._answer, "status page", "status_address")
        self.url = self._server.url

    def close(self) -> None:
        self._server.close()

    def accounts(self) -> bytes:
        """JSON: a list, not older than a second."""
        with self._lock:
            if time.monotonic() - self._gathered_s > _FRESH_S:
                self._gathered = f"[{','.join(map(to_json, self._accounts()))}]".encode()
                self._gathered_s = time.monotonic()
            return self._gathered

    def _answer(self, path: str) -> Answer:
        if path == _ACCOUNTS:
            return 200, "application/json", self.accounts()
        if path in _FILES:
            name, kind = _FILES[path]
            return 200, kind, (_FOLDER / name).read_bytes()
        return 404, "text/plain", b"there is nothing here\n"


def serve(config: Config, supervisors: Sequence[Supervisor]) -> StatusPage | None:
    """The page of a run that is about to start, where its settings want one. Raises PreconditionMissing."""
    if config.status_address == "off" or not (config.status_address or is_ours()):
        return None
    host, port = host_and_port(config.status_address or _LOCAL, "status_address")
    page = StatusPage(host, port, lambda: [supervisor.account() for supervisor in supervisors])
    for supervisor in supervisors:
        supervisor.shown_at(page.url)
    return page
