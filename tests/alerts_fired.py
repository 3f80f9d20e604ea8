"""``python -m tests.alerts_fired``: alerts, fired by a real Prometheus from runs with real faults.

The rules are those of ``observability/alerts.yml`` as they are, so each scene takes half an hour, most of it waiting
(``--scene NAME`` chooses one):

``tables``:
  1. A table's value is no UTF-8, with ``on_poison = park``: XidstreamTableParked, until ``table resume`` and a new
     start.
  2. Somebody ends each session that is idle in a transaction, so the snapshot of another table, whose holder is one,
     fails again and again: XidstreamSnapshotFailing.
``server``: the server is stopped: XidstreamServerUnreachable, until it is started again.
``journal``: a function does not come back while transactions of more than a gigabyte commit: XidstreamJournalNearlyFull
and XidstreamJournalGrowing, until it does.

It prints what fires and when, and ends with status 1 if an alert does not fire, or stays when its cause is gone. It
needs ``prometheus`` on the PATH. It is no test: a test of the rules runs in CI (``alerts_test.yml``).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import psycopg

from tests.waiting import meanwhile
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

_RULES = Path(__file__).parents[1] / "observability" / "alerts.yml"
_SLOT = "alerts"
_HELD = "XIDSTREAM_ALERTS_HELD"
"""An environment variable: the path of the file that holds ``wait_while_held`` up."""
# By TCP, because each start of an embedded server has another socket.
_TRUST = ("local all all trust", "host all,replication all 127.0.0.1/32 trust")
_SCHEMA = """
    create table good (id bigint primary key, v text);
    create table bad (id bigint primary key, v text);
    create table large (id bigint primary key, v text);
    insert into large select i, repeat(md5(i::text), 8) from generate_series(1, 300000) i;
    create sequence ids start 1000000;
    create publication shop for table good, bad, large;
"""
_RANDOM_ROWS = """
    insert into large select nextval('ids'), (
        select string_agg(md5((random() * 1e9 + i + j)::text), '') from generate_series(1, 64) j
    ) from generate_series(1, %s) i
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


