"""One run of the harness: the source, a real change stream into Delta, and the looks, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.truth.source import Source
from tests.truth.watching import Verdict, Watcher
from xidstream import ChangeLog, ChangeStream
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.postgres.ddl_trigger import prepare
from xidstream.pipeline.settings.config import Config

_START_S = 120.0
_END_S = 45.0


@dataclass(frozen=True)
class Settings:
    """``has_trigger``: with the event trigger for DDL. ``until_s``: no further step after this reading of the monotonic
    clock. ``stands_first``: no step before all tables can be read, as a short walk could end while each look is
    refused."""

    n_steps: int
    seed: int
    has_trigger: bool = False
    looks_every: int = 1
    refresh_every: int = 20
    until_s: float = float("inf")
    stands_first: bool = False


@dataclass(frozen=True)
class Result:
    """``unread``: tables that cannot be read in the end, a while after the last step."""

    seed: int
    n_steps: int
    seconds: float
    verdict: Verdict
    unread: frozenset[str]
    n_statements: dict[str, int]

    @property
    def is_right(self) -> bool:
        return not self.verdict.differences and not self.unread

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(self.n_statements.items()))
        unread = f"\nnot readable in the end: {sorted(self.unread)}" if self.unread else ""
        head = f"seed {self.seed}: {self.n_steps} steps in {self.seconds:.0f} s"
        return f"{head}\n{self.verdict}{unread}\n  done: {kinds}"


def run_steps(
    connect: Callable[[], psycopg.Connection[Any]],
    dsn: str,
    spark: Any,
    folder: Path,
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """``connect`` and ``dsn`` lead to one empty database."""
    source = Source(connect, settings.seed)
    if settings.has_trigger:
        with connect() as session:
            prepare(session)
    config = Config.of(
        {
            "dsn": dsn,
            "slot": f"truth_{settings.seed}",
            "publication": "p",
            "storage": str(folder / "segments"),
            "logical_decoding_work_mem": "64kB",
            "create_slot": True,
            "snapshot": "initial",
            "buffers_max": 2,
            "two_phase": settings.seed % 2 == 0,
        }
    )
    query = ChangeStream(config).toDelta(str(folder / "delta")).start(spark)
    began_s = time.monotonic()
    n = n_told = 0
    try:
        log = log_of(query, str(folder / "delta"))
        watcher = Watcher(source, log, spark, settings.seed)
        if settings.stands_first:
            assert not watcher.all_standing(_START_S)
        while n < settings.n_steps and time.monotonic() < settings.until_s:
            source.step()
            n += 1
            if query.exception() is not None:
                raise query.exception()
            if n % settings.looks_every == 0:
                watcher.look()
            if n % settings.refresh_every == 0:
                watcher.refresh()
            verdict = watcher.verdict
            for difference in verdict.differences[n_told:]:
                say(difference)
            n_told = len(verdict.differences)
            if n % 25 == 0:
                say(
                    f"step {n}: {verdict.n_equal.total()} equal, {verdict.n_refused.total()} refused, "
                    f"{len(verdict.differences)} different"
                )
        source.finish()
        unread = watcher.all_standing(_END_S)
        watcher.refresh()
    finally:
        query.stop()
        source.close()
    seconds = time.monotonic() - began_s
    return Result(settings.seed, n, seconds, watcher.verdict, frozenset(unread), dict(source.counts))


def log_of(query: Any, uri: str) -> ChangeLog:
    """When the run has written something that can be read."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            log = ChangeLog(uri)
            if log.readable_lsn:
                return log
        except XidstreamError:
            pass
        if query.exception() is not None:
            raise query.exception()
        assert time.monotonic() < deadline, query.lastProgress
        time.sleep(0.2)
