"""Fault points: places in the code, by name, where a test may have the process die, fail or wait.

Off unless the environment variable ``XIDSTREAM_FAULTS`` is set when a process imports this module; then
``reach`` is one test of a global. It holds faults, separated by commas or lines, or ``@PATH``, a file of them::

    POINT:ACTION[=ARGUMENT][@N][#TAG]
    segment_written:kill@3                   SIGKILL to itself, as the kernel's, at the third passage
    committing_table:error=StorageFault      raise this class of pipeline.errors (default: ComponentLost)
    recorded:delay=500@2                     sleep for 500 ms

Each fault strikes once in a process. ``XIDSTREAM_FAULTS_TOKENS``, a folder, makes it once for all processes and all
their restarts: who strikes makes the fault's file there first, so that a part that was started again is not
killed for ever. ``TAG`` tells apart equal faults that are meant to strike more than once.

A file is looked at again at each passage (one ``stat``), and passages count from when its present content was
read: a test changes it while processes run, the long-lived ones too. Ray's workers, RayDP's executors and their
Python inherit both variables from the Ray that a process starts; a cluster that runs already has its own
environment.

Pairs of names are before and after: ``giving_block``, then ``block_given``. Rejected: monkeypatching (does not
reach other processes), and kills from outside alone (they never hit the same instruction twice).
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xidstream.pipeline import errors
from xidstream.pipeline.errors import ComponentLost, ConfigError, XidstreamError

VARIABLE: Final = "XIDSTREAM_FAULTS"
TOKENS_VARIABLE: Final = "XIDSTREAM_FAULTS_TOKENS"

POINTS: Final = {
    "giving_block": "reader: a block is about to go to a buffer",
    "block_given": "reader: it went",
    "sending_status": "reader: a status update is about to go to the server",
    "status_sent": "reader: it went",
    "decoding_block": "buffer: a block came",
    "block_decoded": "buffer: it is decoded and held, nothing is spilled yet",
    "writing_segment": "buffer: rows are about to be spilled",
    "segment_written": "buffer: they are",
    "sealing": "buffer: a transaction's commit came",
    "sealed": "buffer: its content is about to go to the sequencer",
    "writing_prepared": "buffer: a PREPARE's rows are in segments, its record is not written",
    "prepared_written": "buffer: it is",
    "releasing": "sequencer: the driver asks for a batch, or there may be one for it",
    "released": "sequencer: a batch is about to go to the driver",
    "batch_accepted": "sequencer: the driver reported a batch done; its segments are still there",
    "recording": "sequencer: a position is about to be recorded",
    "recorded": "sequencer: it is durable, nobody was told",
    "confirming": "sequencer: the reader is about to be told",
    "confirmed": "sequencer: it was told",
    "writing_batch": "driver: a batch is about to go to the sink",
    "batch_written": "driver: the sink holds it, the sequencer does not know",
    "batch_reported": "driver: it knows",
    "parquet_written": "executor: a task has written its files, and reports them",
    "committing_table": "driver: files of one table are written, not committed",
    "table_committed": "driver: one table is committed",
    "committing_transactions": "driver: all tables are committed, _transactions is not",
    "transactions_committed": "driver: it is",
}
"""Name → where it is."""

_FAULT: Final = re.compile(
    r"(?P<point>\w+):(?P<action>\w+)(?:=(?P<argument>\w+))?(?:@(?P<nth>\d+))?(?:#(?P<tag>[\w-]+))?"
)
_ACTIONS: Final = ("kill", "error", "delay")


@dataclass(frozen=True)
class Fault:
    point: str
    action: str
    error: type[XidstreamError] = ComponentLost
    delay_ms: int = 0
    nth: int = 1
    """At which passage, counted from 1."""
    tag: str = ""

    @property
    def token(self) -> str:
        """The name of its file: unlike that of any other fault."""
        detail = {"error": f"-{self.error.__name__}", "delay": f"-{self.delay_ms}"}.get(self.action, "")
        return f"{self.point}-{self.action}{detail}-{self.nth}{'-' if self.tag else ''}{self.tag}"


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that a text asks for. Raises ConfigError, also on a name that is not in ``POINTS``."""
    return tuple(_parse_one(part.strip()) for part in re.split(r"[,\n]", text) if part.strip())


