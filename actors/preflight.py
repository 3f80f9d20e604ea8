"""The preflight of a run: ``pipeline.stages.preflight``, and what this machine must have besides.

``xidstream check`` prints ``findings_of``. ``xidstream run`` and ``ChangeStream.start`` call ``require``, before Ray
and a JVM are started for nothing. Neither imports Ray here: what only Ray can tell is one finding that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from xidstream.actors.runtime.java import ensure_java
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import ExitStatus, PreconditionMissing, SlotInUse, SlotLost, XidstreamError
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.slot.admin import describe_slot
from xidstream.pipeline.slot.login import login_of
from xidstream.pipeline.spark.sink_findings import SinkCheck
from xidstream.pipeline.stages.preflight import preflight

SLOT_IN_USE_WAIT_S = 30.0
"""A server notices within seconds that a killed reader is gone; what holds a slot for longer is a living one."""
_SLOT_POLL_S = 0.5


def findings_of(
    config: Config, check_sink: SinkCheck | None = None, *, has_sink: bool = True
) -> list[Finding]:
    """All of it. ``check_sink``: of the sink that the run will be given; None: of ``config.sink``. ``has_sink``: a
    capture has none, and needs no Spark."""
    findings = preflight(config, check_sink, has_sink=has_sink)
    if not has_sink:
        unknown = "free CPUs and memory, and whether each node reaches the server and the storage"
        findings.append(
            Finding.not_checked("cluster", f"what only Ray can tell, once it has started: {unknown}")
        )
        return findings
    try:
        findings.append(Finding.ok("java", f"Java: {ensure_java()}"))
    except PreconditionMissing as error:
        findings.append(Finding.of_error("java", error))
    findings.append(
        Finding.not_checked(
            "cluster",
            "what only Ray and Spark can tell, once they have started: free CPUs and memory, the Java of other nodes, "
            "and whether each node reaches the server, the storage and the sink",
        )
    )
    return findings


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
    told = False
    while True:
        findings = findings_of(config, check_sink, has_sink=has_sink)
        failed = [f for f in findings if f.status is Status.FAILED]
        if [f.raises for f in failed] != [SlotInUse] or time.monotonic() >= deadline_s:
            break
        if not told:
            tell(f"{failed[0].statement}: waiting up to {wait_s:.0f} s for it to end")
            told = True
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
        return bool(describe_slot(login_of(config), config.slot).active)
    except XidstreamError:
        return False  # the next round of findings says what is wrong
