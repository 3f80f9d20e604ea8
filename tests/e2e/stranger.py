"""What another login of this machine gets from a run: a program that reads questions and writes answers, as JSON.

``python stranger.py`` begins as the user of the suite, to import what it needs. If that is root, it then becomes the
user ``nobody`` for good; else it has neither Ray's token nor any secret, but its user's right on files. ``asked`` calls
it. It knows nothing of a run but ports and paths, which anybody may list.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

NOBODY = 65534
_host = "127.0.0.1"

# Py4J's text for the static method that gives whoever has the answer a way to run any command.
GET_RUNTIME = b"c\nz:java.lang.Runtime\ngetRuntime\ne\n"


# A method of each of Ray's servers: one that asks for a token says so for methods that it has.
_METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "CoreWorkerService/GetCoreWorkerStats",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "ReporterService/GetTraceback",
)


def asked(
    ports: list[int], paths: list[Path], host: str = "127.0.0.1"
) -> tuple[dict[int, tuple[str, str]], dict[str, list[str]]]:
    """Port → its protocol, and what it asks for; path → what the stranger could do there (only if this is root)."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([ports, [str(path) for path in paths], host]),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    answers, rights = json.loads(done.stdout)
    return {int(port): (protocol, wants) for port, (protocol, wants) in answers.items()}, rights


def main() -> None:
    import grpc

    global _host
    ports, paths, _host = json.load(sys.stdin)
    # Nobody listens there: both import more of themselves now, which the other user may not read later.
    _grpc(grpc, 1)
    _http(1)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    with ThreadPoolExecutor(8) as threads:
        answers = dict(zip(ports, threads.map(lambda port: _protocol(grpc, port), ports), strict=True))
    print(json.dumps([answers, {path: _rights(path) for path in paths}]))


def _protocol(grpc: Any, port: int) -> tuple[str, str]:
    if (answer := _exchanged(port, GET_RUNTIME)).startswith("!"):
        return "Py4J", "secret" if "Authentication error" in answer else "nothing"
    if answer.startswith("HTTP/") or "<!DOCTYPE" in answer:
        status = _http(port)
        return "HTTP", {"401": "token", "200": "nothing", "404": "nothing"}.get(status, status)
    if answer.startswith("\0\0\x18\x04"):  # settings of HTTP/2
        refusals = {_grpc(grpc, port, f"/ray.rpc.{method}") for method in _METHODS} - {"UNIMPLEMENTED"}
        return "gRPC", "token" if refusals == {"UNAUTHENTICATED"} else f"{refusals}"
    if answer := _exchanged(port, _spark_request(b"\0")):
        if "SaslMessage" in answer:
            return "Spark", "secret"
        return ("PySpark", "secret") if answer.endswith("err") else ("?", answer)
    # It waits for a secret's length in bytes, and then for so many: here it is told that the wrong one has come.
    wrong = b"not the secret"
    answer = _exchanged(port, wrong)
    return ("PySpark", "secret") if not answer else ("?", answer)


def _grpc(grpc: Any, port: int, method: str = "/a/b") -> str:
    """The name of the status."""
    with grpc.insecure_channel(f"{_host}:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=5)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _http(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://{_host}:{port}/", timeout=5) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__


def _exchanged(port: int, sent: bytes) -> str:
    answer = b""
    with suppress(OSError), socket.create_connection((_host, port), 5) as connection:
        connection.settimeout(1.5)
        connection.sendall(sent)
        while len(answer) < 4096 and (part := connection.recv(4096)):
            answer += part
    return answer.decode("latin-1")


def _spark_request(body: bytes) -> bytes:
    """A message of Spark's network layer, as one sends it that has no secret."""
    header = struct.pack(">bqi", 3, 1, len(body))
    return struct.pack(">q", 8 + len(header) + len(body)) + header + body


def _rights(path: str) -> list[str]:
    found = []
    if os.path.isdir(path):
        with suppress(OSError):
            os.listdir(path)
            found.append("list")
        with suppress(OSError):
            os.mkdir(os.path.join(path, "planted"))
            found.append("write")
        return found
    for way, flag in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        with suppress(OSError):
            os.close(os.open(path, flag))
            found.append(way)
    with suppress(OSError):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
        found.append("connect")
    return found


if __name__ == "__main__":
    main()
