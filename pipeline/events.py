"""What a run tells people, with what programs want of it: the lines of ``--log-format json``.

An ``Event`` is its text. Whoever takes text takes it, the functions of the standard ``logging`` among them. Beside the
text it has a name, a level, and facts: the slot, an xid, an LSN, a class of errors. ``JsonLines`` is the formatter that
writes them, one JSON object a line, and writes any other record of ``logging`` as well. docs/status.md lists the keys.

Neither texts nor facts hold a row's value or a secret. Of an exception that is no ``XidstreamError`` only the class and
the places in the code are written: its message is somebody else's, and may quote a value.

Rejected: structlog, a dependency for one formatter; a second text for programs, which would drift from the first.
"""

from __future__ import annotations

import datetime
import json
import logging
import traceback
from collections.abc import Mapping
from typing import Any, Final

from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.quantities import visible

_PLAIN: Final = "log"
"""The name of what is no Event."""


class Event(str):
    """A text for people, with facts for programs. A fact that is None is left out."""

    __slots__ = ("facts", "level", "name")

    name: str
    level: int
    facts: Mapping[str, str | int | float]

    def __new__(
        cls, name: str, text: str, level: int = logging.WARNING, **facts: str | int | float | None
    ) -> Event:
        event = super().__new__(cls, visible(text))
        event.name, event.level = name, level
        event.facts = {key: value for key, value in facts.items() if value is not None}
        return event


def of_error(
    name: str,
    text: str,
    error: XidstreamError,
    level: int = logging.WARNING,
    **facts: str | int | float | None,
) -> Event:
    """An event that an error is the reason for."""
    details = {"error": type(error).__name__, "remedy": error.remedy, **error.facts, **facts}
    return Event(name, text, level, **details)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _PLAIN,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, Event):
            line.update(event=record.msg.name, **record.msg.facts)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["at"] = [
                f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
            ]
        return json.dumps(line)
