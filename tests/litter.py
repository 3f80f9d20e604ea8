"""What starts leave on the disk: ``python -m tests.litter --starts 200 --runs 6``.

*Starts* make all that a run makes but Spark: the run's folder, a Ray with one worker, its logs. Each is a process of
its own. *Runs* are ``xidstream run --available-now`` with everything, on an embedded server. In turn they end in order,
are killed (SIGKILL) when all is there, and fail. After each one the bytes in /tmp, in the user's ``~/.ray`` and
/dev/shm are counted.

Other programs use /tmp as well. So all of it happens in a mount namespace with a /tmp and a /dev/shm of its own where
this user may have one (root), and below a folder given as RAY_TMPDIR elsewhere: then what is written to /tmp in spite
of it is not seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.waiting import wait_until

_START = """
import os, signal, sys
from xidstream.actors.runtime.ray_cluster import connect_ray, keep_logs
import ray

connect_ray(needs_spark=False)
ray.get(ray.remote(lambda: None).remote())
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "failed":
    keep_logs()
"""
_NO_RAY = "Ray did not start"
_WAYS = ("in order", "killed", "failed")
_OWN_TMP = 'mount --bind "$0" /tmp && mount -t tmpfs shm /dev/shm && exec "$@"'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=0, help="how often Ray is started, without Spark")
    parser.add_argument("--runs", type=int, default=0, help="how often everything is started")
    parser.add_argument("--ways", default=",".join(_WAYS), help="how they end, in turn: %(default)s")
    parser.add_argument("--dsn", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(arguments, Path(arguments.inside))
        return
    with tempfile.TemporaryDirectory(prefix="xs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        if not arguments.runs:
            _inside(folder, arguments, "")
            return
        from benchmarks.source import Source, server

        with server() as running:
            source = Source(running, "litter")
            source.execute("select pg_create_logical_replication_slot('litter', 'pgoutput')")
            _inside(folder, arguments, source.dsn)


def _inside(folder: str, arguments: argparse.Namespace, dsn: str) -> None:
    command = [sys.executable, "-m", "tests.litter", "--dsn", dsn, "--ways", arguments.ways]
    command += ["--starts", str(arguments.starts), "--runs", str(arguments.runs)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TMPDIR"))}
    home = Path(tempfile.mkdtemp(prefix="xs-home-", dir=Path.home()))
    environment["HOME"] = str(home)
    try:
        if os.geteuid() == 0 and shutil.which("unshare"):
            own_tmp = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OWN_TMP, folder]
            subprocess.run([*own_tmp, *command, "--inside", "/tmp"], env=environment, check=True)
        else:
            print("not root: what is written to /tmp itself is not seen")
            environment["RAY_TMPDIR"] = folder
            subprocess.run([*command, "--inside", folder], env=environment, check=True)
    finally:
        shutil.rmtree(home)


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    ways = arguments.ways.split(",")
    before = used(folder)
    for i in range(arguments.starts):
        way = ways[i % len(ways)]
        way = start(way)
        report(f"start {i + 1:3} ({way})", folder, before, quietly=i > 3 and (i + 1) % 20 > 0)
    for i in range(arguments.runs):
        way = ways[i % len(ways)]
        way = run(way, arguments.dsn, folder / "pipeline")
        report(f"run {i + 1:3} ({way})", folder, before, quietly=False)


def start(way: str) -> str:
    """How it ended: on a busy machine Ray gives up after 30 s, or hangs, which are two more ways to fail."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-c", _START, way]
        try:
            ended = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=200)
        except subprocess.TimeoutExpired:
            return "Ray hung while it started, killed"
        output.seek(0)
        said = output.read().decode()
        if _NO_RAY in said:
            return _NO_RAY
        if ended.returncode != (-signal.SIGKILL if way == "killed" else 0):
            raise SystemExit(said)
    return way


def run(way: str, dsn: str, folder: Path) -> str:
    """As ``start``."""
    folder.mkdir(exist_ok=True)
    # What fails does so when all is there: at the first batch.
    sink = "foreach:tests.litter:fail" if way == "failed" else f"delta:{folder / 'tables'}"
    command = [
        sys.executable,
        "-m",
        "actors",
        "run",
        "--dsn",
        dsn,
        "--slot",
        "litter",
        "--publication",
        "bench",
    ]
    command += ["--storage", str(folder / "storage"), "--sink", sink, "--snapshot", "never"]
    if way != "killed":
        command.append("--available-now")
    if way == "failed":
        _insert(dsn)
    log = folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        if way == "killed":
            wait_until(lambda: b"caught up" in log.read_bytes() or process.poll() is not None, 300)
            process.kill()
        code = process.wait(300)
    if _NO_RAY in log.read_text():
        return _NO_RAY
    if (code == 0) != (way == "in order"):
        raise SystemExit(f"{way}: status {code}\n{log.read_text()}")
    return way


def _insert(dsn: str) -> None:
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("insert into t (id) select coalesce(max(id), 0) + 1 from t")


def fail(batch: object) -> None:
    """The sink of a run that fails."""
    raise ValueError("on purpose")


def used(folder: Path) -> dict[str, int]:
    places = {"/tmp": folder, "~/.ray": Path.home() / ".ray", "/dev/shm": Path("/dev/shm")}
    return {name: _bytes_below(place) for name, place in places.items()}


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, folders, names in os.walk(folder):
        if "pipeline" in folders:
            folders.remove("pipeline")  # storage and tables: those are to stay
        for name in names:
            try:
                total += os.stat(os.path.join(root, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def report(what: str, folder: Path, before: dict[str, int], *, quietly: bool) -> None:
    # A killed one is tidied up after by its watchdog, when all of Ray has ended.
    wait_until(lambda: not any((path / "t").exists() for path in folder.glob("xids-*")), 120)
    if not quietly:
        grown = {name: n - before[name] for name, n in used(folder).items()}
        entries = sorted(p.name for p in folder.iterdir() if p.name != "pipeline")
        text = ", ".join(f"{n / 1024:,.0f} KiB more in {name}" for name, n in grown.items())
        print(f"{what}: {text}; {' '.join(entries)}", flush=True)


if __name__ == "__main__":
    main()
