"""What an error of py4j says of the session."""

from __future__ import annotations

from py4j.protocol import Py4JError, Py4JNetworkError

from xidstream.pipeline.errors import ComponentLost, SinkFailed
from xidstream.pipeline.spark_errors import fault_of


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
