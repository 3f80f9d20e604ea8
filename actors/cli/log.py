"""What ``xidstream tables`` and ``xidstream consumer`` do. They read the sink's tables, beside a run or without one,
and need no server and no Spark. ``consumer remove`` writes to ``_consumers`` alone."""

from __future__ import annotations

import datetime
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from xidstream.pipeline.changelog.consumers import ConsumerPosition
from xidstream.pipeline.changelog.log_root import root_of
from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.errors import ConfigError, ExitStatus, Unsupported, UsageError
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.pg_rules import table_label
from xidstream.pipeline.quantities import human_bytes, human_s, visible
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.sink_kinds import DELTA, ICEBERG
from xidstream.pipeline.sinks.sink import check_sink_spec, parse_sink_spec


def tables_command(config: Config, *, as_json: bool) -> None:
    """Raises UsageError where there is no log, StorageFault."""
    log = _log_of(config)
    names = log.table_names()
    rows = [(table_label(*name), *_lsns(log, name)) for name in names]
    if as_json:
        keys = ("table", "oldest_lsn", "cut_lsn", "problem")
        click.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], ensure_ascii=False))
        return
    cells = [
        (name, oldest or problem or "none can be read", "all there are" if cut is None else f"behind {cut}")
        for name, oldest, cut, problem in rows
    ]
    _print(("table", "states from", "changes"), cells)
    click.echo(f"up to {log.readable_lsn} states can be read, up to {log.last_commit_lsn} changes")


def consumers_command(config: Config, *, as_json: bool) -> None:
    """Raises UsageError where there is no log, StorageFault."""
    log = _log_of(config)
    found = log.consumers()
    if as_json:
        rows = [
            {"name": each.name, "lsn": str(each.lsn), "moved_at": each.moved_at.isoformat()} for each in found
        ]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    if not found:
        click.echo("no consumer is registered")
        return
    last, now = log.last_commit_lsn, datetime.datetime.now(datetime.timezone.utc)
    cells = [_consumer(each, last, now) for each in found]
    _print(("consumer", "processed up to", "behind", "told"), cells)


def remove_consumer_command(config: Config, name: str, *, is_sure: bool) -> None:
    """In a terminal it asks first, unless ``is_sure``. Raises UsageError for one that is not registered, SystemExit
    where the answer is no, StorageFault."""
    log = _log_of(config)
    there = log.consumers()
    mine = next((each for each in there if each.name == name), None)
    if mine is None:
        near = difflib.get_close_matches(name, [each.name for each in there], n=3)
        hint = (
            f"did you mean {', '.join(near)}?" if near else "`xidstream consumer list` shows those that are"
        )
        raise UsageError(f"consumer {name} is not registered", remedy=hint)
    click.echo(_let_go(mine, [each for each in there if each is not mine], log.last_commit_lsn))
    # A script gives the command on purpose, and has nobody who answers.
    is_asked = not is_sure and sys.stdin.isatty() and sys.stdout.isatty()
    if is_asked and not click.confirm(f"Remove consumer {name}? This cannot be undone."):
        click.echo(f"consumer {name} stays: nothing was removed")
        raise SystemExit(int(ExitStatus.FAILED))
    log.consumer(name).remove()
    click.echo(f"consumer {name} is forgotten: what it has not read may be removed from now on")


def _let_go(mine: ConsumerPosition, others: Sequence[ConsumerPosition], last: int) -> str:
    """What may be removed from the log once this consumer is forgotten, for people."""
    age_s = mine.age_s(datetime.datetime.now(datetime.timezone.utc))
    at = f"consumer {mine.name} has processed all up to {mine.lsn}, and told so {human_s(age_s)} ago"
    first = min(others, key=lambda each: each.lsn, default=None)
    if first is not None and first.lsn <= mine.lsn:
        return f"{at}; consumer {first.name} at {first.lsn} holds back all that this one does"
    if mine.lsn >= last:
        return f"{at}: it has all that there is, and holds back nothing yet"
    upto = Lsn(last) if first is None else min(first.lsn, Lsn(last))
    behind = f"changes behind {mine.lsn}, up to {upto} ({human_bytes(upto - mine.lsn)} of WAL)"
    then = "" if first is None or upto == last else f"; consumer {first.name} needs those after it"
    return f"{at}; log_retention may remove {behind}, when it is gone{then}"


def _log_of(config: Config) -> SlotLog:
    kind, _ = parse_sink_spec(config.sink)
    if not kind.has_states:
        raise ConfigError(
            f"only a sink of tables has a change log that tells this, not {redacted(config.sink)!r}",
            remedy=f"give what the run has as --sink: {DELTA.form} or {ICEBERG.form}",
        )
    check_sink_spec(config.sink)
    return SlotLog(root_of(config.sink), config.slot or None)


def _lsns(log: SlotLog, table: tuple[str, str]) -> tuple[str | None, str | None, str | None]:
    """The oldest state, the cut, and why neither can be told."""
    try:
        oldest, cut = log.oldest_lsn(table), log.cut_lsn(table)
    except Unsupported as error:
        return None, None, error.message
    return None if oldest is None else str(oldest), str(cut) if cut else None, None


def _consumer(each: ConsumerPosition, last: int, now: datetime.datetime) -> Sequence[Any]:
    behind = "nothing" if each.lsn >= last else f"{human_bytes(last - each.lsn)} of WAL"
    return each.name, each.lsn, behind, f"{human_s(each.age_s(now))} ago"


def _print(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    texts = [[visible(str(value)) for value in row] for row in (names, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())
