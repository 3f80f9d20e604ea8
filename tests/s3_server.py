"""An S3 server of moto's, over HTTP, that can be stopped, or made to fail or to be slow.

Everything on our side is real: pyarrow's S3 client, deltalake's, and their retries.

``counted_s3`` has it in a process of its own, which it must be where deltalake writes: that holds the interpreter's
lock while it waits for an answer. It says what was asked, and the bytes of each answer.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow import fs
from werkzeug.serving import BaseWSGIServer, make_server

_DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>You may not.</Message></Error>'
_ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We failed.</Message></Error>'


@dataclass
class Request:
    """``what``: method and path. ``n_bytes``: of the answer, as far as it was sent."""

    what: str
    n_bytes: int = 0

    def counted(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        for part in answer:
            self.n_bytes += len(part)
            yield part


class S3Server:
    """``failing``: answer 500 to everything; ``delay_s``: before each answer. What is stored outlives ``stop``."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self.port = 0
        self.failing = False
        self.delay_s = 0.0
        self.n_requests = 0
        self.n_received_bytes = 0
        self.asked: list[Request] = []
        self._refused: str | None = None
        self.bucket = f"test-{uuid.uuid4().hex[:12]}"
        self.start()
        self.filesystem = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )
        self.filesystem.create_dir(self.bucket)

    def start(self) -> None:
        """At the same port as before."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @contextmanager
    def refusing(self, query: str) -> Iterator[None]:
        """Deny what has ``query`` in its query string."""
        self._refused = query
        try:
            yield
        finally:
            self._refused = None

    def uri(self, path: str) -> str:
        query = f"endpoint_override=127.0.0.1%3A{self.port}&scheme=http&region=us-east-1"
        return f"s3://{self.bucket}/{path}?{query}"

    def keys(self, below: str, ending: str = "") -> list[str]:
        selector = fs.FileSelector(f"{self.bucket}/{below}", recursive=True, allow_not_found=True)
        return [i.path for i in self.filesystem.get_file_info(selector) if i.path.endswith(ending)]

    def contents(self) -> dict[str, bytes]:
        """Every object of the bucket."""
        found = {}
        for info in self.filesystem.get_file_info(fs.FileSelector(self.bucket, recursive=True)):
            if info.type is fs.FileType.File:
                with self.filesystem.open_input_file(info.path) as file:
                    found[info.path] = file.read()
        return found

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.n_requests += 1
        request = Request(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        self.asked.append(request)
        self.n_received_bytes += int(environ.get("CONTENT_LENGTH") or 0)
        if self._refused is not None and self._refused in environ.get("QUERY_STRING", ""):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [_DENIED]
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.failing:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [_ERROR]
        answer: Iterable[bytes] = self._application(environ, start_response)
        return request.counted(answer)


class LosesAnswers(S3Server):
    """Does what it is asked, and answers 500, to so many writes to a Delta log."""

    n_to_lose = 0

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_commit = environ["REQUEST_METHOD"] == "PUT" and "/_delta_log/" in environ["PATH_INFO"]
        if not (is_commit and self.n_to_lose):
            return super()._answer(environ, start_response)
        self.n_to_lose -= 1
        list(super()._answer(environ, lambda *_, **__: None))
        start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
        return [b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"]


class ReplacesBehindLook(S3Server):
    """Runs ``then`` once, after the answer to the next HEAD: an object of that size is another one when it is read."""

    then: Callable[[], object] | None = None

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = super()._answer(environ, start_response)
        if environ["REQUEST_METHOD"] == "HEAD" and self.then is not None:
            then, self.then = self.then, None
            then()
        return answer


class CountedS3:
    """``uri``: of the bucket. ``options``: deltalake's."""

    def __init__(self, connection: Connection) -> None:
        port, bucket = connection.recv()
        self._connection = connection
        self.uri = f"s3://{bucket}"
        self.options = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    def asked(self, part: str = "") -> list[Request]:
        """Since the last call, in order; those whose path has ``part``."""
        self._connection.send(None)
        requests: list[Request] = self._connection.recv()
        return [request for request in requests if part in request.what]


@contextmanager
def counted_s3(server: type[S3Server] = S3Server) -> Iterator[CountedS3]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_and_count, args=(theirs, server), daemon=True)
    process.start()
    theirs.close()
    try:
        yield CountedS3(ours)
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve_and_count(connection: Connection, kind: type[S3Server]) -> None:
    server = kind()
    connection.send((server.port, server.bucket))
    with suppress(EOFError):
        while True:
            connection.recv()
            asked, server.asked = server.asked, []
            connection.send(asked)


def n_bytes_of(requests: Iterable[Request]) -> int:
    return sum(request.n_bytes for request in requests)
