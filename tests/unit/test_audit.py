"""``make audit``: what it asks for, and that it never says "nothing found" where nothing was asked.

OSV itself cannot be asked in a test, so a server here answers in its form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.audit import main


@contextmanager
def osv(answer: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers each question by ``answer(question)``: its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            asked.extend(queries)
            body = json.dumps({"results": [answer(query) for query in queries]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_packages_and_jars_are_asked_for_and_an_advisory_is_told_with_its_jar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    netty = "io.netty:netty-buffer"
    with osv(lambda query: {"vulns": [{"id": "X-1"}]} if query["package"]["name"] == netty else {}) as (
        url,
        asked,
    ):
        assert main(["--url", url]) == 1
    said = capsys.readouterr().out
    assert re.search(rf"^netty-buffer-(\S+)\.jar: {netty} \1: X-1$", said, re.MULTILINE)
    assert re.search(
        r"^\d+ components asked for, [12] with advisories\n\Z", said, re.MULTILINE
    )  # some jars hold others
    names = {(query["package"]["ecosystem"], query["package"]["name"]) for query in asked}
    assert {("PyPI", "psycopg"), ("PyPI", "ray"), ("Maven", netty)} <= names
    # A jar that says nothing of Maven, under its name. Its group is another one in Spark 4.
    assert {("Maven", "org.lz4:lz4-java"), ("Maven", "at.yawk.lz4:lz4-java")} & names


def test_nothing_found_is_said_only_if_all_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with osv(lambda query: {}) as (url, _):
        assert main(["--url", url]) == 0
    assert "components asked for, 0 with advisories" in capsys.readouterr().out
    assert main(["--url", url]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("NOT CHECKED: ") and "Connection refused" in said.err and said.out == ""
    with osv(lambda query: None) as (url, _):
        assert main(["--url", url]) == 2
    assert "NOT CHECKED" in capsys.readouterr().err
