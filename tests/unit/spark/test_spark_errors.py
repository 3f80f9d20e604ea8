"""What an error of py4j says of the session."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from xidstream.pipeline.errors import ComponentLost, SinkFailed
from xidstream.pipeline.spark_errors import fault_of, named


def test_a_call_that_the_living_jvm_could_not_read_is_not_a_lost_session() -> None:
    """It was taken for one, and the run started again for ever."""
    refused = Py4JError(
        "An error occurred while calling z:functions.lit. Trace:\njava.lang.NumberFormatException"
    )
    assert isinstance(fault_of(refused, "calling handle"), SinkFailed)


def test_a_jvm_that_gives_no_answer_is_a_lost_session() -> None:
    for silent in (
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o1.f"),
    ):
        assert isinstance(fault_of(silent, "calling handle"), ComponentLost)


class Py4JJavaError(Exception):
    """Py4J's has a Java object, and this text."""


TRACE = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: a secret value
	at java.base/java.lang.Class.forName0(Native Method)
Caused by: java.lang.ClassNotFoundException: another.secret.Value
	at java.base/java.net.URLClassLoader.findClass(URLClassLoader.java:445)
	... 3 more
"""


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (Py4JJavaError(TRACE), "Py4JJavaError (java.lang.ClassNotFoundException)"),
        (Py4JJavaError("no trace"), "Py4JJavaError"),
        (
            RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited"),
            "RuntimeError (JAVA_GATEWAY_EXITED)",
        ),
        (ValueError("[4711, 4712] are values"), "ValueError"),
        (KeyError("X"), "KeyError"),
    ],
    ids=["java", "java without a trace", "condition", "a list of values", "plain"],
)
def test_a_foreign_error_is_told_by_what_can_be_looked_up_and_without_its_message(
    error: Exception, name: str
) -> None:
    assert named(error) == name
    assert str(fault_of(error, "writing table public.t")).startswith(f"writing table public.t: {name}")
