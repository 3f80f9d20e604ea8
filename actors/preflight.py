"""The preflight of a run: ``pipeline.preflight.checks``, and what this machine must have besides.

``xidstream check`` prints ``findings_of``. ``xidstream run`` and ``ChangeStream.start`` call ``require``, before Ray
and a JVM are started for nothing. Ray is not started here, only asked what it would be: a cluster's, or this machine's.
What only a Ray that runs can tell is one finding that says so.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from xidstream.actors.driver.session import settled
from xidstream.actors.runtime.java import ensure_java
from xidstream.actors.runtime.ray_cluster import cpus_here, is_ours
from xidstream.actors.supervision.cpu_plan import Plan, plan
from xidstream.actors.supervision.other_runs import reading_here
from xidstream.pipeline.errors import ExitStatus, PreconditionMissing, SlotInUse, SlotLost, XidstreamError
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.preflight.checks import preflight
from xidstream.pipeline.quantities import counted
from xidstream.pipeline.settings.addresses import host_and_port
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.sink_findings import SinkCheck

SLOT_IN_USE_WAIT_S = 30.0
"""A server notices within seconds that a killed reader is gone; what holds a slot for longer is a living one."""
_SLOT_POLL_S = 0.5


def findings_of(
    config: Config, check_sink: SinkCheck | None = None, *, has_sink: bool = True
) -> list[Finding]:
    """All of it. ``check_sink``: of the sink that the run will be given; None: of ``config.sink``. ``has_sink``: a
    capture has none, and needs no Spark."""
    findings = preflight(config, check_sink, has_sink=has_sink)
    if (run := reading_here(config)) is not None:
        # The server names its own process, which is another's on this machine.
        findings = [
            f
            for f in findings
            if f.check != "slot" or (f.status is not Status.OK and f.raises is not SlotInUse)
        ]
        findings.append(run)
    if not has_sink:
        unknown = "free memory, and whether each node reaches the server and the storage"
        findings.append(Finding.not_checked("cluster", f"{unknown}: known once Ray has started"))
        return findings
    try:
        findings.append(Finding.ok("java", f"Java: {ensure_java()}"))
    except PreconditionMissing as error:
        findings.append(Finding.of_error("java", error))
    findings.append(
        Finding.not_checked(
            "cluster",
            "free memory, the Java of other nodes, and whether each node reaches the server, the storage and the sink: "
            "known once Ray and Spark have started",
        )
    )
    return findings


def cpus_of_run(configs: Sequence[Config], *, has_sink: bool = True) -> Plan:
    """What the parts of a run of all these slots ask Ray for, and their settings with it.

    A cluster is asked for what the settings say: it may grow. Raises PreconditionMissing where Ray would be the run's
    own, and this machine is too small for it.
    """
    configs = [settled(config) for config in configs]
    return plan(configs, cpus_here(), has_sink=has_sink) if is_ours() else Plan(tuple(configs))


def room_finding(configs: Sequence[Config], *, has_sink: bool = True) -> Finding:
    """Whether this machine has the CPUs for a run of all these slots."""
    try:
        if not is_ours():
            return Finding.not_checked(
                "cpus",
                "whether the Ray cluster has CPUs for the run, or adds nodes: known once the run asks for them",
            )
        planned = cpus_of_run(configs, has_sink=has_sink)
    except XidstreamError as error:
        return Finding.of_error("cpus", error)
    least = "" if planned.scale == 1.0 else f"; each part asks for {planned.scale:.0%} of its share"
    asked = f"{planned.needed:.4g} of this machine's {cpus_here():g} CPUs at the start{least}"
    return Finding.ok("cpus", f"{counted(len(configs), 'slot')} of this run: Ray is asked for {asked}")


def port_findings(config: Config) -> list[Finding]:
    """Whether the ports that the run's settings name are free on this machine. ``config``: of one of its slots."""
    asked = []
    if config.status_address not in ("", "off"):
        asked.append(("status_address", "the status page", config.status_address, ", or off"))
    if config.metrics_address and is_ours():
        free = ", or leave it out: `xidstream status` shows a free one"
        asked.append(("metrics_address", "Ray's metrics", config.metrics_address, free))
    findings = []
    for check, what, address, otherwise in asked:
        host, port = host_and_port(address, check)
        remedy = f"give another {check}{otherwise}"
        why = _why_taken(host, port)
        if why is None:
            findings.append(Finding.ok(check, f"{what} can be served at {host}:{port}"))
        else:
            findings.append(Finding.failed(check, f"{what} cannot be served at {host}:{port}: {why}", remedy))
    return findings


def require_ports(config: Config) -> None:
    """Raise PreconditionMissing for the first that is taken, before Ray is started for nothing."""
    for finding in port_findings(config):
        if finding.status is Status.FAILED:
            raise finding.error()


def _why_taken(host: str, port: int) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the page does
            probe.bind(address)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def require(
    config: Config,
    check_sink: SinkCheck | None = None,
    *,
    tell: Callable[[str], None],
    wait_s: float = SLOT_IN_USE_WAIT_S,
    stopped: Callable[[], bool] = lambda: False,
    has_sink: bool = True,
) -> None:
    """Raise for the first thing that is missing, after telling the others; warnings are told, too.

    A slot that is in use, and nothing else amiss, may be that of a run that was killed a moment ago: it is waited
    for, ``wait_s`` at most, and no longer than until ``stopped``. A lost slot is raised before all else: what needs a
    person's decision is no less lost when the rest is mended.
    """
    deadline_s = time.monotonic() + wait_s
    is_announced = False
    while True:
        findings = findings_of(config, check_sink, has_sink=has_sink)
        failed = [f for f in findings if f.status is Status.FAILED]
        if [f.raises for f in failed] != [SlotInUse] or time.monotonic() >= deadline_s:
            break
        if not is_announced:
            tell(f"{failed[0].statement}: waiting up to {wait_s:.0f} s for it to end")
            is_announced = True
        while _is_in_use(config) and time.monotonic() < deadline_s:
            if stopped():
                return
            time.sleep(_SLOT_POLL_S)
    failed.sort(
        key=lambda f: (f.raises is not SlotLost, f.error().policy.exit_status is not ExitStatus.TERMINAL)
    )
    for finding in findings:
        if finding.status is Status.WARNING:
            tell(f"note: {finding.statement}")
    for finding in failed[1:]:
        tell(f"also: {finding.statement}\n  remedy: {finding.remedy}")
    if failed:
        raise failed[0].error()


def _is_in_use(config: Config) -> bool:
    try:
        return bool(describe_slot(login_of(config), config.slot).active) or reading_here(config) is not None
    except XidstreamError:
        return False  # the next round of findings says what is wrong