def _parse_one(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}: {text!r} is not a fault",
            remedy="POINT:ACTION[=ARGUMENT][@N][#TAG], e.g. sealed:kill@2",
        )
    point, action, argument = match["point"], match["action"], match["argument"]
    if point not in POINTS:
        raise ConfigError(
            f"{VARIABLE}: there is no fault point {point!r}", remedy=f"one of {', '.join(POINTS)}"
        )
    if action not in _ACTIONS or (action == "kill" and argument) or (action == "delay" and not argument):
        raise ConfigError(f"{VARIABLE}: {text!r}: give kill, error[=CLASS] or delay=MILLISECONDS")
    fault = Fault(point, action, nth=max(1, int(match["nth"] or 1)), tag=match["tag"] or "")
    if action == "delay":
        if not argument.isdigit():
            raise ConfigError(f"{VARIABLE}: {text!r}: a delay is a number of milliseconds")
        return dataclasses.replace(fault, delay_ms=int(argument))
    if action == "error" and argument:
        cls = getattr(errors, argument, None)
        if not (isinstance(cls, type) and issubclass(cls, XidstreamError)):
            raise ConfigError(f"{VARIABLE}: pipeline.errors has no class {argument!r}")
        return dataclasses.replace(fault, error=cls)
    return fault


class FaultPlan:
    """What one process was told; ``reach`` counts and strikes. Safe from any thread."""

    def __init__(self, text: str, tokens: str | None) -> None:
        """Raises ConfigError as ``parse``, and where the file cannot be read."""
        self._tokens = Path(tokens) if tokens else None
        self._lock = threading.Lock()
        self._file = Path(text[1:]) if text.startswith("@") else None
        self._stamp: object = None
        self._faults: tuple[Fault, ...] = ()
        self._passages: dict[str, int] = {}
        self._struck: set[str] = set()
        if self._file is None:
            self._faults = parse(text)
        else:
            self._read_again()

    def reach(self, point: str) -> None:
        with self._lock:
            if self._file is not None:
                self._read_again()
            due = [f for f in self._faults if f.point == point]
            if not due:
                return
            n = self._passages[point] = self._passages.get(point, 0) + 1
            # Beyond the n-th, too: that one may have been another process's to strike, which then died without.
            fault = next((f for f in due if n >= f.nth and self._take(f)), None)
        if fault is not None:
            _strike(fault)

    def _take(self, fault: Fault) -> bool:
        if fault.token in self._struck:
            return False
        self._struck.add(fault.token)
        if self._tokens is None:
            return True
        try:
            os.close(os.open(self._tokens / fault.token, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _read_again(self) -> None:
        assert self._file is not None
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return
            text = self._file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{VARIABLE}: cannot read {self._file}: {error.strerror}") from None
        self._faults, self._stamp = parse(text), stamp
        self._passages.clear()


def _strike(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "delay":
        time.sleep(fault.delay_ms / 1000)
    else:
        raise fault.error(f"fault point {fault.point} was told to fail")


def _of_environment() -> FaultPlan | None:
    text = os.environ.get(VARIABLE)
    return FaultPlan(text, os.environ.get(TOKENS_VARIABLE)) if text else None


_plan = _of_environment()


def reach(point: str) -> None:
    """The code passes ``point`` (of ``POINTS``); nothing happens unless this process was told otherwise.

    Raises the error that a fault names, and ConfigError where a file of faults became wrong.
    """
    if _plan is not None:
        _plan.reach(point)


def armed() -> bool:
    """Whether this process may strike at all: a run says so at its start."""
    return _plan is not None