class Scene:
    """A Prometheus, and what a run of slot ``alerts`` needs. The run's log is ``run.log``."""

    def __init__(
        self, work: Path, server: EmbeddedPostgres, session: psycopg.Connection[Any], dsn: str
    ) -> None:
        self.work, self.server, self.session, self.dsn = work, server, session, dsn
        self._metrics_port, port = _free_port(), _free_port()
        (work / "prometheus.yml").write_text(
            f"global: {{evaluation_interval: 15s}}\nrule_files: [{_RULES}]\nscrape_configs:\n"
            "  - {job_name: ray, scrape_interval: 15s, "
            f"static_configs: [{{targets: ['127.0.0.1:{self._metrics_port}']}}]}}\n"
        )
        command = [str(which("prometheus")), f"--config.file={work / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={work / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
        self.prometheus = _process(work / "prometheus.log", *command)
        self.alerts = Alerts(port)

    def command(self, *words: str) -> list[str]:
        place = ["--dsn", self.dsn, "--slot", _SLOT, "--storage", str(self.work / "storage")]
        return [sys.executable, "-m", "xidstream", *words, *place]

    def run(self, *options: str, **settings: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        settings = {"metrics_address": f"127.0.0.1:{self._metrics_port}", **settings}
        lines = [f'{key} = "{value}"' for key, value in settings.items()]
        (self.work / "run.toml").write_text("\n".join(lines))
        command = [
            *self.command("run"),
            "--publication",
            "shop",
            "--config",
            str(self.work / "run.toml"),
            *options,
        ]
        self.alerts.say("the run starts")
        return _process(self.work / "run.log", *command)


def _tables(scene: Scene) -> None:
    alerts, session, sink = scene.alerts, scene.session, f"delta:{scene.work / 'delta'}"
    options = ["--snapshot", "initial", "--sink", sink, "--on-poison", "park"]
    with scene.run(*options, snapshot_bytes_per_s="1MB"), _nobody_idles(scene.dsn):
        _wait_for_rows(scene.work / "delta", session)
        session.execute(rb"insert into bad values (1, E'caf\xe9')")
        alerts.say("a value is no UTF-8, and sessions idle in a transaction are ended")
        alerts.wait("XidstreamTableParked", True, 180)
        alerts.wait("XidstreamSnapshotFailing", True, 1500)
    alerts.say("nobody ends sessions any more")
    subprocess.run([*scene.command("table", "resume"), "--table", "public.bad"], check=True)
    with scene.run(*options, snapshot_bytes_per_s="1MB"):
        # Ten minutes look back at the snapshots' states. Meanwhile a table that is parked yet would fire again.
        alerts.wait("XidstreamSnapshotFailing", False, 1500)
        alerts.wait("XidstreamTableParked", False, 10)


def _server(scene: Scene) -> None:
    with scene.run("--sink", f"delta:{scene.work / 'delta'}") as process:
        _wait_for_rows(scene.work / "delta", scene.session)
        time.sleep(60)
        scene.server.stop("immediate")
        scene.alerts.say("the server is stopped")
        scene.alerts.wait("XidstreamServerUnreachable", True, 400)
        scene.server.start()
        scene.alerts.say("the server is back")
        scene.alerts.wait("XidstreamServerUnreachable", False, 400)
        if process.poll() is not None:
            raise SystemExit("the run has ended")


def _journal(scene: Scene) -> None:
    held = scene.work / "held"
    held.touch()
    os.environ[_HELD] = str(held)

    def commit(n_rows: int) -> None:
        scene.session.execute("select setseed(0.5)")
        scene.session.execute(_RANDOM_ROWS, [n_rows])

    with scene.run(
        "--sink", "foreach:tests.alerts_fired:wait_while_held", journal_max_bytes="1400MB"
    ) as process:
        commit(10)
        for _ in range(12):
            commit(50_000)  # more than 100 MB that nothing compresses
        scene.alerts.say("the function does not come back, and 1.2 GB are committed")
        with meanwhile(lambda: commit(20), every_s=2):
            scene.alerts.wait("XidstreamJournalNearlyFull", True, 600)
            scene.alerts.wait("XidstreamJournalGrowing", True, 1500)
        held.unlink()
        scene.alerts.say("the function comes back")
        scene.alerts.wait("XidstreamJournalNearlyFull", False, 600)
        scene.alerts.wait("XidstreamJournalGrowing", False, 600)
        if process.poll() is not None:
            raise SystemExit("the run has ended")


def wait_while_held(_: Any) -> None:
    """A function of a sink that does not come back while a file is there."""
    while os.path.exists(os.environ[_HELD]):
        time.sleep(0.5)


_SCENES: dict[str, Callable[[Scene], None]] = {"tables": _tables, "server": _server, "journal": _journal}


@contextmanager
def _nobody_idles(dsn: str) -> Iterator[None]:
    """Meanwhile sessions that are idle in a transaction are ended, as some servers' cron jobs do it."""
    with (
        psycopg.connect(dsn, autocommit=True) as session,
        meanwhile(lambda: session.execute(_END_THE_IDLE), every_s=3),
    ):
        yield


def _wait_for_rows(root: Path, session: psycopg.Connection[Any]) -> None:
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
    parser.add_argument("--scene", choices=_SCENES, action="append", help="default: all")
    names = parser.parse_args().scene or list(_SCENES)
    if which("prometheus") is None:
        raise SystemExit("there is no prometheus on the PATH")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="xs-alerts-", ignore_cleanup_errors=True) as folder:
            _show(Path(folder), _SCENES[name])


def _show(work: Path, play: Callable[[Scene], None]) -> None:
    with EmbeddedPostgres(work / "data", tcp=True, hba=_TRUST) as server:
        with psycopg.connect(server.conninfo(), autocommit=True) as session:
            session.execute("create database latin encoding 'SQL_ASCII' locale 'C' template template0")
        dsn = server.conninfo("latin", over_tcp=True)
        with psycopg.connect(dsn, autocommit=True) as session:
            session.execute(_SCHEMA.encode())  # several statements in one
            scene = Scene(work, server, session, dsn)
            subprocess.run(scene.command("slot", "create"), check=True)
            try:
                with scene.prometheus:
                    play(scene)
            except BaseException:
                log = work / "run.log"
                print(log.read_text()[-5000:] if log.exists() else "no log")
                raise


if __name__ == "__main__":
    main()
