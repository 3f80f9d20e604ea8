"""Real actors on a local Ray, without a JVM: the test itself plays the Spark driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import ray

from tests.memory_parts import part_rows
from tests.postgres_fixtures import *  # noqa: F403
from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream.actors.cli.checks import create_slot_command
from xidstream.actors.driver.object_store_frames import read_object
from xidstream.actors.runtime.ray_cluster import connect_ray
from xidstream.actors.supervision.placement import free_cpus
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.account.model import SinkPart, SinkReport
from xidstream.pipeline.errors import ComponentLost, XidstreamError
from xidstream.pipeline.exchange import Batch, SlotIdentity
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.storage.segment_file import SegmentReader


@pytest.fixture(scope="session", autouse=True)
def local_ray() -> None:
    connect_ray()


class Hog:
    def is_there(self) -> bool:
        return True


@pytest.fixture
def leave() -> Iterator[Callable[[float], None]]:
    """``leave(cpus)``: take all CPUs of the tests' Ray but these, when those of the last test have come back.

    Other tests of this process may keep a Spark session, which has its CPUs to the end: the number need not be whole.
    """
    hogs: list[Any] = []

    def take(cpus: float) -> None:
        seen: list[float] = []

        def is_settled() -> bool:
            seen.append(sum(free_cpus().free))
            return len(seen) > 30 and len(set(seen[-30:])) == 1

        wait_until(is_settled)
        hog = ray.remote(Hog).options(num_cpus=round(seen[-1] - cpus, 4)).remote()
        hogs.append(hog)
        ray.get(hog.is_there.remote())

    yield take
    for hog in hogs:
        ray.kill(hog)


class CollectingDriver:
    """Pulls batches and keeps their rows as Arrow; ``hold`` makes it a sink that takes nothing for a while."""

    def __init__(self, storage_uri: str) -> None:
        self._read_segment = SegmentReader(storage_uri)
        self.tables: dict[str, list[pa.Table]] = {}
        self.transactions: list[dict[str, Any]] = []
        self.hold = threading.Event()
        self.is_held = False
        """It has seen ``hold``, and asks for nothing."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._batches = 0
        self.keep_rows = True
        self.take_s = 0.0
        self.n_active = self.most_active = 0
        self.n_rows = 0
        self._dying: list[tuple[BaseException, bool]] = []
        self._is_lost = False
        self.n_begun = 0
        self.deaths_before_count = 0
        """So many loops end after their first batch was confirmed, before anybody can have seen that."""
        self.failing_starts = 0
        """So many sessions do not start."""
        self.hang = threading.Event()
        """As long as it is set, the batch in hand does not end."""

    replaceable = True

    def die(self, *errors: XidstreamError, is_lost: bool | None = None) -> None:
        """The next loops end with these, each when it has a batch in hand. With a ComponentLost, or as ``is_lost``
        says, the driver is lost, too, and what it had counted."""
        self._dying = [(e, isinstance(e, ComponentLost) if is_lost is None else is_lost) for e in errors]

    def start(self) -> ray.ObjectRef | None:
        self._is_lost = self.failing_starts > 0
        if not self.failing_starts:
            return None
        self.failing_starts -= 1
        return ray.remote(_fail_to_start).options(num_cpus=0, max_retries=0).remote()

    def end(self, timeout_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def is_alive(self) -> bool:
        return not self._is_lost

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        self._error = None
        self.n_begun += 1
        self._thread = threading.Thread(target=self._run, args=(sequencer,), daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> bool:
        assert self._thread is not None
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def progress(self) -> SinkReport:
        return SinkReport(SinkPart(n_batches=self._batches, n_rows=self.n_rows))

    def account(self) -> SinkReport | None:
        return None

    def take_output(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def _run(self, sequencer: Any) -> None:
        from xidstream.actors.runtime.ray_errors import unwrap

        try:
            loop = ray.get(sequencer.sink_opened.remote(INVALID_LSN, 0)).loop
            while True:
                while self.hold.is_set():
                    self.is_held = True
                    time.sleep(0.02)
                self.is_held = False
                batch = ray.get(sequencer.next_batch.remote(0.5, loop))
                if batch is None:
                    if ray.get(sequencer.finished.remote()):
                        return
                    continue
                if self._dying:
                    self._lose(*self._dying.pop(0))
                self.n_active += 1
                self.most_active = max(self.most_active, self.n_active)
                try:
                    time.sleep(self.take_s)
                    while self.hang.is_set():
                        time.sleep(0.02)
                    self._take(batch)
                finally:
                    self.n_active -= 1
                ray.get(sequencer.batch_done.remote(batch.number, loop))
                if self.deaths_before_count:
                    self.deaths_before_count -= 1
                    wait_until(lambda b=batch: _has_confirmed(sequencer, b.end_lsn))
                    self._lose(ComponentLost("the driver died behind its first batch"), True)
                self._batches += 1
        except BaseException as error:
            self._error = unwrap(error, "commit sequencer")

    def _lose(self, error: BaseException, is_lost: bool) -> None:
        self._is_lost, self._batches = is_lost, 0 if is_lost else self._batches
        raise error

    def _take(self, batch: Batch) -> None:
        for memory in (part for unit in batch.units for part in unit.memory):
            self._keep(memory.relation.name, part_rows(memory, read_object))
        for part in batch.segment_parts():
            for record_batch in self._read_segment(part):
                self._keep(part.relation.name, pa.Table.from_batches([record_batch]))
        for unit in batch.units:
            self.transactions += unit.transactions.to_pylist()

    def _keep(self, table: str, part: pa.Table) -> None:
        self.n_rows += part.num_rows
        if self.keep_rows:
            self.tables.setdefault(table, []).append(part)

    def rows(self, table: str) -> list[dict[str, Any]]:
        found = [row for part in self.tables.get(table, []) for row in part.to_pylist()]
        return sorted(found, key=lambda r: (r["_commit_lsn"], r["_seq"]))

    def ids(self, table: str) -> list[int]:
        """Of ``rows`` the column alone: a test asks ten times a second, and ``_run`` needs the interpreter, too."""
        columns = ["_commit_lsn", "_seq", "id"]
        parts = [part.select(columns) for part in list(self.tables.get(table, []))]
        if not parts:
            return []
        order = [(name, "ascending") for name in columns[:2]]
        found: list[int] = pa.concat_tables(parts).sort_by(order)["id"].to_pylist()
        return found


def _fail_to_start() -> None:
    raise ComponentLost("the session did not start")


class RayPipeline:
    """A supervisor on a thread, with a CollectingDriver; ``quota`` where it shares a cap with others."""

    def __init__(self, database: Database, folder: Path | str, quota: Any = None) -> None:
        """``folder`` is on this machine, or the URI of a storage that is not."""
        self.database = database
        self.quota = quota
        self.storage = folder if isinstance(folder, str) else folder / "segments"
        self.driver = CollectingDriver(str(self.storage))
        self.notices: list[str] = []
        self.error: BaseException | None = None
        self.supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None

    @property
    def slot(self) -> str:
        return f"s_{self.database.name}"[:63]

    def config(self, **settings: Any) -> Config:
        values = {
            "dsn": self.database.dsn(),
            "slot": self.slot,
            "publication": "p",
            "storage": str(self.storage),
            "create_slot": True,
            "buffers_max": 2,
            **settings,
        }
        return Config.of(values)

    def create_slot(self, **settings: Any) -> None:
        """As ``xidstream slot create`` does: what commits from here on is read. A run that only makes the slot would
        start three processes."""
        create_slot_command(self.config(**settings))

    def start(self, **settings: Any) -> Supervisor:
        """Returns when the parts are there."""
        supervisor = Supervisor(
            self.config(**settings), lambda: self.driver, notify=self.notices.append, quota=self.quota
        )
        self.supervisor, self.error = supervisor, None

        def run() -> None:
            try:
                supervisor.run()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        wait_until(lambda: bool(supervisor.pids) or self.error is not None)
        return supervisor

    def stop(self) -> None:
        if self.supervisor is not None and self._thread is not None:
            self.driver.hold.clear()
            self.driver.hang.clear()
            self.supervisor.stop()
            self._thread.join(60)
            assert not self._thread.is_alive(), "the run did not stop"

    def join(self, timeout_s: float = 120) -> None:
        assert self._thread is not None
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the run did not end"
        if self.error is not None:
            raise self.error

    def run_available(self, **settings: Any) -> None:
        self.start(available_now=True, **settings)
        self.join()

    def restarts(self) -> list[str]:
        """The notices of epochs that ended; that a part was slow to start is none."""
        return [notice for notice in self.notices if "starting again" in notice]

    def segments(self) -> list[Path]:
        assert isinstance(self.storage, Path), "only of a folder"
        return list(self.storage.rglob("*.parquet"))

    def open_rows(self) -> int:
        assert self.supervisor is not None
        reader = self.supervisor.status().account.reader
        return 0 if reader is None else reader.n_open_rows

    def sequencer_pid(self) -> int:
        assert self.supervisor is not None
        epoch = self.supervisor._epoch
        assert epoch is not None
        return int(ray.get(epoch.sequencer.pid.remote()))

    def confirmed(self) -> int:
        row = self.database.execute(
            "select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots where slot_name = %s",
            self.slot,
        )
        return int(row[0][0])


class MemoryWatch:
    """The greatest private memory of some processes, in bytes above what they had at the start."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._base = [self._private(p) for p in self._processes]
        self._stop = threading.Event()
        self.growth = [0] * len(pids)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> list[int]:
        self._stop.set()
        self._thread.join()
        return self.growth

    @staticmethod
    def _private(process: psutil.Process) -> int:
        info = process.memory_info()
        return int(info.rss - info.shared)

    def _watch(self) -> None:
        while not self._stop.wait(0.03):
            for i, process in enumerate(self._processes):
                self.growth[i] = max(self.growth[i], self._private(process) - self._base[i])


@pytest.fixture
def pipeline(database: Database, tmp_path: Path) -> Iterator[RayPipeline]:
    made = RayPipeline(database, tmp_path)
    yield made
    made.stop()


def _has_confirmed(sequencer: Any, lsn: Lsn) -> bool:
    report = ray.get(sequencer.account.remote(with_prepared=False))
    return report is not None and report.confirmed_lsn >= lsn
