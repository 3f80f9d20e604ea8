"""Other runs of a slot on this machine: who they are, so that a second one is refused before it starts anything.

The server knows the process of its own that sends to a slot's reader. Here that number is nobody's, or somebody
else's. A run is found by its socket instead (``runtime.run_socket``). While its checks and Ray take half a
minute it has no supervisor, so ``StartingRun`` answers in its place: two runs that are started at once see each other.
The one that began first goes on.

What another user runs is not told to this one. Then what the server says is all that there is.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from xidstream.actors.runtime.run_search import local_answers
from xidstream.actors.runtime.run_socket import RunSocket
from xidstream.pipeline.account import Account, RunPart
from xidstream.pipeline.account.codec import of_json, to_json
from xidstream.pipeline.errors import SlotInUse, XidstreamError
from xidstream.pipeline.findings import Finding
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.preflight.record_check import without_publications
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted

_STARTED_AT: Final = datetime.datetime.now(datetime.timezone.utc)
_WAITING: Final = ("the checks of server and storage, and Ray",)


class StartingRun:
    """Answers for the slots of a run until its supervisors do. ``close`` may be called twice."""

    def __init__(self, configs: Sequence[Config], *, has_sink: bool) -> None:
        self._sockets: list[RunSocket] = []
        for config in configs:
            answer = to_json(Account(datetime.datetime.now(datetime.timezone.utc), _part(config, has_sink)))
            with suppress(OSError):  # a run is not kept from working where nobody can be answered
                self._sockets.append(RunSocket(config.slot, partial(str, answer)))

    def close(self) -> None:
        while self._sockets:
            self._sockets.pop().close()


def _part(config: Config, has_sink: bool) -> RunPart:
    return RunPart(
        slot=config.slot,
        system_identifier=None,
        database=None,
        publication=config.publication,
        sink=redacted(config.sink) if has_sink else "",
        storage=redacted(config.storage),
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=_STARTED_AT,
        state="starting",
        waiting_for=_WAITING,
        epoch="",
        is_caught_up=False,
    )


def reading_here(config: Config) -> Finding | None:
    """A failed finding that names the run of this slot on this machine; None where there is none but this process."""
    try:
        found = [of_json(answer).run for answer in local_answers(config.slot)]
    except XidstreamError:
        return None  # another user's run, or one that does not answer: the server's word has to do
    others = [run for run in found if run is not None and run.pid != os.getpid() and not _is_later(run)]
    others.sort(key=lambda run: (run.started_at, run.pid))
    if not others:
        return None
    server: str | None = None
    with suppress(XidstreamError), ReplicationConnection(without_publications(config)) as connection:
        server = connection.identify_system().system_identifier
    for run in others:
        is_starting = run.system_identifier is None
        if run.storage == redacted(config.storage) if is_starting else run.system_identifier == server:
            return _finding(run)
    return None


def _is_later(run: RunPart) -> bool:
    """Whether both are before their start, and it began after this process."""
    return run.waiting_for == _WAITING and (run.started_at, run.pid) > (_STARTED_AT, os.getpid())


def _finding(run: RunPart) -> Finding:
    page = f" (status page {run.page})" if run.page else ""
    return Finding.failed(
        "slot",
        f"slot {run.slot} is read by the run with process {run.pid} on this machine, which began at "
        f"{run.started_at:%Y-%m-%d %H:%M:%S} UTC{page}",
        f"look at it with `xidstream status --slot {run.slot}`; to end it: Ctrl-C where it was started, or "
        f"`kill {run.pid}`",
        SlotInUse,
    )
