"""A Ray as ``ray start --head`` makes it, for one test: own ports, own folder, own token; found by nobody else.

``ray.init()`` of another test process would join a Ray whose address is in ``ray_current_cluster`` of the default
temporary folder; ``ray start`` writes it below ``--temp-dir``, so that a folder of our own hides it. It is ended by
its process ids: ``ray stop`` would end every Ray of the machine.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import psutil

from xidstream.actors.driver.spark_secret import SECRET_VARIABLE
from xidstream.actors.runtime.java import ensure_java

BIN = Path(sys.executable).parent
_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 20


class LocalRay:
    """A head node in a context; ``environment`` is a shell's that talks to it, ``address`` the job server's."""

    def __init__(self, *, cpus: int = 2, ip: str = "127.0.0.1") -> None:
        # Not pytest's tmp_path: a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="xs-ray-"))
        self._cpus, self._ip = cpus, ip
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PG", "PYTHON"))},
            "PATH": path_with_java(),
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            SECRET_VARIABLE: secrets.token_hex(32),
        }
        gcs, dashboard = free_ports(2)
        self.gcs = f"{ip}:{gcs}"
        self.address = f"http://{ip}:{dashboard}"
        self._exit = ExitStack()

    def __enter__(self) -> LocalRay:
        gcs, dashboard = self.gcs.rpartition(":")[2], self.address.rpartition(":")[2]
        try:
            self._exit.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._exit.enter_context(
                self._started(
                    "--head",
                    f"--port={gcs}",
                    f"--temp-dir={self.folder}",
                    f"--num-cpus={self._cpus}",
                    f"--object-store-memory={256 << 20}",
                    "--include-dashboard=true",
                    f"--node-ip-address={self._ip}",
                    f"--dashboard-host={self._ip}",
                    f"--dashboard-port={dashboard}",
                    f"--ray-client-server-port={free_ports(1)[0]}",
                    answers=self._answers,
                )
            )
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @contextmanager
    def node(
        self, *, path: str | None = None, cpus: int = 1, ip: str = "127.0.0.1", namespace: str | None = None
    ) -> Iterator[None]:
        """Another node beside the head, whose raylet has this PATH, perhaps in a network namespace of its own."""
        with self._started(
            f"--address={self.gcs}",
            f"--num-cpus={cpus}",
            f"--object-store-memory={80 << 20}",
            f"--node-ip-address={ip}",
            path=path,
            within=() if namespace is None else ("ip", "netns", "exec", namespace),
        ):
            yield

    @contextmanager
    def _started(
        self,
        *options: str,
        path: str | None = None,
        answers: Callable[[], bool] = lambda: True,
        within: tuple[str, ...] = (),
    ) -> Iterator[None]:
        """``ray start`` in the foreground, so that it is a process that can be ended, and with it its children."""
        command = [
            *within,
            str(BIN / "ray"),
            "start",
            "--block",
            f"--dashboard-agent-listen-port={free_ports(1)[0]}",
            *options,
        ]
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                command,
                env={**self.environment, **({"PATH": path} if path else {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Where the executors' JVMs start, too: nothing of the project may be found there by accident.
                cwd=self.folder,
            )
            try:
                deadline_s = time.monotonic() + _START_TIMEOUT_S
                while True:
                    # Not through the file object: the child's position is its own.
                    said = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
                    if "Ray runtime started" in said and answers():
                        break
                    assert process.poll() is None, said
                    assert time.monotonic() < deadline_s, said
                    time.sleep(0.1)
                yield
            finally:
                _end(process)

    def run(self, *command: str, cwd: Path, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """A command of the environment's ``bin`` (``ray``), as a user types it beside the cluster."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=self.environment,
            cwd=cwd,
            check=False,
        )

    def submit(self, entrypoint: list[str], *, working_dir: Path) -> subprocess.CompletedProcess[str]:
        return self.run(
            "ray", "job", "submit", "--address", self.address, "--working-dir", ".", "--", *entrypoint,
            cwd=working_dir,
        )  # fmt: skip

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/api/version", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True  # it listens, and wants a token
        except OSError:
            return False


def _end(process: subprocess.Popen[bytes]) -> None:
    parent = psutil.Process(process.pid)
    family = [parent, *parent.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=_STOP_TIMEOUT_S)
    for member in alive:
        member.kill()
    psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)
    process.wait()


def path_with_java() -> str:
    """As cluster.yaml sets it on its nodes: the environment's ``bin`` and a Java first."""
    return os.pathsep.join([str(ensure_java().parent), str(BIN), os.environ["PATH"]])


def path_without_java(folder: Path) -> str:
    """The machine's programs but ``java``, linked into a folder that is made."""
    folder.mkdir()
    for entry in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(entry).iterdir() if Path(entry).is_dir() else ():
            if program.name != "java":
                link = folder / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return os.pathsep.join([str(BIN), str(folder)])


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
