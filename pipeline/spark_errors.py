"""What went wrong in Spark or Delta, as one of our errors, so that the supervisor knows what to do.

An error of ours raised in an executor comes back as text inside a PythonException; its class decides between
retry, restart and stop, so it is read out of that text. Messages of foreign errors are left out of ours (a
cast error quotes the value): the class is named, Spark's condition and Java's class with it, and the original is the
``__cause__``.
"""

from __future__ import annotations

import re
from typing import Final

from xidstream.pipeline import errors
from xidstream.pipeline.errors import ComponentLost, SinkFailed, StorageFault, XidstreamError, known_reason

_LOST_SIGNS: Final = (
    "SparkContext was shut down",
    "Cannot call methods on a stopped SparkContext",
    "OwnerDied",
    "ObjectLost",
    "UnreconstructableException",
    "ReferenceCountingAssertion",
)
"""The words of a stopped session, and of Ray's object store when the process that owned the rows has ended."""

_RAISED: Final = re.compile(rf"^{re.escape(errors.__name__)}\.(\w+): (.*)$", re.MULTILINE)
_JAVA_CLASS: Final = re.compile(r"^(?:: |Caused by: )((?:[A-Za-z_]\w*\.)+[A-Z][\w$]*)", re.MULTILINE)
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]")
"""The error condition in brackets with which the text of pyspark's errors begins."""


def raised_in_executor(error: BaseException) -> XidstreamError | None:
    """The error of ours that an executor's traceback ends with, or None."""
    found = _RAISED.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    cls = getattr(errors, name, None)
    if isinstance(cls, type) and issubclass(cls, XidstreamError):
        return cls(message)
    return None


def named(error: BaseException) -> str:
    """The error's class, and after it what a person can look up: the Java exception at the root, or Spark's condition.

    ``Py4JJavaError (java.lang.ClassNotFoundException)``, ``PySparkRuntimeError (JAVA_GATEWAY_EXITED)``. Java's comes
    from the trace in the text, because the JVM may be gone.
    """
    name = type(error).__name__
    if name == "Py4JJavaError":
        traced = _JAVA_CLASS.findall(str(error))
        return f"{name} ({traced[-1]})" if traced else name
    condition = _CONDITION.match(str(error))
    return f"{name} ({condition[1]})" if condition else name


def _is_session_lost(error: BaseException) -> bool:
    """The JVM, or what its objects were kept by, is gone; the sink and the data are not at fault.

    Py4JJavaError is an exception inside a living JVM: only its text tells that rows of a dead process were wanted. A
    Py4JError with a trace is a call that a living JVM could not read.
    """
    name = type(error).__name__
    if (
        (name == "Py4JError" and "Trace:" not in str(error))
        or name.startswith("Py4JNetwork")
        or isinstance(error, (ConnectionError, EOFError))
    ):
        return True
    return any(sign in str(error) for sign in _LOST_SIGNS)


def fault_of(error: Exception, doing: str) -> XidstreamError:
    """Our error for ``error``, raised while ``doing`` (e.g. "writing table public.t")."""
    if isinstance(error, XidstreamError):
        return error
    ours = raised_in_executor(error)
    if ours is not None:
        return ours
    name = named(error)
    if _is_session_lost(error):
        return ComponentLost(f"the Spark session was lost while {doing} ({name})")
    if isinstance(error, OSError):
        return StorageFault(f"{doing}: {known_reason(error) or name}")
    return SinkFailed(f"{doing}: {known_reason(error) or name}")
