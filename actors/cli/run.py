"""``xidstream run`` and ``xidstream capture``: preflight, Ray, the supervisors, and what a person sees meanwhile.

Each slot has a supervisor, on a thread of its own. They share the Spark session (``supervision.shared_session``) and
the cap on buffers (``reader.buffer_quota``). A slot that ends with an error says so, and the others go on. The run ends
when all slots have ended, with the worst error. A capture is a run without a sink: it has no Spark session.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from xidstream.actors.cli.display import Display, summary
from xidstream.actors.cli.event_lines import EventLines
from xidstream.actors.cli.json_log import log_as_json
from xidstream.actors.cli.resync import resync_command
from xidstream.actors.driver.session import settled
from xidstream.actors.driver.spark_secret import SECRET_VARIABLE
from xidstream.actors.preflight import cpus_of_run, require, require_ports
from xidstream.actors.reader.buffer_quota import start_quota
from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.actors.runtime.ray_cluster import connect_ray, is_ours, keep_logs
from xidstream.actors.runtime.secrets import refuse_travelling, without_secrets
from xidstream.actors.runtime.signals import STOPPING, StopRequest
from xidstream.actors.status.metrics_server import offer_metrics
from xidstream.actors.status.page import serve
from xidstream.actors.supervision.cpu_plan import Plan
from xidstream.actors.supervision.other_runs import StartingRun
from xidstream.actors.supervision.shared_session import SharedSession
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.errors import ConfigError, ExitStatus, SlotLost, XidstreamError
from xidstream.pipeline.events import Event, of_error
from xidstream.pipeline.faultpoints import VARIABLE, armed
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.settings.catalog_names import CatalogName
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.settings.modes import SnapshotMode, SparkMode
from xidstream.pipeline.settings.sink_kinds import DELTA
from xidstream.pipeline.sinks.sink import check_sink_spec

_CHECKS_POLL_S = 0.25
_CHECKS_END_S = 10.0
"""How long a running check may take to end when the run is stopped: long enough to find that no server answers."""


def run_pipeline(configs: Sequence[Config], stop: StopRequest, began_s: float | None = None) -> None:
    """Until all slots are done or ``stop`` was asked for. ``began_s``: when the command did, by the monotonic clock;
    seconds that are told count from there. Raises the worst of what ended them."""
    # A relative path means the user's folder, not the driver actor's.
    configs = [dataclasses.replace(config, sink=check_sink_spec(config.sink)) for config in configs]
    for config in configs:
        refuse_travelling(config)
        if config.mirror_every and not config.sink_kind.has_base_tables:
            raise ConfigError(
                "mirror_every is for a Delta or Iceberg sink: base tables are made from its change log",
                remedy="leave mirror_every out, or give --sink delta:URI",
            )
        if config.mirror_every and (catalog := CatalogName.parse(config.mirror_catalog)) is not None:
            from xidstream.pipeline.mirror.glue_catalog import check_usable

            if config.sink_kind is not DELTA:
                raise ConfigError(
                    "mirror_catalog is for base tables in Delta's format: those of an Iceberg sink are in its catalog",
                    remedy="leave mirror_catalog out",
                )
            check_usable(catalog, Location.parse(config.sink.partition(":")[2]))
    _run(configs, stop, began_s, has_sink=True)


def capture_slots(configs: Sequence[Config], stop: StopRequest, began_s: float | None = None) -> None:
    """Run the pipeline into the journals of the slots. A sink that the settings name is not used."""
    for config in configs:
        refuse_travelling(config)
        _check_capture(config)
    _run(configs, stop, began_s, has_sink=False)


def _check_capture(config: Config) -> None:
    if not config.journal_max_bytes:
        raise ConfigError(
            "a capture has only the journal to write to, and journal_max_bytes is 0",
            remedy="raise journal_max_bytes: transactions that it has no room for wait in the slot",
        )
    if config.snapshot == SnapshotMode.ONLY.value:
        raise ConfigError("snapshot = only is for a run: a capture takes no snapshots")
    if config.on_slot_lost != "stop":
        raise ConfigError("on_slot_lost = resync is for a run: a capture takes no snapshots")
    if config.create_slot and not (config.snapshot or config.sink):
        raise ConfigError(
            "a capture that creates the slot needs the setting snapshot: are the rows from before the slot wanted?",
            remedy="give --snapshot initial (the next run takes the tables' snapshots) or --snapshot never, or make "
            "the slot with `xidstream slot create`",
        )


def _run(configs: Sequence[Config], stop: StopRequest, began_s: float | None, *, has_sink: bool) -> None:
    choose_for_process(configs[0].storage_mode)
    skip_pandas_import()
    stop.is_quiet = configs[0].log_format == "json"
    display: Display | EventLines = EventLines() if stop.is_quiet else Display(began_s=began_s)
    with display:
        failures = _Run(configs, display, stop, has_sink=has_sink).run()
        if failures:
            raise max(failures, key=_exit_status)


class _Run:
    def __init__(
        self,
        configs: Sequence[Config],
        display: Display | EventLines,
        stop: StopRequest,
        *,
        has_sink: bool = True,
    ) -> None:
        self._configs = configs
        self._has_sink = has_sink
        self._display = display
        self._stop = stop
        self._several = len(configs) > 1
        self._failures: dict[str, BaseException] = {}
        self._is_stop_announced = False
        self._starting = StartingRun(configs, has_sink=has_sink)

    def run(self) -> list[BaseException]:
        """What the slots failed with, none of it raised here. Raises PreconditionMissing where the machine is too
        small for all of them."""
        try:
            return self._run()
        finally:
            self._starting.close()

    def _run(self) -> list[BaseException]:
        if not self._stop.asked:
            self._display.starting("the checks of server and storage")
            self._check()
        ready = [config for config in self._configs if config.slot not in self._failures]
        plan = cpus_of_run(ready, has_sink=self._has_sink) if ready else None
        if ready:
            require_ports(ready[0])
        if ready and not self._stop.asked:
            self._display.starting("Ray")
            with self._stop.held():
                self._connect_ray()
        if self._stop.asked:
            self._display.line("stopped before anything was read", "yellow")
        elif plan is not None:
            self._supervise(plan)
        if self._failures and (logs := keep_logs()):
            self._display.line(f"the logs of this run's processes are kept in {logs}", "yellow")
        return [self._failures[config.slot] for config in self._configs if config.slot in self._failures]

    def _connect_ray(self) -> None:
        config = self._configs[0]
        json_logs = config.log_format == "json"
        try:
            connect_ray(
                json_logs=json_logs,
                needs_spark=self._has_sink,
                offers_metrics=any(config.metrics_address for config in self._configs),
            )
        finally:
            if json_logs:
                log_as_json()
        if self._has_sink and settled(config).spark == SparkMode.RAYDP.value and not is_ours():
            self._display.line(
                f"Spark on this cluster asks for a secret only if each node has one in {SECRET_VARIABLE}: else whoever "
                "reaches its ports may run code as Ray's user (docs/security.md)",
                "yellow",
            )

    def _check(self) -> None:
        """The preflight of each slot, beside the others'."""
        threads = [self._start(config.slot, partial(self._check_one, config)) for config in self._configs]
        deadline_s: float | None = None
        while living := [thread for thread in threads if thread.is_alive()]:
            living[0].join(_CHECKS_POLL_S)
            if self._stop.asked:
                deadline_s = deadline_s or time.monotonic() + _CHECKS_END_S
                if time.monotonic() > deadline_s:
                    return

    def _check_one(self, config: Config) -> None:
        check = partial(
            require,
            config,
            tell=partial(self._tell, config.slot),
            stopped=lambda: self._stop.asked,
            has_sink=self._has_sink,
        )
        try:
            check()
        except SlotLost as error:
            if config.on_slot_lost != "resync":
                raise
            self._tell(
                config.slot,
                of_error(
                    "slot_lost", f"{error.message}; the slot is made anew (on_slot_lost = resync)", error
                ),
            )
            resync_command(config, discard_journal=False, tell=partial(self._tell_resync, config.slot))
            check()

    def _tell_resync(self, slot: str, text: str) -> None:
        self._tell(slot, Event("resync", text, logging.WARNING))

    def _supervise(self, plan: Plan) -> None:
        configs = plan.configs
        session = SharedSession({config.slot: without_secrets(config) for config in configs}, plan.shares)
        quota = None
        if len(configs) > 1:
            quota = start_quota(configs[0].buffers_max, sum(config.buffers_min for config in configs))
        supervisors = {
            config.slot: Supervisor(
                config,
                partial(session.driver, config.slot) if self._has_sink else None,
                partial(self._tell, config.slot),
                quota,
                plan.shares,
            )
            for config in configs
        }
        for supervisor in supervisors.values():
            self._stop.tell(supervisor.stop)
        if armed():
            self._display.line(f"{VARIABLE} is set: parts of this run will fail on purpose", "bold red")
        page = serve(configs[0], list(supervisors.values()))
        self._starting.close()
        if page is not None:
            announced = Event(
                "status_page", f"the status page of this run: {page.url}", logging.INFO, url=page.url
            )
            self._display.line(announced)
        metrics = offer_metrics(configs[0], list(supervisors.values()))
        try:
            self._await(supervisors)
        finally:
            for server in (page, metrics):
                if server is not None:
                    server.close()

    def _await(self, supervisors: dict[str, Supervisor]) -> None:
        """Run them all to their end."""
        threads = [self._start(slot, supervisor.run) for slot, supervisor in supervisors.items()]
        while living := [thread for thread in threads if thread.is_alive()]:
            living[0].join(self._display.interval_s)
            self._show(supervisors)
        self._show(supervisors)
        for slot, supervisor in supervisors.items():
            if slot not in self._failures:
                took = f"in {self._display.elapsed_s:.0f} s"
                text = f"done: {summary(supervisor.status())} · {took}"
                self._tell(slot, Event("done", text, logging.INFO), "")

    def _start(self, slot: str, work: Callable[[], None]) -> threading.Thread:
        """On a thread that does not keep the process from ending at once, when that is asked for."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again when all have ended
                self._fail(slot, error)

        thread = threading.Thread(target=run, name=f"xidstream-{slot}", daemon=True)
        thread.start()
        return thread

    def _show(self, supervisors: dict[str, Supervisor]) -> None:
        for supervisor in supervisors.values():
            for line in supervisor.take_output():
                print(line, flush=True)
        statuses = {slot: supervisor.status() for slot, supervisor in supervisors.items()}
        self._display.show(statuses)
        if self._stop.is_quiet and self._stop.asked and not self._is_stop_announced:
            self._is_stop_announced = True
            self._display.line(Event("stopping", STOPPING, logging.INFO))

    def _fail(self, slot: str, error: BaseException) -> None:
        self._failures[slot] = error
        if self._several:
            event = Event("slot_failed", f"unexpected {type(error).__name__}", logging.ERROR)
            if isinstance(error, XidstreamError):
                event = of_error("slot_failed", error.message, error, logging.ERROR)
            self._tell(slot, event, "bold red")

    def _tell(self, slot: str, text: str, style: str = "yellow") -> None:
        self._display.tell(slot, text, style, several=self._several)


def _exit_status(error: BaseException) -> ExitStatus:
    return error.policy.exit_status if isinstance(error, XidstreamError) else ExitStatus.FAILED
