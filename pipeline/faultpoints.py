"""Fault points: named places in the code where a test can make the process die, fail, wait or stand still.

They are off unless the environment variable ``XIDSTREAM_FAULTS`` is set when a process imports this module. While they
are off, ``reach`` only tests a global. The variable holds faults, separated by commas or lines, or ``@PATH``, a file of
them::

    POINT:ACTION[=ARGUMENT][@N][#TAG]
    segment_written:kill@3                   SIGKILL to itself, as the kernel's, at the third passage
    committing_table:error=StorageFault      raise this class of pipeline.errors (default: ComponentLost)
    recorded:delay=500@2                     sleep for 500 ms
    recorded:stop                            SIGSTOP to itself: all of its threads, until somebody sends SIGCONT

Each fault strikes once in a process. If ``XIDSTREAM_FAULTS_TOKENS`` names a folder, it strikes once in all processes
and all their restarts: a process makes the fault's file there, with its process id, before it strikes. So a part that
was started again is not killed for ever. ``TAG`` tells apart equal faults that are meant to strike more than once.

A file of faults is checked at each passage (one ``stat``), and passages count from the moment when its present content
was read. So a test can change it while processes run, also for long-lived ones. Ray's workers, RayDP's executors and
their Python inherit both variables from the Ray that a process starts. A cluster that runs already has its own
environment.

Names come in pairs, before and after a step: ``giving_block``, then ``block_given``. Rejected: monkeypatching, which
does not reach other processes, and kills from outside alone, which never hit the same instruction twice.
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
    "block_given": "reader: the block was sent",
    "sending_status": "reader: a status update is about to go to the server",
    "status_sent": "reader: the status update was sent",
    "decoding_block": "buffer: a block arrived; a small one may be decoded in the reader",
    "block_decoded": "buffer: the block is decoded and held; nothing is spilled yet",
    "writing_segment": "buffer: rows are about to be spilled",
    "segment_written": "buffer: the rows are spilled",
    "shortening_segment": "buffer: rolled-back rows are about to be cut off a segment",
    "segment_shortened": "buffer: what stays of the segment is written; the whole one is there still",
    "sealing": "buffer: a transaction's commit arrived",
    "sealed": "buffer: the transaction's content is about to go to the sequencer",
    "writing_prepared": "buffer: a PREPARE's rows are in segments; its record is not written yet",
    "prepared_written": "buffer: the record of the PREPARE is written",
    "releasing": "sequencer: the driver asks for a batch, or there may be one for it",
    "released": "sequencer: a batch is about to go to the driver",
    "batch_accepted": "sequencer: the driver reported a batch done; its segments still exist",
    "recording": "sequencer: a position is about to be recorded",
    "recorded": "sequencer: the position is durable; nobody was told yet",
    "confirming": "sequencer: the reader is about to be told",
    "confirmed": "sequencer: the reader was told",
    "writing_journal": "sequencer: units are about to be written to a journal file",
    "journal_written": "sequencer: a journal file is durable; the record does not name it",
    "loading_journal": "sequencer: a journal file's units are about to be loaded",
    "snapshot_range_reading": "snapshot reader: a range is about to be read",
    "snapshot_range_written": "snapshot reader: a range's files are durable; nobody was told yet",
    "writing_batch": "driver: a batch is about to go to the sink",
    "batch_written": "driver: the sink holds the batch; the sequencer does not know yet",
    "batch_reported": "driver: the sequencer knows",
    "parquet_written": "executor: a task has written its files and reports them",
    "segment_filled_in_part": "driver: a part of its commit's constants is in a segment",
    "segment_filled": "driver: a segment has its commit's constants; the table has no name for it",
    "segment_linked": "driver: the table has a name for a segment; the table is not committed",
    "memory_written": "driver: rows that were in memory are in files of one table; the table is not committed",
    "committing_table": "driver: the files of one table are written; the table is not committed",
    "iceberg_committing": "iceberg: in the driver, the manifests of one table are written; the catalog names none",
    "iceberg_merging": "iceberg: in the driver, small files of one table are merged into one that no snapshot names",
    "iceberg_tables_committed": "iceberg: in the driver, the catalog has taken a batch's tables in one request",
    "table_committed": "driver: one table is committed",
    "carrying_snapshot": "driver: the rows that a repair does not read are about to be carried over",
    "snapshot_carried": "driver: the rows that a repair does not read are in files; the table is not committed",
    "committing_snapshot": "driver: a table's snapshot is in files; the table is not committed",
    "snapshot_committed": "driver: the table has its snapshot's rows; _snapshots has no line for them",
    "snapshot_told": "driver: _snapshots has the line",
    "folding_log": "retention: in the driver, a table is about to be folded at the cut",
    "log_folded": "retention: in the driver, the table's rows at the cut are in files; the table is not committed",
    "shortening_log": "retention: in the driver, what may be cut of a table's log is known; the table is not committed",
    "log_shortened": "retention: in the driver, a table's log is cut; others, and _transactions, are not",
    "committing_transactions": "driver: all tables are committed, or will be with it; _transactions is not",
    "transactions_committed": "driver: _transactions is committed",
    "writing_base": "mirror: the new files of a base table are about to be written",
    "base_written": "mirror: the new files of a base table are written; its table is not committed",
    "base_committed": "mirror: a base table is committed; the manifest does not name its version",
    "committing_manifest": "mirror: all base tables are committed; the manifest is not",
    "manifest_committed": "mirror: the manifest names the versions",
    "keeping_states": "erasure: the fold of an older base table is written; the table is not committed",
    "states_kept": "erasure: the log answers from a fold what it answered from an older base table",
    "erasing_rows": "erasure: a table's files are written anew; the table is not committed",
    "rows_erased": "erasure: a table of the log has no row of the keys",
    "base_erased": "erasure: a base table has no row of the keys; the manifest names its version of before",
    "erasure_told": "erasure: the record says what was done",
    "vacuuming_base": "mirror: lines of the manifest are removed; files that it named alone are there still",
}
"""Name → where in the process the point is."""

_FAULT: Final = re.compile(
    r"(?P<point>\w+):(?P<action>\w+)(?:=(?P<argument>\w+))?(?:@(?P<nth>\d+))?(?:#(?P<tag>[\w-]+))?"
)
_ACTIONS: Final = ("kill", "error", "delay", "stop")


@dataclass(frozen=True)
class Fault:
    point: str
    action: str
    error: type[XidstreamError] = ComponentLost
    delay_ms: int = 0
    nth: int = 1
    """At which passage the fault strikes, counted from 1."""
    tag: str = ""

    @property
    def token(self) -> str:
        """The name of the fault's file. No other fault has the same."""
        detail = {"error": f"-{self.error.__name__}", "delay": f"-{self.delay_ms}"}.get(self.action, "")
        return f"{self.point}-{self.action}{detail}-{self.nth}{'-' if self.tag else ''}{self.tag}"


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that a text asks for. Raises ConfigError, also for a name that is not in ``POINTS``."""
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
    if (
        action not in _ACTIONS
        or (action in ("kill", "stop") and argument)
        or (action == "delay" and not argument)
    ):
        raise ConfigError(f"{VARIABLE}: {text!r}: give kill, stop, error[=CLASS] or delay=MILLISECONDS")
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
    """The faults of one process. ``reach`` counts passages and strikes. Any thread may call it."""

    def __init__(self, text: str, tokens: str | None) -> None:
        """Raises ConfigError as ``parse`` does, and if the file cannot be read."""
        self._tokens = Path(tokens) if tokens else None
        """The folder in which processes note the faults that struck; None: each process by itself."""
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._file = Path(text[1:]) if text.startswith("@") else None
        """The file that the faults are read from; None: they are in the text itself."""
        self._stamp: object = None
        """The time and inode of the file that was read: another file has others."""
        self._faults: tuple[Fault, ...] = ()
        """The faults that may strike."""
        self._passages: dict[str, int] = {}
        """By point: how often it was passed, since the faults were read."""
        self._struck: set[str] = set()
        """The tokens of the faults that have struck."""
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
            # Also after the n-th passage: another process may have been about to strike then, and died before.
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
            token = os.open(self._tokens / fault.token, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            try:
                os.write(token, b"%d" % os.getpid())
            finally:
                os.close(token)
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
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "delay":
        time.sleep(fault.delay_ms / 1000)
    else:
        raise fault.error(f"fault point {fault.point} was told to fail")


def _of_environment() -> FaultPlan | None:
    text = os.environ.get(VARIABLE)
    return FaultPlan(text, os.environ.get(TOKENS_VARIABLE)) if text else None


_plan = _of_environment()


def reach(point: str) -> None:
    """Note that the code passes ``point`` (of ``POINTS``). Nothing happens unless a fault is set for it.

    Raises the error that the fault names, and ConfigError if a file of faults became wrong.
    """
    if _plan is not None:
        _plan.reach(point)


def armed() -> bool:
    """Whether this process has faults at all. A run says so at its start."""
    return _plan is not None
