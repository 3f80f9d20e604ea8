"""Azurite, Microsoft's emulator of Azure Blob Storage, as a process of its own that says what it was asked.

It is a package of npm: ``npm install azurite``. No test needs it to be there. ``XIDSTREAM_AZURITE`` is the path of its
program ``azurite-blob``; else PATH has it. Before 3.37 it takes no notice of ``startFrom`` in a listing, by which
deltalake finds the newest version of a table: a second commit then fails.
"""

from __future__ import annotations

import base64
import datetime
import email.utils
import hashlib
import hmac
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from azure.storage.blob import generate_container_sas

_ACCOUNT = "devstoreaccount1"
# The same in every Azurite, and in its documentation: it opens nothing.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_CONTAINER = "lake"
_VERSION = "2023-11-03"
_REQUEST = re.compile(r'"([A-Z]+) (/\S*) HTTP')
_STARTS_S = 60.0


def program() -> str | None:
    return os.environ.get("XIDSTREAM_AZURITE") or shutil.which("azurite-blob")


class Azurite:
    """``uri``: of a container. ``options``: deltalake's."""

    def __init__(self, log: Path, port: int) -> None:
        self._log, self._port, self._n_read = log, port, 0
        self.uri = f"abfs://{_CONTAINER}"
        self.options = {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
            "allow_http": "true",
        }

    @property
    def port(self) -> int:
        return self._port

    def behind(self, port: int) -> dict[str, str]:
        """``options``, for whoever asks at another port, where a proxy is."""
        return {**self.options, "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}"}

    def storage_uri(self, path: str, port: int | None = None) -> str:
        """As pyarrow wants it. It may not have the key, and so it has a signature, good for an hour.

        The signature is for the container: with one for the account Azurite answers 500 to Put Block From URL, and to a
        batch of deletes."""
        signature = generate_container_sas(
            _ACCOUNT,
            _CONTAINER,
            _KEY,
            permission="racwdl",
            expiry=datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1),
        )
        place = f"127.0.0.1:{port or self._port}/{_CONTAINER}/{path}"
        return f"abfs://{_ACCOUNT}@{place}?enable_tls=false&{signature}"

    def asked(self) -> list[str]:
        """Method and path with query of each request since the last call."""
        lines = self._log.read_text().splitlines()
        new, self._n_read = lines[self._n_read :], len(lines)
        return [f"{found[1]} {found[2]}" for line in new if (found := _REQUEST.search(line))]

    def make_container(self) -> None:
        """Raises URLError where nothing listens yet."""
        date = email.utils.formatdate(usegmt=True)
        path = f"/{_ACCOUNT}/{_CONTAINER}"
        headers = {"x-ms-date": date, "x-ms-version": _VERSION}
        told = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        text = "PUT" + "\n" * 12 + f"{told}/{_ACCOUNT}{path}\nrestype:container"
        digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}?restype=container", method="PUT", headers=headers
        )
        with urllib.request.urlopen(request, timeout=30):
            pass


@contextmanager
def azurite(path: str, folder: Path) -> Iterator[Azurite]:
    """``path``: of the program. ``folder``: for its log; what it stores is in memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "azurite.log"
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [path, "--blobPort", str(port), *options], stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        made, until = Azurite(log, port), time.monotonic() + _STARTS_S
        while True:
            try:
                made.make_container()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"Azurite did not start: {log.read_text()[-2_000:]}") from None
                time.sleep(0.1)
        yield made
    finally:
        process.terminate()
        process.wait()
