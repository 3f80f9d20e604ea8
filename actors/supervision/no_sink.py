"""In a driver's place where there is none: a run that writes all it reads to the journal (``xidstream capture``).

It has no session and no batch loop. It asks the sequencer whether the end is reached, which raises what ended it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from xidstream.actors.runtime.ray_errors import unwrap
from xidstream.pipeline.account.model import SinkReport
from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables

_T = TypeVar("_T")


class NoSink:
    """A ``Driver`` for a sequencer without a sink."""

    replaceable = False

    def __init__(self) -> None:
        self._sequencer: Any = None

    def start(self) -> ray.ObjectRef | None:
        return None

    def begin(self, sequencer: Any, identity: SlotIdentity) -> None:
        self._sequencer = sequencer

    def result(self, timeout_s: float) -> bool:
        time.sleep(timeout_s)
        try:
            return bool(ray.get(self._sequencer.finished.remote()))
        except Exception as error:
            raise unwrap(error, "commit sequencer") from error

    def end(self, timeout_s: float) -> bool:
        return True

    def is_alive(self) -> bool:
        return True

    def on_snapshots(self, call: Callable[[SnapshotTables], _T], *, after_end: bool = False) -> _T:
        raise ComponentLost("there is no sink")

    def progress(self) -> SinkReport:
        return SinkReport()

    def account(self) -> SinkReport | None:
        return None

    def take_output(self) -> list[str]:
        return []

    def close(self) -> None:
        pass
