"""The Spark driver actor: the Spark session, in a process that can be replaced.

A JVM that died cannot be started again in the same process. So the command line keeps its session in an actor: a new
actor takes the place of a lost one, and the run goes on.

The session starts with the actor where each batch needs it anyway, and on a cluster, where it takes longest. Else it
starts when something first asks for it (``driver_session``). Whether it *can* start is
looked at in the beginning either way.

Several slots of one run share the actor and its session, each with a batch loop of its own on a thread of its own;
``actors.supervision.shared_session`` says who starts and ends it. Their Spark jobs are told apart by job groups.

The command line's process imports this module to name the actor. So what only a mirror needs (deltalake, pyarrow's
datasets and with them pandas: some 55 MB) is imported when one starts, in the actor.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from py4j.protocol import Py4JError

from xidstream.actors.driver.batch_loop import BatchLoop
from xidstream.actors.driver.printed_lines import PrintedLines
from xidstream.actors.driver.session_kind import n_executors
from xidstream.actors.driver.spark_master import SparkMaster
from xidstream.actors.driver.trouble import session_trouble, trouble_of
from xidstream.actors.runtime.driver_session import DriverSession, LoopSession
from xidstream.actors.runtime.java import ensure_java
from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.actors.runtime.process_facts import this_process
from xidstream.actors.runtime.spark_version import require_raydp_for_spark
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.settings.modes import SparkMode
from xidstream.pipeline.settings.sink_kinds import kind_of
from xidstream.pipeline.sinks.sink import make_sink
from xidstream.pipeline.spark_errors import fault_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from xidstream.actors.mirror import MirrorLoop

_T = TypeVar("_T")


class SparkDriver:
    """The actor, of one slot or several. ``run`` blocks one thread for each; the others answer."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        choose_for_process(next(iter(configs.values())).storage_mode)
        if not any(kind_of(config.sink).runs_users_code for config in configs.values()):
            skip_pandas_import()
        self._configs = configs
        self._loops: dict[str, BatchLoop] = {}
        """By slot: its batch loop, the last one that began."""
        self._sessions: dict[str, LoopSession] = {}
        """By slot: the session as its loop has it."""
        self._names: dict[str, str] = {}
        """By slot: the name of its loop, without which none is ended."""
        self._mirrors: dict[str, MirrorLoop] = {}
        """By slot: the refreshes of its base tables, where it has any."""
        self._lines = PrintedLines()
        """Lines that were printed and not taken yet."""
        self._session = DriverSession(self._start_session)
        """The one Spark session of all slots."""
        self._master: SparkMaster | None = None
        """Spark's master; None before the session is started."""

    def start(self) -> None:
        """Raises PreconditionMissing where no session can be started here, and what ``start_spark`` raises where one
        is started at once."""
        require_raydp_for_spark()
        ensure_java()
        if any(map(_needs_session, self._configs.values())):
            self._session.get()
        # For good: it is the process's, and several loops may end and begin at any time.
        sys.stdout = self._lines

    def _start_session(self) -> SparkSession:
        from xidstream.actors.driver.session import start_spark

        slot, config = next(iter(self._configs.items()))
        name = f"xidstream-{slot}"
        spark = start_spark(config, name)
        self._master = SparkMaster(name)
        return spark

    def run(self, slot: str, name: str, sequencer: Any, identity: SlotIdentity) -> None:
        """``name`` is the loop's alone, and that of its Spark jobs' group.

        Raises what the loop raises, and ComponentLost where the JVM is gone."""
        try:
            self._run(slot, name, sequencer, identity)
        except (Py4JError, OSError) as error:
            # Of what stands around the sink, which names its own: a JVM may die at any call.
            raise fault_of(error, "delivering batches") from error

    def _run(self, slot: str, name: str, sequencer: Any, identity: SlotIdentity) -> None:
        config = self._configs[slot]
        session = LoopSession(self._session, name, f"slot {slot}")
        loop = BatchLoop(
            session,
            make_sink(config.sink, identity, config.sink_settings),
            sequencer,
            config.storage,
            identity,
            self.progress(slot),
            self._loops[slot].history if slot in self._loops else None,
        )
        # In this order: what ends the loop before must never find this one under the old name.
        self._names[slot] = name
        self._sessions[slot] = session
        self._loops[slot] = loop
        if config.mirror_every and slot not in self._mirrors:
            from xidstream.actors.mirror import start_beside

            # Once, for all epochs: nothing of it belongs to one.
            self._mirrors[slot] = start_beside(config, self._session, print)
        loop.run()

    def end(self, slot: str, name: str) -> None:
        """End this loop and no later one: a call may be slow, and the next epoch's loop be there already."""
        if self._names.get(slot) == name and slot in self._loops:
            self._loops[slot].stop()
            with contextlib.suppress(Py4JError, OSError):  # a lost JVM, and its jobs with it
                self._sessions[slot].cancel_jobs()

    def is_alive(self) -> bool:
        """Whether it has a session that works, or may still start one. Raises what Py4J raises when the JVM is gone."""
        spark = self._session.started
        if spark is None or self._master is None:
            return not self._session.has_failed
        return not self._master.is_lost() and not spark.sparkContext._jsc.sc().isStopped()

    def trouble(self, slot: str) -> str | None:
        """The reason why the session runs no more job, or why the current batch will never end; None if neither is
        known."""
        spark = self._session.started
        if spark is None or self._master is None:
            return None
        return session_trouble(spark) or trouble_of(self._master, self._loops.get(slot))

    def progress(self, slot: str) -> SinkReport:
        return self._loops[slot].progress if slot in self._loops else SinkReport()

    def account(self, slot: str) -> SinkReport:
        """For the run's account. It asks the JVM, so it may take as long as the JVM does."""
        loop = self._loops.get(slot)
        process = this_process("Spark driver")
        if loop is None:
            return SinkReport(process=process)
        return loop.sink_report(self._n_executors(), process)

    def _n_executors(self) -> int | None:
        spark = self._session.started
        try:
            return None if spark is None else n_executors(spark)
        except (Py4JError, OSError):
            return None  # a lost JVM: ``trouble`` says so

    def on_snapshots(self, slot: str, call: Callable[[SnapshotTables], _T], after_end: bool) -> _T:
        """``call`` gets the ``SnapshotTables`` of the slot's sink."""
        if slot not in self._loops:
            raise ComponentLost("the Spark driver writes to no sink at the moment")
        return self._loops[slot].on_snapshots(call, after_end=after_end)

    def take_output(self) -> list[str]:
        """Take what was printed, of all slots."""
        return self._lines.take()

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        for mirror in self._mirrors.values():
            with contextlib.suppress(Py4JError, OSError):  # a lost JVM
                mirror.stop()
        if self._session.started is not None:
            from xidstream.actors.driver.session import stop_spark

            stop_spark()


def _needs_session(config: Config) -> bool:
    """``config`` is settled: it says where Spark's tasks run."""
    return config.spark != SparkMode.LOCAL.value or kind_of(config.sink).needs_spark
