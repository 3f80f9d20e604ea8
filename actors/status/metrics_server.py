"""Ray's metrics at the address that ``metrics_address`` names, for a run whose Ray is its own.

Ray's agent offers them on a free port of 127.0.0.1, for this machine alone, and can do it nowhere else. Where
Prometheus is to find them at one place, perhaps from another machine, the run asks the agent for each request, and
passes on the answer without the lines that name a program by its path: these are nobody's business outside (on this
machine ``ps`` shows them, too).

Requests do nothing but read. Nobody is asked for a password: the address says who may come.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final

from xidstream.actors.runtime.ray_cluster import is_ours
from xidstream.actors.status.http_server import Answer, HttpServer
from xidstream.actors.supervision.ray_metrics import metrics_url
from xidstream.actors.supervision.supervisor import Supervisor
from xidstream.pipeline.settings.addresses import host_and_port
from xidstream.pipeline.settings.config import Config

_ANSWER_S: Final = 10.0
_PATH: Final = re.compile(rb'^[^#\n][^\n]*="[^"\n]*/[^\n]*\n', re.MULTILINE)
"""A sample with a slash in the value of a label."""


def offer_metrics(config: Config, supervisors: Sequence[Supervisor]) -> HttpServer | None:
    """Until it is closed. None where the settings ask for nothing, or Ray is not the run's. Raises
    PreconditionMissing where the address cannot be had."""
    if not config.metrics_address or not is_ours():
        return None
    host, port = host_and_port(config.metrics_address, "metrics_address")
    server = HttpServer(host, port, _answer, "metrics", "metrics_address")
    for supervisor in supervisors:
        supervisor.measured_at(f"{server.url}metrics")
    return server


def without_paths(samples: bytes) -> bytes:
    """Prometheus' text, without the samples that have a path in a label."""
    return _PATH.sub(b"", samples)


def _answer(path: str) -> Answer:
    if path not in ("/", "/metrics"):
        return 404, "text/plain", b"there is nothing here\n"
    url = metrics_url()
    if url is None:
        return 503, "text/plain", b"Ray offers no metrics yet\n"
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return 200, answer.headers["Content-Type"], without_paths(answer.read())
    except (OSError, urllib.error.URLError):
        return 503, "text/plain", b"Ray's agent does not answer\n"
