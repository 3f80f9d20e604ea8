"""``python -m tests.alerts_fired``: three alerts, fired by a real Prometheus from a run with real faults.

The rules are those of ``observability/alerts.yml`` as they are, so this takes half an hour, most of them waiting:

1. a table's value is no UTF-8, with ``on_poison = park``: XidstreamTableParked, until ``table resume`` and a new start;
2. somebody ends each session that is idle in a transaction, so the snapshot of another table, whose holder is one,
   fails again and again: XidstreamSnapshotFailing;
3. the server is stopped: XidstreamServerUnreachable, until it is started again.

It prints what fires and when, and ends with status 1 if one of the three did not, or if one stays when its cause is
gone. It needs ``prometheus`` on the PATH. It is no test: a test of the rules runs in CI (``alerts_test.yml``).
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import psycopg

from tests.waiting import meanwhile
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

_RULES = Path(__file__).parents[1] / "observability" / "alerts.yml"
_SLOT = "alerts"
# By TCP, because each start of an embedded server has another socket.
_TRUST = ("local all all trust", "host all,replication all 127.0.0.1/32 trust")
_SCHEMA = """
    create table good (id bigint primary key, v text);
    create table bad (id bigint primary key, v text);
    create table large (id bigint primary key, v text);
    insert into large select i, repeat(md5(i::text), 8) from generate_series(1, 300000) i;
    create publication shop for table good, bad, large;
"""
_END_THE_IDLE = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where state = 'idle in transaction' and datname = current_database() and pid <> pg_backend_pid()
"""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Alerts:
    """What the Prometheus at ``port`` says of the alerts."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/alerts"
        self._start_s = time.monotonic()
        self._last: dict[str, str] = {}

    def states(self) -> dict[str, str]:
        """Pending and firing alerts by name. What has changed is printed."""
        try:
            with urllib.request.urlopen(self._url, timeout=10) as answer:
                alerts = json.load(answer)["data"]["alerts"]
        except OSError:
            return {}
        now = {alert["labels"]["alertname"]: str(alert["state"]) for alert in alerts}
        for name in sorted(now.keys() | self._last.keys()):
            if (state := now.get(name, "gone")) != self._last.get(name):
                self.say(f"{name}: {state}")
                if state == "firing":
                    self.say(
                        *(a["annotations"]["summary"] for a in alerts if a["labels"]["alertname"] == name)
                    )
        self._last = now
        return now

    def wait(self, name: str, firing: bool, timeout_s: float) -> None:
        self._until(lambda: (self.states().get(name) == "firing") == firing, timeout_s, name)

    def _until(self, holds: Callable[[], bool], timeout_s: float, name: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{name}: not within {timeout_s:.0f} s; now {self._last}")
            time.sleep(2)

    def say(self, *lines: str) -> None:
        for line in lines:
            print(f"{time.monotonic() - self._start_s:6.0f} s  {line}", flush=True)


@contextmanager
def _process(log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


def _show(work: Path, server: EmbeddedPostgres, dsn: str, *, only_server: bool) -> None:
    metrics_port, port = _free_port(), _free_port()
    (work / "prometheus.yml").write_text(
        f"global: {{evaluation_interval: 15s}}\nrule_files: [{_RULES}]\nscrape_configs:\n"
        f"  - {{job_name: ray, scrape_interval: 15s, static_configs: [{{targets: ['127.0.0.1:{metrics_port}']}}]}}\n"
    )
    prometheus = [str(which("prometheus")), f"--config.file={work / 'prometheus.yml'}"]
    prometheus += [f"--storage.tsdb.path={work / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    place = ["--dsn", dsn, "--slot", _SLOT, "--storage", str(work / "storage")]
    run = [sys.executable, "-m", "xidstream", "run", *place, "--publication", "shop", "--snapshot", "initial"]
    run += ["--sink", f"delta:{work / 'delta'}", "--on-poison", "park"]
    (work / "run.toml").write_text(f'metrics_port = {metrics_port}\nsnapshot_bytes_per_s = "1MB"\n')
    run += ["--config", str(work / "run.toml")]
    alerts, log = Alerts(port), work / "run.log"
    with _process(work / "prometheus.log", *prometheus), psycopg.connect(dsn, autocommit=True) as session:
        session.execute(_SCHEMA.encode())  # several statements in one
        subprocess.run([sys.executable, "-m", "xidstream", "slot", "create", *place], check=True)
        if not only_server:
            with _process(log, *run), _nobody_idles(dsn):
                _wait_for_rows(work / "delta", session)
                session.execute(rb"insert into bad values (1, E'caf\xe9')")
                alerts.say("a value is no UTF-8, and sessions idle in a transaction are ended")
                alerts.wait("XidstreamTableParked", True, 180)
                alerts.wait("XidstreamSnapshotFailing", True, 1500)
            alerts.say("nobody ends sessions any more")
            table = ["table", "resume", *place, "--table", "public.bad"]
            subprocess.run([sys.executable, "-m", "xidstream", *table], check=True)
        with _process(log, *run) as process:
            alerts.say("the run starts")
            _wait_for_rows(work / "delta", session)
            # Ten minutes look back at the snapshots' states. Meanwhile a table that is parked yet would fire again.
            alerts.wait("XidstreamSnapshotFailing", False, 1500)
            alerts.wait("XidstreamTableParked", False, 10)
            time.sleep(60)
            server.stop("immediate")
            alerts.say("the server is stopped")
            alerts.wait("XidstreamServerUnreachable", True, 400)
            server.start()
            alerts.say("the server is back")
            alerts.wait("XidstreamServerUnreachable", False, 400)
            if process.poll() is not None:
                raise SystemExit("the run has ended")


@contextmanager
def _nobody_idles(dsn: str) -> Iterator[None]:
    """Meanwhile sessions that are idle in a transaction are ended, as some servers' cron jobs do it."""
    with (
        psycopg.connect(dsn, autocommit=True) as session,
        meanwhile(lambda: session.execute(_END_THE_IDLE), every_s=3),
    ):
        yield


def _wait_for_rows(root: Path, session: psycopg.Connection[tuple[object, ...]]) -> None:
    """Until the run delivers, so that what comes next is behind its first snapshots' beginnings."""
    deadline_s = time.monotonic() + 180
    while True:
        session.execute("insert into good select coalesce(max(id), 0) + 1, 'x' from good")
        if list(root.glob("public.good/_delta_log/*.json")) or list(root.glob("*good*/**/_delta_log/*.json")):
            return
        if time.monotonic() > deadline_s:
            raise SystemExit("the run delivers nothing")
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.alerts_fired", description=__doc__)
    parser.add_argument("--server", action="store_true", help="only the third, which takes five minutes")
    only_server = parser.parse_args().server
    if which("prometheus") is None:
        raise SystemExit("there is no prometheus on the PATH")
    with tempfile.TemporaryDirectory(prefix="xs-alerts-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        with EmbeddedPostgres(work / "data", tcp=True, hba=_TRUST) as server:
            with psycopg.connect(server.conninfo(), autocommit=True) as session:
                session.execute("create database latin encoding 'SQL_ASCII' locale 'C' template template0")
            try:
                _show(work, server, server.conninfo("latin", over_tcp=True), only_server=only_server)
            except BaseException:
                print((work / "run.log").read_text()[-5000:] if (work / "run.log").exists() else "no log")
                raise


if __name__ == "__main__":
    main()
