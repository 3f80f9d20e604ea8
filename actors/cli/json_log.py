"""Has this process log JSON to stderr, one object a line: ``run --log-format json``.

All goes through ``logging``, so warnings of libraries in this process come as JSON, too. The processes of the actors
write into Ray's files, and never to this terminal; ``connect_ray`` has Ray write those as JSON.
"""

from __future__ import annotations

import logging
import sys

from xidstream.pipeline.events import JsonLines


def log_as_json() -> None:
    """From here on this process logs JSON to stderr, and nothing else. Called again after Ray's start, which adds
    handlers of its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(capture=True)
    for name, level in ((None, logging.WARNING), ("ray", logging.WARNING), ("xidstream", logging.INFO)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = True
        for old in logger.handlers[:]:
            logger.removeHandler(old)
    logging.getLogger().addHandler(handler)


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
