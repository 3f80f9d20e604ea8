"""Variables with a password, which this process needs for its own connections, and its children must not inherit.

A Ray that is started here hands its environment on to every worker, and to the JVMs of Spark: to a user's code, too.
``runtime.secrets`` brings the variables to the reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from xidstream.pipeline.postgres.conninfo import secret_variables


def hidden_variables() -> dict[str, str]:
    """The names of the variables that are set here."""
    return {name: os.environ[name] for name in sorted(secret_variables()) if name in os.environ}


@contextmanager
def hidden_from_children() -> Iterator[None]:
    """Take them out of the environment while children are started."""
    hidden = hidden_variables()
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
